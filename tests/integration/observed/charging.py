"""A task whose transactions succeed, fail, are tried again and call providers that are well, broken and metered."""

import time
from contextlib import suppress

from ergon_framework import BusinessError, ConsumerPolicy, Pause, consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.errors import ProviderDependencyError, ProviderError
from ergon_framework.providers.policy import ProviderPolicy

POLICY = ConsumerPolicy.load(
    {
        "loop": {"streaming": True, "drain_timeout": 1.0, "empty_queue": {"backoff": 0.1, "cap": 0.1}},
        "steps": {"process": {"retry": {"max_attempts": 2, "backoff": 0.01}}},
    }
)
#: One that breaks opens after two faults; one that is metered has one call an hour.
QUICK_RETRY = {"retry": {"max_attempts": 2, "base_delay_seconds": 0.01, "max_delay_seconds": 0.01}}
ORDERS = PostgresQueue("orders")


class ObservedProvider(ProviderBase):
    capability = "charging"

    def __init__(self, name, fails=False, **policy):
        self.provider_name = name
        self.policy = ProviderPolicy.load(QUICK_RETRY | policy)
        self._fails = fails
        super().__init__()

    def _execute_impl(self, **_):
        if self._fails:
            raise ProviderDependencyError("it is down")
        return {"status": "paid"}


PROVIDERS = (
    ObservedProvider("well"),
    ObservedProvider("broken", fails=True, breaker={"failure_threshold": 2, "open_cooldown_seconds": 60}),
    ObservedProvider("metered", quota={"hour": 1}),
)


def gate():
    """Pause the loop for a part of each period that drifts against the scrapes."""
    return Pause("every now and then", 0.3) if time.time() % 2.3 < 0.7 else None


@consumer(ORDERS, policy=POLICY, gates=[gate])
def charge(order: dict):
    number = order["number"]
    if number % 10 == 0:
        raise BusinessError("it has no total")
    if number % 10 == 1:
        raise OSError("the disk is away")
    for provider in PROVIDERS:
        with suppress(ProviderError):
            provider.call("charge", {"number": number})
