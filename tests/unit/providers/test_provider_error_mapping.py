"""The mapping by names: statuses, wrappers, and errors that are never mapped."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
import sys
import urllib.error
from concurrent.futures import CancelledError
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.errors import Category, ConfigurationError, ErgonError
from ergon_framework.providers.error_mapping import RULES, error_for_status, to_provider_error
from ergon_framework.providers.errors import ProviderBadRequestError, ProviderError, ProviderTimeoutError

NOW = 1e9


def map_error(error):
    return to_provider_error(error, now=NOW)


def classify(error):
    result = map_error(error)
    return result.reason_code, result.sent


def make_class(package, name, *bases, **fields):
    """Create a class like that of a library that may not be installed here."""
    return type(name, bases or (Exception,), {"__module__": f"{package}.somewhere", **fields})


# -- statuses -------------------------------------------------------------------------------------


def expected_reason(status):
    if status in {401, 403}:
        return "auth_failed"
    if status in {425, 429}:
        return "rate_limited"
    if status == 408:
        return "timeout"
    return {3: "response_invalid", 4: "bad_request", 5: "dependency_unavailable"}[status // 100]


class Answer:
    def __init__(self, headers=None, **fields):
        self.headers = headers
        self.__dict__.update(fields)

    def __bool__(self):
        return False  # like one library's response, for every failure


class ErrorWithStatus(Exception):
    def __init__(self, **fields):
        super().__init__("no words of mine: s3cret")
        self.__dict__.update(fields)


SHAPES = [
    lambda status, headers: ErrorWithStatus(response=Answer(headers, status_code=status)),
    lambda status, headers: ErrorWithStatus(response=Answer(headers, status=status)),
    lambda status, headers: ErrorWithStatus(status_code=status, headers=headers),
    lambda status, headers: ErrorWithStatus(status=status, headers=headers),
]


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("status", [*range(300, 309), *range(400, 452), 499, *range(500, 512), 599])
def test_a_status_is_mapped_from_every_attribute(shape, status):
    result = map_error(shape(status, None))
    assert (result.reason_code, result.http_status, result.retry_after) == (expected_reason(status), status, None)
    assert str(result) == f"the provider answered {status}"


@pytest.mark.spec("PRV-24")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["Retry-After", "retry-after", "RETRY-AFTER"])
def test_the_header_is_read_from_every_attribute(shape, name):
    assert map_error(shape(429, {"X": "1", name: "17"})).retry_after == 17
    assert map_error(shape(503, {name: "Sun, 09 Sep 2001 01:46:50 GMT"})).retry_after == 10
    assert map_error(shape(503, {name: "later"})).retry_after is None
    assert map_error(shape(503, [("Retry-After", "3")])).retry_after is None


@pytest.mark.parametrize("status", [100, 200, 204, 299])
def test_a_status_that_is_not_a_failure_is_rejected(status):
    with pytest.raises(ValueError, match="is not a failure"):
        error_for_status(status)


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("status", [0, 99, 600, 999, -1])
def test_a_status_that_does_not_exist_is_an_internal_error(status):
    assert error_for_status(status).reason_code == "internal_error"


@pytest.mark.parametrize("status", [True, "503", None, 200, 0, 700, 503.0])
def test_an_invalid_failure_status_is_ignored(status):
    assert map_error(ErrorWithStatus(status=status)).http_status is None
    assert map_error(ErrorWithStatus(status=HTTPStatus.BAD_GATEWAY)).http_status == 502


def test_an_attribute_that_raises_is_ignored():
    class Sly(Exception):
        @property
        def response(self):
            raise RuntimeError("not yet")

    assert map_error(Sly()).reason_code == "internal_error"


# -- classes --------------------------------------------------------------------------------------

REFUSED = ("connection_error", False)
BROKEN = ("connection_error", True)
SLOW = ("timeout", True)
NEVER_SENT = ("timeout", False)
UNREADABLE = ("response_invalid", True)
INTERNAL = ("internal_error", True)
INTERNAL_UNSENT = ("internal_error", False)


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize(
    "error, classification",
    [
        (TimeoutError(), SLOW),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), SLOW),
        (ConnectionRefusedError(111, "refused"), REFUSED),
        (ConnectionResetError(104, "reset"), BROKEN),
        (ConnectionAbortedError(), BROKEN),
        (BrokenPipeError(), BROKEN),
        (socket.gaierror(-2, "unknown"), REFUSED),
        (OSError(errno.EHOSTUNREACH, "no route"), BROKEN),
        (OSError(errno.ENETUNREACH, "no network"), BROKEN),
        (OSError("Multiple exceptions: [Errno 111] a, [Errno 111] b"), REFUSED),
        (ssl.SSLCertVerificationError(1, "self-signed"), REFUSED),
        (ssl.SSLError(1, "wrong version"), BROKEN),
        (asyncio.IncompleteReadError(b"", 5), BROKEN),
        (asyncio.LimitOverrunError("long", 5), UNREADABLE),
        (urllib.error.URLError(ConnectionRefusedError()), REFUSED),
        (urllib.error.URLError("unknown url type"), BROKEN),
        (json.JSONDecodeError("no", "s3cret", 0), UNREADABLE),
        (UnicodeDecodeError("utf-8", b"s3cret", 0, 1, "no"), UNREADABLE),
        (FileNotFoundError(2, "gone"), INTERNAL),
        (OSError("odd"), INTERNAL),
        (KeyError("id"), INTERNAL),
        (ValueError("no"), INTERNAL),
        (CancelledError(), INTERNAL),
        (RuntimeError("what"), INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_exceptions_of_python_are_mapped(error, classification):
    assert classify(error) == classification
    assert map_error(error).__cause__ is error
    assert "s3cret" not in str(map_error(error))


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("package", ["httpx", "httpx2", "httpcore", "httpcore2"])
@pytest.mark.parametrize(
    "name, classification",
    [
        ("ConnectTimeout", NEVER_SENT),
        ("PoolTimeout", NEVER_SENT),
        ("ReadTimeout", SLOW),
        ("WriteTimeout", SLOW),
        ("TimeoutException", SLOW),
        ("ConnectError", REFUSED),
        ("ProxyError", REFUSED),
        ("ReadError", BROKEN),
        ("WriteError", BROKEN),
        ("CloseError", BROKEN),
        ("NetworkError", BROKEN),
        ("RemoteProtocolError", BROKEN),
        ("LocalProtocolError", INTERNAL_UNSENT),
        ("UnsupportedProtocol", INTERNAL_UNSENT),
        ("InvalidURL", INTERNAL_UNSENT),
        ("DecodingError", UNREADABLE),
        ("TooManyRedirects", UNREADABLE),
        ("StreamConsumed", INTERNAL),
    ],
)
def test_the_names_of_both_httpx_are_known(package, name, classification):
    assert classify(make_class(package, name)()) == classification


@pytest.mark.parametrize(
    "name, classification",
    [
        ("ConnectionTimeoutError", NEVER_SENT),
        ("ServerTimeoutError", SLOW),
        ("ClientConnectorError", REFUSED),
        ("ServerDisconnectedError", BROKEN),
        ("ClientPayloadError", BROKEN),
        ("ContentTypeError", UNREADABLE),
        ("InvalidURL", INTERNAL_UNSENT),
    ],
)
def test_the_names_of_aiohttp_are_known(name, classification):
    assert classify(make_class("aiohttp", name)()) == classification


def test_a_pool_that_is_empty_is_no_fault_of_the_provider():
    for package, name in (("httpx", "PoolTimeout"), ("urllib3", "EmptyPoolError"), ("sqlalchemy", "TimeoutError")):
        result = map_error(make_class(package, name)())
        assert (result.reason_code, result.sent, result.fault) == ("timeout", False, False)


def test_the_same_name_in_another_package_means_nothing():
    assert classify(make_class("mine", "ReadTimeout")()) == INTERNAL


def test_a_subclass_is_what_its_parent_is():
    parent = make_class("httpx", "ReadTimeout")
    assert classify(make_class("mine", "Slow", parent)()) == SLOW


def test_the_status_of_a_proxy_is_not_the_status_of_the_provider():
    assert classify(make_class("aiohttp", "ClientHttpProxyError", status=407)()) == REFUSED


def test_a_status_that_a_library_invents_for_an_unreadable_response_is_ignored():
    error = make_class("aiohttp", "ClientResponseError", status=400)()
    error.__cause__ = make_class("aiohttp", "BadStatusLine", make_class("aiohttp", "HttpProcessingError"))()
    assert classify(error) == UNREADABLE
    assert map_error(error).http_status is None


def test_content_that_is_not_json_counts_only_if_the_status_is_a_success():
    kind = make_class("aiohttp", "ContentTypeError")
    fine, broken = kind(), kind()
    fine.status, broken.status = 200, 502
    assert [map_error(error).reason_code for error in (fine, broken)] == ["response_invalid", "dependency_unavailable"]


def test_every_rule_is_reached_by_its_own_name():
    for (package, name), rule in RULES.items():
        if package in sys.stdlib_module_names:
            continue
        result = map_error(make_class(package, name)())
        assert (type(result), result.sent) == (rule.kind, rule.sent)
        assert result.fault is (rule.kind.fault if rule.fault is None else rule.fault)
        assert str(result) == f"{rule.message} ({package}.somewhere.{name})"


# -- wrappers -------------------------------------------------------------------------------------


class UserError(Exception):
    """An exception that user code raises in place of a library's exception."""


