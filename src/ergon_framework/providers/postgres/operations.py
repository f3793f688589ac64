"""The database operations before and after an attempt, and the parsing of their answers; for both variants.

Before an attempt the database admits it: the circuit breaker is not open, each quota window has a call left, which is
reserved, and the idempotency key has no result yet. Afterwards the outcome is stored. A quota window is a minute, hour,
day or month. An operation is a generator that yields queries and receives their rows; a thread or an event loop runs
it.

Results that are stored for idempotency keys are serialized here.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from ergon_framework.database.operation import Operation, PreparedTextQuery, Query
from ergon_framework.providers import circuit_breaker, idempotency
from ergon_framework.providers.circuit_breaker import BreakerSnapshot, BreakerState, CallRefused, Permit, Probe
from ergon_framework.providers.errors import ProviderInternalError, ProviderQuotaExceededError
from ergon_framework.providers.idempotency import StoredResult
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.postgres import sql
from ergon_framework.providers.postgres.breaker_cache import BreakerCache, parse_snapshot, shift_clock
from ergon_framework.providers.postgres.keys import MAX_KEY_BYTES, check_name, check_tenant, scope_key
from ergon_framework.providers.postgres.quota_blocks import (
    BlockPolicy,
    LeasedBlock,
    QuotaBlockCache,
    UnusedQuota,
    WindowLimits,
)
from ergon_framework.providers.quota import QuotaState, WindowKind, window_at
from ergon_framework.providers.state import (
    AdmissionRequest,
    AdmissionResult,
    AdmittedAttempt,
    AttemptResult,
    KeyInFlight,
    ReplayedResult,
)
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Maximum number of bytes of a stored result.
MAX_RESULT_BYTES: Final = 1024 * 1024

#: Created once: json.dumps creates an encoder per call unless all options are the defaults.
_encode: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def serialize_result(value: dict[str, Any]) -> str | None:
    """Return *value* as it is stored; None if it cannot be: it is not plain JSON, or larger than 1 MiB.

    The call counts as made in any case. Its key is then stored as done without a result, so that the call is
    not made again; a later call with this key gets an error that says so.
    """
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError):
        logs.log_event(logging.WARNING, "provider result not stored", {"reason": "not_json"}, to=_log)
        return None
    # The encoder writes ASCII, so that each character is one byte.
    if len(text) > MAX_RESULT_BYTES:
        logs.log_event(
            logging.WARNING, "provider result not stored", {"reason": "too_large", "size": len(text)}, to=_log
        )
        return None
    return text


def result_not_stored_error() -> ProviderInternalError:
    """Return the error of a key whose call was made and whose result could not be stored."""
    return ProviderInternalError(
        "the call of this idempotency key was made, and its result could not be stored: "
        "it was not plain JSON, or larger than 1 MiB",
        sent=False,
        final=True,
        code="result_not_kept",
    )


# -- admission rules --------------------------------------------------------------------------------

WINDOW_KINDS: Final = tuple(WindowKind)


@dataclass(slots=True)
class PostgresAdmitted(AdmittedAttempt):
    """An attempt that the PostgreSQL store admitted, with the reservations to end after it."""

    #: The reservation of this call alone; None if it was taken from a block, or if there is no quota.
    reservation: int | None = None
    #: The cache that the call was taken from, and the reservation of its block; an unsent call is refunded there.
    block_cache: QuotaBlockCache | None = None
    block: int | None = None


def quota_limits(quota: QuotaPolicy) -> WindowLimits | None:
    """Return the limits of all windows; None if none is limited."""
    return (quota.minute, quota.hour, quota.day, quota.month) if quota.limits else None


def is_closed(state: BreakerSnapshot) -> bool:
    """Return whether all calls are admitted, and only a fault can change that."""
    return state.state is BreakerState.CLOSED and state.override is None


def blocked_by(state: BreakerSnapshot, now: float) -> CallRefused | None:
    """Return the refusal that follows from *state*; None if a call may be admitted."""
    until = circuit_breaker.blocked_until(state)
    return None if until is None or until <= now else CallRefused(state, until)


# -- before an attempt ------------------------------------------------------------------------------


def admit_operation(
    request: AdmissionRequest, *, limits: WindowLimits | None, process_name: str, breaker_cache: BreakerCache
) -> Operation[AdmissionResult]:
    """Claim the key, reserve quota and get the breaker's permit in one round trip."""
    scope, key = request.scope, request.idempotency_key
    state = breaker_cache.get(scope)
    values = (
        scope_key(scope),
        scope.provider_name,
        scope.capability,
        None if limits is None else _format_array(limits),
        _format_policy(request.policy),
        process_name,
        repr(request.lease),
        _format_flag(state is not None and not is_closed(state)),
    )
    if key is None:
        query = PreparedTextQuery(sql.ADMIT_PLAIN, values)
    else:
        _check_key(request, key)
        claim = request.tenant_id, key, request.fingerprint, request.owner
        query = PreparedTextQuery(
            sql.ADMIT,
            (*values, *claim, _format_flag(request.attempt_number == 1), _format_flag(request.outcome_unknown)),
        )
    ((text,),) = yield query
    answer = json.loads(text)
    if isinstance(answer, list):
        reservation, generation, failures = answer
        if state is None or (state.generation, state.consecutive_failures) != (generation, failures):
            breaker_cache.update(scope, BreakerSnapshot(consecutive_failures=failures, generation=generation))
        return PostgresAdmitted(request, Permit(generation), reservation=reservation)
    return _parse_admission(request, answer, breaker_cache)


