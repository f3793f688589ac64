"""What each exception of each client library means, as tables; none of the libraries is imported."""

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
class Rule:
    """What one class of exceptions means.

    A *vague* rule holds only if nothing inside the exception has a rule. *over_status* is for those
    whose status is not the provider's.
    """

    kind: type[ProviderError]
    says: str
    sent: bool = True
    fault: bool | None = None
    vague: bool = False
    over_status: bool = False


# -- statuses -------------------------------------------------------------------------------------

#: Statuses that do not mean what their hundred means.
STATUSES: Final[dict[int, type[ProviderError]]] = {
    401: ProviderAuthError,
    403: ProviderAuthError,
    408: ProviderTimeoutError,
    425: ProviderRateLimitError,
    429: ProviderRateLimitError,
}
#: The others, by their hundred.
HUNDREDS: Final[dict[int, type[ProviderError]]] = {
    3: ProviderResponseFormatError,
    4: ProviderBadRequestError,
    5: ProviderDependencyError,
}


# -- classes --------------------------------------------------------------------------------------

_CONNECT_TIMEOUT: Final = Rule(ProviderTimeoutError, "no connection in time", sent=False)
_READ_TIMEOUT: Final = Rule(ProviderTimeoutError, "no answer in time")
_SOME_TIMEOUT: Final = Rule(ProviderTimeoutError, "no answer in time", vague=True)
# Our own pool was empty. The provider is slow at worst, and the calls that it is slow at say so themselves.
_POOL_TIMEOUT: Final = Rule(ProviderTimeoutError, "no connection of the pool was free in time", sent=False, fault=False)
_NO_CONNECTION: Final = Rule(ProviderConnectionError, "the connection could not be made", sent=False)
_NO_TLS: Final = Rule(ProviderConnectionError, "the certificate was not accepted", sent=False)
_SOME_TLS: Final = Rule(ProviderConnectionError, "the secure connection failed", vague=True)
_NO_PROXY: Final = Rule(ProviderConnectionError, "the proxy made no connection", sent=False, over_status=True)
_BROKEN: Final = Rule(ProviderConnectionError, "the connection broke")
_SOME_BREAK: Final = Rule(ProviderConnectionError, "the connection broke", vague=True)
_UNREADABLE: Final = Rule(ProviderResponseFormatError, "the answer could not be read")
_REDIRECTS: Final = Rule(ProviderResponseFormatError, "the provider redirects without end")
_UNAVAILABLE: Final = Rule(ProviderDependencyError, "the provider could not serve the call", vague=True)
_REFUSED_DATA: Final = Rule(ProviderBadRequestError, "the provider refused the data")
_NEVER_BUILT: Final = Rule(ProviderInternalError, "the request could not be made", sent=False)

_HTTPX: Final = {
    "ConnectTimeout": _CONNECT_TIMEOUT,
    "ReadTimeout": _READ_TIMEOUT,
    "WriteTimeout": Rule(ProviderTimeoutError, "the request could not be sent in time"),
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
    "NewConnectionError": _NO_CONNECTION,  # a ConnectTimeoutError by inheritance only
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
    "IntegrityError": _REFUSED_DATA,
    "DataError": _REFUSED_DATA,
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
# A worker that runs out of its own time says nothing of the provider.
_WORKER_TIME: Final = Rule(ProviderTimeoutError, "a time limit of the worker was reached", fault=False)
_BILLIARD: Final = {"SoftTimeLimitExceeded": _WORKER_TIME, "TimeLimitExceeded": _WORKER_TIME}
#: Top package and name of a class -> what it means.
RULES: Final[dict[tuple[str, str], Rule]] = {
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

#: Classes that mean several things -> how the message begins that means one of them.
WORDS: Final[dict[tuple[str, str], dict[str, Rule]]] = {
    ("urllib3", "ResponseError"): {"too many redirects": _REDIRECTS},
    # What asyncio says when none of a host's addresses could be reached.
    ("builtins", "OSError"): {"Multiple exceptions: ": _NO_CONNECTION},
}

#: Numbers of plain OSErrors that tell of the network; the rest tell of files.
ERRNOS: Final[dict[int, Rule]] = {
    errno.ETIMEDOUT: _READ_TIMEOUT,
    **dict.fromkeys((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ENETRESET), _BROKEN),
}
