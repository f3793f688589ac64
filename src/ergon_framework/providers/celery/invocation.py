"""The invocation of a task: the data it was sent with, parsed within limits; no I/O.

The content of a message is untrusted. A rejected value is replaced by its default, and the rejection is kept, so that
a dead letter can be written in any case.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ergon_framework.providers.errors import ERROR_BY_REASON, ProviderBadRequestError, ProviderError, ReasonCode
from ergon_framework.providers.idempotency import effect_name
from ergon_framework.providers.models import DEFAULT_TENANT
from ergon_framework.transaction import Transaction

#: The message header that holds the values that are not arguments of the task.
HEADER: Final = "ergon"
#: The fields of that header. The first three may also be arguments of the task.
ARGUMENT_NAMES: Final = ("tenant_id", "campaign_id", "idempotency_key")
FIELD_NAMES: Final = (*ARGUMENT_NAMES, "correlation_id", "timeout_budget_seconds", "task_execution_id")
#: The header field of a task that was sent again: why the breaker is open, as a reason code and a message.
CAUSE_FIELD: Final = "cause"
#: The headers that carry a trace.
TRACE_HEADERS: Final = ("traceparent", "tracestate", "baggage")

#: Maximum lengths in characters of a name, a key and a trace header.
MAX_NAME_CHARS: Final = 200
MAX_KEY_CHARS: Final = 255
MAX_TRACE_CHARS: Final = 8_192

_NAME_PATTERN: Final = re.compile(rf"[^\x00-\x1f\x7f\ud800-\udfff]{{1,{MAX_NAME_CHARS}}}")
#: A key is sent to providers in a header, so only visible ASCII is allowed.
_KEY_PATTERN: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One task that was sent: its tenant, the operation it calls, its key, and its time budget.

    ``key`` is the key of the task's own operation: the explicit one, or one derived from the task's id, so that it is
    the same at every delivery. ``rejection`` is the error of an invalid message.
    """

    task_id: str
    task_name: str
    provider_name: str
    capability: str
    operation: str
    tenant_id: str
    campaign_id: str | None
    correlation_id: str
    explicit_key: str | None
    budget: float
    trace: Mapping[str, str]
    #: The id that the attempts of its calls refer to: the one that the sender passed, else the task's own.
    task_execution_id: str
    #: The maximum attempts of one call, from the provider's policy.
    max_attempts: int = 1
    rejection: ProviderBadRequestError | None = None
    #: The last failure of an earlier delivery, which later met an open breaker.
    cause: ProviderError | None = None

    @property
    def transaction(self) -> Transaction:
        """The transaction in which the body runs: the keys of all its calls derive from it."""
        return Transaction(
            id=self.explicit_key or self.task_id,
            source=self.task_name,
            tenant=self.tenant_id,
            correlation=self.correlation_id,
            trace=self.trace,
        )

    @property
    def key(self) -> str:
        return self.explicit_key or self.transaction.derive(effect_name(self.provider_name, self.operation))


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The declared call of a task."""

    task_name: str
    provider_name: str
    capability: str
    operation: str
    budget: float
    max_attempts: int = 1


def read_invocation(
    call_spec: CallSpec,
    *,
    task_id: Any,
    headers: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any] | None,
    root_id: Any = None,
) -> Invocation:
    """Return the invocation of a message with these headers and keyword arguments."""
    headers = headers or {}
    values, rejections = _parse_fields(headers.get(HEADER), kwargs if isinstance(kwargs, Mapping) else {})
    budget = call_spec.budget
    if "timeout_budget_seconds" in values:
        budget = values["timeout_budget_seconds"]
        if budget > call_spec.budget:
            rejections.append(f"timeout_budget_seconds must not exceed the task's {call_spec.budget:g} s")
            budget = call_spec.budget
    normalized_id = normalize_task_id(task_id)
    return Invocation(
        task_id=normalized_id,
        task_name=call_spec.task_name,
        provider_name=call_spec.provider_name,
        capability=call_spec.capability,
        operation=call_spec.operation,
        tenant_id=values.get("tenant_id") or DEFAULT_TENANT,
        campaign_id=values.get("campaign_id"),
        correlation_id=values.get("correlation_id") or (normalize_task_id(root_id) if root_id else normalized_id),
        explicit_key=values.get("idempotency_key"),
        budget=budget,
        trace=_parse_trace(headers),
        task_execution_id=values.get("task_execution_id") or normalized_id,
        max_attempts=call_spec.max_attempts,
        rejection=ProviderBadRequestError("; ".join(rejections), sent=False, code="invocation") if rejections else None,
        cause=_parse_cause(headers.get(HEADER)),
    )


def normalize_task_id(task_id: Any) -> str:
    """Return *task_id* as every store accepts it: unchanged, or its SHA-256 if it is too long or unprintable."""
    text = str(task_id)
    if _NAME_PATTERN.fullmatch(text):
        return text
    return "sha256-" + hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def build_header(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header for a sender's *values*, without None; raise ValueError for values a worker would reject."""
    fields, rejections = _parse_fields({name: value for name, value in values.items() if value is not None}, {})
    if rejections:
        raise ValueError("; ".join(rejections))
    return fields


def _parse_fields(header: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {}
    rejections: list[str] = []
    if header is not None and not isinstance(header, Mapping):
        rejections.append(f"the header {HEADER!r} must be a mapping, got {type(header).__name__}")
        header = None
    for name in FIELD_NAMES:
        value = None if header is None else header.get(name)
        if value is None and name in ARGUMENT_NAMES:
            value = kwargs.get(name)
        if value is None:
            continue
        rejection = _explain_rejection(name, value)
        if rejection is None:
            fields[name] = value
        else:
            rejections.append(f"{name} {rejection}")  # without the value, which is untrusted
    return fields, rejections


def _explain_rejection(name: str, value: Any) -> str | None:
    if name == "timeout_budget_seconds":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number and 0 < value < float("inf") else "must be a number of seconds above 0"
    if name == "idempotency_key":
        is_valid = isinstance(value, str) and _KEY_PATTERN.fullmatch(value)
        return None if is_valid else f"must be 1 to {MAX_KEY_CHARS} visible ASCII characters, without blanks"
    is_valid = isinstance(value, str) and _NAME_PATTERN.fullmatch(value)
    return None if is_valid else f"must be text of 1 to {MAX_NAME_CHARS} characters, without control characters"


def _parse_cause(header: Any) -> ProviderError | None:
    match header.get(CAUSE_FIELD) if isinstance(header, Mapping) else None:
        case [str(reason), str(message)] if reason in ReasonCode.__members__.values():
            return ERROR_BY_REASON[ReasonCode(reason)](message)
    return None


def _parse_trace(headers: Mapping[str, Any]) -> dict[str, str]:
    values = {name: headers.get(name) for name in TRACE_HEADERS}
    return {
        name: value for name, value in values.items() if isinstance(value, str) and 0 < len(value) <= MAX_TRACE_CHARS
    }
