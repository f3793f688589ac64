"""How full a queue is, looked at while its task runs."""

from __future__ import annotations

import asyncio
import time

import pytest

from ergon_framework import MemoryConnector, Transaction, consumer
from ergon_framework.connectors.memory_log import MemoryLog
from ergon_framework.runner.measuring import looks, measured, measured_async
from ergon_framework.task.relay import relay
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import registry_of


class Moody(MemoryConnector):
    """A queue that cannot always be asked."""

    away = False

    def depth(self):
        if self.away:
            raise OSError("no line")
        return super().depth()


def task_of(name, flavour, connector):
    if flavour == "sync":

        def handle(order): ...
    else:

        async def handle(order): ...

    return consumer(connector, name=name)(handle)


def depth(name):
    return {
        labels["ergon.queue.state"]: value
        for labels, value in registry_of().read(names.QUEUE_DEPTH)
        if labels["ergon.task"] == name
    }


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def during(task, every, act):
    """Do *act* while the queue of *task* is looked at."""
    if asyncio.iscoroutinefunction(type(task).process_transaction):

        async def run():
            async with measured_async(task, every):
                await asyncio.to_thread(act)

        asyncio.run(run())
        return
    with measured(task, every):
        act()


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_the_depth_is_told_while_the_task_runs_unknown_while_nobody_answers_and_gone_at_the_end(flavour, request):
    name = request.node.name
    connector = Moody("orders")
    connector.dispatch([Transaction(f"o-{number}") for number in range(3)])
    task = task_of(name, flavour, connector)

    def act():
        until(lambda: depth(name) == {"ready": 3, "delayed": 0, "in_flight": 0, "dead": 0})
        connector.away = True
        until(lambda: depth(name) == {})
        connector.away = False
        until(lambda: depth(name) != {})

    during(task, 0.01, act)
    until(lambda: depth(name) == {})


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_nobody_looks_unless_told_to(flavour, request):
    connector = Moody("orders")
    connector.depth = lambda: pytest.fail("somebody has looked")
    during(task_of(request.node.name, flavour, connector), None, lambda: None)


def test_of_a_queue_the_first_process_looks_and_of_a_log_each_and_of_a_relay_the_relay_itself():
    queue = task_of("a", "sync", MemoryConnector("orders"))
    log = task_of("b", "sync", MemoryLog("orders"))
    assert [looks(queue, number=number) for number in (None, 1, 2)] == [True, True, False]
    assert [looks(log, number=number) for number in (None, 1, 2)] == [True, True, True]
    assert not looks(relay(MemoryConnector("a"), MemoryConnector("b")), number=None)