def _parse_admission(request: AdmissionRequest, answer: dict[str, Any], breaker_cache: BreakerCache) -> AdmissionResult:
    """Parse an answer that is more than a plain admission."""
    decision = answer["decision"]
    # The times of an answer are the server's; they are converted to the clock of this process.
    shift = request.now - answer["at"]
    if decision in {"admitted", "open"}:
        state = shift_clock(parse_snapshot(answer["breaker"]), shift)
        breaker_cache.update(request.scope, state)
        if decision == "open":
            raise circuit_breaker.circuit_open_error(CallRefused(state, answer["until"] + shift), request.now)
        number = answer["probe"]
        probe = None if number is None else Probe(number, request.now + request.policy.breaker.probe_lease_seconds)
        return PostgresAdmitted(request, Permit(state.generation, probe), reservation=answer["reservation"])
    if decision == "replayed":
        if answer["value"] is None:
            raise result_not_stored_error()
        return ReplayedResult(StoredResult(answer["value"], answer["http_status"]))
    if decision == "busy":
        return KeyInFlight(answer["until"] + shift)
    if decision == "exhausted":
        raise quota_exceeded_error(answer["kind"], answer["limit"], server_time=answer["at"])
    raise idempotency.key_conflict_error()


@lru_cache(maxsize=1024)
def _format_array(numbers: tuple[float | None, ...]) -> str:
    """Format an array as the server reads it; as cached text, because the values rarely change."""
    return "{" + ",".join("NULL" if number is None else repr(number) for number in numbers) + "}"


def _format_policy(policy: ProviderPolicy) -> str:
    breaker = policy.breaker
    max_probes = breaker.half_open_max_calls
    return _format_array((policy.keep, breaker.open_cooldown_seconds, max_probes, breaker.probe_lease_seconds))


def quota_exceeded_error(kind: int, limit: int, *, server_time: float) -> ProviderQuotaExceededError:
    """Return the error of an exhausted window, with the message of the quota model; *kind* counts from 1."""
    now = datetime.fromtimestamp(server_time, UTC)
    try:
        QuotaState(window_at(WINDOW_KINDS[kind - 1], now), limit, limit).reserve(now=now)
    except ProviderQuotaExceededError as error:
        return error
    raise AssertionError("an exhausted window admitted a call")


def lease_block_operation(
    request: AdmissionRequest,
    block_cache: QuotaBlockCache,
    unused: UnusedQuota | None,
    *,
    policy: BlockPolicy,
    process_name: str,
    breaker_cache: BreakerCache,
) -> Operation[LeasedBlock | ProviderQuotaExceededError]:
    """Reserve the next block of *block_cache* and release *unused*; return the error if no call remains."""
    sent_at = time.monotonic()
    parameters = _build_scope_parameters(request) | {
        "limits": _format_array(block_cache.limits),
        "process_name": process_name,
        "calls": policy.size,
        "seconds": policy.lease,
        "timeout": request.lease,
        "previous": None if unused is None else unused.reservation,
        "unspent": 0 if unused is None else unused.unspent,
    }
    ((breaker_values, granted, server_time, until, kind, limit, reservation),) = yield Query(sql.LEASE, parameters)
    breaker_cache.update(request.scope, shift_clock(parse_snapshot(breaker_values), request.now - server_time))
    if not granted:
        return quota_exceeded_error(kind, limit, server_time=server_time)
    shortest = next(kind for kind, _ in request.policy.quota.limits)
    window = window_at(shortest, datetime.fromtimestamp(server_time, UTC))
    return LeasedBlock(reservation, granted, window, server_time, until, sent_at)