def test_an_explicit_cause_is_followed():
    error = UserError("wrapped")
    error.__cause__ = ConnectionRefusedError()
    assert classify(error) == REFUSED
    assert map_error(error).__cause__ is error
    builtin_error = ValueError("wrapped")
    builtin_error.__cause__ = TimeoutError()
    assert classify(builtin_error) == SLOW


def raise_while_handling(outer, inner):
    try:
        try:
            raise inner
        except type(inner):
            raise outer  # noqa: B904 - without a cause, as it happens by mistake
    except type(outer) as error:
        return error


def test_the_context_is_followed_unless_the_outer_error_is_a_builtin():
    assert classify(raise_while_handling(UserError(), ConnectionRefusedError())) == REFUSED
    assert classify(raise_while_handling(AttributeError("slip"), ConnectionRefusedError())) == INTERNAL
    # The second call may have been sent, whatever the result of the first.
    assert classify(raise_while_handling(TimeoutError(), ConnectionRefusedError())) == SLOW


def test_a_suppressed_context_is_not_followed():
    error = raise_while_handling(UserError(), TimeoutError())
    error.__cause__ = None  # as `raise … from None` does
    assert error.__suppress_context__
    assert classify(error) == INTERNAL


def test_the_most_specific_error_inside_wrappers_wins():
    outer = make_class("requests", "ConnectionError")
    middle = make_class("urllib3", "MaxRetryError")()
    middle.reason = make_class("urllib3", "NewConnectionError")()
    assert classify(outer(middle)) == REFUSED
    assert classify(outer(make_class("urllib3", "ProtocolError")("aborted", ConnectionResetError()))) == BROKEN
    assert classify(outer(make_class("urllib3", "ReadTimeoutError")())) == SLOW
    assert classify(outer()) == BROKEN


