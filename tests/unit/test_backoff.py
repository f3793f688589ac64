"""The arithmetic of waiting."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.engine import backoff
from ergon_framework.engine.backoff import LONGEST, delay, jittered, shortest

seconds = st.floats(0, 1e6)
multipliers = st.floats(1, 100)
ratios = st.floats(0, 1)


@pytest.mark.spec("CON-13", "PRO-08")
def test_waits_grow_by_the_multiplier_and_end_growing_at_the_cap():
    assert [delay(attempt, backoff=1, multiplier=3, cap=10) for attempt in range(5)] == [1, 3, 9, 10, 10]


@pytest.mark.spec("CON-13", "PRO-08")
def test_a_cap_of_zero_caps_nothing():
    assert [delay(attempt, backoff=1, multiplier=3, cap=0) for attempt in range(5)] == [1, 3, 9, 27, 81]


@pytest.mark.spec("CON-13", "PRO-08")
@given(attempt=st.integers(0, 20), base=seconds, multiplier=st.floats(1, 2), cap=st.floats(0.001, 1e6))
def test_a_wait_is_the_documented_formula(attempt, base, multiplier, cap):
    expected = min(cap, base * multiplier**attempt)
    assert delay(attempt, backoff=base, multiplier=multiplier, cap=cap) == pytest.approx(expected)


@pytest.mark.parametrize("attempt", [2_000, 10**9, 10**400])
def test_the_cap_holds_for_any_attempt(attempt):
    assert delay(attempt, backoff=1, multiplier=2, cap=30) == 30


@pytest.mark.parametrize("attempt", [2_000, 10**9, 10**400])
def test_without_a_cap_a_wait_stays_finite(attempt):
    assert delay(attempt, backoff=1, multiplier=2, cap=0) == LONGEST


def test_a_product_that_overflows_is_capped_too():
    # The power alone still fits into a float here, the product does not.
    assert delay(1, backoff=1e200, multiplier=1e200, cap=0) == LONGEST


@pytest.mark.parametrize("attempt", [0, 1, 10**400])
def test_a_multiplier_of_one_keeps_every_wait_the_same(attempt):
    assert delay(attempt, backoff=2, multiplier=1, cap=0) == 2


@pytest.mark.parametrize("attempt", [0, 1, 10**400])
def test_a_backoff_of_zero_never_waits(attempt):
    assert delay(attempt, backoff=0, multiplier=2, cap=30) == 0


def test_a_constant_wait_is_capped_as_well():
    assert delay(0, backoff=40, multiplier=1, cap=30) == 30


def test_an_attempt_below_zero_is_refused():
    with pytest.raises(ValueError, match="attempts count from 0, so -1 is none"):
        delay(-1, backoff=1, multiplier=2, cap=0)


@given(attempt=st.integers(0), base=seconds, multiplier=multipliers, cap=seconds)
def test_every_wait_is_finite_and_none_is_shorter_than_the_one_before(attempt, base, multiplier, cap):
    now, then = (delay(at, backoff=base, multiplier=multiplier, cap=cap) for at in (attempt, attempt + 1))
    assert 0 <= now <= then <= (cap or LONGEST)


@pytest.mark.parametrize("rolled, expected", [(0.0, 5.0), (0.25, 7.5), (0.5, 10.0), (0.75, 12.5)])
def test_jitter_is_symmetric(rolled, expected):
    assert jittered(10, 0.5, lambda: rolled) == expected


def test_no_jitter_leaves_the_wait_as_it_is():
    assert jittered(10, 0, lambda: 0.9) == 10


@given(wait=seconds, ratio=ratios, rolled=st.floats(0, 1, exclude_max=True))
def test_jitter_stays_within_its_ratio_and_is_never_negative(wait, ratio, rolled):
    moved = jittered(wait, ratio, lambda: rolled)
    assert moved >= 0
    assert abs(moved - wait) <= wait * ratio * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    "limits, expected",
    [((), None), ((None,), None), ((3.0,), 3.0), ((None, 3.0, None), 3.0), ((3.0, 0.0, 5.0), 0.0)],
)
def test_the_shortest_limit_is_the_one_that_binds(limits, expected):
    assert shortest(*limits) == expected


def test_the_longest_wait_can_really_be_waited():
    # The thread library's own bound; a longer wait raises OverflowError.
    assert math.isfinite(LONGEST)
    assert LONGEST * 2 < 2**63 / 1e9


def test_the_examples_are_true():
    assert doctest.testmod(backoff, raise_on_error=True).attempted > 0
