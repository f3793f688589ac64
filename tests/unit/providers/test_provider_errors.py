"""The canonical errors: their classification, pickling, and what they never contain."""

from __future__ import annotations

import copy
import doctest
import json
import pickle
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.errors import Category, ErgonError, has_valid_verdict
from ergon_framework.providers import errors
from ergon_framework.providers.circuit_breaker import is_provider_fault
from ergon_framework.providers.errors import (
    ERROR_BY_REASON,
    AttemptInfo,
    ProviderBadRequestError,
    ProviderCircuitOpenError,
    ProviderError,
    ProviderRateLimitError,
    ProviderTimeoutError,
    ReasonCode,
    sanitize_message,
)

TABLE = {
    "ProviderTimeoutError": ("timeout", True, True, True),
    "ProviderConnectionError": ("connection_error", True, True, True),
    "ProviderRateLimitError": ("rate_limited", True, False, True),
    "ProviderAuthError": ("auth_failed", False, False, True),
    "ProviderQuotaExceededError": ("quota_exhausted", False, False, False),
    "ProviderBadRequestError": ("bad_request", False, False, True),
    "ProviderResponseFormatError": ("response_invalid", False, True, True),
    "ProviderDependencyError": ("dependency_unavailable", True, True, True),
    "ProviderInternalError": ("internal_error", False, False, True),
    "ProviderCircuitOpenError": ("circuit_open", False, False, False),
}
kinds = st.sampled_from(sorted(ERROR_BY_REASON.values(), key=lambda kind: kind.__name__))


def pickle_round_trip(error):
    """Return the error as another process would receive it."""
    return pickle.loads(pickle.dumps(error))


@pytest.mark.spec("PRV-03", "PRV-04", "PRV-20")
@pytest.mark.parametrize("name", TABLE)
def test_each_class_has_its_reason_and_its_classification(name):
    error = getattr(errors, name)("broken")
    assert isinstance(error, ProviderError)
    assert (error.reason_code, error.retryable, error.fault, error.sent) == TABLE[name]
    assert error.code == error.reason_code
    assert (error.http_status, error.retry_after, error.result, error.attempts) == (None, None, None, ())
    assert has_valid_verdict(error)


@pytest.mark.spec("PRV-03")
def test_there_are_ten_reasons_and_each_has_one_class():
    assert [str(code) for code in ReasonCode] == [
        "timeout",
        "connection_error",
        "rate_limited",
        "auth_failed",
        "quota_exhausted",
        "bad_request",
        "response_invalid",
        "dependency_unavailable",
        "circuit_open",
        "internal_error",
    ]
    assert {code: kind.__name__ for code, kind in ERROR_BY_REASON.items()} == {
        row[0]: name for name, row in TABLE.items()
    }


def test_only_a_bad_request_is_business_and_no_class_is_final():
    business = [kind for kind in ERROR_BY_REASON.values() if kind("x").category is Category.BUSINESS]
    assert business == [ProviderBadRequestError]
    assert not any(kind("x").final for kind in ERROR_BY_REASON.values())


def test_an_error_may_differ_from_its_class():
    error = ProviderTimeoutError(
        "x", http_status=408, retry_after=2, sent=False, fault=False, category=Category.TIMEOUT, final=True, code="own"
    )
    assert (error.http_status, error.retry_after, error.sent, error.fault) == (408, 2, False, False)
    assert (error.category, error.final, error.code, error.reason_code) == ("TIMEOUT", True, "own", "timeout")
    assert (ProviderTimeoutError.sent, ProviderTimeoutError.fault) == (True, True)


@pytest.mark.spec("PRV-20")
@pytest.mark.parametrize(
    "error, expected",
    [
        (None, False),
        (ProviderTimeoutError("x"), True),
        (ProviderTimeoutError("x", sent=False, fault=False), None),
        (ProviderRateLimitError("x"), False),
        (ProviderBadRequestError("x"), False),
        (ProviderCircuitOpenError("x"), None),
        (ProviderError("x"), None),
    ],
)
def test_the_breaker_counts_faults_and_successes_and_ignores_the_rest(error, expected):
    assert is_provider_fault(error) is expected


# -- pickling -------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-25")
@given(
    kind=kinds,
    status=st.none() | st.integers(100, 599),
    delay=st.none() | st.floats(0, 1e6),
    is_sent=st.booleans(),
    text=st.text(max_size=50),
)
def test_every_error_is_equal_after_pickling(kind, status, delay, is_sent, text):
    error = kind(text, http_status=status, retry_after=delay, sent=is_sent)
    for arrived in (
        pickle_round_trip(error),
        pickle_round_trip(pickle_round_trip(error)),
        copy.copy(error),
        copy.deepcopy(error),
    ):
        assert type(arrived) is kind
        assert (str(arrived), vars(arrived)) == (str(error), vars(error))
        assert (arrived.reason_code, arrived.http_status) == (error.reason_code, status)
        assert (arrived.retry_after, arrived.sent) == (delay, is_sent)


@pytest.mark.spec("PRV-25")
@pytest.mark.parametrize(
    "cause",
    [TimeoutError("timed out"), ConnectionRefusedError(111, "Connection refused"), socket.gaierror(-2, "unknown")],
)
def test_a_plain_cause_arrives_whole(cause):
    error = ProviderTimeoutError("slow")
    error.__cause__ = cause
    arrived = pickle_round_trip(pickle_round_trip(error)).__cause__
    assert (type(arrived), arrived.args) == (type(cause), cause.args)


