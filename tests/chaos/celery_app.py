"""The app of the chaos run with Celery: what a call meets is said by its payload.

Each end that a worker is about to report is a line of a journal.
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
from ergon_framework.providers.celery_task import CeleryProviderTask, provider_task
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.mapping import for_status
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.sql.ledger import Ledger

DSN = os.environ["CHAOS_DSN"]
FOLDER = Path(os.environ["CHAOS_FOLDER"])
#: The folder of a memory cgroup, if one could be made.
CGROUP = os.environ.get("CHAOS_CGROUP")
#: Twice what the group allows.
GREED = 64 * 1024 * 1024
DELIVERIES = 3

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


class Upstream(ProviderBase):
    provider_name = "upstream"
    capability = "chaos"
    policy = ProviderPolicy(
        retry=RetryPolicy(max_attempts=3, base_delay_seconds=0.02, max_delay_seconds=0.05),
        # Each kind of trouble is to be met by the tasks that ask for it, and by no others.
        breaker=BreakerPolicy(failure_threshold=1_000_000),
    )

    def _execute_impl(self, *, payload: dict[str, Any], context: Any, **_: Any) -> dict[str, Any]:
        kind = payload["kind"]
        time.sleep(payload.get("takes", 0.0))
        if kind == "down" or (kind == "flaky" and context.attempt_number == 1):
            raise for_status(503)
        if kind == "refused":
            raise for_status(422)
        if kind == "hang":
            time.sleep(60)
        if kind == "poison" or (kind == "greedy" and _first(payload["id"])):
            eat()
        return {"id": payload["id"]}


def _first(name: str) -> bool:
    """Whether nobody has been here before."""
    try:
        (FOLDER / "eaten" / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def eat() -> None:
    """Take more memory than the group allows; the kernel kills the process in the middle of it."""
    if CGROUP is not None:
        (Path(CGROUP) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        held = bytearray(GREED)
        for place in range(0, GREED, 4096):
            held[place] = 1
    os.kill(os.getpid(), 9)


options: dict[str, Any] = {"ledger": Ledger(DSN), "dead_letter_interval": 1.0}
upstream = Upstream(books=MemoryBooks())
# Whatever a kill can do to it, it must not be worn out.
call = provider_task(app, upstream, "call", max_deliveries=50, timeout_budget_seconds=3.0, **options)
deadly = provider_task(app, upstream, "call", name="upstream.deadly", max_deliveries=DELIVERIES, **options)


@app.task(
    base=CeleryProviderTask,
    bind=True,
    provider=upstream,
    operation="call",
    max_deliveries=50,
    timeout_budget_seconds=0.5,
    soft_time_limit=1.5,
    time_limit=3.0,
    **options,
)
def limited(self: CeleryProviderTask, payload: dict[str, Any]) -> Any:
    """In the middle of a call, for longer than a time limit."""
    until = time.monotonic() + 60
    while True:
        try:
            time.sleep(max(0.0, until - time.monotonic()))
        except SoftTimeLimitExceeded:
            if payload["kind"] == "soft":
                raise


class Journal(logging.Handler):
    """One line for each end, of any process; short lines of one write do not mix."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "provider task ended":
            line = json.dumps([record.correlation_id, record.outcome, record.reason_code, os.getpid()]) + "\n"
            with (FOLDER / "journal").open("ab", buffering=0) as file:
                file.write(line.encode())


logging.getLogger("ergon_framework.providers.celery").addHandler(Journal())
