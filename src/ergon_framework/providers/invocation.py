"""An invocation: what a task was sent with, read within limits; pure.

Whatever arrives in a message may be anything. What is refused is replaced by what would have held
without it, and the refusal is kept beside: a dead letter can be written in any case.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ergon_framework.providers.errors import BY_REASON, ProviderBadRequestError, ProviderError, ReasonCode
from ergon_framework.providers.execution import NO_TENANT
from ergon_framework.providers.idempotency import effect
from ergon_framework.transaction import Transaction

#: The header of a message that holds what is not an argument of the task.
HEADER: Final = "ergon"
#: The names in that header. Those of whom it is for may be arguments of the task as well.
WHOSE: Final = ("tenant_id", "campaign_id", "idempotency_key")
NAMES: Final = (*WHOSE, "correlation_id", "timeout_budget_seconds", "task_execution_id")
#: In that header of a task that was sent again: why the breaker is open, as a reason code and a message.
CAUSE: Final = "cause"
#: Headers that bring a trace.
TRACE: Final = ("traceparent", "tracestate", "baggage")

#: The longest name of anybody or anything, and the longest key.
LONGEST: Final = 200
LONGEST_KEY: Final = 255
LONGEST_TRACE: Final = 8_192

_NAME: Final = re.compile(rf"[^\x00-\x1f\x7f\ud800-\udfff]{{1,{LONGEST}}}")
#: A key is sent to providers in a header: visible ASCII and nothing else.
_KEY: Final = re.compile(rf"[\x21-\x7e]{{1,{LONGEST_KEY}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One task that was sent: whose it is, what it calls, under which key, and how long it may take.

    ``key`` is that of its own operation: the one that was given, or one that follows from the task's
    id, so that it is the same at every delivery. ``refused`` is what was wrong with the message.
    """

    task_id: str
    task_name: str
    provider_name: str
    capability: str
    operation: str
    tenant_id: str
    campaign_id: str | None
    correlation_id: str
    given_key: str | None
    budget: float
    trace: Mapping[str, str]
    #: What the attempts of its calls refer to: the id that the sender gave, else the task's own.
    task_execution_id: str
    #: Of one call, as the policy of the provider says.
    max_attempts: int = 1
    refused: ProviderBadRequestError | None = None
    #: The last failure of an earlier delivery, which met an open breaker afterwards.
    cause: ProviderError | None = None

    @property
    def transaction(self) -> Transaction:
        """What a body runs in: all keys of its calls follow from this."""
        return Transaction(
            self.given_key or self.task_id,
            source=self.task_name,
            tenant=self.tenant_id,
            correlation=self.correlation_id,
            trace=self.trace,
        )

    @property
    def key(self) -> str:
        return self.given_key or self.transaction.derive(effect(self.provider_name, self.operation))


@dataclass(frozen=True, slots=True)
class Called:
    """What a task calls, as it was declared."""

    task_name: str
    provider_name: str
    capability: str
    operation: str
    budget: float
    max_attempts: int = 1


def read(
    called: Called,
    *,
    task_id: Any,
    headers: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any] | None,
    root_id: Any = None,
) -> Invocation:
    """The invocation of a message with these headers and keyword arguments."""
    headers = headers or {}
    given, refused = _given(headers.get(HEADER), kwargs if isinstance(kwargs, Mapping) else {})
    budget = called.budget
    if "timeout_budget_seconds" in given:
        budget = given["timeout_budget_seconds"]
        if budget > called.budget:
            refused.append(f"timeout_budget_seconds may shorten the task's {called.budget:g} s, and not lengthen them")
            budget = called.budget
    known = identified(task_id)
    return Invocation(
        task_id=known,
        task_name=called.task_name,
        provider_name=called.provider_name,
        capability=called.capability,
        operation=called.operation,
        tenant_id=given.get("tenant_id") or NO_TENANT,
        campaign_id=given.get("campaign_id"),
        correlation_id=given.get("correlation_id") or (identified(root_id) if root_id else known),
        given_key=given.get("idempotency_key"),
        budget=budget,
        trace=_trace(headers),
        task_execution_id=given.get("task_execution_id") or known,
        max_attempts=called.max_attempts,
        refused=ProviderBadRequestError("; ".join(refused), sent=False, code="invocation") if refused else None,
        cause=_cause(headers.get(HEADER)),
    )


def identified(task_id: Any) -> str:
    """*task_id* as every store accepts it: itself, or its SHA-256 if it is too long or unprintable."""
    known = str(task_id)
    if _NAME.fullmatch(known):
        return known
    return "sha256-" + hashlib.sha256(known.encode(errors="backslashreplace")).hexdigest()


def header(given: Mapping[str, Any]) -> dict[str, Any]:
    """The header for what a sender gives, without what is None; ValueError for what a worker would refuse."""
    found, refused = _given({name: value for name, value in given.items() if value is not None}, {})
    if refused:
        raise ValueError("; ".join(refused))
    return found


def _given(header: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    refused: list[str] = []
    if header is not None and not isinstance(header, Mapping):
        refused.append(f"the header {HEADER!r} holds names and values, and not {type(header).__name__}")
        header = None
    for name in NAMES:
        value = None if header is None else header.get(name)
        if value is None and name in WHOSE:
            value = kwargs.get(name)
        if value is None:
            continue
        why = _refusal(name, value)
        if why is None:
            found[name] = value
        else:
            refused.append(f"{name} {why}")  # without the value: it may be anything
    return found, refused


def _refusal(name: str, value: Any) -> str | None:
    if name == "timeout_budget_seconds":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number and 0 < value < float("inf") else "is a number of seconds above 0"
    if name == "idempotency_key":
        sound = isinstance(value, str) and _KEY.fullmatch(value)
        return None if sound else f"is 1 to {LONGEST_KEY} visible ASCII characters, without blanks"
    sound = isinstance(value, str) and _NAME.fullmatch(value)
    return None if sound else f"is text of 1 to {LONGEST} characters, without control characters"


def _cause(header: Any) -> ProviderError | None:
    match header.get(CAUSE) if isinstance(header, Mapping) else None:
        case [str(reason), str(message)] if reason in ReasonCode.__members__.values():
            return BY_REASON[ReasonCode(reason)](message)
    return None


def _trace(headers: Mapping[str, Any]) -> dict[str, str]:
    found = {name: headers.get(name) for name in TRACE}
    return {name: value for name, value in found.items() if isinstance(value, str) and 0 < len(value) <= LONGEST_TRACE}
