"""The figures of waiting."""

from __future__ import annotations

from ergon_framework.engine.retry import MAX_DELAY_SECONDS, backoff_delay


def test_the_longest_wait_is_a_century() -> None:
    assert MAX_DELAY_SECONDS == 3_155_760_000.0


def test_a_cap_below_one_second_limits_the_delay() -> None:
    assert backoff_delay(3, backoff=1, multiplier=2, cap=0.5) == 0.5


def test_a_backoff_of_one_and_a_multiplier_of_two_grow() -> None:
    assert [backoff_delay(attempt, backoff=1, multiplier=2, cap=0) for attempt in range(4)] == [1, 2, 4, 8]
