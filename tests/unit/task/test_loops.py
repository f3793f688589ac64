"""Loops of one task that is made of several."""

from __future__ import annotations

from types import SimpleNamespace

from ergon_framework import ProducerMixin, Transaction
from ergon_framework.task.consume import Consumption
from ergon_framework.task.loops import Loops, loops_of, share_loops


class Part:
    """A task with loops."""

    def __eq__(self, other):
        return isinstance(other, Part)

    __hash__ = None


def test_tasks_that_are_equal_have_loops_of_their_own():
    one, other = Part(), Part()
    assert loops_of(one) is loops_of(one)
    assert loops_of(one) is not loops_of(other)


def test_the_loops_of_a_part_are_those_of_the_whole():
    whole, part, other = Part(), Part(), Part()
    share_loops(part, whole)
    assert loops_of(part) is loops_of(whole)
    assert loops_of(other) is not loops_of(whole)


def test_whoever_cannot_be_woken_is_left_alone():
    loops, woken = Loops(), []
    with (
        loops.entered(SimpleNamespace(), lambda: None),
        loops.entered(SimpleNamespace(), lambda: None, wake=lambda: woken.append(1)),
    ):
        loops.wake()
    assert woken == [1]


def test_in_hand_is_what_runs_and_what_waits_for_a_slot():
    consumption = object.__new__(Consumption)
    consumption._crew, consumption._intake = SimpleNamespace(flights=[1, 2]), [3, 4, 5]
    assert consumption.in_hand == 5


def test_a_producer_has_nothing_in_hand_that_it_fetched():
    seen = []

    class Producer(ProducerMixin):
        def produce_transaction(self, transaction):
            seen.append(loops_of(self).in_hand)

    Producer().produce_transactions([Transaction("one", source="here")])
    assert seen == [0]
