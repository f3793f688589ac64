"""Matching of dead letters by a query."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ergon_framework.connectors.dead_letters import DeadLetterQuery, parse_handle
from ergon_framework.errors import Category, ConfigurationError
from tests.unit.connectors.test_dead_letters import make_record

MATCHING_FIELDS = {
    "id": "order-7",
    "reason": "declined",
    "type": "order.placed",
    "key": "customer-1",
    "tenant": "acme",
    "correlation": "basket-3",
    "task": "charge",
    "error_type": "BusinessError",
    "category": Category.BUSINESS,
}


def test_an_empty_query_matches_everything():
    assert DeadLetterQuery().matches(make_record())
    assert DeadLetterQuery().is_unfiltered


@pytest.mark.parametrize("name, value", MATCHING_FIELDS.items())
def test_each_field_is_compared_with_its_own(name, value):
    assert DeadLetterQuery(**{name: value}).matches(make_record())
    other = Category.TIMEOUT if name == "category" else f"{value}-2"
    query = DeadLetterQuery(**MATCHING_FIELDS | {name: other})
    assert not query.matches(make_record())
    assert not query.is_unfiltered


def test_all_given_fields_must_match():
    assert DeadLetterQuery(**MATCHING_FIELDS).matches(make_record())


@pytest.mark.parametrize("name", ["task", "error_type", "category"])
def test_without_a_failure_no_failure_filter_matches(name):
    assert not DeadLetterQuery(**{name: MATCHING_FIELDS[name]}).matches(make_record(failure=None))


@pytest.mark.parametrize(
    "window, expected",
    [
        ({"since": 9.0}, True),
        ({"since": 9.1}, False),
        ({"until": 9.0}, False),
        ({"until": 9.1}, True),
        ({"since": 8.0, "until": 10.0}, True),
    ],
)
def test_a_window_includes_its_start_and_excludes_its_end(window, expected):
    assert DeadLetterQuery(**window).matches(make_record()) is expected


def test_an_empty_text_is_a_filter_too():
    assert not DeadLetterQuery(key="").matches(make_record())


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"id": "x" * 1001}, "id: "),
        ({"key": "a\0b"}, "key: .*contains a NUL character, which no store accepts"),
        ({"reason": "\udc80"}, "reason: "),
        ({"since": float("nan")}, "since: "),
        ({"since": -1e12}, "since: "),
        ({"until": 1e12}, "until: "),
        ({"resaon": "x"}, "resaon: "),
    ],
)
def test_a_too_long_invalid_or_unknown_field_is_rejected(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        DeadLetterQuery.load(**fields)
    with pytest.raises(ValidationError):
        DeadLetterQuery(**fields)


def test_a_handle_may_be_the_largest_number():
    assert parse_handle(str(2**63 - 1)) == 2**63 - 1


def test_a_query_is_frozen():
    with pytest.raises(ValidationError):
        DeadLetterQuery().id = "a"
