"""The plant: a consumer, a provider that runs its work as a job, and the executor that publishes a fact about it."""

import os
import sys

import zones

from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.executors.registry import HandlerRegistry
from ergon_framework.facts.append import Facts
from ergon_framework.jobs.client import JobClient
from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator
from ergon_framework.providers.base import ProviderBase

RULES = ConsumerPolicy.load(
    {"loop": {"streaming": True, "drain_timeout": 2.0, "empty_queue": {"backoff": 0.1, "cap": 0.1}}}
)
ERGON = (sys.executable, "-c", "from ergon_framework.cli.main import main; main()")
#: An executor sees only the variables that it is passed.
PASSED_VARIABLES = ("PATH", "OTEL_", "ERGON_", "QUEUE", "PLANT", "HUB_DSN", "CERTIFICATES")

registry = HandlerRegistry()


@registry.handler
def press(number: int) -> None:
    with zones.plant(zones.PLANT) as boundary:
        Facts(boundary, zone=zones.PLANT).append(zones.HUB, subject=f"order:{number}", predicate="pressed")


class PressingProvider(ProviderBase):
    provider_name = "works"
    capability = "pressing"

    def _execute_impl(self, *, payload, **_):
        with JobClient() as jobs:
            return {"job": jobs.submit("press", payload["number"]).id}


WORKS = PressingProvider()


@consumer(RabbitMQQueue(os.environ["QUEUE"]), policy=RULES)
def take(order: dict) -> None:
    WORKS.call("press", {"number": order["number"]})


orchestrator = Orchestrator(
    {
        "python": ExecutorGroup(
            command=ExecutorCommand(
                words=(*ERGON, "executor", "run", "--handlers", "plant:registry"),
                environment={name: value for name, value in os.environ.items() if name.startswith(PASSED_VARIABLES)},
            ),
            pool=PoolPolicy(size=1, grace=2.0),
        )
    },
    policy=RULES,
)
