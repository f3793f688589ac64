"""The mapping by names: statuses, wrappers, and what is never mapped."""

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
from ergon_framework.providers.errors import ProviderBadRequestError, ProviderError, ProviderTimeoutError
from ergon_framework.providers.mapping import canonical, for_status
from ergon_framework.providers.rules import RULES

NOW = 1e9


def mapped(error):
    return canonical(error, now=NOW)


def verdict(error):
    found = mapped(error)
    return found.reason_code, found.sent


def imitation(package, name, *bases, **fields):
    """A class as a library has it that may not be installed here."""
    return type(name, bases or (Exception,), {"__module__": f"{package}.somewhere", **fields})


# -- statuses -------------------------------------------------------------------------------------


def expected(status):
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
        return False  # as one library has it for every failure


class Carrying(Exception):
    def __init__(self, **fields):
        super().__init__("no words of mine: s3cret")
        self.__dict__.update(fields)


SHAPES = [
    lambda status, headers: Carrying(response=Answer(headers, status_code=status)),
    lambda status, headers: Carrying(response=Answer(headers, status=status)),
    lambda status, headers: Carrying(status_code=status, headers=headers),
    lambda status, headers: Carrying(status=status, headers=headers),
]


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("status", [*range(300, 309), *range(400, 452), 499, *range(500, 512), 599])
def test_a_status_is_mapped_wherever_it_is_carried(shape, status):
    found = mapped(shape(status, None))
    assert (found.reason_code, found.http_status, found.retry_after) == (expected(status), status, None)
    assert str(found) == f"the provider answered {status}"


@pytest.mark.spec("PRV-24")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["Retry-After", "retry-after", "RETRY-AFTER"])
def test_the_header_is_read_wherever_it_is_carried(shape, name):
    assert mapped(shape(429, {"X": "1", name: "17"})).retry_after == 17
    assert mapped(shape(503, {name: "Sun, 09 Sep 2001 01:46:50 GMT"})).retry_after == 10
    assert mapped(shape(503, {name: "later"})).retry_after is None
    assert mapped(shape(503, [("Retry-After", "3")])).retry_after is None


@pytest.mark.parametrize("status", [100, 200, 204, 299])
def test_a_status_that_is_no_failure_is_refused(status):
    with pytest.raises(ValueError, match="is no failure"):
        for_status(status)


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("status", [0, 99, 600, 999, -1])
def test_a_status_that_does_not_exist_is_an_internal_error(status):
    assert for_status(status).reason_code == "internal_error"


@pytest.mark.parametrize("status", [True, "503", None, 200, 0, 700, 503.0])
def test_what_is_no_status_of_a_failure_says_nothing(status):
    assert mapped(Carrying(status=status)).http_status is None
    assert mapped(Carrying(status=HTTPStatus.BAD_GATEWAY)).http_status == 502


def test_an_attribute_that_raises_says_nothing():
    class Sly(Exception):
        @property
        def response(self):
            raise RuntimeError("not yet")

    assert mapped(Sly()).reason_code == "internal_error"


# -- classes --------------------------------------------------------------------------------------

