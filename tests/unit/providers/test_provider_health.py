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
    BUCKET_BOUNDS_MS,
    NOT_CALLED_REASONS,
    AttemptOutcome,
    AttemptSample,
    CallStats,
    HourStats,
    MinuteStats,
    floor_to_minute,
    group_by_minute,
)

NOW = 1_800_000_030.0
rows = st.builds(
    AttemptSample,
    at=st.integers(0, 7_200).map(lambda ago: NOW - ago),
    outcome=st.sampled_from(AttemptOutcome),
    duration_ms=st.integers(0, 200_000) | st.floats(0, 200_000),
    reason_code=st.none() | st.sampled_from(ReasonCode),
)
row_lists = st.lists(rows, max_size=60)


def make_success(ms, at=NOW):
    return AttemptSample(at, AttemptOutcome.SUCCESS, ms)


def make_failure(at=NOW, code=ReasonCode.TIMEOUT):
    return AttemptSample(at, AttemptOutcome.FAILED, 10, code)


def exact_p95(durations):
    """Return the 95th percentile by nearest rank, computed from the values."""
    ordered = sorted(durations)
    rank = next(k for k in range(1, len(ordered) + 1) if 100 * k >= 95 * len(ordered))
    return ordered[rank - 1]


# -- buckets --------------------------------------------------------------------------------------


def test_the_bounds_rise_by_at_most_28_percent():
    assert BUCKET_BOUNDS_MS[0] == 1
    assert BUCKET_BOUNDS_MS[-1] == 100_000
    assert len(BUCKET_BOUNDS_MS) == 51
    assert all(1 < above / below <= 1.28 + 1e-9 for below, above in pairwise(BUCKET_BOUNDS_MS))


@pytest.mark.parametrize("ms, bucket", [(0, 0), (1, 0), (1.01, 1), (1.25, 1), (100_000, 50), (100_001, 51)])
def test_a_bound_belongs_to_the_bucket_below_it(ms, bucket):
    assert CallStats.from_rows([make_success(ms)]).buckets.index(1) == bucket


@pytest.mark.spec("PRV-10")
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_the_p95_is_never_below_the_exact_value_and_within_its_bound(durations):
    shown, exact = CallStats.from_rows(make_success(ms) for ms in durations).p95_latency_ms, exact_p95(durations)
    assert shown >= exact
    if exact <= 1:
        assert shown <= 1
    elif exact <= 100_000:
        assert shown <= exact * 1.28 * (1 + 1e-9)
    assert shown <= max(durations)


@pytest.mark.parametrize("count, rank", [(1, 1), (19, 19), (20, 19), (21, 20), (100, 95), (101, 96)])
def test_the_rank_is_the_nearest_one(count, rank):
    values = [BUCKET_BOUNDS_MS[0]] * (rank - 1) + [BUCKET_BOUNDS_MS[9]] + [BUCKET_BOUNDS_MS[20]] * (count - rank)
    assert CallStats.from_rows(make_success(ms) for ms in values).p95_latency_ms == BUCKET_BOUNDS_MS[9]


# -- counts ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-10", "DX-28")
def test_the_rate_is_the_share_of_attempts_that_succeeded():
    calls = CallStats.from_rows(
        [
            make_success(5),
            make_success(5),
            make_failure(),
            AttemptSample(NOW, AttemptOutcome.RETRY, 5),
            AttemptSample(NOW, AttemptOutcome.DEAD_LETTER, 5),
        ]
    )
    assert (calls.success, calls.retry, calls.failed, calls.dead_letter, calls.total) == (2, 1, 1, 1, 4)
    assert calls.success_rate == 0.5


@pytest.mark.spec("PRV-10")
def test_without_calls_there_is_no_rate_and_no_latency():
    hour = HourStats.at(NOW, ())
    assert (hour.success_rate_1h, hour.p95_latency_ms_1h) == (None, None)