@pytest.mark.parametrize(
    "message, code, status",
    [
        ("too many 503 error responses", "dependency_unavailable", 503),
        ("too many 429 error responses", "rate_limited", 429),
        ("too many error responses", "dependency_unavailable", None),
    ],
)
def test_the_status_of_a_library_that_retried_itself_is_read_from_its_message(message, code, status):
    kind = type("ResponseError", (Exception,), {"__module__": "urllib3.exceptions"})
    result = map_error(make_class("requests", "RetryError")(kind(message)))
    assert (result.reason_code, result.http_status) == (code, status)


def test_the_innermost_of_several_vague_errors_wins():
    assert classify(urllib.error.URLError(TimeoutError("timed out"))) == SLOW
    kind = type("ResponseError", (Exception,), {"__module__": "urllib3.exceptions"})
    assert classify(make_class("urllib3", "MaxRetryError")(kind("too many redirects"))) == UNREADABLE


def test_a_group_is_classified_by_its_members():
    assert (
        classify(ExceptionGroup("tasks", [UserError(), ExceptionGroup("inner", [ConnectionRefusedError()])])) == REFUSED
    )
    assert classify(ExceptionGroup("tasks", [KeyError("x")])) == INTERNAL


@given(st.integers(1, 200))
def test_a_circle_and_a_long_chain_end(length):
    first = last = UserError()
    for _ in range(length):
        last.__cause__ = UserError()
        last = last.__cause__
    last.__cause__ = first
    assert classify(first) == INTERNAL


# -- framework errors, and errors that are never mapped -------------------------------------------


def test_a_canonical_error_is_returned_as_it_is_also_from_inside():
    error = ProviderTimeoutError("slow")
    assert map_error(error) is error
    assert error.__cause__ is None
    outer = UserError()
    outer.__cause__ = error
    assert map_error(outer) is error
    assert error.__cause__ is None


def test_another_framework_error_keeps_its_classification():
    error = ErgonError("declined", category=Category.BUSINESS, retry_after=3, final=True, code="declined")
    result = map_error(error)
    assert (result.reason_code, result.retryable, result.http_status) == ("internal_error", False, None)
    assert (result.category, result.retry_after, result.final, result.code) == ("BUSINESS", 3, True, "declined")
    assert result.__cause__ is error
    assert map_error(ConfigurationError("wrong")).final
    assert map_error(ErgonError("plain")).code == "internal_error"


def test_an_invalid_classification_is_not_kept():
    class Odd(ErgonError):
        retry_after = -1
        final = True

    assert (map_error(Odd("x")).retry_after, map_error(Odd("x")).final) == (None, False)


@pytest.mark.parametrize(
    "interrupt",
    [
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        SystemExit(2),
        GeneratorExit(),
        BaseExceptionGroup("tasks", [KeyboardInterrupt()]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_interrupt_is_not_a_failed_call(interrupt):
    with pytest.raises(type(interrupt)) as caught:
        map_error(interrupt)
    assert caught.value is interrupt


def test_a_timeout_caused_by_a_cancellation_is_a_timeout():
    async def slow():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(slow())
    assert classify(caught.value) == SLOW


class Mute(OSError):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.spec("PRV-25")
@given(st.sampled_from([ValueError, OSError, UserError, ConnectionError, Mute]), st.text(max_size=40))
def test_no_message_of_a_third_party_exception_is_repeated(kind, message):
    result = map_error(kind(f"s3cret {message}"))
    assert isinstance(result, ProviderError)
    assert "s3cret" not in str(result)


def test_a_bad_request_of_the_provider_is_business():
    assert isinstance(map_error(ErrorWithStatus(status_code=422)), ProviderBadRequestError)
    assert map_error(ErrorWithStatus(status_code=422)).category is Category.BUSINESS
