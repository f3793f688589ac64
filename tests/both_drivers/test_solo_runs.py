"""Solo runs in virtual time: the last permitted delivery of a transaction runs alone among all loops of a process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from threading import Thread

import pytest

from ergon_framework.clock import Clock
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.engine.aio import AsyncioDriver
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.testing.virtual_time import VirtualTime, run_virtual
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.running import running_loops
from ergon_framework.worker.solo import MAX_PAUSE_SECONDS, MAX_REST_SECONDS, MAX_WAIT_SECONDS, SoloRun
from tests.log_events import get_event

pytestmark = [pytest.mark.spec("CNN-11"), pytest.mark.invariant]

STOP_AFTER_SECONDS = 300.0


@dataclass
class HandlerCall:
    task: str
    id: str
    began: float
    ended: float | None = None

    def overlaps(self, other):
        return self is not other and self.began < other.ended and other.began < self.ended


class Loop:
    """One task of the process; its handler takes *seconds*."""

    def __init__(self, process, name, seconds, max_deliveries, options):
        self.process, self.name, self.seconds = process, name, seconds
        self.connector = MemoryConnector(name, clock=process.clock)
        self.policy = ConsumerPolicy.load(
            {
                "loop": {
                    "streaming": True,
                    "concurrency": {"value": 4},
                    "max_deliveries": max_deliveries,
                    "drain_timeout": 5.0,
                    "empty_queue": {"backoff": 5.0, "cap": 5.0},
                    **options,
                },
                "steps": {"process": {"retry": {"timeout": None}}},
            }
        )
        running_loops(self).solo_run = process.solo_run

    def begin(self, transaction):
        call = HandlerCall(self.name, transaction.id, self.process.now())
        self.process.calls.append(call)
        return call, self.seconds.get(transaction.id, 1.0) if isinstance(self.seconds, dict) else self.seconds


class ThreadLoop(Loop, ConsumerMixin):
    def process_transaction(self, transaction):
        call, seconds = self.begin(transaction)
        self.process.time.sleep(seconds)
        call.ended = self.process.now()


class AsyncLoop(Loop, AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        call, seconds = self.begin(transaction)
        await asyncio.sleep(seconds)
        call.ended = self.process.now()


class OneProcess:
    """Several tasks in one process, each with a loop; all of them are stopped at the end."""

    def __init__(self, variant):
        self.variant = variant
        self.now = lambda: 0.0
        self.solo_run = SoloRun(self.clock)
        self.loops, self.calls, self.actions, self.reports = [], [], [], {}

    def clock(self):
        return self.now()

    def add(self, name, *ids, seconds=1.0, max_deliveries=10, **loop):
        """Add a task; with max_deliveries=1 each of its transactions is on its last permitted delivery."""
        task_class = ThreadLoop if self.variant == "threads" else AsyncLoop
        task = task_class(self, name, seconds, max_deliveries, loop)
        task.connector.dispatch([Transaction(id=each, source=name) for each in ids])
        self.loops.append(task)
        return task

    def at(self, moment, action):
        self.actions.append((moment, action))

    def dispatch_at(self, moment, task, *ids):
        self.at(moment, lambda: task.connector.dispatch([Transaction(id=each, source=task.name) for each in ids]))

    def run(self, stop_at=STOP_AFTER_SECONDS):
        for task in self.loops:
            self.at(stop_at, task.stop)
        if self.variant == "threads":
            self._run_threads()
        else:
            run_virtual(self._run_asyncio())
        assert set(self.reports) == {task.name for task in self.loops}
        return self

    def _run_threads(self):
        time = self.time = VirtualTime()
        self.now = time.clock
        for moment, action in self.actions:
            time.call_at(moment, action)

        def consume(task):
            self.reports[task.name] = task.consume_transactions(task.policy, driver=partial(ThreadDriver, waiting=time))
            time.thread_ended()

        for task in self.loops:
            time.start(Thread(target=consume, args=(task,), daemon=True))
        time.run_until_idle()

    async def _run_asyncio(self):
        loop = asyncio.get_running_loop()
        self.now = loop.time
        for moment, action in self.actions:
            loop.call_later(moment, action)

        async def consume(task):
            driver = partial(AsyncioDriver, Clock(monotonic=loop.time))
            self.reports[task.name] = await task.consume_transactions(task.policy, driver=driver)

        await asyncio.gather(*map(consume, self.loops))

    def of(self, task):
        return [call for call in self.calls if call.task == task]

    def overlapping(self, call):
        return [other for other in self.calls if call.overlaps(other)]


@pytest.fixture(params=["threads", "asyncio"])
def process(request):
    return OneProcess(request.param)


def ids(count, prefix="order"):
    return [f"{prefix}-{number}" for number in range(count)]


def count(metric, task):
    return sum(value for labels, value in get_registry().read(metric) if labels["ergon.task"] == task)


def test_the_last_permitted_delivery_runs_alone_among_forty_loops(process):
    for number in range(39):
        process.add(f"busy-{number}", *ids(8), seconds=0.3)
    process.add("suspect", "s", seconds=2.0, max_deliveries=1)
    process.run()
    (suspect,) = process.of("suspect")
    assert process.overlapping(suspect) == []
    assert [len(process.of(f"busy-{number}")) for number in range(39)] == [8] * 39
    assert {(call.task, call.id) for call in process.calls if call.ended is None} == set()


def test_two_loops_with_a_suspect_each_run_them_one_after_the_other(process):
    process.add("first", "a", "b", seconds=1.0, max_deliveries=1)
    process.add("second", "a", "b", seconds=1.0, max_deliveries=1)
    process.add("busy", *ids(30), seconds=0.2)
    process.run()
    suspects = process.of("first") + process.of("second")
    assert sorted((call.task, call.id) for call in suspects) == [
        ("first", "a"),
        ("first", "b"),
        ("second", "a"),
        ("second", "b"),
    ]
    assert [process.overlapping(call) for call in suspects] == [[]] * 4
    assert len(process.of("busy")) == 30


def test_forty_loops_with_a_suspect_each_all_finish(process):
    for number in range(40):
        process.add(f"task-{number}", "s", seconds=0.5, max_deliveries=1)
    process.run()
    assert len(process.calls) == 40
    assert [process.overlapping(call) for call in process.calls] == [[]] * 40


def test_no_loop_holds_a_claim_that_has_not_started_while_a_suspect_runs(process):
    suspect = process.add("suspect", seconds=4.0, max_deliveries=1)
    busy = process.add("busy", *ids(40), seconds=1.0, prefetch=10)
    depths = []
    process.dispatch_at(3.0, suspect, "s")
    process.at(6.0, lambda: depths.append((running_loops(busy).in_flight, len(process.of("suspect")))))
    process.run()
    assert depths == [(0, 1)]
    assert process.overlapping(process.of("suspect")[0]) == []
    assert len(process.of("busy")) == 40
    assert process.reports["busy"].released_started == 0


def test_a_suspect_starts_next_to_a_handler_that_does_not_leave_within_the_limit(process, caplog):
    process.add("long", "l", seconds=100.0)
    process.dispatch_at(1.0, process.add("suspect", seconds=1.0, max_deliveries=1), "s")
    timeouts = count(names.SOLO_TIMEOUTS, "suspect")
    process.run()
    (suspect,) = process.of("suspect")
    assert 1.0 + MAX_WAIT_SECONDS <= suspect.began < 1.0 + MAX_WAIT_SECONDS + 1.0
    assert [call.task for call in process.overlapping(suspect)] == ["long"]
    assert count(names.SOLO_TIMEOUTS, "suspect") == timeouts + 1
    assert "solo run timed out" in [get_event(record) for record in caplog.records]


def test_a_pause_for_a_suspect_ends_at_its_limit_although_the_suspect_still_runs(process):
    process.add("suspect", "s", seconds=150.0, max_deliveries=1)
    busy = process.add("busy", seconds=1.0)
    process.dispatch_at(1.0, busy, "b")
    pauses, timeouts = count(names.SOLO_PAUSE_SECONDS, "busy"), count(names.SOLO_TIMEOUTS, "busy")
    process.run()
    (call,) = process.of("busy")
    assert MAX_PAUSE_SECONDS <= call.began < MAX_PAUSE_SECONDS + 2.0
    # The counter is shared by all tests of a process, so a difference of two values is rounded.
    paused = round(count(names.SOLO_PAUSE_SECONDS, "busy") - pauses, 6)
    assert MAX_PAUSE_SECONDS <= paused < MAX_PAUSE_SECONDS + 1.0
    assert count(names.SOLO_TIMEOUTS, "busy") == timeouts + 1


def test_a_second_suspect_waits_for_the_first_and_then_for_its_limit(process):
    process.add("hung", "s", seconds=280.0, max_deliveries=1)
    second = process.add("second", seconds=1.0, max_deliveries=1)
    process.dispatch_at(1.0, second, "t")
    process.run()
    (call,) = process.of("second")
    # It pauses for the first one until its limit, asks for a solo run of its own, and stops waiting for that too.
    assert MAX_PAUSE_SECONDS + MAX_WAIT_SECONDS <= call.began < MAX_PAUSE_SECONDS + MAX_WAIT_SECONDS + 2.0


def test_a_queue_full_of_suspects_leaves_time_to_the_other_loops(process):
    process.add("suspects", *ids(20), seconds=0.5, max_deliveries=1)
    process.add("busy", *ids(40), seconds=0.1)
    process.run()
    assert len(process.of("suspects")) == 20
    assert [process.overlapping(call) for call in process.of("suspects")] == [[]] * 20
    first, last = process.of("suspects")[0], process.of("suspects")[-1]
    assert len(process.of("busy")) == 40
    assert max(call.began for call in process.of("busy")) < last.began, "they do not wait for the end of the queue"
    assert last.ended - first.began < 20 * (0.5 + MAX_REST_SECONDS)


def test_a_stop_ends_a_wait_for_a_solo_run_and_releases_the_suspect(process):
    suspect = process.add("suspect", max_deliveries=1)
    process.add("long", "l", seconds=20.0)
    process.dispatch_at(1.0, suspect, "s")
    process.run(stop_at=10.0)
    assert process.of("suspect") == []
    assert process.reports["suspect"].stop_reason == "stop"
    assert suspect.connector.depth().ready == 1


def test_a_stop_ends_a_pause(process):
    process.add("suspect", "s", seconds=20.0, max_deliveries=1)
    process.dispatch_at(1.0, process.add("busy"), *ids(5))
    process.run(stop_at=10.0)
    assert process.of("busy") == []
    assert process.reports["busy"].stop_reason == "stop"


def test_a_loop_that_ends_during_its_solo_run_does_not_hold_the_others(process):
    suspect = process.add("suspect", "s", seconds=100.0, max_deliveries=1)
    process.add("busy", *ids(5), seconds=1.0)
    process.at(3.0, suspect.stop)
    process.run()
    began = [call.began for call in process.of("busy")]
    assert len(began) == 5
    assert max(began) < 20.0, "the drain of the other loop takes 5 s"


def test_waiting_work_of_a_loop_that_ends_with_its_queue_is_not_released(process):
    suspect = process.add("suspect", seconds=3.0, max_deliveries=1)
    once = process.add("once", seconds={"k-0": 2.0, "k-1": 1.0}, streaming=False)
    once.connector.dispatch([Transaction(id=f"k-{number}", source="once", key="k") for number in range(2)])
    process.dispatch_at(0.5, suspect, "s")
    process.run()
    assert [call.id for call in process.of("once")] == ["k-0", "k-1"]
    assert (process.reports["once"].stop_reason, process.overlapping(process.of("suspect")[0])) == ("empty", [])


def test_the_lease_of_a_paused_and_of_a_waiting_loop_is_renewed(process):
    process.add("long", "l", seconds=25.0)
    suspect = process.add("suspect", seconds=40.0, max_deliveries=1)
    process.dispatch_at(1.0, suspect, "s")
    process.run()
    assert suspect.connector.capabilities.renewable
    assert [call.id for call in process.of("suspect")] == ["s"], "a lost claim would be delivered again"
    assert process.overlapping(process.of("suspect")[0]) == []