@pytest.mark.parametrize("code", sorted(NOT_CALLED_REASONS))
def test_a_call_rejected_by_the_framework_is_not_counted_as_a_call(code):
    calls = CallStats.from_rows(
        [make_success(100), make_failure(code=code), AttemptSample(NOW, AttemptOutcome.DEAD_LETTER, 0, code)]
    )
    assert (calls.refused, calls.total, calls.success_rate, calls.p95_latency_ms) == (1, 1, 1.0, 100)
    assert calls.dead_letter == 1
    assert CallStats.from_rows([make_failure(code=code)]).success_rate is None


@given(row_lists, row_lists, row_lists)
def test_counts_are_added_in_any_order_and_any_groups(one, two, three):
    a, b, c = CallStats.from_rows(one), CallStats.from_rows(two), CallStats.from_rows(three)
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) == CallStats.from_rows(one + two + three)
    assert a.merge(b) == b.merge(a)
    assert a.merge(CallStats()) == a


@pytest.mark.spec("PRV-10")
@given(row_lists, st.randoms(use_true_random=False), st.integers(1, 7))
def test_minutes_added_incrementally_equal_those_recomputed_from_the_rows(rows, random, size):
    shuffled = rows[:]
    random.shuffle(shuffled)
    kept: dict[int, MinuteStats] = {}
    for begin in range(0, len(shuffled), size):
        for part in group_by_minute(shuffled[begin : begin + size]):
            kept[part.start] = kept[part.start].merge(part) if part.start in kept else part
    assert tuple(kept[start] for start in sorted(kept)) == group_by_minute(rows)
    assert HourStats.at(NOW, kept.values()) == HourStats.at(NOW, group_by_minute(rows))


@given(row_lists)
def test_the_hour_is_its_rows_of_the_last_sixty_minutes(rows):
    within = [row for row in rows if floor_to_minute(NOW) - 3_600 < floor_to_minute(row.at) <= floor_to_minute(NOW)]
    hour = HourStats.at(NOW, group_by_minute(rows))
    assert hour.calls == CallStats.from_rows(within)
    called = [
        row
        for row in within
        if row.reason_code not in NOT_CALLED_REASONS and row.outcome is not AttemptOutcome.DEAD_LETTER
    ]
    successes = [row for row in called if row.outcome is AttemptOutcome.SUCCESS]
    assert hour.success_rate_1h == (len(successes) / len(called) if called else None)
    if called:
        exact = exact_p95([row.duration_ms for row in called])
        assert exact <= hour.p95_latency_ms_1h <= max((*BUCKET_BOUNDS_MS, 1e9)[bisect_left(BUCKET_BOUNDS_MS, exact)], 1)


@pytest.mark.spec("PRV-10")
def test_the_hour_slides_with_the_time():
    rollups = group_by_minute(
        [
            make_success(5, at=NOW),
            make_failure(at=NOW - 59 * 60),
            make_failure(at=NOW - 60 * 60),
            make_success(5, at=NOW + 60),
        ]
    )
    assert HourStats.at(NOW, rollups).success_rate_1h == 0.5
    assert HourStats.at(NOW + 60, rollups).success_rate_1h == 1.0
    assert HourStats.at(NOW + 61 * 60, rollups).success_rate_1h is None


# -- minutes --------------------------------------------------------------------------------------


@given(st.floats(0, 4e9))
def test_a_minute_begins_at_its_first_second(at):
    start = floor_to_minute(at)
    assert start % 60 == 0
    assert start <= at < start + 60


def test_two_different_minutes_cannot_be_merged():
    with pytest.raises(ValueError, match="different minutes"):
        MinuteStats(60).merge(MinuteStats(120))
    with pytest.raises(ValueError, match="first second"):
        MinuteStats(61)


def test_one_minute_may_be_counted_in_many_parts():
    parts = [group_by_minute([make_success(ms)])[0] for ms in (1, 2, 3)]
    assert reduce(MinuteStats.merge, parts).calls.success == 3
