"""The canonical errors of provider calls: one class per reason code, each with its verdict.

A verdict is the classification of an error: its category, whether and when a retry can help, and its code.
"""

from __future__ import annotations

import pickle  # nosec - only loads data inside a pickle that the caller is already loading
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final

from ergon_framework.errors import Category, ErgonError
from ergon_framework.failure import MAX_MESSAGE_CHARS, MAX_SEARCHED_CHARS
from ergon_framework.telemetry.redaction import HIDDEN, mask_credentials


class ReasonCode(StrEnum):
    """The reason why a call failed, as tables and dead letters store it."""

    TIMEOUT = "timeout"
    CONNECTION_ERROR = "connection_error"
    RATE_LIMITED = "rate_limited"
    AUTH_FAILED = "auth_failed"
    QUOTA_EXHAUSTED = "quota_exhausted"
    BAD_REQUEST = "bad_request"
    RESPONSE_INVALID = "response_invalid"
    DEPENDENCY_UNAVAILABLE = "dependency_unavailable"
    CIRCUIT_OPEN = "circuit_open"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """One attempt: its start, its duration, its error if it failed, and the delay after it."""

    attempt_number: int
    started_at: float
    duration: float
    error: ProviderError | None = None
    delay: float | None = None


class ProviderError(ErgonError):
    """A failed provider call; the class gives the reason, and the attributes the consequences.

    ``retryable`` says whether another attempt can help. ``fault`` says whether the provider is to
    blame, which the breaker counts. ``sent`` is False only if the provider certainly never got the
    request, so that its quota is refunded; True includes "unknown".
    ``result`` and ``attempts`` are set by the code that made the call. ``final`` does not depend on the
    class: only the code that stops retrying can decide that no caller should retry.

    Credentials, query strings of addresses and values of secrets are removed from the message. Secrets in any other
    form are not recognised, so a message must contain no body and no header.
    """

    reason_code: ClassVar[ReasonCode] = ReasonCode.INTERNAL_ERROR
    retryable: ClassVar[bool] = False
    code = ReasonCode.INTERNAL_ERROR
    hides_causes = True
    fault: bool = False
    sent: bool = True
    http_status: int | None = None
    result: Any = None
    attempts: tuple[AttemptInfo, ...] = ()

    def __init__(
        self,
        message: str = "",
        *,
        http_status: int | None = None,
        retry_after: float | None = None,
        sent: bool | None = None,
        fault: bool | None = None,
        category: Category | None = None,
        final: bool | None = None,
        not_attempted: bool | None = None,
        temporary: bool | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(
            sanitize_message(message),
            category=category,
            retry_after=retry_after,
            final=final,
            not_attempted=not_attempted,
            temporary=temporary,
            code=code,
        )
        if http_status is not None:
            self.http_status = int(http_status)
        if sent is not None:
            self.sent = sent
        if fault is not None:
            self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        # The fields follow as state, not as arguments: the last of the attempts refers to this error.
        return (
            _create_blank,
            (type(self), self.args),
            {"fields": self.__dict__.copy(), "cause": _pack_cause(self.__cause__)},
        )

    def __setstate__(self, state: Any, /) -> None:
        self.__dict__.update(state["fields"])
        self.__cause__ = _unpack_cause(state["cause"])


class ProviderTimeoutError(ProviderError):
    """The provider did not answer in time; whether it carried out the request is often unknown.

    The category is SYSTEM: the engine uses TIMEOUT for its own expired scopes.
    """

    reason_code = code = ReasonCode.TIMEOUT
    retryable = True
    fault = True


class ProviderConnectionError(ProviderError):
    """The connection to the provider failed: DNS, TLS, refused or reset."""

    reason_code = code = ReasonCode.CONNECTION_ERROR
    retryable = True
    fault = True


class ProviderRateLimitError(ProviderError):
    """The provider is healthy and requests a pause; ``retry_after`` is its length if the provider sent one."""

    reason_code = code = ReasonCode.RATE_LIMITED
    retryable = True


class ProviderAuthError(ProviderError):
    """The provider rejects the credentials; a retry cannot help, a changed configuration can."""

    reason_code = code = ReasonCode.AUTH_FAILED


class ProviderQuotaExceededError(ProviderError):
    """The framework's own quota for the window is exhausted; nothing was sent."""

    reason_code = code = ReasonCode.QUOTA_EXHAUSTED
    sent = False


class ProviderBadRequestError(ProviderError):
    """The provider understood the request and rejected it: it can never succeed in this form."""

    category = Category.BUSINESS
    reason_code = code = ReasonCode.BAD_REQUEST


class ProviderResponseFormatError(ProviderError):
    """The response does not have the agreed format.

    It counts as the provider's fault: outages often look like a proxy's HTML page instead of JSON.
    """

    reason_code = code = ReasonCode.RESPONSE_INVALID
    fault = True


class ProviderDependencyError(ProviderError):
    """The provider reports that it cannot serve requests now."""

    reason_code = code = ReasonCode.DEPENDENCY_UNAVAILABLE
    retryable = True
    fault = True


class ProviderInternalError(ProviderError):
    """A failure on this side of the call, or an exception without a mapping."""

    reason_code = code = ReasonCode.INTERNAL_ERROR


class ProviderCircuitOpenError(ProviderError):
    """The breaker admits no calls until ``open_until``, in seconds since the epoch; nothing was sent."""

    reason_code = code = ReasonCode.CIRCUIT_OPEN
    sent = False
    not_attempted = True
    open_until: float | None = None

    def __init__(self, message: str = "", *, open_until: float | None = None, **verdict: Any) -> None:
        super().__init__(message, **verdict)
        if open_until is not None:
            self.open_until = open_until


#: The error classes by their reason code.
ERROR_BY_REASON: Final[dict[ReasonCode, type[ProviderError]]] = {
    kind.reason_code: kind
    for kind in (
        ProviderTimeoutError,
        ProviderConnectionError,
        ProviderRateLimitError,
        ProviderAuthError,
        ProviderQuotaExceededError,
        ProviderBadRequestError,
        ProviderResponseFormatError,
        ProviderDependencyError,
        ProviderCircuitOpenError,
        ProviderInternalError,
    )
}


# -- redaction of messages ------------------------------------------------------------------------

# A password is often written unescaped, with any character in it: everything from the colon up to an @
# counts as a password, even if a path is lost.
_ADDRESS_PATTERN: Final = re.compile(
    r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?:[^\s@?#]*:[^\s@]*@|[^\s/?#@]*@)*([^\s?#]*)(?:[?#]\S*)?"
)
_QUERY_PATTERN: Final = re.compile(r"\?[^\s?=]+=\S*")


def sanitize_message(message: str) -> str:
    """Return the first 500 characters of *message* without credentials, query strings and secrets.

    A secret is recognised by the name that it is assigned to.

    >>> sanitize_message("GET https://me:pw@api.example/v1/x?key=1 failed")
    'GET https://api.example/v1/x failed'
    """
    return mask_credentials(
        _QUERY_PATTERN.sub(
            f"?{HIDDEN}",
            _ADDRESS_PATTERN.sub(r"\1\2", mask_credentials(message[:MAX_SEARCHED_CHARS])[:MAX_MESSAGE_CHARS]),
        )
    )


# -- pickling -------------------------------------------------------------------------------------

#: Modules whose exceptions hold only their arguments.
_PLAIN_MODULES: Final = frozenset({"builtins", "socket", "ssl", "asyncio.exceptions", "http.client"})


def _create_blank(kind: type[ProviderError], args: tuple[Any, ...]) -> ProviderError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def _pack_cause(cause: BaseException | None) -> bytes | str | None:
    """Return *cause* pickled if it is safe, else only the name of its type.

    The exceptions of client libraries hold the request with its headers, and their messages hold
    addresses, statements and bodies: none of these may reach a queue, a table or a result backend.
    """
    if cause is None:
        return None
    try:
        return pickle.dumps(cause) if _is_harmless(cause) else get_type_name(cause)
    except Exception:  # noqa: BLE001 - an exception that cannot be pickled is replaced by its type name
        return get_type_name(cause)


def _unpack_cause(packed: bytes | str | None) -> BaseException | None:
    if packed is None or isinstance(packed, str):
        return None if packed is None else ErgonError(packed)
    cause = pickle.loads(packed)  # noqa: S301  # nosec - part of a pickle that the caller is already loading
    return cause if isinstance(cause, BaseException) else None


def _is_harmless(cause: BaseException) -> bool:
    if isinstance(cause, ProviderError):
        return True
    if type(cause) is ErgonError:  # a type name that was unpickled before
        return cause.__cause__ is None and not vars(cause) and _has_safe_arguments(cause.args)
    if type(cause).__module__ not in _PLAIN_MODULES:
        return False
    # For these classes the pickle consists of the class, the arguments and, if there are any, the attributes.
    parts = cause.__reduce__()
    return len(parts) == 2 and _has_safe_arguments(parts[1])  # noqa: PLR2004 - without attributes


def _has_safe_arguments(args: Any) -> bool:
    return all(
        arg is None or isinstance(arg, bool | int | float) or (isinstance(arg, str) and sanitize_message(arg) == arg)
        for arg in args
    )


def get_type_name(error: BaseException) -> str:
    """Return the full name of the error's type: ``httpx.ReadTimeout``."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
