"""Quota: windows that tile time, reservations, refunds and leased blocks."""

from __future__ import annotations

import calendar
import doctest
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.providers import quota
from ergon_framework.providers.errors import ProviderQuotaExceededError
from ergon_framework.providers.quota import QuotaState, Window, WindowKind, window_at

NOON = datetime(2026, 11, 15, 12, 0, 30, tzinfo=UTC)
kinds = st.sampled_from(WindowKind)
moments = st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - bounds


def make_state(limit=3, kind=WindowKind.MINUTE, now=NOON):
    return QuotaState.new(kind, limit, now=now)


def expect_rejection(quota_state, now, n=1):
    with pytest.raises(ProviderQuotaExceededError) as caught:
        quota_state.reserve(n, now=now)
    return caught.value


# -- windows --------------------------------------------------------------------------------------


@given(kinds, moments)
def test_a_moment_is_in_its_window_and_the_windows_tile_time(kind, moment):
    window = window_at(kind, moment)
    assert moment in window
    assert window.start.tzinfo is UTC
    assert window_at(kind, window.start) == window
    assert window_at(kind, window.end - timedelta(microseconds=1)) == window
    after, before = window_at(kind, window.end), window_at(kind, window.start - timedelta(microseconds=1))
    assert after.start == window.end
    assert before.end == window.start
    assert window.end not in window


@given(kinds, moments)
def test_a_window_is_as_long_as_its_name_says(kind, moment):
    window = window_at(kind, moment)
    days = calendar.monthrange(window.start.year, window.start.month)[1]
    lengths = {"minute": 60, "hour": 3_600, "day": 86_400, "month": days * 86_400}
    assert (window.end - window.start).total_seconds() == lengths[kind]


@pytest.mark.parametrize(
    "month, end",
    [
        ((2028, 2), (2028, 3)),
        ((2027, 2), (2027, 3)),
        ((2026, 12), (2027, 1)),
        ((2026, 4), (2026, 5)),
        ((2100, 2), (2100, 3)),
    ],
)
def test_a_month_ends_at_the_first_of_the_next_month(month, end):
    window = window_at(WindowKind.MONTH, datetime(*month, 28, 23, 59, tzinfo=UTC))
    assert (window.start, window.end) == (datetime(*month, 1, tzinfo=UTC), datetime(*end, 1, tzinfo=UTC))


@given(kinds, moments, st.integers(-14 * 60, 14 * 60))
def test_a_window_does_not_depend_on_the_time_zone_of_the_caller(kind, moment, minutes):
    local_moment = moment.astimezone(timezone(timedelta(minutes=minutes)))
    assert window_at(kind, local_moment) == window_at(kind, moment)


def test_a_moment_without_a_zone_is_refused():
    with pytest.raises(ValueError, match="has no time zone: pass"):
        window_at(WindowKind.DAY, datetime(2026, 1, 1))  # noqa: DTZ001 - that is the point


# -- reservations ---------------------------------------------------------------------------------


@pytest.mark.spec("PRV-09", "PRV-17", "PRV-28")
def test_the_limit_is_admitted_and_the_next_call_fails_immediately():
    quota_state = make_state(limit=3)
    for used in (1, 2, 3):
        quota_state = quota_state.reserve(now=NOON)
        assert (quota_state.limit_count, quota_state.used_count, quota_state.remaining_count) == (3, used, 3 - used)
    error = expect_rejection(quota_state, NOON)
    assert (error.reason_code, error.retry_after, error.sent, error.retryable) == ("quota_exhausted", 30, False, False)
    assert str(error) == "quota of 3 a minute is exhausted until 2026-11-15T12:01:00+00:00"


@pytest.mark.spec("PRV-09")
def test_a_reservation_of_several_is_all_or_none():
    quota_state = make_state(limit=3).reserve(2, now=NOON)
    expect_rejection(quota_state, NOON, n=2)
    assert quota_state.reserve(1, now=NOON).remaining_count == 0


@pytest.mark.spec("PRV-17")
def test_the_next_window_is_untouched():
    exhausted = make_state(limit=1).reserve(now=NOON).mark_exhausted(NOON)
    assert exhausted.last_exhausted_at == NOON
    later = exhausted.reserve(now=NOON + timedelta(seconds=30))
    assert (later.window.start, later.used_count) == (datetime(2026, 11, 15, 12, 1, tzinfo=UTC), 1)
    assert later.last_exhausted_at == NOON


def test_a_clock_that_is_late_cannot_open_a_window_again():
    later = make_state(limit=1).reserve(now=NOON + timedelta(minutes=5))
    assert expect_rejection(later, NOON).retry_after == 5 * 60 + 30


