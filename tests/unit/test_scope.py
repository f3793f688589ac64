"""The execution scope: readable anywhere inside a handler, and only ever shortened."""

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

ORDER = Transaction(id="order-7", source="shop", tenant="acme", correlation="basket-3")


class Clock:
    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


def make_scope(transaction=ORDER, *, deadline=None, clock=None, number=2):
    return Scope(transaction, step="process", attempt=number, deadline=deadline, clock=clock or Clock())


def run_in_handler(handler_scope, function):
    """Run *function* as if inside the handler of *entered*, without changing this test's context."""

    def call():
        scope.set_scope(handler_scope)
        return function()

    return contextvars.copy_context().run(call)


@pytest.mark.spec("CON-43")
def test_code_inside_a_handler_can_read_the_scope():
    handler_scope = make_scope(deadline=130.0)
    current = run_in_handler(handler_scope, scope.current)
    assert current is handler_scope
    assert (current.transaction_id, current.correlation, current.tenant) == ("order-7", "basket-3", "acme")
    assert (current.attempt, current.step, current.deadline, current.cancelled) == (2, "process", 130.0, False)


@pytest.mark.spec("CON-43")
def test_tasks_and_threads_inside_a_handler_read_the_same_scope():
    handler_scope = make_scope()
    seen = []

    def handler():
        async def inner():
            return await asyncio.create_task(asyncio.to_thread(scope.current))

        seen.append(asyncio.run(inner()))
        thread = threading.Thread(target=contextvars.copy_context().run, args=(lambda: seen.append(scope.current()),))
        thread.start()
        thread.join()

    run_in_handler(handler_scope, handler)
    assert seen == [handler_scope, handler_scope]


def test_there_is_no_scope_outside_of_a_handler():
    assert scope.current() is None


def test_a_scope_can_be_left():
    assert run_in_handler(make_scope(), lambda: (scope.set_scope(None), scope.current())[1]) is None


def test_a_transaction_without_a_correlation_correlates_by_its_id():
    assert make_scope(Transaction(id="order-7")).correlation == "order-7"
    assert make_scope(Transaction(id="order-7")).tenant is None


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
    def shorten():
        with scope.deadline_within(seconds) as inner:
            assert scope.current() is inner
            return inner.deadline

    assert run_in_handler(make_scope(deadline=deadline), shorten) == expected


@pytest.mark.spec("CON-43")
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.none() | st.floats(0, 1e6))
def test_no_layer_gives_inner_layers_more_time_than_it_has(layers, deadline):
    def shorten_each(rest):
        outer = scope.current()
        if not rest:
            return
        with scope.deadline_within(rest[0]) as inner:
            assert outer.deadline is None or inner.deadline <= outer.deadline
            shorten_each(rest[1:])

    run_in_handler(make_scope(deadline=deadline), lambda: shorten_each(layers))


@pytest.mark.spec("CON-43")
def test_an_infinite_limit_changes_nothing():
    def shorten():
        with scope.deadline_within(float("inf")) as inner:
            return inner.deadline

    assert run_in_handler(make_scope(deadline=130.0), shorten) == 130.0


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_an_invalid_time_is_rejected(seconds):
    def shorten():
        with scope.deadline_within(seconds):
            pytest.fail("entered")

    with pytest.raises(ValueError, match="seconds must be >= 0"):
        run_in_handler(make_scope(), shorten)


def test_a_shortened_scope_belongs_to_the_same_attempt():
    def shorten():
        with scope.deadline_within(1) as inner:
            return inner

    outer = make_scope(deadline=130.0)
    inner = run_in_handler(outer, shorten)
    assert (inner.transaction, inner.step, inner.attempt, inner.clock) == (ORDER, "process", 2, outer.clock)


@pytest.mark.parametrize("leave", [lambda: None, lambda: 1 / 0], ids=["normally", "by an error"])
def test_the_outer_scope_is_back_after_the_shortened_one(leave):
    def shorten():
        outer = scope.current()
        try:
            with scope.deadline_within(1):
                leave()
        except ZeroDivisionError:
            pass
        return scope.current() is outer

    assert run_in_handler(make_scope(), shorten)


def test_nothing_can_be_shortened_outside_of_a_handler():
    with pytest.raises(ConfigurationError, match="no scope to shorten"), scope.deadline_within(1):
        pytest.fail("entered")


def test_the_time_left_runs_down_to_zero_and_no_further():
    clock = Clock(100.0)
    attempt_scope = make_scope(deadline=130.0, clock=clock)
    remaining = []
    for clock.now in (100.0, 129.5, 130.0, 200.0):
        remaining.append(attempt_scope.remaining())
    assert remaining == [30.0, 0.5, 0.0, 0.0]


def test_without_a_deadline_no_time_runs_down():
    assert make_scope().remaining() is None


# -- cancellation ---------------------------------------------------------------------------------


@pytest.mark.spec("CON-43")
def test_a_cancelled_attempt_is_cancelled_for_every_inner_layer():
    outer = make_scope()

    def cancel_outer():
        with scope.deadline_within(10), scope.deadline_within(5) as inner:
            before = inner.cancelled
            outer.cancel()
            return before, inner.cancelled

    assert run_in_handler(outer, cancel_outer) == (False, True)
    assert outer.cancelled


def test_a_cancelled_layer_does_not_cancel_its_attempt():
    outer = make_scope()

    def cancel_inner():
        with scope.deadline_within(10) as inner:
            inner.cancel()
            return inner.cancelled

    assert run_in_handler(outer, cancel_inner)
    assert not outer.cancelled


# -- names of effects -----------------------------------------------------------------------------


@pytest.mark.spec("CON-48")
def test_an_effect_has_the_id_that_its_transaction_derives():
    assert make_scope().derive("payments.charge") == ORDER.derive("payments.charge")


@pytest.mark.spec("CON-48")
def test_a_second_effect_of_one_name_in_one_attempt_is_an_error():
    attempt_scope = make_scope()
    attempt_scope.derive("payments.charge")
    with pytest.raises(
        ConfigurationError, match=r"effect name 'payments.charge' is used twice.*'order-7'.*different name="
    ):
        attempt_scope.derive("payments.charge")
    assert attempt_scope.derive("payments.charge/tip") != ORDER.derive("payments.charge")


@pytest.mark.spec("CON-48")
def test_a_shortened_scope_shares_the_effect_names_of_its_attempt():
    attempt_scope = make_scope()

    def derive_twice():
        with scope.deadline_within(10) as first:
            first.derive("payments.charge")
        with scope.deadline_within(10) as second:
            second.derive("payments.charge")

    with pytest.raises(ConfigurationError, match="is used twice"):
        run_in_handler(attempt_scope, derive_twice)
    with pytest.raises(ConfigurationError, match="is used twice"):
        attempt_scope.derive("payments.charge")


@pytest.mark.spec("CON-48")
def test_the_next_attempt_may_use_the_name_again_and_gets_the_same_id():
    assert make_scope(number=0).derive("payments.charge") == make_scope(number=1).derive("payments.charge")
