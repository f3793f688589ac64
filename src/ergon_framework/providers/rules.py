"""The meaning of each client library's exceptions, as tables; none of the libraries is imported."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

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
)


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """The meaning of one exception class.

    An *is_fallback* rule applies only if no exception inside has a rule. *ignores_status* is for exceptions
    whose status is not the provider's.
    """

    kind: type[ProviderError]
    message: str
    sent: bool = True
    fault: bool | None = None
    is_fallback: bool = False
    ignores_status: bool = False


# -- statuses -------------------------------------------------------------------------------------

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


# -- classes --------------------------------------------------------------------------------------

_CONNECT_TIMEOUT: Final = ErrorRule(ProviderTimeoutError, "no connection in time", sent=False)
_READ_TIMEOUT: Final = ErrorRule(ProviderTimeoutError, "no answer in time")
_SOME_TIMEOUT: Final = ErrorRule(ProviderTimeoutError, "no answer in time", is_fallback=True)
# The client's own pool was empty. At worst the provider is slow, and the slow calls report that themselves.
_POOL_TIMEOUT: Final = ErrorRule(
    ProviderTimeoutError, "no connection of the pool was free in time", sent=False, fault=False
)
_NO_CONNECTION: Final = ErrorRule(ProviderConnectionError, "the connection could not be made", sent=False)
_NO_TLS: Final = ErrorRule(ProviderConnectionError, "the certificate was not accepted", sent=False)
_SOME_TLS: Final = ErrorRule(ProviderConnectionError, "the secure connection failed", is_fallback=True)
_NO_PROXY: Final = ErrorRule(ProviderConnectionError, "the proxy made no connection", sent=False, ignores_status=True)
_BROKEN: Final = ErrorRule(ProviderConnectionError, "the connection broke")
_SOME_BREAK: Final = ErrorRule(ProviderConnectionError, "the connection broke", is_fallback=True)
_UNREADABLE: Final = ErrorRule(ProviderResponseFormatError, "the answer could not be read")
_REDIRECTS: Final = ErrorRule(ProviderResponseFormatError, "the provider redirects without end")
_UNAVAILABLE: Final = ErrorRule(ProviderDependencyError, "the provider could not serve the call", is_fallback=True)
_REJECTED_DATA: Final = ErrorRule(ProviderBadRequestError, "the provider refused the data")
_NEVER_BUILT: Final = ErrorRule(ProviderInternalError, "the request could not be made", sent=False)

_HTTPX: Final = {
    "ConnectTimeout": _CONNECT_TIMEOUT,
    "ReadTimeout": _READ_TIMEOUT,
    "WriteTimeout": ErrorRule(ProviderTimeoutError, "the request could not be sent in time"),
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
