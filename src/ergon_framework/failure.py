"""The one failure record: what consumers, jobs, providers and facts say about a failure."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from ergon_framework.errors import Category, text, to_storable
from ergon_framework.redaction import redact_text

#: Longest error message that is kept; whole documents do not belong into a record.
MESSAGE = 500
#: The most characters of a message that are searched for secrets before it is cut.
SEARCHED: Final = 16 * 1024
#: Longest traceback that is kept, in bytes of UTF-8.
TRACEBACK: Final = 8 * 1024


#: The code of what is no attempt but a correction of the payload; it stands in a history beside them.
EDITED: Final = "ergon.edited"
#: How many corrections are kept however many attempts follow.
_EDITS: Final = 3


class Attempt(BaseModel):
    """One past attempt, as it travels with the transaction; times are seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    attempt: int
    category: Category
    code: str | None = None
    error: str = Field("", max_length=MESSAGE)
    at: float = 0.0
    delay: float | None = None


class Deferral(BaseModel):
    """How often a transaction was deferred because a service was unavailable, as it travels with the transaction.

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
    error: str = Field("", max_length=MESSAGE)

    @classmethod
    def following(
        cls, past: Deferral | None, *, now: float, limit: float, code: str | None, error: str
    ) -> Deferral | None:
        """Return the deferral after *past*; None once *limit* seconds since the first one have passed.

        A first deferral in the future, or more exempt time than has passed, comes from another clock or from a
        producer who wants no limit: neither counts for more than the time until now.
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
    """What the exception handler raised when it was called for a failure and failed itself."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    error_type: str
    error_message: str = Field("", max_length=MESSAGE)
    category: Category
    code: str | None = None
    traceback: str | None = None


class Failure(BaseModel):
    """Why a piece of work ended badly: one shape for every part, so that one tool can read them all.

    Thirteen of the fields are the provider document's; the rest is what the other parts add.
    ``attempts`` counts from 1, as in every table and on every wire. ``traceback`` says where the error was
    raised: at most 20 frames and 8 KiB, redacted, without the values of variables.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    # the provider document's thirteen
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
    error_message: str = Field("", max_length=MESSAGE)
    attempts: int = Field(ge=0)
    occurred_at: float

    # ours
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


def error_type_of(error: BaseException) -> str:
    """Return the type of an error: the one that it names itself, else the class of its cause, else its own class."""
    named: str | None = getattr(error, "error_type", None)
    return named or type(error.__cause__ or error).__name__


def describe(error: BaseException, *, values: bool = False) -> str:
    """Return the error's message without secrets, short enough to keep and in characters that every store accepts.

    Without *values* a validation error of pydantic is reduced to locations and error types.
    """
    # Redacted before it is cut: half a secret has not its form any more.
    return cut(redact_text(text(error, values=values, raw=True)[:SEARCHED]) or type(error).__qualname__)


def cut(message: str) -> str:
    """Return *message* in characters that every store accepts, cut to the length of a message."""
    message = to_storable(message[: MESSAGE + 1])
    return message if len(message) <= MESSAGE else message[: MESSAGE - 1] + "…"


def latest(history: tuple[Attempt, ...], most: int) -> tuple[Attempt, ...]:
    """The last *most* of *history*; attempts do not crowd out what somebody has corrected."""
    if len(history) <= most:
        return history
    edits = [number for number, past in enumerate(history) if past.code == EDITED][-_EDITS:]
    others = [number for number in range(len(history)) if number not in edits][-(most - len(edits)) :]
    return tuple(history[number] for number in sorted((*edits, *others)))
