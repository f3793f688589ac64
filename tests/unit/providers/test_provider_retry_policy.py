"""The retry policy: delays, the decision after a failure, and the plain loop."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.errors import (
    BY_REASON,
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderDependencyError,
    ProviderInternalError,
    ProviderRateLimitError,
    ProviderTimeoutError,
)
from ergon_framework.providers.retry import Again, GiveUp, Ran, RetryPolicy, Tried, Why

RETRYABLE = {"timeout", "connection_error", "dependency_unavailable", "rate_limited"}
POLICY = RetryPolicy(max_attempts=4, base_delay_seconds=1.0, max_delay_seconds=3.0, jitter_ratio=0.0)

seconds = st.floats(0, 1e6)
ratios = st.floats(0, 1)
rolls = st.floats(0, 1, exclude_max=True)


class World:
    """A clock that moves only when somebody sleeps or works."""

    def __init__(self, *ends, takes=0.0, oversleeps=0.0):
        self.now = 100.0
        self.ends = list(ends)
        self.takes = takes
        self.oversleeps = oversleeps
        self.slept = []
        self.calls = 0

    def clock(self):
        return self.now

    def wall(self):
        return 1e9 + self.now

    def sleep(self, delay):
        self.slept.append(delay)
        self.now += delay + self.oversleeps

    def call(self):
        self.calls += 1
        self.now += self.takes
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        if isinstance(end, BaseException):
            raise end
        return end

    def run(self, policy=POLICY, budget=None, dice=None):
        return policy.run(self.call, clock=self.clock, wall=self.wall, sleep=self.sleep, dice=dice, budget=budget)


# -- delays ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-07", "PRV-17")
def test_delays_double_from_the_base_and_end_growing_at_the_cap():
    policy = RetryPolicy(base_delay_seconds=0.5, max_delay_seconds=3.0, jitter_ratio=0.0)
    assert [policy.delay(number) for number in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.spec("PRV-07", "PRV-17")
@given(number=st.integers(1, 40), base=st.floats(0, 1e3), cap=st.floats(0, 1e6))
def test_a_delay_is_the_documented_formula(number, base, cap):
    policy = RetryPolicy(base_delay_seconds=base, max_delay_seconds=cap)
    assert policy.delay(number) == pytest.approx(min(cap, base * 2 ** (number - 1)))


@pytest.mark.spec("PRV-07", "PRV-17")
@given(number=st.integers(1, 60), base=seconds, cap=seconds, ratio=ratios, rolled=rolls)
def test_jitter_is_a_share_of_the_delay_to_either_side(number, base, cap, ratio, rolled):
    policy = RetryPolicy(base_delay_seconds=base, max_delay_seconds=cap, jitter_ratio=ratio)
    plain, moved = policy.delay(number), policy.delay(number, lambda: rolled)
    assert moved >= 0
    assert abs(moved - plain) <= plain * ratio * (1 + 1e-9) + 1e-9


@pytest.mark.spec("PRV-07")
def test_jitter_is_symmetric_and_comes_after_the_cap():
    policy = RetryPolicy(base_delay_seconds=10, max_delay_seconds=10, jitter_ratio=0.5)
    assert [policy.delay(1, lambda rolled=rolled: rolled) for rolled in (0.0, 0.5, 0.75)] == [5.0, 10.0, 12.5]


@pytest.mark.spec("PRV-24")
def test_other_dice_give_another_delay():
    policy = RetryPolicy()
    assert policy.delay(1, lambda: 0.1) != policy.delay(1, lambda: 0.9)


@pytest.mark.parametrize("number", [2_000, 10**9, 10**400])
def test_no_attempt_number_is_too_large(number):
    assert POLICY.delay(number) == 3.0
    assert math.isfinite(RetryPolicy(max_delay_seconds=1e300).delay(number))


@pytest.mark.parametrize("number", [0, -1])
def test_an_attempt_number_below_one_is_refused(number):
    with pytest.raises(ValueError, match="count from 1"):
        POLICY.delay(number)


# -- the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"base_delay_seconds": -1.0},
        {"max_delay_seconds": -1.0},
        {"jitter_ratio": 1.1},
        {"jitter_ratio": -0.1},
        {"max_delay_seconds": math.inf},
        {"max_attempts": "3"},
        {"attempts": 3},
    ],
)
def test_what_is_out_of_bounds_or_unknown_is_refused(wrong):
    with pytest.raises(ValidationError):
        RetryPolicy(**wrong)
    with pytest.raises(ConfigurationError):
        RetryPolicy.load(wrong)


@pytest.mark.spec("PRV-28")
def test_the_policy_is_frozen_and_travels():
    policy = RetryPolicy(max_attempts=2, base_delay_seconds=1, max_delay_seconds=2, jitter_ratio=0.5)
    with pytest.raises(ValidationError):
        policy.max_attempts = 3
    assert pickle.loads(pickle.dumps(policy)) == policy


# -- the decision ---------------------------------------------------------------------------------


@pytest.mark.spec("PRV-04", "PRV-08", "PRV-17")
@pytest.mark.parametrize("reason", BY_REASON)
def test_only_retryable_errors_lead_to_another_attempt(reason):
    decision = POLICY.next(1, BY_REASON[reason]("x"), remaining=None, dice=None)
    assert decision == (Again(1.0) if reason in RETRYABLE else GiveUp(Why.NOT_RETRYABLE))


def test_what_a_lower_layer_gave_up_on_is_not_tried_again():
    assert POLICY.next(1, ProviderTimeoutError("x", final=True), remaining=None, dice=None) == GiveUp(Why.NOT_RETRYABLE)


def test_the_last_attempt_is_the_last():
    assert POLICY.next(3, ProviderTimeoutError("x"), remaining=None, dice=None) == Again(3.0)
    assert POLICY.next(4, ProviderTimeoutError("x"), remaining=None, dice=None) == GiveUp(Why.ATTEMPTS_SPENT)


@pytest.mark.spec("PRV-08")
@pytest.mark.parametrize(
    "left, decision", [(1.01, Again(1.0)), (1.0, GiveUp(Why.NO_TIME_LEFT)), (0.0, GiveUp(Why.NO_TIME_LEFT))]
)
def test_a_wait_that_leaves_no_time_for_the_call_is_not_begun(left, decision):
    assert POLICY.next(1, ProviderTimeoutError("x"), remaining=left, dice=None) == decision


@pytest.mark.spec("PRV-24")
@given(
    number=st.integers(1, 3),
    asked=st.none() | st.floats(0, 1e5),
    left=st.none() | st.floats(0, 1e5),
    ratio=ratios,
    rolled=rolls,
)
def test_what_the_provider_asked_to_wait_is_never_shortened(number, asked, left, ratio, rolled):
    policy = POLICY.model_copy(update={"jitter_ratio": ratio})
    own = policy.delay(number, lambda: rolled)
    decision = policy.next(number, ProviderRateLimitError("x", retry_after=asked), remaining=left, dice=lambda: rolled)
    wait = max(own, asked or 0.0)
    assert decision == (Again(wait) if left is None or wait < left else GiveUp(Why.NO_TIME_LEFT))


# -- the loop -------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-08", "PRV-28")
def test_a_transient_failure_is_tried_again_and_every_attempt_is_told():
    world = World(TimeoutError(), ProviderRateLimitError("x", retry_after=7), "value", takes=0.5)
    ran = world.run()
    assert isinstance(ran, Ran)
    assert ran.value == "value"
    first, second, third = ran.attempts
    assert (first.attempt_number, first.began, first.duration, first.delay) == (1, 100.0, 0.5, 1.0)
    assert isinstance(first.error, ProviderTimeoutError)
    assert (second.attempt_number, second.began, second.duration, second.delay) == (2, 101.5, 0.5, 7)
    assert third == Tried(3, 109.0, 0.5)
    assert world.slept == [1.0, 7]


@pytest.mark.spec("PRV-08", "PRV-17")
def test_an_error_that_is_not_retryable_ends_it_at_once():
    world = World(ProviderBadRequestError("no", http_status=422))
    with pytest.raises(ProviderBadRequestError) as caught:
        world.run()
    assert (world.calls, world.slept) == (1, [])
    assert [(tried.attempt_number, tried.error, tried.delay) for tried in caught.value.attempts] == [
        (1, caught.value, None)
    ]


def test_when_the_attempts_are_spent_the_last_canonical_error_is_raised_with_its_cause():
    world = World(ConnectionResetError(), ConnectionRefusedError())
    with pytest.raises(ProviderConnectionError) as caught:
        world.run()
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert (world.calls, world.slept) == (4, [1.0, 2.0, 3.0])
    assert [tried.delay for tried in caught.value.attempts] == [1.0, 2.0, 3.0, None]
    assert caught.value.attempts[-1].error is caught.value
    assert not caught.value.final  # only execute can say so


def test_a_bug_is_not_tried_again():
    world = World(KeyError("id"))
    with pytest.raises(ProviderInternalError):
        world.run()
    assert world.calls == 1


@pytest.mark.parametrize("leaving", [KeyboardInterrupt(), SystemExit(3)])
def test_who_wants_to_leave_may(leaving):
    world = World(leaving)
    with pytest.raises(type(leaving)) as caught:
        world.run()
    assert caught.value is leaving


@pytest.mark.spec("PRV-08")
@given(
    budget=st.floats(0.001, 100),
    takes=st.floats(0, 10),
    asked=st.none() | st.floats(0, 30),
    ratio=ratios,
    rolled=rolls,
)
def test_no_attempt_begins_and_no_sleep_ends_after_the_budget(budget, takes, asked, ratio, rolled):
    world = World(ProviderDependencyError("x", retry_after=asked), takes=takes)
    policy = RetryPolicy(max_attempts=10, jitter_ratio=ratio)
    with pytest.raises(ProviderDependencyError) as caught:
        world.run(policy, budget=budget, dice=lambda: rolled)
    attempts = caught.value.attempts
    assert all(tried.began < 100.0 + budget for tried in attempts)
    assert world.now <= 100.0 + budget + takes * (1 + 1e-9)
    # A sleep that rounding made end at the very end of the budget is followed by nothing.
    assert len(attempts) == world.calls
    assert len(world.slept) - world.calls in (-1, 0)


def test_a_sleep_that_took_too_long_is_not_followed_by_an_attempt():
    world = World(ProviderTimeoutError("x"), oversleeps=5.0)
    with pytest.raises(ProviderTimeoutError) as caught:
        world.run(budget=2.0)
    assert world.calls == 1
    assert [tried.delay for tried in caught.value.attempts] == [1.0]


@pytest.mark.parametrize("budget", [0, -1.0])
def test_without_time_nothing_is_called_and_nobody_is_blamed(budget):
    world = World("value")
    with pytest.raises(ProviderTimeoutError) as caught:
        world.run(budget=budget)
    assert world.calls == 0
    assert (caught.value.sent, caught.value.fault, caught.value.attempts) == (False, False, ())


def test_a_date_in_a_header_is_compared_with_the_wall_time():
    class Refused(Exception):
        status_code = 429
        headers = {"retry-after": "Sun, 09 Sep 2001 01:49:00 GMT"}  # noqa: RUF012 - as a library has it

    world = World(Refused(), "value")
    assert world.run().attempts[0].delay == 1e9 - 1e9 + 40.0


@pytest.mark.spec("DX-32", "PRV-28")
def test_a_call_is_run_as_the_document_shows_it():
    came = []

    def call():
        came.append(None)
        if len(came) < 3:
            raise ConnectionResetError("as a client would")
        return "fine"

    ran = RetryPolicy(max_attempts=3, base_delay_seconds=0.001, max_delay_seconds=0.002).run(call)
    assert (ran.value, [one.attempt_number for one in ran.attempts]) == ("fine", [1, 2, 3])
    came.clear()
    with pytest.raises(ProviderConnectionError) as caught:
        RetryPolicy(max_attempts=2, base_delay_seconds=0.0).run(call)
    assert len(caught.value.attempts) == 2
