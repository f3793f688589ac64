"""Which dead letters a query means."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ergon_framework.connectors.deadletters import DeadLetterQuery, number
from ergon_framework.errors import Category, ConfigurationError
from tests.unit.connectors.test_deadletters import record

FITS = {
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


def test_a_query_that_says_nothing_means_everything():
    assert DeadLetterQuery().matches(record())
    assert DeadLetterQuery().everything


@pytest.mark.parametrize("name, value", FITS.items())
def test_each_field_is_compared_with_its_own(name, value):
    assert DeadLetterQuery(**{name: value}).matches(record())
    other = Category.TIMEOUT if name == "category" else f"{value}-2"
    query = DeadLetterQuery(**FITS | {name: other})
    assert not query.matches(record())
    assert not query.everything


def test_all_that_is_given_must_fit():
    assert DeadLetterQuery(**FITS).matches(record())


@pytest.mark.parametrize("name", ["task", "error_type", "category"])
def test_without_a_failure_no_filter_on_one_fits(name):
    assert not DeadLetterQuery(**{name: FITS[name]}).matches(record(failure=None))


@pytest.mark.parametrize(
    "window, fits",
    [
        ({"since": 9.0}, True),
        ({"since": 9.1}, False),
        ({"until": 9.0}, False),
        ({"until": 9.1}, True),
        ({"since": 8.0, "until": 10.0}, True),
    ],
)
def test_a_window_has_its_start_and_not_its_end(window, fits):
    assert DeadLetterQuery(**window).matches(record()) is fits


def test_an_empty_text_is_a_filter_too():
    assert not DeadLetterQuery(key="").matches(record())


@pytest.mark.parametrize(
    "given, said",
    [
        ({"id": "x" * 1001}, "id: "),
        ({"key": "a\0b"}, "key: .* no store keeps"),
        ({"reason": "\udc80"}, "reason: "),
        ({"since": float("nan")}, "since: "),
        ({"since": -1e12}, "since: "),
        ({"until": 1e12}, "until: "),
        ({"resaon": "x"}, "resaon: "),
    ],
)
def test_what_is_too_long_odd_or_unknown_is_refused(given, said):
    with pytest.raises(ConfigurationError, match=said):
        DeadLetterQuery.load(**given)
    with pytest.raises(ValidationError):
        DeadLetterQuery(**given)


def test_a_place_may_be_the_last_number_there_is():
    assert number(str(2**63 - 1)) == 2**63 - 1


def test_a_query_is_frozen():
    with pytest.raises(ValidationError):
        DeadLetterQuery().id = "a"
