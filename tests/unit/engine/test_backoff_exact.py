"""The figures of waiting."""

from __future__ import annotations

from ergon_framework.engine.backoff import LONGEST, delay


def test_the_longest_wait_is_a_century() -> None:
    assert LONGEST == 3_155_760_000.0


def test_a_cap_below_one_second_is_a_cap() -> None:
    assert delay(3, backoff=1, multiplier=2, cap=0.5) == 0.5


def test_a_backoff_of_one_and_a_multiplier_of_two_grow() -> None:
    assert [delay(attempt, backoff=1, multiplier=2, cap=0) for attempt in range(4)] == [1, 2, 4, 8]