@pytest.mark.spec("PRV-25")
def test_a_chain_of_framework_errors_arrives_whole():
    error = ProviderTimeoutError("slow")
    error.__cause__ = ProviderRateLimitError("busy", http_status=429)
    error.__cause__.__cause__ = TimeoutError("timed out")
    arrived = pickle_round_trip(error)
    assert (type(arrived.__cause__), arrived.__cause__.http_status) == (ProviderRateLimitError, 429)
    assert type(arrived.__cause__.__cause__) is TimeoutError


class Foreign(Exception):
    """An error like those of client libraries: it holds the request."""

    def __init__(self, message, request=None):
        super().__init__(message)
        self.request = request


def make_decode_error():
    try:
        b"s3cret \xff".decode()
    except UnicodeDecodeError as error:
        return error


def make_json_error():
    try:
        json.loads("s3cret")
    except ValueError as error:
        return error


def make_error_with_headers():
    error = TimeoutError("slow")
    error.headers = {"authorization": "s3cret"}
    return error


@pytest.mark.spec("PRV-25")
@pytest.mark.parametrize(
    "cause, name",
    [
        (Foreign("no", {"Authorization": "Bearer s3cret"}), f"{__name__}.Foreign"),
        (Foreign("GET https://api/x?sig=s3cret"), f"{__name__}.Foreign"),
        (ValueError("https://me:s3cret@api/x"), "ValueError"),
        (ValueError("/v1/x?sig=s3cret failed"), "ValueError"),
        (OSError(2, "gone", "https://me:s3cret@api/x"), "FileNotFoundError"),
        (ValueError("locked", threading.Lock()), "ValueError"),
        (ErgonError("api_key=s3cret"), "ergon_framework.errors.ErgonError"),
        (ExceptionGroup("s3cret", [ValueError("s3cret")]), "ExceptionGroup"),
        (make_decode_error(), "UnicodeDecodeError"),
        (make_json_error(), "json.decoder.JSONDecodeError"),
        (make_error_with_headers(), "TimeoutError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cause_that_may_hold_a_secret_arrives_as_its_name_only(cause, name):
    error = ProviderTimeoutError("slow")
    error.__cause__ = cause
    data = pickle.dumps(error)
    assert b"s3cret" not in data
    for arrived in (
        pickle.loads(data),
        pickle_round_trip(pickle.loads(data)),
    ):  # a second round trip loses nothing more
        assert type(arrived.__cause__) is ErgonError
        assert str(arrived.__cause__) == name
    assert error.__cause__ is cause  # pickling did not change it


def test_an_error_that_holds_itself_among_its_attempts_arrives():
    error = ProviderTimeoutError("slow", http_status=504)
    error.attempts = (AttemptInfo(1, 0.0, 2.5, ProviderRateLimitError("busy"), 1.0), AttemptInfo(2, 3.5, 0.5, error))
    arrived = pickle_round_trip(error)
    assert arrived.attempts[1].error is arrived
    assert (arrived.attempts[0].delay, arrived.attempts[0].error.reason_code) == (1.0, "rate_limited")


def test_circular_causes_do_not_break_pickling():
    one, two = ProviderTimeoutError("one"), ProviderTimeoutError("two")
    one.__cause__, two.__cause__ = two, one
    assert str(pickle_round_trip(one).__cause__) == "two"


def test_the_end_time_of_an_open_breaker_arrives():
    arrived = pickle_round_trip(ProviderCircuitOpenError("open", open_until=12.5, retry_after=2.5))
    assert (arrived.open_until, arrived.retry_after) == (12.5, 2.5)


# -- contents of a message ------------------------------------------------------------------------


@pytest.mark.spec("PRV-25")
@pytest.mark.parametrize(
    "message, expected",
    [
        ("GET https://me:s3cret@api.example/v1/x failed", "GET https://api.example/v1/x failed"),
        ("https://s3cret@api.example:8443/v1", "https://api.example:8443/v1"),
        ("https://api.example/v1?sig=s3cret&a=1", "https://api.example/v1"),
        ("https://api.example/v1#s3cret", "https://api.example/v1"),
        ("postgresql://me:a/s3cret?@db/shop", "postgresql://db/shop"),
        ("postgresql://me:p@s3cret@db/shop", "postgresql://db/shop"),
        ("url: /v1/x?sig=s3cret (Caused by X)", "url: /v1/x?[hidden] (Caused by X)"),
        ("Authorization: Bearer s3cret", None),
        ("api_key=s3cret", "api_key=[hidden]"),
        ("nothing to hide? no", "nothing to hide? no"),
    ],
)
def test_a_message_is_cleaned_of_credentials(message, expected):
    shown = str(ProviderBadRequestError(message))
    assert "s3cret" not in shown
    assert expected is None or shown == expected


@given(st.text(max_size=30), st.sampled_from(["https", "postgresql", "amqp+ssl"]))
def test_no_password_of_an_address_is_ever_shown(text, scheme):
    password = "".join(text.split()).replace("@", "") + "s3cret"
    assert "s3cret" not in sanitize_message(f"cannot reach {scheme}://me:{password}@host/path now")


@given(st.text(max_size=700))
def test_cleaning_is_idempotent_and_bounded(text):
    once = sanitize_message(text)
    assert len(sanitize_message("?a=1" * 10_000)) <= 500
    assert sanitize_message(once) == once


def test_the_docstring_examples_are_correct():
    assert doctest.testmod(errors, raise_on_error=True).attempted > 0