# -- after an attempt -------------------------------------------------------------------------------


def complete_operation(
    admitted: PostgresAdmitted, result: AttemptResult, breaker_cache: BreakerCache
) -> Operation[BreakerState | None] | None:
    """Update key, reservation and breaker in one round trip; return None if there is nothing to write."""
    request, permit, error = admitted.request, admitted.permit, result.error
    fault = None if error is None and result.stored_result is None else circuit_breaker.is_provider_fault(error)
    updates_breaker = (
        permit.probe is not None
        or fault is True
        or (fault is False and breaker_cache.count_failures(request.scope) > 0)
    )
    ends_key = result.is_last and request.idempotency_key is not None
    if not updates_breaker and not ends_key and admitted.reservation is None:
        return None
    return (
        _complete_with_breaker(admitted, result, breaker_cache, ends_key=ends_key, fault=fault)
        if updates_breaker
        else _finish_without_breaker(admitted, result, ends_key=ends_key)
    )


def _finish_without_breaker(
    admitted: PostgresAdmitted, result: AttemptResult, *, ends_key: bool
) -> Operation[BreakerState | None]:
    """End the key and the reservation of an attempt whose result cannot change the breaker."""
    request, stored_result = admitted.request, result.stored_result
    provider, keep = request.scope.provider_name, repr(request.policy.keep)
    reservation = None if admitted.reservation is None else str(admitted.reservation)
    if ends_key and stored_result is not None:
        status = None if stored_result.http_status is None else str(stored_result.http_status)
        key_columns = request.tenant_id, provider, request.idempotency_key, request.owner
        yield PreparedTextQuery(
            sql.COMPLETE_SUCCESS,
            (*key_columns, serialize_result(stored_result.value), status, keep, reservation),
        )
        return None
    key = (request.tenant_id, request.idempotency_key, request.owner) if ends_key else (None, None, None)
    unspent, outcome_unknown = str(_count_unspent(result)), _format_flag(result.outcome_unknown)
    values = provider, repr(request.lease), reservation, unspent, *key, "f", outcome_unknown, keep, None, None
    yield PreparedTextQuery(sql.FINISH, values)
    return None


def _complete_with_breaker(
    admitted: PostgresAdmitted,
    result: AttemptResult,
    breaker_cache: BreakerCache,
    *,
    ends_key: bool,
    fault: bool | None,
) -> Operation[BreakerState | None]:
    """End key and reservation, report to the breaker, and return the state that it entered, if any."""
    request, permit, error, stored_result = admitted.request, admitted.permit, result.error, result.stored_result
    breaker = request.policy.breaker
    parameters = _build_scope_parameters(request) | {
        "key_tenant": request.tenant_id,
        "key": request.idempotency_key if ends_key else None,
        "owner": request.owner,
        "keep": request.policy.keep,
        "timeout": request.lease,
        "reservation": admitted.reservation,
        "unspent": _count_unspent(result),
        "done": stored_result is not None,
        "outcome_unknown": result.outcome_unknown,
        "value": serialize_result(stored_result.value) if ends_key and stored_result is not None else None,
        "http_status": None if stored_result is None else stored_result.http_status,
        "generation": permit.generation,
        "probe": None if permit.probe is None else permit.probe.number,
        "fault": fault,
        "code": error.reason_code.value if error is not None and fault else None,
        "threshold": breaker.failure_threshold,
        "cooldown": breaker.open_cooldown_seconds,
        "max_probes": breaker.half_open_max_calls,
    }
    ((breaker_values, new_state, server_time),) = yield Query(sql.COMPLETE, parameters)
    if breaker_values is not None:
        breaker_cache.update(request.scope, shift_clock(parse_snapshot(breaker_values), result.now - server_time))
    return None if new_state is None else BreakerState(new_state)


def _build_scope_parameters(request: AdmissionRequest) -> dict[str, Any]:
    scope = request.scope
    return {"tenant": scope_key(scope), "provider": scope.provider_name, "capability": scope.capability}


def _check_key(request: AdmissionRequest, key: str) -> None:
    check_tenant(request.tenant_id)
    check_name("key", key, MAX_KEY_BYTES)


def _count_unspent(result: AttemptResult) -> int:
    """Return the number of the attempt's calls that were certainly never made."""
    return int(result.error is not None and not result.error.sent)


def _format_flag(value: bool) -> str:  # noqa: FBT001 - the value to format
    return "t" if value else "f"
