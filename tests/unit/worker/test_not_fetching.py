"""Why nothing comes in: what probes are told of a loop that runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ergon_framework import ConsumerPolicy, MemoryConnector, Transaction, consumer, producer
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import ConnectionLostError
from ergon_framework.gates import Pause
from ergon_framework.worker.running import RunningLoops, running_loops

STREAMING_POLICY = ConsumerPolicy.load(
    {"loop": {"streaming": True, "limit": 1}, "steps": {"fetch": {"retry": {"backoff": 0.0}}}}
)
FETCH_ERROR = "the connector cannot be read: ConnectionLostError: no line"


class UnreachableQueue(MemoryConnector):
    """Has no line for two fetches, and looks at what is then said of the loop."""

    def __init__(self) -> None:
        super().__init__("orders")
        self.reasons: list[list[str] | None] = []
        self.task = None

    def _record_reasons(self):
        self.reasons.append(running_loops(self.task).not_fetching_reasons)
        if len(self.reasons) <= 2:
            raise ConnectionLostError("no line")

    def fetch_transactions(self, batch_size, **extra):
        self._record_reasons()
        return super().fetch_transactions(batch_size, **extra)

    async def fetch_transactions_async(self, batch_size, **extra):
        self._record_reasons()
        return await super().fetch_transactions_async(batch_size, **extra)


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize("variant", ["def", "async def"])
def test_a_lost_connection_is_a_not_fetching_reason_until_a_fetch_succeeds(variant):
    queue = UnreachableQueue()
    queue.dispatch([Transaction(id="order-1")])

    def handle(order):
        queue.reasons.append(running_loops(queue.task).not_fetching_reasons)

    async def handle_async(order):
        handle(order)

    queue.task = consumer(queue, policy=STREAMING_POLICY)(handle if variant == "def" else handle_async)
    run = queue.task.run
    assert (run() if variant == "def" else asyncio.run(run())).finished == 1
    assert queue.reasons == [[], [FETCH_ERROR], [FETCH_ERROR], []]
    assert running_loops(queue.task).not_fetching_reasons is None


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize("variant", ["def", "async def"])
@pytest.mark.parametrize("bridge", [lambda queue: queue, as_sync, as_async])
def test_rejected_writes_are_a_not_fetching_reason_although_reads_succeed(variant, bridge):
    class FullQueue(MemoryConnector):
        write_refusal = "the memory is full"

    queue, reasons = FullQueue("orders"), []
    queue.dispatch([Transaction(id="order-1")])

    def handle(order):
        reasons.append(running_loops(task).not_fetching_reasons)
        FullQueue.write_refusal = None
        reasons.append(running_loops(task).not_fetching_reasons)

    async def handle_async(order):
        handle(order)

    task = consumer(bridge(queue), policy=STREAMING_POLICY)(handle if variant == "def" else handle_async)
    report = task.run() if variant == "def" else asyncio.run(task.run())
    assert (report.finished, reasons) == (1, [["the connector accepts no new messages: the memory is full"], []])


@pytest.mark.spec("RUN-02")
def test_a_pausing_gate_is_a_not_fetching_reason_and_an_empty_queue_is_not():
    queue = MemoryConnector("orders")
    reasons = []

    def gate():
        reasons.append(running_loops(task).not_fetching_reasons)
        if len(reasons) == 1:
            return Pause("the breaker is open", 0.001)
        if len(reasons) == 3:
            task.stop()
        return None

    policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.001}}})
    task = consumer(queue, policy=policy, gates=[gate])(lambda order: None)
    task.run()
    assert reasons == [[], ["the breaker is open"], []]


def test_a_producer_has_no_not_fetching_reason():
    queue = MemoryConnector("orders")
    reasons = []

    @producer(queue)
    def send(order):
        reasons.append(running_loops(send).not_fetching_reasons)
        return "sent"

    send.produce_transactions([Transaction(id="order-1")])
    assert reasons == [[]]


def test_without_a_loop_the_reasons_are_none():
    assert RunningLoops().not_fetching_reasons is None


@pytest.mark.parametrize("variant", ["def", "async def"])
def test_an_idle_loop_is_woken_to_call_its_gates(variant):
    queue = MemoryConnector("orders")
    in_flight_counts, called_again = [], threading.Event()

    def wake_loop():
        # More than once: between its gate and its fetch a loop does not hear it.
        while not called_again.wait(0.02):
            running_loops(task).wake()

    def gate():
        in_flight_counts.append(running_loops(task).in_flight)
        if len(in_flight_counts) == 1:
            # Without being called it would idle for an hour.
            threading.Thread(target=wake_loop, daemon=True).start()
            return None
        called_again.set()
        task.stop()
        return Pause("an operator says so")

    policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 3600.0, "cap": 0.0}}})

    async def handle_async(order): ...

    task = consumer(queue, policy=policy, gates=[gate])((lambda order: None) if variant == "def" else handle_async)
    asyncio.run(task.run()) if variant == "async def" else task.run()
    assert in_flight_counts[:2] == [0, 0]


def test_fetched_deliveries_without_an_outcome_are_in_flight():
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction(id="order-1"), Transaction(id="order-2")])
    counts = []
    task = consumer(queue)(lambda order: counts.append(running_loops(task).in_flight))
    task.run()
    assert counts
    assert all(1 <= count <= 2 for count in counts)
    assert running_loops(task).in_flight == 0


def test_a_loop_with_a_closed_event_loop_is_not_woken():
    def raise_closed_loop():
        raise RuntimeError("Event loop is closed")

    loops, wake_calls = RunningLoops(), []
    with (
        loops.track(object(), list, wake=raise_closed_loop),
        loops.track(object(), list, wake=lambda: wake_calls.append(1)),
    ):
        loops.wake()
    loops.wake()
    assert wake_calls == [1]


@pytest.mark.spec("SEC-16")
@pytest.mark.parametrize("variant", ["def", "async def"])
def test_the_first_fetch_with_work_is_reported_once_and_before_the_work_starts(variant):
    queue, events = MemoryConnector("orders"), []

    def handle(order):
        events.append("started")

    async def handle_async(order):
        handle(order)

    queue.dispatch([Transaction(id="order-1"), Transaction(id="order-2")])
    policy = ConsumerPolicy.load({"loop": {"concurrency": {"value": 1}, "batch": {"size": 1}}})
    task = consumer(queue, policy=policy)(handle if variant == "def" else handle_async)
    running_loops(task).on_first_fetch = lambda: events.append("fetched")
    task.run() if variant == "def" else asyncio.run(task.run())
    assert events == ["fetched", "started", "started"]
