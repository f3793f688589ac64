"""Retry-After, in both of its forms."""

from __future__ import annotations

import doctest
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.providers import error_mapping
from ergon_framework.providers.error_mapping import MAX_RETRY_AFTER_SECONDS, parse_retry_after

moments = st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - bounds


@pytest.mark.spec("PRV-24")
@given(st.integers(0, 10**9))
def test_a_number_is_a_delay_in_seconds_at_any_time(number):
    assert parse_retry_after(str(number), now=1e9) == min(number, MAX_RETRY_AFTER_SECONDS)


@pytest.mark.spec("PRV-24")
@given(now=moments, ahead=st.integers(0, 40 * 86_400))
def test_a_date_is_the_seconds_until_it(now, ahead):
    now = now.replace(microsecond=0)
    date = datetime.fromtimestamp(now.timestamp() + ahead, UTC)
    for text in (
        format_datetime(date, usegmt=True),
        date.strftime("%a, %d %b %Y %H:%M:%S +0000"),
        date.strftime("%a %b %e %H:%M:%S %Y"),
    ):
        assert parse_retry_after(text, now=now.timestamp()) == min(ahead, MAX_RETRY_AFTER_SECONDS)


def test_the_old_form_with_two_digits_of_the_year_is_read():
    assert parse_retry_after("Sunday, 06-Nov-94 08:49:37 GMT", now=784111777.0 - 5) == 5


@given(now=moments, behind=st.integers(1, 10**8))
def test_a_past_date_has_no_delay(now, behind):
    date = datetime.fromtimestamp(now.timestamp() - behind, UTC)
    assert parse_retry_after(format_datetime(date, usegmt=True), now=now.timestamp()) is None


@pytest.mark.parametrize(
    "value", [None, "", "   ", "-1", "-0.5", "+5", "1e3", "inf", "nan", "soon", "0x10", "12 s", "١٢", "99/99", "Mon"]
)
def test_an_invalid_value_has_no_delay(value):
    assert parse_retry_after(value, now=0.0) is None


@given(st.text())
def test_any_text_has_no_delay_or_a_bounded_delay(text):
    delay = parse_retry_after(text, now=1e9)
    assert delay is None or 0 <= delay <= MAX_RETRY_AFTER_SECONDS


@given(
    st.from_regex(
        r"\A(Mon, )?[0-9]{1,3} (Jan|Feb|Dec) [0-9]{1,5} [0-9]{1,3}:[0-9]{1,3}(:[0-9]{1,3})? ([+-][0-9]{4,9}|GMT)?\Z"
    )
)
def test_any_date_like_text_has_no_delay_or_a_bounded_delay(text):
    delay = parse_retry_after(text, now=1e9)
    assert delay is None or 0 <= delay <= MAX_RETRY_AFTER_SECONDS


@pytest.mark.parametrize(
    "value, expected",
    [("0", 0), (" 7 ", 7), ("1.5", 1.5), ("9" * 400, MAX_RETRY_AFTER_SECONDS), ("2678401", MAX_RETRY_AFTER_SECONDS)],
)
def test_numbers_at_the_edges(value, expected):
    assert parse_retry_after(value, now=0.0) == expected


def test_the_docstring_examples_are_correct():
    assert doctest.testmod(error_mapping, raise_on_error=True).attempted > 0
