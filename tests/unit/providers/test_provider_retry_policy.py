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
    ERROR_BY_REASON,
    AttemptInfo,
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderDependencyError,
    ProviderInternalError,
    ProviderRateLimitError,
    ProviderTimeoutError,
)
from ergon_framework.providers.retry import DoNotRetry, GiveUpReason, RetryAfter, RetryPolicy, RetryResult

RETRYABLE = {"timeout", "connection_error", "dependency_unavailable", "rate_limited"}
POLICY = RetryPolicy(max_attempts=4, base_delay_seconds=1.0, max_delay_seconds=3.0, jitter_ratio=0.0)

seconds = st.floats(0, 1e6)
ratios = st.floats(0, 1)
rolls = st.floats(0, 1, exclude_max=True)


class RetryHarness:
    """A clock that moves only during sleeps and calls."""

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

    def run(self, policy=POLICY, budget=None, random=None):
        return policy.run(self.call, clock=self.clock, wall=self.wall, sleep=self.sleep, random=random, budget=budget)


# -- delays ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-07", "PRV-17")
def test_delays_double_from_the_base_up_to_the_cap():
    policy = RetryPolicy(base_delay_seconds=0.5, max_delay_seconds=3.0, jitter_ratio=0.0)
    assert [policy.compute_delay(number) for number in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.spec("PRV-07", "PRV-17")
@given(number=st.integers(1, 40), base=st.floats(0, 1e3), cap=st.floats(0, 1e6))
def test_a_delay_is_the_documented_formula(number, base, cap):
    policy = RetryPolicy(base_delay_seconds=base, max_delay_seconds=cap)
    assert policy.compute_delay(number) == pytest.approx(min(cap, base * 2 ** (number - 1)))


@pytest.mark.spec("PRV-07", "PRV-17")
@given(number=st.integers(1, 60), base=seconds, cap=seconds, ratio=ratios, rolled=rolls)
def test_jitter_is_a_share_of_the_delay_to_either_side(number, base, cap, ratio, rolled):
    policy = RetryPolicy(base_delay_seconds=base, max_delay_seconds=cap, jitter_ratio=ratio)
    plain, moved = policy.compute_delay(number), policy.compute_delay(number, lambda: rolled)
    assert moved >= 0
    assert abs(moved - plain) <= plain * ratio * (1 + 1e-9) + 1e-9


@pytest.mark.spec("PRV-07")
def test_jitter_is_symmetric_and_comes_after_the_cap():
    policy = RetryPolicy(base_delay_seconds=10, max_delay_seconds=10, jitter_ratio=0.5)
    assert [policy.compute_delay(1, lambda rolled=rolled: rolled) for rolled in (0.0, 0.5, 0.75)] == [5.0, 10.0, 12.5]


@pytest.mark.spec("PRV-24")
def test_another_random_value_gives_another_delay():
    policy = RetryPolicy()
    assert policy.compute_delay(1, lambda: 0.1) != policy.compute_delay(1, lambda: 0.9)


@pytest.mark.parametrize("number", [2_000, 10**9, 10**400])
def test_no_attempt_number_is_too_large(number):
    assert POLICY.compute_delay(number) == 3.0
    assert math.isfinite(RetryPolicy(max_delay_seconds=1e300).compute_delay(number))


@pytest.mark.parametrize("number", [0, -1])
def test_an_attempt_number_below_one_is_refused(number):
    with pytest.raises(ValueError, match="attempt_number must be >= 1, got"):
        POLICY.compute_delay(number)


# -- the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
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
def test_an_invalid_or_unknown_field_is_rejected(fields):
    with pytest.raises(ValidationError):
        RetryPolicy(**fields)
    with pytest.raises(ConfigurationError):
        RetryPolicy.load(fields)


@pytest.mark.spec("PRV-28")
def test_the_policy_is_frozen_and_can_be_pickled():
    policy = RetryPolicy(max_attempts=2, base_delay_seconds=1, max_delay_seconds=2, jitter_ratio=0.5)
    with pytest.raises(ValidationError):
        policy.max_attempts = 3
    assert pickle.loads(pickle.dumps(policy)) == policy


# -- the decision ---------------------------------------------------------------------------------


@pytest.mark.spec("PRV-04", "PRV-08", "PRV-17")
@pytest.mark.parametrize("reason", ERROR_BY_REASON)
def test_only_retryable_errors_lead_to_another_attempt(reason):
    decision = POLICY.decide(1, ERROR_BY_REASON[reason]("x"), remaining=None, random=None)
    assert decision == (RetryAfter(1.0) if reason in RETRYABLE else DoNotRetry(GiveUpReason.NOT_RETRYABLE))


def test_a_final_error_is_not_retried():
    assert POLICY.decide(1, ProviderTimeoutError("x", final=True), remaining=None, random=None) == DoNotRetry(
        GiveUpReason.NOT_RETRYABLE
    )


def test_the_last_attempt_is_the_last():
    assert POLICY.decide(3, ProviderTimeoutError("x"), remaining=None, random=None) == RetryAfter(3.0)
    assert POLICY.decide(4, ProviderTimeoutError("x"), remaining=None, random=None) == DoNotRetry(
        GiveUpReason.ATTEMPTS_EXHAUSTED
    )


@pytest.mark.spec("PRV-08")
@pytest.mark.parametrize(
    "remaining, decision",
    [
        (1.01, RetryAfter(1.0)),
        (1.0, DoNotRetry(GiveUpReason.NO_TIME_LEFT)),
        (0.0, DoNotRetry(GiveUpReason.NO_TIME_LEFT)),
    ],
)
def test_a_wait_that_leaves_no_time_for_the_call_is_not_started(remaining, decision):
    assert POLICY.decide(1, ProviderTimeoutError("x"), remaining=remaining, random=None) == decision


@pytest.mark.spec("PRV-24")
@given(
    number=st.integers(1, 3),
    requested_delay=st.none() | st.floats(0, 1e5),
    remaining=st.none() | st.floats(0, 1e5),
    ratio=ratios,
    rolled=rolls,
)
def test_the_delay_that_a_provider_requests_is_never_shortened(number, requested_delay, remaining, ratio, rolled):
    policy = POLICY.model_copy(update={"jitter_ratio": ratio})
    own = policy.compute_delay(number, lambda: rolled)
    decision = policy.decide(
        number, ProviderRateLimitError("x", retry_after=requested_delay), remaining=remaining, random=lambda: rolled
    )
    wait = max(own, requested_delay or 0.0)
    assert decision == (
        RetryAfter(wait) if remaining is None or wait < remaining else DoNotRetry(GiveUpReason.NO_TIME_LEFT)
    )


# -- the loop -------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-08", "PRV-28")
def test_a_transient_failure_is_retried_and_every_attempt_is_recorded():
    harness = RetryHarness(TimeoutError(), ProviderRateLimitError("x", retry_after=7), "value", takes=0.5)
    ran = harness.run()
    assert isinstance(ran, RetryResult)
    assert ran.value == "value"
    first, second, third = ran.attempts
    assert (first.attempt_number, first.started_at, first.duration, first.delay) == (1, 100.0, 0.5, 1.0)
    assert isinstance(first.error, ProviderTimeoutError)
    assert (second.attempt_number, second.started_at, second.duration, second.delay) == (2, 101.5, 0.5, 7)
    assert third == AttemptInfo(3, 109.0, 0.5)
    assert harness.slept == [1.0, 7]


@pytest.mark.spec("PRV-08", "PRV-17")
def test_an_error_that_is_not_retryable_ends_it_immediately():
    harness = RetryHarness(ProviderBadRequestError("no", http_status=422))
    with pytest.raises(ProviderBadRequestError) as caught:
        harness.run()
    assert (harness.calls, harness.slept) == (1, [])
    assert [(tried.attempt_number, tried.error, tried.delay) for tried in caught.value.attempts] == [
        (1, caught.value, None)
    ]


def test_when_the_attempts_are_spent_the_last_canonical_error_is_raised_with_its_cause():
    harness = RetryHarness(ConnectionResetError(), ConnectionRefusedError())
    with pytest.raises(ProviderConnectionError) as caught:
        harness.run()
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert (harness.calls, harness.slept) == (4, [1.0, 2.0, 3.0])
    assert [tried.delay for tried in caught.value.attempts] == [1.0, 2.0, 3.0, None]
    assert caught.value.attempts[-1].error is caught.value
    assert not caught.value.final  # only execute can set it


def test_a_bug_is_not_retried():
    harness = RetryHarness(KeyError("id"))
    with pytest.raises(ProviderInternalError):
        harness.run()
    assert harness.calls == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_is_passed_on(interrupt):
    harness = RetryHarness(interrupt)
    with pytest.raises(type(interrupt)) as caught:
        harness.run()
    assert caught.value is interrupt


@pytest.mark.spec("PRV-08")
@given(
    budget=st.floats(0.001, 100),
    takes=st.floats(0, 10),
    requested_delay=st.none() | st.floats(0, 30),
    ratio=ratios,
    rolled=rolls,
)
def test_no_attempt_begins_and_no_sleep_ends_after_the_budget(budget, takes, requested_delay, ratio, rolled):
    harness = RetryHarness(ProviderDependencyError("x", retry_after=requested_delay), takes=takes)
    policy = RetryPolicy(max_attempts=10, jitter_ratio=ratio)
    with pytest.raises(ProviderDependencyError) as caught:
        harness.run(policy, budget=budget, random=lambda: rolled)
    attempts = caught.value.attempts
    assert all(tried.started_at < 100.0 + budget for tried in attempts)
    assert harness.now <= 100.0 + budget + takes * (1 + 1e-9)
    # A sleep that rounding made end exactly at the end of the budget is followed by nothing.
    assert len(attempts) == harness.calls
    assert len(harness.slept) - harness.calls in (-1, 0)


def test_a_sleep_that_took_too_long_is_not_followed_by_an_attempt():
    harness = RetryHarness(ProviderTimeoutError("x"), oversleeps=5.0)
    with pytest.raises(ProviderTimeoutError) as caught:
        harness.run(budget=2.0)
    assert harness.calls == 1
    assert [tried.delay for tried in caught.value.attempts] == [1.0]


@pytest.mark.parametrize("budget", [0, -1.0])
def test_without_time_no_call_is_made_and_no_fault_is_counted(budget):
    harness = RetryHarness("value")
    with pytest.raises(ProviderTimeoutError) as caught:
        harness.run(budget=budget)
    assert harness.calls == 0
    assert (caught.value.sent, caught.value.fault, caught.value.attempts) == (False, False, ())


def test_a_date_in_a_header_is_compared_with_the_wall_time():
    class Refused(Exception):
        status_code = 429
        headers = {"retry-after": "Sun, 09 Sep 2001 01:49:00 GMT"}  # noqa: RUF012 - as a library has it

    harness = RetryHarness(Refused(), "value")
    assert harness.run().attempts[0].delay == 1e9 - 1e9 + 40.0


@pytest.mark.spec("DX-32", "PRV-28")
def test_a_call_is_run_as_the_document_shows_it():
    calls = []

    def call():
        calls.append(None)
        if len(calls) < 3:
            raise ConnectionResetError("as a client would")
        return "fine"

    ran = RetryPolicy(max_attempts=3, base_delay_seconds=0.001, max_delay_seconds=0.002).run(call)
    assert (ran.value, [one.attempt_number for one in ran.attempts]) == ("fine", [1, 2, 3])
    calls.clear()
    with pytest.raises(ProviderConnectionError) as caught:
        RetryPolicy(max_attempts=2, base_delay_seconds=0.0).run(call)
    assert len(caught.value.attempts) == 2
