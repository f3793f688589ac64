"""Handlers of the chaos run on the Python runtime: ergon executor run --handlers handlers:registry"""

from __future__ import annotations

from typing import Any

from work import RetryRequestedError, perform

from ergon_framework.executors.registry import HandlerRegistry, Retry
from ergon_framework.executors.runtime import current_job

registry = HandlerRegistry()


@registry.handler("chaos.work")
def work(instructions: dict[str, Any]) -> Any:
    job = current_job()
    try:
        return perform(instructions, job.job_id, job.attempt, "python")
    except RetryRequestedError:
        raise Retry("not this time", after=0.2) from None
