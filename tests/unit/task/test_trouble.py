"""Why nothing comes in: what probes are told of a loop that runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ergon_framework import ConsumerPolicy, MemoryConnector, Transaction, consumer, producer
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import ConnectionLost
from ergon_framework.task.gates import Pause
from ergon_framework.task.loops import Loops, loops_of

POLICY = ConsumerPolicy.load({"loop": {"streaming": True, "limit": 1}, "steps": {"fetch": {"retry": {"backoff": 0.0}}}})
LOST = "the connector cannot be read: ConnectionLost: no line"


class Away(MemoryConnector):
    """Has no line for two fetches, and looks at what is then said of the loop."""

    def __init__(self) -> None:
        super().__init__("orders")
        self.seen: list[list[str] | None] = []
        self.task = None

    def _look(self):
        self.seen.append(loops_of(self.task).troubles)
        if len(self.seen) <= 2:
            raise ConnectionLost("no line")

    def fetch_transactions(self, batch_size, **extra):
        self._look()
        return super().fetch_transactions(batch_size, **extra)

    async def fetch_transactions_async(self, batch_size, **extra):
        self._look()
        return await super().fetch_transactions_async(batch_size, **extra)


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize("flavour", ["def", "async def"])
def test_a_line_that_is_down_is_a_trouble_until_a_fetch_is_answered(flavour):
    queue = Away()
    queue.dispatch([Transaction("order-1")])

    def handle(order):
        queue.seen.append(loops_of(queue.task).troubles)

    async def handle_async(order):
        handle(order)

    queue.task = consumer(queue, policy=POLICY)(handle if flavour == "def" else handle_async)
    run = queue.task.run
    assert (run() if flavour == "def" else asyncio.run(run())).finished == 1
    assert queue.seen == [[], [LOST], [LOST], []]
    assert loops_of(queue.task).troubles is None


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize("flavour", ["def", "async def"])
@pytest.mark.parametrize("bridge", [lambda queue: queue, as_sync, as_async])
def test_a_server_that_takes_no_writes_is_a_trouble_although_it_is_read(flavour, bridge):
    class Full(MemoryConnector):
        write_refusal = "the memory is full"

    queue, seen = Full("orders"), []
    queue.dispatch([Transaction("order-1")])

    def handle(order):
        seen.append(loops_of(task).troubles)
        Full.write_refusal = None
        seen.append(loops_of(task).troubles)

    async def handle_async(order):
        handle(order)

    task = consumer(bridge(queue), policy=POLICY)(handle if flavour == "def" else handle_async)
    report = task.run() if flavour == "def" else asyncio.run(task.run())
    assert (report.finished, seen) == (1, [["the connector takes no new messages: the memory is full"], []])


@pytest.mark.spec("RUN-02")
def test_a_gate_that_holds_the_loop_is_a_trouble_and_an_empty_queue_is_none():
    queue = MemoryConnector("orders")
    seen = []

    def gate():
        seen.append(loops_of(task).troubles)
        if len(seen) == 1:
            return Pause("the breaker is open", 0.001)
        if len(seen) == 3:
            task.stop()
        return None

    policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.001}}})
    task = consumer(queue, policy=policy, gates=[gate])(lambda order: None)
    task.run()
    assert seen == [[], ["the breaker is open"], []]


def test_who_only_produces_has_no_trouble():
    queue = MemoryConnector("orders")
    seen = []

    @producer(queue)
    def send(order):
        seen.append(loops_of(send).troubles)
        return "sent"

    send.produce_transactions([Transaction("order-1")])
    assert seen == [[]]


def test_no_loop_is_no_answer():
    assert Loops().troubles is None


@pytest.mark.parametrize("flavour", ["def", "async def"])
def test_a_loop_that_idles_is_woken_to_ask_its_gates(flavour):
    queue = MemoryConnector("orders")
    asked, again = [], threading.Event()

    def call():
        # More than once: between its gate and its fetch a loop does not hear it.
        while not again.wait(0.02):
            loops_of(task).wake()

    def gate():
        asked.append(loops_of(task).in_hand)
        if len(asked) == 1:
            # Without being called it would idle for an hour.
            threading.Thread(target=call, daemon=True).start()
            return None
        again.set()
        task.stop()
        return Pause("an operator says so")

    policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 3600.0, "cap": 0.0}}})

    async def handle_async(order): ...

    task = consumer(queue, policy=policy, gates=[gate])((lambda order: None) if flavour == "def" else handle_async)
    asyncio.run(task.run()) if flavour == "async def" else task.run()
    assert asked[:2] == [0, 0]


def test_what_was_fetched_and_has_no_outcome_is_in_hand():
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("order-1"), Transaction("order-2")])
    seen = []
    task = consumer(queue)(lambda order: seen.append(loops_of(task).in_hand))
    task.run()
    assert seen
    assert all(1 <= count <= 2 for count in seen)
    assert loops_of(task).in_hand == 0


def test_a_loop_whose_event_loop_is_closed_is_nobody_to_wake():
    def closed():
        raise RuntimeError("Event loop is closed")

    loops, heard = Loops(), []
    with loops.entered(object(), list, wake=closed), loops.entered(object(), list, wake=lambda: heard.append(1)):
        loops.wake()
    loops.wake()
    assert heard == [1]


@pytest.mark.spec("SEC-16")
@pytest.mark.parametrize("flavour", ["def", "async def"])
def test_the_first_fetch_that_brings_work_is_noted_once_and_before_any_of_it_starts(flavour):
    queue, seen = MemoryConnector("orders"), []

    def handle(order):
        seen.append("started")

    async def handle_async(order):
        handle(order)

    queue.dispatch([Transaction("order-1"), Transaction("order-2")])
    policy = ConsumerPolicy.load({"loop": {"concurrency": {"value": 1}, "batch": {"size": 1}}})
    task = consumer(queue, policy=policy)(handle if flavour == "def" else handle_async)
    loops_of(task).on_first_fetch = lambda: seen.append("fetched")
    task.run() if flavour == "def" else asyncio.run(task.run())
    assert seen == ["fetched", "started", "started"]
