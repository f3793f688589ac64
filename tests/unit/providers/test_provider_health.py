"""Health: roll-ups by the minute and the sliding hour."""

from __future__ import annotations

from bisect import bisect_left
from functools import reduce
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import (
    BOUNDS_MS,
    NOT_CALLED,
    Calls,
    Hour,
    Minute,
    Outcome,
    Row,
    minute_of,
    minutes,
)

NOW = 1_800_000_030.0
rows = st.builds(
    Row,
    at=st.integers(0, 7_200).map(lambda ago: NOW - ago),
    outcome=st.sampled_from(Outcome),
    duration_ms=st.integers(0, 200_000) | st.floats(0, 200_000),
    reason_code=st.none() | st.sampled_from(ReasonCode),
)
many = st.lists(rows, max_size=60)


def ok(ms, at=NOW):
    return Row(at, Outcome.SUCCESS, ms)


def failed(at=NOW, code=ReasonCode.TIMEOUT):
    return Row(at, Outcome.FAILED, 10, code)


def truth(durations):
    """The 95th of each 100 by nearest rank, from the values themselves."""
    ordered = sorted(durations)
    rank = next(k for k in range(1, len(ordered) + 1) if 100 * k >= 95 * len(ordered))
    return ordered[rank - 1]


# -- buckets --------------------------------------------------------------------------------------


def test_the_bounds_rise_by_no_more_than_they_promise():
    assert BOUNDS_MS[0] == 1
    assert BOUNDS_MS[-1] == 100_000
    assert len(BOUNDS_MS) == 51
    assert all(1 < above / below <= 1.28 + 1e-9 for below, above in pairwise(BOUNDS_MS))


@pytest.mark.parametrize("ms, bucket", [(0, 0), (1, 0), (1.01, 1), (1.25, 1), (100_000, 50), (100_001, 51)])
def test_a_bound_belongs_to_the_bucket_below_it(ms, bucket):
    assert Calls.of([ok(ms)]).buckets.index(1) == bucket


@pytest.mark.spec("PRV-10")
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_the_p95_is_never_below_the_truth_and_within_its_bound(durations):
    shown, true = Calls.of(ok(ms) for ms in durations).p95_latency_ms, truth(durations)
    assert shown >= true
    if true <= 1:
        assert shown <= 1
    elif true <= 100_000:
        assert shown <= true * 1.28 * (1 + 1e-9)
    assert shown <= max(durations)


@pytest.mark.parametrize("count, rank", [(1, 1), (19, 19), (20, 19), (21, 20), (100, 95), (101, 96)])
def test_the_rank_is_the_nearest_one(count, rank):
    values = [BOUNDS_MS[0]] * (rank - 1) + [BOUNDS_MS[9]] + [BOUNDS_MS[20]] * (count - rank)
    assert Calls.of(ok(ms) for ms in values).p95_latency_ms == BOUNDS_MS[9]


# -- counts ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-10", "DX-28")
def test_the_rate_is_the_share_of_attempts_that_succeeded():
    calls = Calls.of([ok(5), ok(5), failed(), Row(NOW, Outcome.RETRY, 5), Row(NOW, Outcome.DEAD_LETTER, 5)])
    assert (calls.success, calls.retry, calls.failed, calls.dead_letter, calls.total) == (2, 1, 1, 1, 4)
    assert calls.success_rate == 0.5


@pytest.mark.spec("PRV-10")
def test_without_calls_there_is_no_rate_and_no_latency():
    hour = Hour.at(NOW, ())
    assert (hour.success_rate_1h, hour.p95_latency_ms_1h) == (None, None)


@pytest.mark.parametrize("code", sorted(NOT_CALLED))
def test_what_we_refused_ourselves_is_no_call(code):
    calls = Calls.of([ok(100), failed(code=code), Row(NOW, Outcome.DEAD_LETTER, 0, code)])
    assert (calls.refused, calls.total, calls.success_rate, calls.p95_latency_ms) == (1, 1, 1.0, 100)
    assert calls.dead_letter == 1
    assert Calls.of([failed(code=code)]).success_rate is None


@given(many, many, many)
def test_counts_are_added_in_any_order_and_any_groups(one, two, three):
    a, b, c = Calls.of(one), Calls.of(two), Calls.of(three)
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) == Calls.of(one + two + three)
    assert a.merge(b) == b.merge(a)
    assert a.merge(Calls()) == a


@pytest.mark.spec("PRV-10")
@given(many, st.randoms(use_true_random=False), st.integers(1, 7))
def test_minutes_added_up_on_the_way_equal_those_recomputed_from_the_rows(rows, random, size):
    shuffled = rows[:]
    random.shuffle(shuffled)
    kept: dict[int, Minute] = {}
    for begin in range(0, len(shuffled), size):
        for part in minutes(shuffled[begin : begin + size]):
            kept[part.start] = kept[part.start].merge(part) if part.start in kept else part
    assert tuple(kept[start] for start in sorted(kept)) == minutes(rows)
    assert Hour.at(NOW, kept.values()) == Hour.at(NOW, minutes(rows))


@given(many)
def test_the_hour_is_its_rows_of_the_last_sixty_minutes(rows):
    within = [row for row in rows if minute_of(NOW) - 3_600 < minute_of(row.at) <= minute_of(NOW)]
    hour = Hour.at(NOW, minutes(rows))
    assert hour.calls == Calls.of(within)
    called = [row for row in within if row.reason_code not in NOT_CALLED and row.outcome is not Outcome.DEAD_LETTER]
    successes = [row for row in called if row.outcome is Outcome.SUCCESS]
    assert hour.success_rate_1h == (len(successes) / len(called) if called else None)
    if called:
        true = truth([row.duration_ms for row in called])
        assert true <= hour.p95_latency_ms_1h <= max((*BOUNDS_MS, 1e9)[bisect_left(BOUNDS_MS, true)], 1)


@pytest.mark.spec("PRV-10")
def test_the_hour_slides_with_the_time():
    told = minutes([ok(5, at=NOW), failed(at=NOW - 59 * 60), failed(at=NOW - 60 * 60), ok(5, at=NOW + 60)])
    assert Hour.at(NOW, told).success_rate_1h == 0.5
    assert Hour.at(NOW + 60, told).success_rate_1h == 1.0
    assert Hour.at(NOW + 61 * 60, told).success_rate_1h is None


# -- minutes --------------------------------------------------------------------------------------


@given(st.floats(0, 4e9))
def test_a_minute_begins_at_its_first_second(at):
    start = minute_of(at)
    assert start % 60 == 0
    assert start <= at < start + 60


def test_two_minutes_are_not_one():
    with pytest.raises(ValueError, match="stay two"):
        Minute(60).merge(Minute(120))
    with pytest.raises(ValueError, match="first second"):
        Minute(61)


def test_one_minute_may_be_counted_in_many_parts():
    parts = [minutes([ok(ms)])[0] for ms in (1, 2, 3)]
    assert reduce(Minute.merge, parts).calls.success == 3
