"""The failure record that consumers, jobs, providers and facts share, and the history of attempts and deferrals.

A deferral is a redelivery after a delay that counts no attempt, because a service was unavailable.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from ergon_framework.errors import Category, error_message, to_storable
from ergon_framework.redaction import redact_text

#: Maximum length of a stored error message; whole documents do not belong into a record.
MAX_MESSAGE_CHARS = 500
#: Maximum number of characters of a message that are searched for secrets before it is cut.
MAX_SEARCHED_CHARS: Final = 16 * 1024
#: Maximum length of a stored traceback, in bytes of UTF-8.
MAX_TRACEBACK_BYTES: Final = 8 * 1024


#: The code of a history entry that is a correction of the payload (``ergon dlq edit`` writes it), not an attempt.
EDITED_CODE: Final = "ergon.edited"
#: Number of corrections that a history keeps, however many attempts follow.
_MAX_EDITS: Final = 3


class Attempt(BaseModel):
    """One past attempt, as messages and dead letters store it; times are seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    attempt: int
    category: Category
    code: str | None = None
    error: str = Field("", max_length=MAX_MESSAGE_CHARS)
    at: float = 0.0
    delay: float | None = None


class Deferral(BaseModel):
    """How often a transaction was deferred because a service was unavailable, as the message stores it.

    Times are seconds since the epoch. ``since`` is the first deferral, ``at`` the latest one, and ``until``
    the end of ``loop.max_deferral`` as the policy was then. ``exempt`` is the time that the transaction has
    waited for a circuit breaker since the first deferral: it does not count towards the limit. ``code`` and
    ``error`` are those of the latest deferral.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    count: int = Field(ge=1)
    since: float = Field(allow_inf_nan=False)
    at: float = Field(allow_inf_nan=False)
    until: float = Field(allow_inf_nan=False)
    exempt: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    code: str | None = None
    error: str = Field("", max_length=MAX_MESSAGE_CHARS)

    @classmethod
    def from_previous(
        cls, past: Deferral | None, *, now: float, limit: float, code: str | None, error: str
    ) -> Deferral | None:
        """Return the deferral after *past*; None once *limit* seconds since the first one have passed.

        A first deferral in the future, or more exempt time than has passed, comes from a different clock or from a
        producer that wants to avoid the limit: neither counts for more than the time until now.
        """
        count, since, exempt = (0, now, 0.0) if past is None else (past.count, min(past.since, now), past.exempt)
        exempt = min(exempt, now - since)
        if now - since - exempt >= limit:
            return None
        return cls(
            count=count + 1, since=since, at=now, until=since + exempt + limit, exempt=exempt, code=code, error=error
        )

    def add_exempt(self, seconds: float) -> Deferral:
        """Return a copy whose limit is *seconds* later: the transaction waits for a circuit breaker."""
        return self.model_copy(update={"exempt": self.exempt + seconds, "until": self.until + seconds})


class HandlerError(BaseModel):
    """The error of an exception handler that failed while it handled a failure."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    error_type: str
    error_message: str = Field("", max_length=MAX_MESSAGE_CHARS)
    category: Category
    code: str | None = None
    traceback: str | None = None


class Failure(BaseModel):
    """Why a piece of work failed: one shape for every part, so that one tool can read all records.

    The specification of providers defines thirteen of the fields; the other parts add the rest. ``attempts`` counts
    from 1, as in every table and on every wire. ``traceback`` shows where the error was raised: at most 20 frames and 8
    KiB, redacted, without the values of variables. ``final`` means that a lower layer had given up, so that nothing was
    retried. ``still_running`` means that a call that timed out had not exited when the record was made: it may still
    act. ``succeeded_steps`` names the steps of the lifecycle that succeeded before the failure. ``reason_code`` is why
    the work was given up, ``handler_error`` the error of the exception handler, if that failed too.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    # The thirteen fields of the specification of providers.
    tenant_id: str | None = None
    campaign_id: str | None = None
    task_name: str
    provider_name: str | None = None
    capability: str | None = None
    operation: str | None = None
    idempotency_key: str | None = None
    correlation_id: str | None = None
    reason_code: str
    error_type: str
    error_message: str = Field("", max_length=MAX_MESSAGE_CHARS)
    attempts: int = Field(ge=0)
    occurred_at: float

    # The framework's own fields.
    transaction_id: str
    source: str = ""
    category: Category
    step: str | None = None
    final: bool = False
    still_running: bool = False
    succeeded_steps: tuple[str, ...] = ()
    deliveries: int | None = None
    trace_id: str | None = None
    history: tuple[Attempt, ...] = ()
    traceback: str | None = None
    handler_error: HandlerError | None = None
    detail: dict[str, Any] = Field(default_factory=dict)


def get_error_type(error: BaseException) -> str:
    """Return the error's own ``error_type`` if it has one, else the class name of its cause, else of the error."""
    declared: str | None = getattr(error, "error_type", None)
    return declared or type(error.__cause__ or error).__name__


def describe_error(error: BaseException, *, values: bool = False) -> str:
    """Return the error's message without secrets, cut to the stored length, in characters that every store accepts.

    Without *values*, a validation error of pydantic is reduced to locations and error types.
    """
    # Redacted before it is cut: half a secret no longer has a recognisable form.
    return cut(
        redact_text(error_message(error, values=values, raw=True)[:MAX_SEARCHED_CHARS]) or type(error).__qualname__
    )


def cut(message: str) -> str:
    """Return *message* in characters that every store accepts, cut to MAX_MESSAGE_CHARS."""
    message = to_storable(message[: MAX_MESSAGE_CHARS + 1])
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"


def trim_history(history: tuple[Attempt, ...], limit: int) -> tuple[Attempt, ...]:
    """Return the last *limit* entries of *history*; attempts do not displace the last corrections."""
    if len(history) <= limit:
        return history
    edits = [number for number, past in enumerate(history) if past.code == EDITED_CODE][-_MAX_EDITS:]
    others = [number for number in range(len(history)) if number not in edits][-(limit - len(edits)) :]
    return tuple(history[number] for number in sorted((*edits, *others)))