def test_a_limit_of_zero_admits_nothing():
    expect_rejection(make_state(limit=0), NOON)


@pytest.mark.spec("PRV-19")
def test_an_unsent_call_is_refunded_once_and_only_to_its_own_window():
    reserved = make_state(limit=1).reserve(now=NOON)
    assert reserved.refund(window=reserved.window) == make_state(limit=1)
    with pytest.raises(ValueError, match="check for a double refund"):
        make_state(limit=1).refund(window=reserved.window)
    later = reserved.reserve(now=NOON + timedelta(minutes=1))
    assert later.refund(window=reserved.window) is later


@pytest.mark.spec("PRV-32")
def test_a_limit_can_be_changed_within_the_window():
    exhausted = make_state(limit=1).reserve(now=NOON)
    assert exhausted.with_limit(2).reserve(now=NOON).used_count == 2
    lowered = exhausted.with_limit(0)
    assert (lowered.used_count, lowered.remaining_count, lowered.limit_count) == (1, -1, 0)
    expect_rejection(lowered, NOON)


@pytest.mark.parametrize("limit, used", [(-1, 0), (1, -1)])
def test_a_quota_counts_from_zero(limit, used):
    with pytest.raises(ValueError, match="counts must be >= 0"):
        QuotaState(window_at(WindowKind.DAY, NOON), limit, used)


@pytest.mark.parametrize("n", [0, -1])
def test_zero_calls_cannot_be_reserved_or_refunded(n):
    with pytest.raises(ValueError, match="must be >= 1"):
        make_state().reserve(n, now=NOON)
    with pytest.raises(ValueError, match=rf"cannot refund {n} calls of \d+ used"):
        make_state().reserve(now=NOON).refund(n, window=make_state().window)


steps = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "refund", "lease", "take", "return", "wait"]), st.integers(1, 4), st.integers(0, 25)
    ),
    max_size=60,
)


@pytest.mark.spec("PRV-19", "PRV-29")
@given(limit=st.integers(0, 6), steps=steps)
def test_no_window_ever_admits_more_than_its_limit_and_the_sum_always_holds(limit, steps):
    quota_state, now = make_state(limit), NOON
    sent: dict[Window, int] = {}
    reserved: list[tuple[Window, int]] = []
    blocks = []
    for action, n, seconds in steps:
        try:
            if action == "reserve":
                quota_state = quota_state.reserve(n, now=now)
                sent[quota_state.window] = sent.get(quota_state.window, 0) + n
                reserved.append((quota_state.window, n))
            elif action == "refund" and reserved:
                window, count = reserved.pop(0)
                quota_state = quota_state.refund(count, window=window)
                sent[window] -= count
            elif action == "lease":
                quota_state, block = quota_state.lease(n, now=now, seconds=20)
                assert 1 <= block.left <= n
                assert block.until <= block.window.end
                blocks.append(block)
            elif action == "take" and blocks:
                block = blocks.pop(0)
                rest = block.take(now)
                if rest is not None:
                    sent[block.window] = sent.get(block.window, 0) + 1
                    blocks.append(rest)
            elif action == "return" and blocks:
                quota_state = quota_state.release_block(blocks.pop(0), now=now)
            elif action == "wait":
                now += timedelta(seconds=seconds)
        except ProviderQuotaExceededError as error:
            assert 0 < error.retry_after <= 60  # noqa: PT017 - whether it is raised is not the question
        assert quota_state.used_count + quota_state.remaining_count == quota_state.limit_count == limit
        assert 0 <= quota_state.used_count <= limit
        assert all(count <= limit for count in sent.values())


@pytest.mark.spec("PRV-19")
def test_an_expired_block_counts_as_used_and_grants_nothing():
    leased, block = make_state(limit=5).lease(4, now=NOON, seconds=10)
    assert (leased.used_count, block.left) == (4, 4)
    late = NOON + timedelta(seconds=10)
    assert block.take(late) is None
    assert leased.release_block(block, now=late) is leased
    assert leased.release_block(block, now=NOON).used_count == 0
    rest, small = leased.lease(4, now=NOON, seconds=10)
    assert (small.left, rest.remaining_count) == (1, 0)
    with pytest.raises(ProviderQuotaExceededError):
        rest.lease(1, now=NOON, seconds=10)


def test_an_empty_block_grants_nothing_and_returns_nothing():
    leased, block = make_state(limit=5).lease(1, now=NOON, seconds=10)
    empty = block.take(NOON)
    assert empty.left == 0
    assert empty.take(NOON) is None
    assert leased.release_block(empty, now=NOON) is leased


def test_the_docstring_examples_are_correct():
    assert doctest.testmod(quota, raise_on_error=True).attempted > 0