REFUSED = ("connection_error", False)
BROKEN = ("connection_error", True)
SLOW = ("timeout", True)
NEVER_SENT = ("timeout", False)
UNREADABLE = ("response_invalid", True)
OURS = ("internal_error", True)
OURS_UNSENT = ("internal_error", False)


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize(
    "error, said",
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
        (FileNotFoundError(2, "gone"), OURS),
        (OSError("odd"), OURS),
        (KeyError("id"), OURS),
        (ValueError("no"), OURS),
        (CancelledError(), OURS),
        (RuntimeError("what"), OURS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_exceptions_of_python_are_mapped(error, said):
    assert verdict(error) == said
    assert mapped(error).__cause__ is error
    assert "s3cret" not in str(mapped(error))


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("package", ["httpx", "httpx2", "httpcore", "httpcore2"])
@pytest.mark.parametrize(
    "name, said",
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
        ("LocalProtocolError", OURS_UNSENT),
        ("UnsupportedProtocol", OURS_UNSENT),
        ("InvalidURL", OURS_UNSENT),
        ("DecodingError", UNREADABLE),
        ("TooManyRedirects", UNREADABLE),
        ("StreamConsumed", OURS),
    ],
)
def test_the_names_of_both_httpx_are_known(package, name, said):
    assert verdict(imitation(package, name)()) == said


@pytest.mark.parametrize(
    "name, said",
    [
        ("ConnectionTimeoutError", NEVER_SENT),
        ("ServerTimeoutError", SLOW),
        ("ClientConnectorError", REFUSED),
        ("ServerDisconnectedError", BROKEN),
        ("ClientPayloadError", BROKEN),
        ("ContentTypeError", UNREADABLE),
        ("InvalidURL", OURS_UNSENT),
    ],
)
def test_the_names_of_aiohttp_are_known(name, said):
    assert verdict(imitation("aiohttp", name)()) == said


def test_a_pool_that_is_empty_is_no_fault_of_the_provider():
    for package, name in (("httpx", "PoolTimeout"), ("urllib3", "EmptyPoolError"), ("sqlalchemy", "TimeoutError")):
        found = mapped(imitation(package, name)())
        assert (found.reason_code, found.sent, found.fault) == ("timeout", False, False)


def test_the_same_name_in_another_package_means_nothing():
    assert verdict(imitation("mine", "ReadTimeout")()) == OURS


def test_a_subclass_is_what_its_parent_is():
    parent = imitation("httpx", "ReadTimeout")
    assert verdict(imitation("mine", "Slow", parent)()) == SLOW


def test_the_status_of_a_proxy_is_not_the_providers():
    assert verdict(imitation("aiohttp", "ClientHttpProxyError", status=407)()) == REFUSED


def test_a_status_that_the_library_made_up_for_an_unreadable_answer_is_not_believed():
    error = imitation("aiohttp", "ClientResponseError", status=400)()
    error.__cause__ = imitation("aiohttp", "BadStatusLine", imitation("aiohttp", "HttpProcessingError"))()
    assert verdict(error) == UNREADABLE
    assert mapped(error).http_status is None


def test_a_content_that_is_not_json_counts_only_if_the_status_is_well():
    kind = imitation("aiohttp", "ContentTypeError")
    fine, broken = kind(), kind()
    fine.status, broken.status = 200, 502
    assert [mapped(error).reason_code for error in (fine, broken)] == ["response_invalid", "dependency_unavailable"]


def test_every_rule_is_reached_by_its_own_name():
    for (package, name), rule in RULES.items():
        if package in sys.stdlib_module_names:
            continue
        found = mapped(imitation(package, name)())
        assert (type(found), found.sent) == (rule.kind, rule.sent)
        assert found.fault is (rule.kind.fault if rule.fault is None else rule.fault)
        assert str(found) == f"{rule.says} ({package}.somewhere.{name})"


# -- wrappers -------------------------------------------------------------------------------------


class Mine(Exception):
    """What a user raises in the place of a library's exception."""


def test_an_explicit_cause_is_followed():
    error = Mine("wrapped")
    error.__cause__ = ConnectionRefusedError()
    assert verdict(error) == REFUSED
    assert mapped(error).__cause__ is error
    plain = ValueError("wrapped")
    plain.__cause__ = TimeoutError()
    assert verdict(plain) == SLOW


def context_of(outer, inner):
    try:
        try:
            raise inner
        except type(inner):
            raise outer  # noqa: B904 - without a cause, as it happens by mistake
    except type(outer) as error:
        return error


def test_what_was_being_handled_is_followed_unless_the_outer_one_is_of_python_itself():
    assert verdict(context_of(Mine(), ConnectionRefusedError())) == REFUSED
    assert verdict(context_of(AttributeError("slip"), ConnectionRefusedError())) == OURS
    # The second call may have been sent, whatever became of the first.
    assert verdict(context_of(TimeoutError(), ConnectionRefusedError())) == SLOW


def test_what_was_put_aside_on_purpose_is_not_followed():
    error = context_of(Mine(), TimeoutError())
    error.__cause__ = None  # as `raise … from None` does
    assert error.__suppress_context__
    assert verdict(error) == OURS


def test_the_most_telling_one_inside_vague_wrappers_wins():
    outer = imitation("requests", "ConnectionError")
    middle = imitation("urllib3", "MaxRetryError")()
    middle.reason = imitation("urllib3", "NewConnectionError")()
    assert verdict(outer(middle)) == REFUSED
    assert verdict(outer(imitation("urllib3", "ProtocolError")("aborted", ConnectionResetError()))) == BROKEN
    assert verdict(outer(imitation("urllib3", "ReadTimeoutError")())) == SLOW
    assert verdict(outer()) == BROKEN


@pytest.mark.parametrize(
    "words, code, status",
    [
        ("too many 503 error responses", "dependency_unavailable", 503),
        ("too many 429 error responses", "rate_limited", 429),
        ("too many error responses", "dependency_unavailable", None),
    ],
)
def test_the_status_of_a_library_that_retried_by_itself_is_read_from_its_words(words, code, status):
    kind = type("ResponseError", (Exception,), {"__module__": "urllib3.exceptions"})
    found = mapped(imitation("requests", "RetryError")(kind(words)))
    assert (found.reason_code, found.http_status) == (code, status)


def test_of_several_vague_ones_the_innermost_is_believed():
    assert verdict(urllib.error.URLError(TimeoutError("timed out"))) == SLOW
    kind = type("ResponseError", (Exception,), {"__module__": "urllib3.exceptions"})
    assert verdict(imitation("urllib3", "MaxRetryError")(kind("too many redirects"))) == UNREADABLE


def test_a_group_is_what_is_in_it():
    assert verdict(ExceptionGroup("tasks", [Mine(), ExceptionGroup("inner", [ConnectionRefusedError()])])) == REFUSED
    assert verdict(ExceptionGroup("tasks", [KeyError("x")])) == OURS


@given(st.integers(1, 200))
def test_a_circle_and_a_long_chain_end(length):
    first = last = Mine()
    for _ in range(length):
        last.__cause__ = Mine()
        last = last.__cause__
    last.__cause__ = first
    assert verdict(first) == OURS


# -- our own, and what is never mapped ------------------------------------------------------------


def test_a_canonical_error_is_returned_as_it_is_also_from_inside():
    error = ProviderTimeoutError("slow")
    assert mapped(error) is error
    assert error.__cause__ is None
    outer = Mine()
    outer.__cause__ = error
    assert mapped(outer) is error
    assert error.__cause__ is None


def test_another_error_of_ours_keeps_its_verdict():
    error = ErgonError("declined", category=Category.BUSINESS, retry_after=3, final=True, code="declined")
    found = mapped(error)
    assert (found.reason_code, found.retryable, found.http_status) == ("internal_error", False, None)
    assert (found.category, found.retry_after, found.final, found.code) == ("BUSINESS", 3, True, "declined")
    assert found.__cause__ is error
    assert mapped(ConfigurationError("wrong")).final
    assert mapped(ErgonError("plain")).code == "internal_error"


def test_a_verdict_that_cannot_be_relied_on_is_not_kept():
    class Odd(ErgonError):
        retry_after = -1
        final = True

    assert (mapped(Odd("x")).retry_after, mapped(Odd("x")).final) == (None, False)


@pytest.mark.parametrize(
    "leaving",
    [
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        SystemExit(2),
        GeneratorExit(),
        BaseExceptionGroup("tasks", [KeyboardInterrupt()]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_wants_to_leave_is_not_a_failed_call(leaving):
    with pytest.raises(type(leaving)) as caught:
        mapped(leaving)
    assert caught.value is leaving


def test_a_cancellation_inside_a_timeout_is_only_how_it_was_made():
    async def slow():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(slow())
    assert verdict(caught.value) == SLOW


class Mute(OSError):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.spec("PRV-25")
@given(st.sampled_from([ValueError, OSError, Mine, ConnectionError, Mute]), st.text(max_size=40))
def test_no_word_of_a_foreign_exception_is_repeated(kind, words):
    found = mapped(kind(f"s3cret {words}"))
    assert isinstance(found, ProviderError)
    assert "s3cret" not in str(found)


def test_a_bad_request_of_the_provider_is_business():
    assert isinstance(mapped(Carrying(status_code=422)), ProviderBadRequestError)
    assert mapped(Carrying(status_code=422)).category is Category.BUSINESS
