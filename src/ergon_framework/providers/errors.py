"""The canonical errors of provider calls: one class per reason, each with its verdict."""

from __future__ import annotations

import pickle  # nosec - only loads what stands inside a pickle that somebody is loading already
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ergon_framework.errors import Category, ErgonError
from ergon_framework.failure import MESSAGE, SEARCHED
from ergon_framework.telemetry.redaction import HIDDEN, masked

if TYPE_CHECKING:
    from ergon_framework.providers.retry import Tried


class ReasonCode(StrEnum):
    """Why a call failed, in the words of the tables and of the dead letter."""

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


class ProviderError(ErgonError):
    """A call to a provider failed; the class says why, and its attributes what follows.

    ``retryable`` says whether another attempt can help. ``fault`` says whether the provider is to
    blame, which the breaker counts. ``sent`` is False only where it is certain that the provider
    never got the request, so that its quota is given back; True also stands for "nobody knows".
    ``result`` and ``attempts`` are filled in by whoever made the call. ``final`` is not the
    class's word: only he who stops trying can say that nobody should try again.

    The message is cleaned of credentials, queries of addresses and values of secrets. What it is
    told in other words cannot be recognised, so no body and no header belongs into it.
    """

    reason_code: ClassVar[ReasonCode] = ReasonCode.INTERNAL_ERROR
    retryable: ClassVar[bool] = False
    code = ReasonCode.INTERNAL_ERROR
    hides_causes = True
    fault: bool = False
    sent: bool = True
    http_status: int | None = None
    result: Any = None
    attempts: tuple[Tried, ...] = ()

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
        later: bool | None = None,
        temporary: bool | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(
            clean(message),
            category=category,
            retry_after=retry_after,
            final=final,
            later=later,
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
        # The fields follow as state, not as arguments: the last of the attempts holds this very error.
        return _blank, (type(self), self.args), {"fields": self.__dict__.copy(), "cause": _packed(self.__cause__)}

    def __setstate__(self, state: Any, /) -> None:
        self.__dict__.update(state["fields"])
        self.__cause__ = _unpacked(state["cause"])


class ProviderTimeoutError(ProviderError):
    """The answer did not come in time; whether the request was carried out is often unknown.

    Its category is SYSTEM: TIMEOUT is the engine's word for a scope of its own that expired.
    """

    reason_code = code = ReasonCode.TIMEOUT
    retryable = True
    fault = True


class ProviderConnectionError(ProviderError):
    """There is no line to the provider, or it broke: DNS, TLS, refused, reset."""

    reason_code = code = ReasonCode.CONNECTION_ERROR
    retryable = True
    fault = True


class ProviderRateLimitError(ProviderError):
    """The provider is well and asks for a pause; ``retry_after`` is its length where it was told."""

    reason_code = code = ReasonCode.RATE_LIMITED
    retryable = True


class ProviderAuthError(ProviderError):
    """The provider does not accept who we are; trying again cannot help, changing the setup can."""

    reason_code = code = ReasonCode.AUTH_FAILED


class ProviderQuotaExceededError(ProviderError):
    """Our own quota for the window is spent; nothing was sent."""

    reason_code = code = ReasonCode.QUOTA_EXHAUSTED
    sent = False


class ProviderBadRequestError(ProviderError):
    """The provider understood and refused: the work itself is impossible as it was asked for."""

    category = Category.BUSINESS
    reason_code = code = ReasonCode.BAD_REQUEST


class ProviderResponseFormatError(ProviderError):
    """The answer is none that was agreed on.

    It is the provider's fault: a page of a proxy in the place of JSON is how outages often look.
    """

    reason_code = code = ReasonCode.RESPONSE_INVALID
    fault = True


class ProviderDependencyError(ProviderError):
    """The provider says that it cannot serve now."""

    reason_code = code = ReasonCode.DEPENDENCY_UNAVAILABLE
    retryable = True
    fault = True


class ProviderInternalError(ProviderError):
    """Something of ours broke around the call, or something that nobody has mapped."""

    reason_code = code = ReasonCode.INTERNAL_ERROR


class ProviderCircuitOpenError(ProviderError):
    """The breaker lets nothing through until ``open_until``, in seconds since the epoch; nothing was sent."""

    reason_code = code = ReasonCode.CIRCUIT_OPEN
    sent = False
    later = True
    open_until: float | None = None

    def __init__(self, message: str = "", *, open_until: float | None = None, **verdict: Any) -> None:
        super().__init__(message, **verdict)
        if open_until is not None:
            self.open_until = open_until


#: Every class with a reason of its own, by that reason.
BY_REASON: Final[dict[ReasonCode, type[ProviderError]]] = {
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


# -- what a message may say -----------------------------------------------------------------------

# A password is often written unescaped, with any character in it: from the colon on, everything up to
# an @ is taken for one, even if this costs a path.
_ADDRESS: Final = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?:[^\s@?#]*:[^\s@]*@|[^\s/?#@]*@)*([^\s?#]*)(?:[?#]\S*)?")
_QUERY: Final = re.compile(r"\?[^\s?=]+=\S*")


def clean(message: str) -> str:
    """The first 500 characters of *message*, without the credentials and queries of addresses and without secrets.

    A secret is recognised by the name that it is assigned to.

    >>> clean("GET https://me:pw@api.example/v1/x?key=1 failed")
    'GET https://api.example/v1/x failed'
    """
    return masked(_QUERY.sub(f"?{HIDDEN}", _ADDRESS.sub(r"\1\2", masked(message[:SEARCHED])[:MESSAGE])))


# -- to another process ---------------------------------------------------------------------------

#: Where the exceptions come from that are known to hold nothing but what their arguments say.
_PLAIN: Final = frozenset({"builtins", "socket", "ssl", "asyncio.exceptions", "http.client"})


def _blank(kind: type[ProviderError], args: tuple[Any, ...]) -> ProviderError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def _packed(cause: BaseException | None) -> bytes | str | None:
    """*cause* as bytes where it may travel whole, else only the name of its type.

    The exceptions of client libraries hold the request with its headers, and their messages hold
    addresses, statements and bodies: none of that may reach a queue, a table or a result store.
    """
    if cause is None:
        return None
    try:
        return pickle.dumps(cause) if _harmless(cause) else type_name(cause)
    except Exception:  # noqa: BLE001 - any refusal means the same: this cause stays here
        return type_name(cause)


def _unpacked(packed: bytes | str | None) -> BaseException | None:
    if packed is None or isinstance(packed, str):
        return None if packed is None else ErgonError(packed)
    cause = pickle.loads(packed)  # noqa: S301  # nosec - see above
    return cause if isinstance(cause, BaseException) else None


def _harmless(cause: BaseException) -> bool:
    if isinstance(cause, ProviderError):
        return True
    if type(cause) is ErgonError:  # a name that has travelled before
        return cause.__cause__ is None and not vars(cause) and _speakable(cause.args)
    if type(cause).__module__ not in _PLAIN:
        return False
    # Of these classes the answer is the class, the arguments and, if there are any, the attributes.
    made = cause.__reduce__()
    return len(made) == 2 and _speakable(made[1])  # noqa: PLR2004 - see above


def _speakable(args: Any) -> bool:
    return all(
        arg is None or isinstance(arg, bool | int | float) or (isinstance(arg, str) and clean(arg) == arg)
        for arg in args
    )


def type_name(error: BaseException) -> str:
    """The full name of the error's type: ``httpx.ReadTimeout``."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
