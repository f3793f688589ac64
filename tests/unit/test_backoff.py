"""The arithmetic of waiting."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.engine import retry
from ergon_framework.engine.retry import MAX_DELAY_SECONDS, apply_jitter, backoff_delay, min_or_none

seconds = st.floats(0, 1e6)
multipliers = st.floats(1, 100)
ratios = st.floats(0, 1)


@pytest.mark.spec("CON-13", "PRO-08")
def test_waits_grow_by_the_multiplier_up_to_the_cap():
    assert [backoff_delay(attempt, backoff=1, multiplier=3, cap=10) for attempt in range(5)] == [1, 3, 9, 10, 10]


@pytest.mark.spec("CON-13", "PRO-08")
def test_a_cap_of_zero_means_no_cap():
    assert [backoff_delay(attempt, backoff=1, multiplier=3, cap=0) for attempt in range(5)] == [1, 3, 9, 27, 81]


@pytest.mark.spec("CON-13", "PRO-08")
@given(attempt=st.integers(0, 20), base=seconds, multiplier=st.floats(1, 2), cap=st.floats(0.001, 1e6))
def test_a_wait_is_the_documented_formula(attempt, base, multiplier, cap):
    expected = min(cap, base * multiplier**attempt)
    assert backoff_delay(attempt, backoff=base, multiplier=multiplier, cap=cap) == pytest.approx(expected)


@pytest.mark.parametrize("attempt", [2_000, 10**9, 10**400])
def test_the_cap_holds_for_any_attempt(attempt):
    assert backoff_delay(attempt, backoff=1, multiplier=2, cap=30) == 30


@pytest.mark.parametrize("attempt", [2_000, 10**9, 10**400])
def test_without_a_cap_a_wait_stays_finite(attempt):
    assert backoff_delay(attempt, backoff=1, multiplier=2, cap=0) == MAX_DELAY_SECONDS


def test_a_product_that_overflows_is_capped_too():
    # The power alone still fits into a float here, the product does not.
    assert backoff_delay(1, backoff=1e200, multiplier=1e200, cap=0) == MAX_DELAY_SECONDS


@pytest.mark.parametrize("attempt", [0, 1, 10**400])
def test_a_multiplier_of_one_keeps_every_wait_the_same(attempt):
    assert backoff_delay(attempt, backoff=2, multiplier=1, cap=0) == 2


@pytest.mark.parametrize("attempt", [0, 1, 10**400])
def test_a_backoff_of_zero_never_waits(attempt):
    assert backoff_delay(attempt, backoff=0, multiplier=2, cap=30) == 0


def test_a_constant_wait_is_capped_as_well():
    assert backoff_delay(0, backoff=40, multiplier=1, cap=30) == 30


def test_an_attempt_below_zero_is_rejected():
    with pytest.raises(ValueError, match="attempt must be >= 0, got -1"):
        backoff_delay(-1, backoff=1, multiplier=2, cap=0)


@given(attempt=st.integers(0), base=seconds, multiplier=multipliers, cap=seconds)
def test_every_wait_is_finite_and_none_is_shorter_than_the_one_before(attempt, base, multiplier, cap):
    now, then = (backoff_delay(at, backoff=base, multiplier=multiplier, cap=cap) for at in (attempt, attempt + 1))
    assert 0 <= now <= then <= (cap or MAX_DELAY_SECONDS)


@pytest.mark.parametrize("random_value, expected", [(0.0, 5.0), (0.25, 7.5), (0.5, 10.0), (0.75, 12.5)])
def test_jitter_is_symmetric(random_value, expected):
    assert apply_jitter(10, 0.5, lambda: random_value) == expected


def test_no_jitter_leaves_the_wait_as_it_is():
    assert apply_jitter(10, 0, lambda: 0.9) == 10


@given(wait=seconds, ratio=ratios, random_value=st.floats(0, 1, exclude_max=True))
def test_jitter_stays_within_its_ratio_and_is_never_negative(wait, ratio, random_value):
    jittered_wait = apply_jitter(wait, ratio, lambda: random_value)
    assert jittered_wait >= 0
    assert abs(jittered_wait - wait) <= wait * ratio * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    "limits, expected",
    [((), None), ((None,), None), ((3.0,), 3.0), ((None, 3.0, None), 3.0), ((3.0, 0.0, 5.0), 0.0)],
)
def test_the_shortest_limit_applies(limits, expected):
    assert min_or_none(*limits) == expected


def test_the_longest_wait_fits_the_thread_library():
    # The limit of the thread library; a longer wait raises OverflowError.
    assert math.isfinite(MAX_DELAY_SECONDS)
    assert MAX_DELAY_SECONDS * 2 < 2**63 / 1e9


def test_the_examples_are_true():
    assert doctest.testmod(retry, raise_on_error=True).attempted > 0
