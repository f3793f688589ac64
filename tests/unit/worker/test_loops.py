"""Loops of one task that is made of several."""

from __future__ import annotations

from types import SimpleNamespace

from ergon_framework import ProducerMixin, Transaction
from ergon_framework.worker.consume import ConsumeLoop
from ergon_framework.worker.running import RunningLoops, running_loops, share_running_loops


class EqualTask:
    """A task with loops."""

    def __eq__(self, other):
        return isinstance(other, EqualTask)

    __hash__ = None


def test_equal_tasks_have_separate_running_loops():
    one, other = EqualTask(), EqualTask()
    assert running_loops(one) is running_loops(one)
    assert running_loops(one) is not running_loops(other)


def test_a_part_shares_the_loops_of_its_owner():
    owner, part, other = EqualTask(), EqualTask(), EqualTask()
    share_running_loops(part, owner)
    assert running_loops(part) is running_loops(owner)
    assert running_loops(other) is not running_loops(owner)


def test_a_loop_without_a_wake_function_is_skipped():
    loops, wake_calls = RunningLoops(), []
    with (
        loops.track(SimpleNamespace(), lambda: None),
        loops.track(SimpleNamespace(), lambda: None, wake=lambda: wake_calls.append(1)),
    ):
        loops.wake()
    assert wake_calls == [1]


def test_in_flight_counts_running_and_waiting_deliveries():
    loop = object.__new__(ConsumeLoop)
    loop._slot_table, loop._backlog = SimpleNamespace(running=[1, 2]), [3, 4, 5]
    assert loop.in_flight == 5


def test_a_producer_has_no_fetched_delivery_in_flight():
    seen = []

    class Producer(ProducerMixin):
        def produce_transaction(self, transaction):
            seen.append(running_loops(self).in_flight)

    Producer().produce_transactions([Transaction(id="one", source="here")])
    assert seen == [0]
