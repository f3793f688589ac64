"""Mapping of third-party exceptions to canonical errors, by tables; none of the client libraries is imported.

A canonical error is one of ``providers.errors``: its class is the reason of the failure, its attributes are the
verdict, such as whether a retry can help.

An exception is recognised by the top-level package and the name of its class, or of any base class, so that a
subclass is mapped like its base. The wall time is passed in, because a Retry-After header may hold a date.
"""

from __future__ import annotations

import errno
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from ergon_framework.errors import ErgonError, error_message, has_valid_verdict
from ergon_framework.providers.errors import (
    ProviderAuthError,
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderDependencyError,
    ProviderError,
    ProviderInternalError,
    ProviderRateLimitError,
    ProviderResponseFormatError,
    ProviderTimeoutError,
    get_type_name,
)

#: Longer pauses are reduced to this. No quota window is longer than a month, so a larger number is
#: a mistake, and its deferral would never end.
MAX_RETRY_AFTER_SECONDS: Final = 31 * 86_400.0

_SECONDS_PATTERN: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def parse_retry_after(value: str | None, *, now: float) -> float | None:
    """Return the seconds from *now* (since the epoch) that *value* asks to wait; None if it asks for nothing.

    A negative number, a date in the past, and text that is neither a number nor a date ask for nothing.

    >>> [parse_retry_after(value, now=60.0) for value in ("120", "Thu, 01 Jan 1970 00:01:30 GMT", "soon")]
    [120.0, 30.0, None]
    """
    if value is None:
        return None
    text = value.strip()
    if _SECONDS_PATTERN.fullmatch(text):
        return min(float(text), MAX_RETRY_AFTER_SECONDS)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):  # the parser's errors for text that is not a date
        return None
    wait = _to_epoch_seconds(moment) - now
    return min(wait, MAX_RETRY_AFTER_SECONDS) if wait >= 0 else None


