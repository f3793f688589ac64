from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time

import pytest

from ergon_framework import AsyncConsumerMixin, AsyncTask, BusinessError, MemoryConnector, Transaction, consumer
from ergon_framework.runner.watchdog import Watchdog
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import registry_of
from tests.log_events import event_of


def deep(seen):
    """Holds the thread that calls it until the watchdog has seen it."""
    seen.wait(20)


def counted(task):
    return {
        labels.get("ergon.step"): n for labels, n in registry_of().read(names.BLOCKED) if labels["ergon.task"] == task
    }


class Told(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []
        self.seen = threading.Event()
        self.free = threading.Event()

    def emit(self, record):
        # A machine that is busy may hold any event loop for a moment; what is asked about is what holds it on purpose.
        if any(name.endswith(".deep") for name in getattr(record, "functions", ())):
            self.records.append(record)
            self.seen.set()
        elif self.records and event_of(record) == "event loop free":
            self.free.set()


@pytest.fixture
def told():
    handler = Told()
    log = logging.getLogger("ergon_framework.task")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(before)


async def watched(task, limit=0.5):
    watchdog = Watchdog(task, limit).start()
    try:
        await task.run()
        await asyncio.to_thread(told_free, watchdog)
    finally:
        watchdog.stop()
    return watchdog


def hold(watchdog):
    until = time.monotonic() + 20
    while watchdog.blocked is None and time.monotonic() < until:
        time.sleep(0.01)


def told_free(watchdog):
    until = time.monotonic() + 20
    while watchdog.blocked is not None and time.monotonic() < until:
        time.sleep(0.01)


def made(step, told):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("order-1", {"card": "4111"})])
    name = f"charge_{step}"

    @consumer(queue, name=name)
    async def charge(order):
        # A first wait, so that what follows is resumed by the event loop and not called by the engine.
        await asyncio.sleep(0)
        if step == "process":
            deep(told.seen)
        if step == "exception":
            raise BusinessError("declined")

    @charge.on_success
    async def charged(order, result):
        if step == "success":
            deep(told.seen)

    @charge.on_failure
    async def failed(order, error):
        deep(told.seen)

    return charge


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize("step", ["process", "success", "exception"])
def test_what_holds_the_event_loop_is_named_with_its_step_and_functions(told, step):
    task = made(step, told)
    watchdog = asyncio.run(watched(task))
    (record,) = told.records
    handler = {"process": "charge", "success": "charged", "exception": "failed"}[step]
    assert (record.levelname, record.task, record.step) == ("ERROR", task.name, step)
    inner = [name.rpartition(".")[2] for name in record.functions]
    assert inner[-2:] == ["deep", handler]
    assert "4111" not in str(vars(record))
    assert event_of(record) == "event loop blocked"
    assert counted(task.name)[step] == 1
    assert told.free.wait(20)
    assert watchdog.blocked is None


@pytest.mark.spec("RUN-02")
def test_it_is_seen_for_as_long_as_it_lasts(told):
    said = []

    class Charge(AsyncConsumerMixin, AsyncTask):
        async def process_transaction(self, transaction):
            hold(self.services.box[0])
            said.append(self.services.box[0].blocked)

    async def run():
        queue, box = MemoryConnector("orders"), []
        queue.dispatch([Transaction("order-1")])
        task = Charge(queue, box=box)
        box.append(Watchdog(task, 0.05).start())
        try:
            await task.run()
            await asyncio.to_thread(told_free, box[0])
        finally:
            box[0].stop()
        assert box[0].blocked is None

    asyncio.run(run())
    assert said[0].startswith("the event loop is held for 0 s by process of Charge, in ")


def test_what_is_no_step_of_the_task_is_told_as_what_it_is(told):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("order-1")])

    async def beside():
        deep(told.seen)

    @consumer(queue, name="beside")
    async def charge(order):
        await asyncio.create_task(beside())

    asyncio.run(watched(charge))
    (record,) = told.records
    assert not hasattr(record, "step")
    assert counted("beside")[None] >= 1


def test_an_event_loop_that_is_free_is_not_told(told):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("order-1")])

    @consumer(queue, name="free")
    async def charge(order):
        await asyncio.sleep(0.2)

    asyncio.run(watched(charge, limit=10.0))
    assert counted("free") == {}


def test_a_method_without_code_is_passed_over():
    class Charge(AsyncConsumerMixin, AsyncTask):
        async def process_transaction(self, transaction): ...

        handle_transaction_success = functools.partial(print)

    async def run():
        watchdog = Watchdog(Charge(MemoryConnector("orders")), 1.0)
        return sorted(watchdog._codes.values())

    assert asyncio.run(run()) == ["exception", "process"]


def test_an_event_loop_that_is_closed_is_watched_no_longer():
    async def run():
        return Watchdog(made("process", Told()), 0.05)

    watchdog = asyncio.run(run())
    watchdog._watch()
    watchdog.stop()
