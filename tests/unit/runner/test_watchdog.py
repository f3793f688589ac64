from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time

import pytest

from ergon_framework import AsyncConsumerMixin, AsyncTask, BusinessError, MemoryConnector, Transaction, consumer
from ergon_framework.runner.probes import Watchdog
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from tests.log_events import get_event


def deep(event):
    """Block the calling thread until the watchdog has seen it."""
    event.wait(20)


def count_blocks(task):
    return {
        labels.get("ergon.step"): n
        for labels, n in get_registry().read(names.EVENT_LOOP_BLOCKED)
        if labels["ergon.task"] == task
    }


class BlockRecorder(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []
        self.block_seen = threading.Event()
        self.loop_freed = threading.Event()

    def emit(self, record):
        # A busy machine may block any event loop for a moment; only deliberate blocking is recorded.
        if any(name.endswith(".deep") for name in getattr(record, "functions", ())):
            self.records.append(record)
            self.block_seen.set()
        elif self.records and get_event(record) == "event loop free":
            self.loop_freed.set()


@pytest.fixture
def recorder():
    handler = BlockRecorder()
    log = logging.getLogger("ergon_framework.task")
    previous_level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(previous_level)


async def run_watched(task, limit=0.5):
    watchdog = Watchdog([task], limit).start()
    try:
        await task.run()
        await asyncio.to_thread(wait_until_free, watchdog)
    finally:
        watchdog.stop()
    return watchdog


def block_until_seen(watchdog):
    deadline = time.monotonic() + 20
    while watchdog.blocked is None and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_until_free(watchdog):
    deadline = time.monotonic() + 20
    while watchdog.blocked is not None and time.monotonic() < deadline:
        time.sleep(0.01)


def make_task(step, recorder):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction({"card": "4111"}, id="order-1")])
    name = f"charge_{step}"

    @consumer(queue, name=name)
    async def charge(order):
        # A first wait, so that the rest is resumed by the event loop and not called by the engine.
        await asyncio.sleep(0)
        if step == "process":
            deep(recorder.block_seen)
        if step == "exception":
            raise BusinessError("declined")

    @charge.on_success
    async def charged(order, result):
        if step == "success":
            deep(recorder.block_seen)

    @charge.on_failure
    async def failed(order, error):
        deep(recorder.block_seen)

    return charge


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize("step", ["process", "success", "exception"])
def test_the_report_of_a_blocked_event_loop_names_its_step_and_functions(recorder, step):
    task = make_task(step, recorder)
    watchdog = asyncio.run(run_watched(task))
    (record,) = recorder.records
    handler = {"process": "charge", "success": "charged", "exception": "failed"}[step]
    assert (record.levelname, record.task, record.step) == ("ERROR", task.name, step)
    inner = [name.rpartition(".")[2] for name in record.functions]
    assert inner[-2:] == ["deep", handler]
    assert "4111" not in str(vars(record))
    assert get_event(record) == "event loop blocked"
    assert count_blocks(task.name)[step] == 1
    assert recorder.loop_freed.wait(20)
    assert watchdog.blocked is None


@pytest.mark.spec("RUN-02")
def test_a_block_is_visible_while_it_lasts(recorder):
    descriptions = []

    class Charge(AsyncConsumerMixin, AsyncTask):
        async def process_transaction(self, transaction):
            block_until_seen(self.services.box[0])
            descriptions.append(self.services.box[0].blocked)

    async def run():
        queue, box = MemoryConnector("orders"), []
        queue.dispatch([Transaction(id="order-1")])
        task = Charge(queue, services={"box": box})
        box.append(Watchdog([task], 0.05).start())
        try:
            await task.run()
            await asyncio.to_thread(wait_until_free, box[0])
        finally:
            box[0].stop()
        assert box[0].blocked is None

    asyncio.run(run())
    assert descriptions[0].startswith("event loop is blocked for 0 s by process of Charge, in ")


def test_a_block_outside_any_step_is_reported_without_a_step(recorder):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction(id="order-1")])

    async def block_in_other_task():
        deep(recorder.block_seen)

    @consumer(queue, name="beside")
    async def charge(order):
        await asyncio.create_task(block_in_other_task())

    asyncio.run(run_watched(charge))
    (record,) = recorder.records
    assert not hasattr(record, "step")
    assert count_blocks("beside")[None] >= 1


def test_a_free_event_loop_is_not_reported(recorder):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction(id="order-1")])

    @consumer(queue, name="free")
    async def charge(order):
        await asyncio.sleep(0.2)

    asyncio.run(run_watched(charge, limit=10.0))
    assert count_blocks("free") == {}


def test_a_method_without_code_is_skipped():
    class Charge(AsyncConsumerMixin, AsyncTask):
        async def process_transaction(self, transaction): ...

        handle_transaction_success = functools.partial(print)

    async def run():
        watchdog = Watchdog([Charge(MemoryConnector("orders"))], 1.0)
        return sorted(watchdog._step_by_code.values())

    assert asyncio.run(run()) == ["exception", "process"]


def test_a_closed_event_loop_is_no_longer_watched():
    async def run():
        return Watchdog([make_task("process", BlockRecorder())], 0.05)

    watchdog = asyncio.run(run())
    watchdog._run_checks()
    watchdog.stop()
