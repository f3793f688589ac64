"""The app that the tests of CeleryProviderTask send to, and that a real worker of theirs runs.

What a call meets is said by its payload: the port of the upstream that is called, or a way to die.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.concurrency.asynpool import AsynPool
from celery.exceptions import SoftTimeLimitExceeded

from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.celery_task import CeleryProviderTask, provider_task
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.sql.ledger import Ledger
from ergon_framework.providers.synthetic import SyntheticProvider

#: The same for whoever sends and for the worker; names of queues are the test run's own.
BROKER = os.environ["TEST_BROKER"]
DSN = os.environ["TEST_DSN"]
RUN = os.environ["TEST_RUN"]
#: Where a worker writes the envelopes of its log.
ENVELOPES = os.environ.get("TEST_ENVELOPES")

app = Celery("tests", broker=BROKER, backend=DSN.replace("postgresql://", "db+postgresql+psycopg://"))
app.conf.update(
    task_default_queue=f"ergon-{RUN}",
    broker_transport_options={"confirm_publish": True},
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_lost_wait=0.1,
    result_expires=None,
)

# A child that is gone is replaced at the next look, which is every five seconds otherwise.
AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.2})

books = MemoryBooks()
FAST = RetryPolicy(max_attempts=3, base_delay_seconds=0.01, max_delay_seconds=0.02)


class Rank(ProviderBase):
    """Calls the synthetic upstream whose port is in the payload."""

    provider_name = "rank"
    capability = "rank_snapshot"
    #: Its breaker stays closed: the tests share it, and come in any order.
    policy = ProviderPolicy(retry=FAST, breaker=BreakerPolicy(failure_threshold=1000))

    def _execute_impl(self, *, payload: dict[str, Any], **call: Any) -> Any:
        if payload.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "blurt" in payload:
            raise RuntimeError(payload["blurt"])
        upstream: Any = SimpleNamespace(address=("127.0.0.1", payload["port"]))
        return SyntheticProvider(upstream)._execute_impl(payload=payload, **call)


class Touchy(Rank):
    provider_name = "touchy"
    policy = ProviderPolicy(
        retry=RetryPolicy(max_attempts=1), breaker=BreakerPolicy(failure_threshold=2, open_cooldown_seconds=1.0)
    )


class Patient(Touchy):
    """Meets its breaker between two attempts."""

    provider_name = "patient"
    policy = ProviderPolicy(retry=FAST, breaker=BreakerPolicy(failure_threshold=2, open_cooldown_seconds=1.0))


class Brief(Patient):
    provider_name = "brief"


class Scarce(Rank):
    provider_name = "scarce"
    policy = ProviderPolicy(retry=FAST, quota=QuotaPolicy(month=2))


class Metered(Rank):
    """Has the state of the process: what a user gets who says nothing."""

    provider_name = "metered"


options: dict[str, Any] = {
    "ledger": Ledger(DSN),
    "dead_letter_queue": f"ergon-{RUN}-deadletter",
    "dead_letter_interval": 0.3,
    "max_deliveries": 1,
}
rank = Rank(books=books)
snapshot = provider_task(app, rank, "snapshot", **options)
touchy = provider_task(app, Touchy(books=books), "snapshot", max_retries=0, **options)
patient = provider_task(app, Patient(books=books), "snapshot", **options)
brief = provider_task(app, Brief(books=books), "snapshot", max_retries=1, **options)
scarce = provider_task(app, Scarce(books=books), "snapshot", **options)
metered = provider_task(app, Metered(), "snapshot", **options)
hurried = provider_task(app, rank, "snapshot", name="rank.hurried", timeout_budget_seconds=0.4, **options)


@app.task(base=CeleryProviderTask, bind=True, provider=rank, operation="refresh", **options)
def refresh(self: CeleryProviderTask, port: int, *, tenant_id: str, campaign_id: str) -> Any:
    first = self.call("refresh", {"port": port})
    second = self.call("refresh", {"port": port, "again": True}, name="again")
    return {"first": first, "second": second, "for": [tenant_id, campaign_id]}


@app.task(
    base=CeleryProviderTask,
    bind=True,
    provider=rank,
    operation="dawdle",
    timeout_budget_seconds=0.2,
    soft_time_limit=0.6,
    time_limit=1.2,
    **options,
)
def dawdle(self: CeleryProviderTask, limit: str) -> Any:
    """Does something that no budget can end."""
    if limit == "soft":
        time.sleep(30)
    while True:
        try:
            time.sleep(30)
        except SoftTimeLimitExceeded:
            continue


@app.task
def plain(number: int) -> int:
    return number + 1


class Noted(logging.Handler):
    """Writes each record of ours with all fields that are not every record's."""

    def emit(self, record: logging.LogRecord) -> None:
        import json  # noqa: PLC0415 - only in a worker

        usual = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "event"}
        fields = {name: value for name, value in vars(record).items() if name not in usual}
        with open(ENVELOPES or os.devnull, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(
                json.dumps({"event": vars(record).get("event"), "level": record.levelname, "fields": fields}) + "\n"
            )


if ENVELOPES:
    logging.getLogger("ergon_framework.providers.celery").addHandler(Noted())
