"""The depth of a queue, measured while its task runs."""

from __future__ import annotations

import asyncio
import time

import pytest

from ergon_framework import MemoryConnector, Transaction, consumer
from ergon_framework.runner.queue_depth import publish_depth, publish_depth_async, should_measure
from ergon_framework.task.relay import relay
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.testing.memory_log import MemoryLog


class FlakyQueue(MemoryConnector):
    """A queue that is sometimes unavailable."""

    is_unavailable = False

    def depth(self):
        if self.is_unavailable:
            raise OSError("no line")
        return super().depth()


def make_task(name, variant, connector):
    if variant == "sync":

        def handle(order): ...
    else:

        async def handle(order): ...

    return consumer(connector, name=name)(handle)


def read_depth(name):
    return {
        labels["ergon.queue.state"]: value
        for labels, value in get_registry().read(names.QUEUE_DEPTH)
        if labels["ergon.task"] == name
    }


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_during(task, interval, action):
    """Run *act* while the depth of the queue of *task* is measured."""
    if asyncio.iscoroutinefunction(type(task).process_transaction):

        async def run():
            async with publish_depth_async(task, interval):
                await asyncio.to_thread(action)

        asyncio.run(run())
        return
    with publish_depth(task, interval):
        action()


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("variant", ["sync", "async"])
def test_depth_is_published_during_the_run_unknown_during_outages_and_removed_at_the_end(variant, request):
    name = request.node.name
    connector = FlakyQueue("orders")
    connector.dispatch([Transaction(id=f"o-{number}") for number in range(3)])
    task = make_task(name, variant, connector)

    def change_availability():
        wait_until(lambda: read_depth(name) == {"ready": 3, "delayed": 0, "in_flight": 0, "dead": 0})
        connector.is_unavailable = True
        wait_until(lambda: read_depth(name) == {})
        connector.is_unavailable = False
        wait_until(lambda: read_depth(name) != {})

    run_during(task, 0.01, change_availability)
    wait_until(lambda: read_depth(name) == {})


@pytest.mark.parametrize("variant", ["sync", "async"])
def test_depth_is_not_measured_without_an_interval(variant, request):
    connector = FlakyQueue("orders")
    connector.depth = lambda: pytest.fail("the depth was polled")
    run_during(make_task(request.node.name, variant, connector), None, lambda: None)


def test_only_the_first_process_measures_a_queue_every_process_a_log_and_none_a_relay():
    queue = make_task("a", "sync", MemoryConnector("orders"))
    log = make_task("b", "sync", MemoryLog("orders"))
    assert [should_measure(queue, number=number) for number in (None, 1, 2)] == [True, True, False]
    assert [should_measure(log, number=number) for number in (None, 1, 2)] == [True, True, True]
    assert not should_measure(relay(MemoryConnector("a"), MemoryConnector("b")), number=None)
