"""The execution scope: readable anywhere below a handler, and only ever shortened."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework import scope
from ergon_framework.errors import ConfigurationError
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction

ORDER = Transaction("order-7", source="shop", tenant="acme", correlation="basket-3")


class Clock:
    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


def attempt(transaction=ORDER, *, deadline=None, clock=None, number=2):
    return Scope(transaction, step="process", attempt=number, deadline=deadline, clock=clock or Clock())


def below(entered, function):
    """Run *function* as if below the handler of *entered*, leaving this test's context alone."""

    def body():
        scope.enter(entered)
        return function()

    return contextvars.copy_context().run(body)


@pytest.mark.spec("CON-43")
def test_everything_below_a_handler_can_read_the_scope():
    entered = attempt(deadline=130.0)
    read = below(entered, scope.current)
    assert read is entered
    assert (read.transaction_id, read.correlation, read.tenant) == ("order-7", "basket-3", "acme")
    assert (read.attempt, read.step, read.deadline, read.cancelled) == (2, "process", 130.0, False)


@pytest.mark.spec("CON-43")
def test_tasks_and_carried_threads_below_a_handler_read_the_same_scope():
    entered = attempt()
    seen = []

    def handler():
        async def inner():
            return await asyncio.create_task(asyncio.to_thread(scope.current))

        seen.append(asyncio.run(inner()))
        carried = threading.Thread(target=contextvars.copy_context().run, args=(lambda: seen.append(scope.current()),))
        carried.start()
        carried.join()

    below(entered, handler)
    assert seen == [entered, entered]


def test_there_is_no_scope_outside_of_a_handler():
    assert scope.current() is None


def test_a_scope_can_be_left():
    assert below(attempt(), lambda: (scope.enter(None), scope.current())[1]) is None


def test_a_transaction_without_a_correlation_correlates_by_its_id():
    assert attempt(Transaction("order-7")).correlation == "order-7"
    assert attempt(Transaction("order-7")).tenant is None


# -- the deadline ---------------------------------------------------------------------------------


@pytest.mark.spec("CON-43")
@pytest.mark.parametrize(
    "deadline, seconds, expected",
    [
        (130.0, 10, 110.0),
        (130.0, 30, 130.0),
        (130.0, 1000, 130.0),
        (None, 10, 110.0),
        (90.0, 10, 90.0),
        (130.0, 0, 100),
    ],
)
def test_a_deadline_can_only_be_shortened(deadline, seconds, expected):
    def shortened():
        with scope.shorten(seconds) as inner:
            assert scope.current() is inner
            return inner.deadline

    assert below(attempt(deadline=deadline), shortened) == expected


@pytest.mark.spec("CON-43")
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.none() | st.floats(0, 1e6))
def test_no_layer_gives_the_layers_below_it_more_time_than_it_has(layers, deadline):
    def nested(rest):
        outer = scope.current()
        if not rest:
            return
        with scope.shorten(rest[0]) as inner:
            assert outer.deadline is None or inner.deadline <= outer.deadline
            nested(rest[1:])

    below(attempt(deadline=deadline), lambda: nested(layers))


@pytest.mark.spec("CON-43")
def test_an_infinite_wish_changes_nothing():
    def shortened():
        with scope.shorten(float("inf")) as inner:
            return inner.deadline

    assert below(attempt(deadline=130.0), shortened) == 130.0


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_time_that_no_clock_reaches_is_refused(seconds):
    def shortened():
        with scope.shorten(seconds):
            pytest.fail("entered")

    with pytest.raises(ValueError, match="a scope can be shortened to a number of seconds >= 0"):
        below(attempt(), shortened)


def test_a_shortened_scope_is_the_same_work():
    def shortened():
        with scope.shorten(1) as inner:
            return inner

    outer = attempt(deadline=130.0)
    inner = below(outer, shortened)
    assert (inner.transaction, inner.step, inner.attempt, inner.clock) == (ORDER, "process", 2, outer.clock)


@pytest.mark.parametrize("leave", [lambda: None, lambda: 1 / 0], ids=["normally", "by an error"])
def test_the_outer_scope_is_back_after_the_shortened_one(leave):
    def shortened():
        outer = scope.current()
        try:
            with scope.shorten(1):
                leave()
        except ZeroDivisionError:
            pass
        return scope.current() is outer

    assert below(attempt(), shortened)


def test_nothing_can_be_shortened_outside_of_a_handler():
    with pytest.raises(ConfigurationError, match="no scope to shorten"), scope.shorten(1):
        pytest.fail("entered")


def test_the_time_left_runs_down_to_zero_and_no_further():
    clock = Clock(100.0)
    running = attempt(deadline=130.0, clock=clock)
    left = []
    for clock.now in (100.0, 129.5, 130.0, 200.0):
        left.append(running.remaining())
    assert left == [30.0, 0.5, 0.0, 0.0]


def test_without_a_deadline_no_time_runs_down():
    assert attempt().remaining() is None


# -- cancellation ---------------------------------------------------------------------------------


@pytest.mark.spec("CON-43")
def test_a_cancelled_attempt_is_cancelled_for_every_layer_below():
    outer = attempt()

    def shortened():
        with scope.shorten(10), scope.shorten(5) as inner:
            before = inner.cancelled
            outer.cancel()
            return before, inner.cancelled

    assert below(outer, shortened) == (False, True)
    assert outer.cancelled


def test_a_cancelled_layer_does_not_cancel_the_attempt_above_it():
    outer = attempt()

    def shortened():
        with scope.shorten(10) as inner:
            inner.cancel()
            return inner.cancelled

    assert below(outer, shortened)
    assert not outer.cancelled


# -- names of effects -----------------------------------------------------------------------------


@pytest.mark.spec("CON-48")
def test_an_effect_has_the_id_that_its_transaction_derives():
    assert attempt().derive("payments.charge") == ORDER.derive("payments.charge")


@pytest.mark.spec("CON-48")
def test_a_second_effect_of_one_name_in_one_attempt_is_an_error():
    running = attempt()
    running.derive("payments.charge")
    with pytest.raises(ConfigurationError, match=r"second effect named 'payments.charge'.*'order-7'.*its own name="):
        running.derive("payments.charge")
    assert running.derive("payments.charge/tip") != ORDER.derive("payments.charge")


@pytest.mark.spec("CON-48")
def test_a_shortened_scope_is_no_way_around_the_names_of_its_attempt():
    running = attempt()

    def twice():
        with scope.shorten(10) as first:
            first.derive("payments.charge")
        with scope.shorten(10) as second:
            second.derive("payments.charge")

    with pytest.raises(ConfigurationError, match="second effect"):
        below(running, twice)
    with pytest.raises(ConfigurationError, match="second effect"):
        running.derive("payments.charge")


@pytest.mark.spec("CON-48")
def test_the_next_attempt_may_use_the_name_again_and_gets_the_same_id():
    assert attempt(number=0).derive("payments.charge") == attempt(number=1).derive("payments.charge")
