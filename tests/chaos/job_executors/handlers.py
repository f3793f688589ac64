"""Handlers of the chaos run on the Python runtime: ergon executor run --handlers handlers:registry"""

from __future__ import annotations

from typing import Any

from work import Wanted, perform

from ergon_framework.executor.job import current_job
from ergon_framework.executor.registry import Registry, Retry

registry = Registry()


@registry.handler("chaos.work")
def work(told: dict[str, Any]) -> Any:
    job = current_job()
    try:
        return perform(told, job.job_id, job.attempt, "python")
    except Wanted:
        raise Retry("not this time", after=0.2) from None
