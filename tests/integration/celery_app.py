"""The Celery app that the tests of CeleryProviderTask send to and that a real Celery worker runs.

The payload selects what a call meets: the port of the upstream that is called, or a way to end the process.
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
from ergon_framework.providers.celery.ledger import TaskLedger
from ergon_framework.providers.celery.task import CeleryProviderTask, provider_task
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.testing.fake_provider import FakeProvider

#: The same for the sender and for the worker; the queue names belong to the test run.
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

# A child that has exited is replaced at the next poll, which otherwise runs every five seconds.
AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.2})

shared_state = MemoryProviderState()
FAST_RETRY = RetryPolicy(max_attempts=3, base_delay_seconds=0.01, max_delay_seconds=0.02)


class RankProvider(ProviderBase):
    """Call the fake upstream whose port is in the payload."""

    provider_name = "rank"
    capability = "rank_snapshot"
    #: Its breaker stays closed: the tests share it and run in any order.
    policy = ProviderPolicy(retry=FAST_RETRY, breaker=BreakerPolicy(failure_threshold=1000))

    def _execute_impl(self, *, payload: dict[str, Any], **call: Any) -> Any:
        if payload.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "blurt" in payload:
            raise RuntimeError(payload["blurt"])
        upstream: Any = SimpleNamespace(address=("127.0.0.1", payload["port"]))
        return FakeProvider(upstream)._execute_impl(payload=payload, **call)


class QuickBreakerProvider(RankProvider):
    provider_name = "touchy"
    policy = ProviderPolicy(
        retry=RetryPolicy(max_attempts=1), breaker=BreakerPolicy(failure_threshold=2, open_cooldown_seconds=1.0)
    )


class RetryingBreakerProvider(QuickBreakerProvider):
    """Meet the open breaker between two attempts."""

    provider_name = "patient"
    policy = ProviderPolicy(retry=FAST_RETRY, breaker=BreakerPolicy(failure_threshold=2, open_cooldown_seconds=1.0))


class OneRetryProvider(RetryingBreakerProvider):
    provider_name = "brief"


class SmallQuotaProvider(RankProvider):
    provider_name = "scarce"
    policy = ProviderPolicy(retry=FAST_RETRY, quota=QuotaPolicy(month=2))


class DefaultStateProvider(RankProvider):
    """Use the provider state of the process, which is the default of a user without options."""

    provider_name = "metered"


options: dict[str, Any] = {
    "ledger": TaskLedger(DSN),
    "dead_letter_queue": f"ergon-{RUN}-deadletter",
    "dead_letter_interval": 0.3,
    "max_deliveries": 1,
}
rank_provider = RankProvider(state_store=shared_state)
snapshot = provider_task(app, rank_provider, "snapshot", **options)
touchy = provider_task(app, QuickBreakerProvider(state_store=shared_state), "snapshot", max_retries=0, **options)
patient = provider_task(app, RetryingBreakerProvider(state_store=shared_state), "snapshot", **options)
brief = provider_task(app, OneRetryProvider(state_store=shared_state), "snapshot", max_retries=1, **options)
scarce = provider_task(app, SmallQuotaProvider(state_store=shared_state), "snapshot", **options)
metered = provider_task(app, DefaultStateProvider(), "snapshot", **options)
hurried = provider_task(app, rank_provider, "snapshot", name="rank.hurried", timeout_budget_seconds=0.4, **options)


@app.task(base=CeleryProviderTask, bind=True, provider=rank_provider, operation="refresh", **options)
def refresh(self: CeleryProviderTask, port: int, *, tenant_id: str, campaign_id: str) -> Any:
    first = self.call("refresh", {"port": port})
    second = self.call("refresh", {"port": port, "again": True}, name="again")
    return {"first": first, "second": second, "for": [tenant_id, campaign_id]}


@app.task(
    base=CeleryProviderTask,
    bind=True,
    provider=rank_provider,
    operation="dawdle",
    timeout_budget_seconds=0.2,
    soft_time_limit=0.6,
    time_limit=1.2,
    **options,
)
def dawdle(self: CeleryProviderTask, limit: str) -> Any:
    """Do something that no budget can end."""
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


class JsonRecordHandler(logging.Handler):
    """Write each record of the framework with all fields that are not standard record fields."""

    def emit(self, record: logging.LogRecord) -> None:
        import json  # noqa: PLC0415 - only in a worker

        standard_fields = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "event"}
        fields = {name: value for name, value in vars(record).items() if name not in standard_fields}
        with open(ENVELOPES or os.devnull, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(
                json.dumps({"event": vars(record).get("event"), "level": record.levelname, "fields": fields}) + "\n"
            )


if ENVELOPES:
    logging.getLogger("ergon_framework.providers.celery").addHandler(JsonRecordHandler())