def _to_epoch_seconds(moment: datetime) -> float:
    # Two of the three date formats name no zone; all three mean UTC.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# -- rules ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """The meaning of one exception class; *sent* and *fault* replace those of *kind*, except a *fault* of None.

    An *is_fallback* rule applies only if no exception inside has a rule. *ignores_status* is for exceptions
    whose status is not the provider's.
    """

    kind: type[ProviderError]
    message: str
    sent: bool = True
    fault: bool | None = None
    is_fallback: bool = False
    ignores_status: bool = False


# -- statuses ---------------------------------------------------------------------------------------

#: Statuses whose meaning differs from their class.
STATUSES: Final[dict[int, type[ProviderError]]] = {
    401: ProviderAuthError,
    403: ProviderAuthError,
    408: ProviderTimeoutError,
    425: ProviderRateLimitError,
    429: ProviderRateLimitError,
}
#: The other statuses, by their first digit.
STATUS_CLASSES: Final[dict[int, type[ProviderError]]] = {
    3: ProviderResponseFormatError,
    4: ProviderBadRequestError,
    5: ProviderDependencyError,
}


# -- classes ----------------------------------------------------------------------------------------

_CONNECT_TIMEOUT: Final = ErrorRule(ProviderTimeoutError, "connecting timed out", sent=False)
_READ_TIMEOUT: Final = ErrorRule(ProviderTimeoutError, "no response within the timeout")
_SOME_TIMEOUT: Final = ErrorRule(ProviderTimeoutError, "no response within the timeout", is_fallback=True)
# The client's own pool was empty. At worst the provider is slow, and the slow calls report that themselves.
_POOL_TIMEOUT: Final = ErrorRule(ProviderTimeoutError, "connection pool exhausted", sent=False, fault=False)
_NO_CONNECTION: Final = ErrorRule(ProviderConnectionError, "connecting failed", sent=False)
_NO_TLS: Final = ErrorRule(ProviderConnectionError, "the certificate was not accepted", sent=False)
_SOME_TLS: Final = ErrorRule(ProviderConnectionError, "the secure connection failed", is_fallback=True)
_NO_PROXY: Final = ErrorRule(ProviderConnectionError, "the proxy made no connection", sent=False, ignores_status=True)
_BROKEN: Final = ErrorRule(ProviderConnectionError, "the connection was lost")
_SOME_BREAK: Final = ErrorRule(ProviderConnectionError, "the connection was lost", is_fallback=True)
_UNREADABLE: Final = ErrorRule(ProviderResponseFormatError, "the response could not be parsed")
_REDIRECTS: Final = ErrorRule(ProviderResponseFormatError, "the provider redirects too often")
_UNAVAILABLE: Final = ErrorRule(ProviderDependencyError, "the provider could not serve the call", is_fallback=True)
_REJECTED_DATA: Final = ErrorRule(ProviderBadRequestError, "the provider rejected the data")
_NEVER_BUILT: Final = ErrorRule(ProviderInternalError, "the request is invalid", sent=False)

_HTTPX: Final = {
    "ConnectTimeout": _CONNECT_TIMEOUT,
    "ReadTimeout": _READ_TIMEOUT,
    "WriteTimeout": ErrorRule(ProviderTimeoutError, "sending the request timed out"),
    "PoolTimeout": _POOL_TIMEOUT,
    "TimeoutException": _SOME_TIMEOUT,
    "ConnectError": _NO_CONNECTION,
    "ReadError": _BROKEN,
    "WriteError": _BROKEN,
    "CloseError": _BROKEN,
    "NetworkError": _SOME_BREAK,
    "RemoteProtocolError": _BROKEN,
    "LocalProtocolError": _NEVER_BUILT,
    "ProxyError": _NO_PROXY,
    "UnsupportedProtocol": _NEVER_BUILT,
    "InvalidURL": _NEVER_BUILT,
    "DecodingError": _UNREADABLE,
    "TooManyRedirects": _REDIRECTS,
}
_REQUESTS: Final = {
    "ConnectTimeout": _CONNECT_TIMEOUT,
    "ReadTimeout": _READ_TIMEOUT,
    "Timeout": _SOME_TIMEOUT,
    "ProxyError": _NO_PROXY,
    "SSLError": _SOME_TLS,
    "ConnectionError": _SOME_BREAK,
    "ChunkedEncodingError": _BROKEN,
    "ContentDecodingError": _UNREADABLE,
    "JSONDecodeError": _UNREADABLE,
    "TooManyRedirects": _REDIRECTS,
    "RetryError": _UNAVAILABLE,
    "InvalidJSONError": _NEVER_BUILT,
    "InvalidURL": _NEVER_BUILT,
    "InvalidSchema": _NEVER_BUILT,
    "MissingSchema": _NEVER_BUILT,
    "InvalidHeader": _NEVER_BUILT,
    "URLRequired": _NEVER_BUILT,
}
_URLLIB3: Final = {
    "NewConnectionError": _NO_CONNECTION,  # not a timeout, although it inherits from ConnectTimeoutError
    "ConnectTimeoutError": _CONNECT_TIMEOUT,
    "ReadTimeoutError": _READ_TIMEOUT,
    "TimeoutError": _SOME_TIMEOUT,
    "EmptyPoolError": _POOL_TIMEOUT,
    "ProxyError": _NO_PROXY,
    "SSLError": _SOME_TLS,
    "ProtocolError": _SOME_BREAK,
    "IncompleteRead": _BROKEN,
    "InvalidChunkLength": _BROKEN,
    "DecodeError": _UNREADABLE,
    "ResponseError": _UNAVAILABLE,
    "MaxRetryError": _SOME_BREAK,
    "LocationValueError": _NEVER_BUILT,
}
_AIOHTTP: Final = {
    "ConnectionTimeoutError": _CONNECT_TIMEOUT,
    "ServerTimeoutError": _READ_TIMEOUT,
    "ClientConnectorError": _NO_CONNECTION,
    "ClientConnectorCertificateError": _NO_TLS,
    "ServerFingerprintMismatch": _NO_TLS,
    "ClientHttpProxyError": _NO_PROXY,
    "ClientConnectionError": _SOME_BREAK,
    "ServerDisconnectedError": _BROKEN,
    "ClientPayloadError": _SOME_BREAK,
    "TransferEncodingError": _BROKEN,
    "ContentLengthError": _BROKEN,
    "HttpProcessingError": _UNREADABLE,
    "ContentTypeError": _UNREADABLE,
    "WSServerHandshakeError": _UNREADABLE,
    "TooManyRedirects": _REDIRECTS,
    "InvalidURL": _NEVER_BUILT,
    "NonHttpUrlClientError": _NEVER_BUILT,
}
_SQLALCHEMY: Final = {
    "TimeoutError": _POOL_TIMEOUT,
    "DisconnectionError": _BROKEN,
    "InterfaceError": _SOME_BREAK,
    "OperationalError": _UNAVAILABLE,
    "InternalError": _UNAVAILABLE,
    "IntegrityError": _REJECTED_DATA,
    "DataError": _REJECTED_DATA,
}
_STANDARD: Final = {
    "builtins": {
        "TimeoutError": _SOME_TIMEOUT,
        "ConnectionRefusedError": _NO_CONNECTION,
        "ConnectionError": _BROKEN,
        "UnicodeDecodeError": _UNREADABLE,
    },
    "socket": {"gaierror": _NO_CONNECTION, "herror": _NO_CONNECTION},
    "ssl": {"SSLCertVerificationError": _NO_TLS, "SSLError": _SOME_TLS},
    "asyncio": {"IncompleteReadError": _BROKEN, "LimitOverrunError": _UNREADABLE},
    "http": {
        "RemoteDisconnected": _BROKEN,
        "IncompleteRead": _BROKEN,
        "BadStatusLine": _UNREADABLE,
        "LineTooLong": _UNREADABLE,
        "InvalidURL": _NEVER_BUILT,
        "NotConnected": _NO_CONNECTION,
    },
    "urllib": {"ContentTooShortError": _BROKEN, "URLError": _SOME_BREAK},
    "json": {"JSONDecodeError": _UNREADABLE},
    "simplejson": {"JSONDecodeError": _UNREADABLE},
    "xml": {"ParseError": _UNREADABLE},
    "gzip": {"BadGzipFile": _UNREADABLE},
    "zlib": {"error": _UNREADABLE},
}
# A worker that reaches its own time limit says nothing about the provider.
_WORKER_TIMEOUT: Final = ErrorRule(ProviderTimeoutError, "a time limit of the worker was reached", fault=False)
_BILLIARD: Final = {"SoftTimeLimitExceeded": _WORKER_TIMEOUT, "TimeLimitExceeded": _WORKER_TIMEOUT}
#: Rules by top-level package and class name.
RULES: Final[dict[tuple[str, str], ErrorRule]] = {
    (package, name): rule
    for package, rules in {
        "httpx": _HTTPX,
        "httpx2": _HTTPX,
        "httpcore": _HTTPX,
        "httpcore2": _HTTPX,
        "requests": _REQUESTS,
        "urllib3": _URLLIB3,
        "aiohttp": _AIOHTTP,
        "sqlalchemy": _SQLALCHEMY,
        "billiard": _BILLIARD,
        **_STANDARD,
    }.items()
    for name, rule in rules.items()
}

#: Rules of classes with several meanings, by the prefix of the message.
MESSAGE_RULES: Final[dict[tuple[str, str], dict[str, ErrorRule]]] = {
    ("urllib3", "ResponseError"): {"too many redirects": _REDIRECTS},
    # The message of asyncio if none of a host's addresses could be reached.
    ("builtins", "OSError"): {"Multiple exceptions: ": _NO_CONNECTION},
}

#: Error numbers of plain OSErrors that concern the network; all others concern files.
ERRNO_RULES: Final[dict[int, ErrorRule]] = {
    errno.ETIMEDOUT: _READ_TIMEOUT,
    **dict.fromkeys((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ENETRESET), _BROKEN),
}


# -- mapping ----------------------------------------------------------------------------------------

#: Maximum number of exceptions of one chain that are examined.
MAX_CHAIN_DEPTH: Final = 32


def error_for_status(status: int, *, retry_after: float | None = None) -> ProviderError:
    """Return the error of a response with *status*; raise ValueError for a status from 100 to 299."""
    if 100 <= status < 300:  # noqa: PLR2004 - statuses that are not failures
        raise ValueError(f"status {status} is not a failure: expected 300 or above; check the response body instead")
    kind = STATUSES.get(status) or STATUS_CLASSES.get(status // 100, ProviderInternalError)
    return kind(f"the provider answered {status}", http_status=status, retry_after=retry_after)


def to_provider_error(error: BaseException, *, now: float) -> ProviderError:
    """Return the canonical form of *error*, which becomes its cause; *now* is the wall time, for dates in headers.

    A ProviderError is returned unchanged. Any other ErgonError keeps its verdict as an
    internal_error. An exception that is not an Exception (a cancellation, an exit) is raised again unchanged, so
    that it cannot count as a failed call.
    """
    if isinstance(error, ProviderError):
        return error
    if not isinstance(error, Exception):
        raise error
    # A wrapped ErgonError already has a verdict; a new error would only hide it.
    ergon_error = next((inner for inner in _iterate_chain(error) if isinstance(inner, ErgonError)), None)
    if isinstance(ergon_error, ProviderError):
        return ergon_error
    mapped_error = _map_exception(error, now=now) if ergon_error is None else _from_ergon_error(ergon_error)
    mapped_error.__cause__ = error
    return mapped_error


def _map_exception(error: Exception, *, now: float) -> ProviderError:
    mapped_error: ProviderError | None = None
    for inner in _iterate_chain(error):
        rule = _find_rule(inner)
        status = None if rule is not None and rule.ignores_status else _get_status(inner)
        if status is not None:
            return error_for_status(status, retry_after=_get_retry_after(inner, now=now))
        if rule is None:
            continue
        mapped_error = _from_rule(rule, inner)
        if not rule.is_fallback:
            break
    return mapped_error or ProviderInternalError(f"the call failed with {get_type_name(error)}")


def _from_rule(rule: ErrorRule, error: BaseException) -> ProviderError:
    # The exception's own message is omitted: it may hold addresses, statements and bodies.
    return rule.kind(f"{rule.message} ({get_type_name(error)})", sent=rule.sent, fault=rule.fault)


def _from_ergon_error(error: ErgonError) -> ProviderError:
    message = f"the call failed with {get_type_name(error)}"
    if not has_valid_verdict(error):
        return ProviderInternalError(message)
    return ProviderInternalError(
        message,
        category=error.category,
        retry_after=error.retry_after,
        final=error.final,
        not_attempted=error.not_attempted,
        temporary=error.temporary,
        code=error.code,
    )


def _find_rule(error: BaseException) -> ErrorRule | None:
    for kind in type(error).__mro__:
        name = (kind.__module__.partition(".")[0], kind.__name__)
        for prefix, rule in MESSAGE_RULES.get(name, {}).items():
            if error_message(error, raw=True).startswith(prefix):
                return rule
        if name in RULES:
            return RULES[name]
    return ERRNO_RULES.get(error.errno) if isinstance(error, OSError) and error.errno is not None else None


def _iterate_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield *error* and the exceptions inside it, the outermost first."""
    seen, pending = {id(error)}, deque([error])
    for _ in range(MAX_CHAIN_DEPTH):
        if not pending:
            return
        current = pending.popleft()
        yield current
        for inner in _iterate_inner(current):
            if isinstance(inner, Exception) and id(inner) not in seen:
                seen.add(id(inner))
                pending.append(inner)


