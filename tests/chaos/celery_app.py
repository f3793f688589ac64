"""The app of the chaos run with Celery: the payload of a call says which fault it meets.

Each result that a worker is about to report is one line of a journal.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.celery.ledger import TaskLedger
from ergon_framework.providers.celery.task import CeleryProviderTask, provider_task
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.error_mapping import error_for_status
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy

DSN = os.environ["CHAOS_DSN"]
FOLDER = Path(os.environ["CHAOS_FOLDER"])
#: The folder of a memory cgroup, if one could be created.
CGROUP = os.environ.get("CHAOS_CGROUP")
#: Twice the limit of the cgroup.
GREEDY_BYTES = 64 * 1024 * 1024
MAX_DELIVERIES = 3

app = Celery(
    "chaos", broker=os.environ["CHAOS_BROKER"], backend=DSN.replace("postgresql://", "db+postgresql+psycopg://")
)
app.conf.update(
    broker_transport_options={"confirm_publish": True},
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_heartbeat=10,
    worker_prefetch_multiplier=1,
    worker_lost_wait=1.0,
    result_expires=None,
)


class UpstreamProvider(ProviderBase):
    provider_name = "upstream"
    capability = "chaos"
    policy = ProviderPolicy(
        retry=RetryPolicy(max_attempts=3, base_delay_seconds=0.02, max_delay_seconds=0.05),
        # Only the tasks that ask for a kind of fault may meet it.
        breaker=BreakerPolicy(failure_threshold=1_000_000),
    )

    def _execute_impl(self, *, payload: dict[str, Any], context: Any, **_: Any) -> dict[str, Any]:
        kind = payload["kind"]
        time.sleep(payload.get("takes", 0.0))
        if kind == "down" or (kind == "flaky" and context.attempt_number == 1):
            raise error_for_status(503)
        if kind == "refused":
            raise error_for_status(422)
        if kind == "hang":
            time.sleep(60)
        if kind == "poison" or (kind == "greedy" and _is_first_call(payload["id"])):
            exhaust_memory()
        return {"id": payload["id"]}


def _is_first_call(name: str) -> bool:
    """Tell whether this is the first call for *name*."""
    try:
        (FOLDER / "eaten" / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def exhaust_memory() -> None:
    """Allocate more memory than the cgroup allows; the kernel kills the process meanwhile."""
    if CGROUP is not None:
        (Path(CGROUP) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        memory = bytearray(GREEDY_BYTES)
        for offset in range(0, GREEDY_BYTES, 4096):
            memory[offset] = 1
    os.kill(os.getpid(), 9)


task_options: dict[str, Any] = {"ledger": TaskLedger(DSN), "dead_letter_interval": 1.0}
upstream = UpstreamProvider(state_store=MemoryProviderState())
# Kills alone must not exhaust its deliveries.
call = provider_task(app, upstream, "call", max_deliveries=50, timeout_budget_seconds=3.0, **task_options)
deadly = provider_task(app, upstream, "call", name="upstream.deadly", max_deliveries=MAX_DELIVERIES, **task_options)


@app.task(
    base=CeleryProviderTask,
    bind=True,
    provider=upstream,
    operation="call",
    max_deliveries=50,
    timeout_budget_seconds=0.5,
    soft_time_limit=1.5,
    time_limit=3.0,
    **task_options,
)
def limited(self: CeleryProviderTask, payload: dict[str, Any]) -> Any:
    """Call the provider for longer than a time limit."""
    deadline = time.monotonic() + 60
    while True:
        try:
            time.sleep(max(0.0, deadline - time.monotonic()))
        except SoftTimeLimitExceeded:
            if payload["kind"] == "soft":
                raise


class JournalHandler(logging.Handler):
    """Writes one line for each result, of any process; short single writes do not interleave."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "provider task ended":
            line = json.dumps([record.correlation_id, record.outcome, record.reason_code, os.getpid()]) + "\n"
            with (FOLDER / "journal").open("ab", buffering=0) as file:
                file.write(line.encode())


logging.getLogger("ergon_framework.providers.celery").addHandler(JournalHandler())