def _iterate_inner(error: BaseException) -> Iterator[Any]:
    yield error.__cause__
    yield _get_attribute(error, "reason")
    yield from error.args
    if isinstance(error, BaseExceptionGroup):
        yield from error.exceptions
    # A TypeError in an except block is a bug, and a TimeoutError there may belong to a second call: an implicit
    # context explains only exceptions of libraries, which report on a call.
    if not error.__suppress_context__ and type(error).__module__ != "builtins":
        yield error.__context__


# -- status and headers of a response ---------------------------------------------------------------

_TOO_MANY_RESPONSES: Final = re.compile(r"too many ([345][0-9]{2}) error responses")


def _get_status(error: BaseException) -> int | None:
    if _is_unparsed(error):
        return None
    response = _get_attribute(error, "response")
    sources = ((response, "status_code"), (response, "status"), (error, "status_code"), (error, "status"))
    for source, name in sources:
        status = _get_attribute(source, name)
        if isinstance(status, int) and not isinstance(status, bool) and 300 <= status < 600:  # noqa: PLR2004 - failures
            return int(status)
    # A library that retries internally keeps only this sentence of the last response.
    match = (
        _TOO_MANY_RESPONSES.search(error_message(error, raw=True))
        if get_type_name(error) == "urllib3.exceptions.ResponseError"
        else None
    )
    return int(match[1]) if match else None


def _is_unparsed(error: BaseException) -> bool:
    """Return whether the status is invented: aiohttp assigns 400 to a response that it cannot parse."""
    cause = error.__cause__
    return cause is not None and any(
        kind.__name__ == "HttpProcessingError" and kind.__module__.startswith("aiohttp.")
        for kind in type(cause).__mro__
    )


def _get_retry_after(error: BaseException, *, now: float) -> float | None:
    for source in (_get_attribute(error, "response"), error):
        headers = _get_attribute(source, "headers")
        # Each library has its own mapping type; all of them can list their items.
        pairs = headers.items() if hasattr(headers, "items") else ()
        for name, value in pairs:
            if str(name).lower() == "retry-after":
                return parse_retry_after(str(value), now=now)
    return None


def _get_attribute(source: Any, name: str) -> Any:
    """Return an attribute of a third-party object; None if its property raises."""
    try:
        return getattr(source, name, None)
    except Exception:  # noqa: BLE001 - a property that raises has no usable value
        return None
