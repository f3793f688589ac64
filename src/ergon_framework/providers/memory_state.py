"""The provider state in memory: for tests, for single-process programs, and as the reference for shared stores.

The provider state is the quotas and circuit breakers by scope (tenant, provider and capability), the idempotency keys
with their results, and the last attempts, for health.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections import OrderedDict, deque
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers import idempotency
from ergon_framework.providers.circuit_breaker import BreakerSnapshot, BreakerState, Permit
from ergon_framework.providers.errors import ProviderError, ProviderQuotaExceededError
from ergon_framework.providers.health import AttemptSample, HourStats, group_by_minute
from ergon_framework.providers.idempotency import KeyClaimed, KeyEntry, KeyHeld, KeyInFlightState, StoredResult
from ergon_framework.providers.models import AttemptRecord
from ergon_framework.providers.quota import QuotaState, Window, WindowKind
from ergon_framework.providers.state import (
    AdmissionRequest,
    AdmissionResult,
    AdmittedAttempt,
    AsyncProviderState,
    AttemptResult,
    KeyInFlight,
    ProviderScope,
    ProviderState,
    ReplayedResult,
)

#: Tenant, provider and key.
_Key: TypeAlias = tuple[str, str, str]


class MemoryProviderState(ProviderState, AsyncProviderState):
    """Quota, breakers and keys of one process; safe from any thread and any event loop.

    Its size is bounded: it keeps at most *max_keys* results for their keys, and the last *max_rows* attempts
    for health, the newest in both cases. A key whose call is in flight, a breaker that is not closed
    and a quota whose window has not ended are never evicted. All of it ends with the process.
    """

    may_block = False

    def __init__(self, *, max_keys: int = 10_000, max_rows: int = 10_000, max_scopes: int = 10_000) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[_Key, KeyEntry] = OrderedDict()
        self._breakers: OrderedDict[ProviderScope, BreakerSnapshot] = OrderedDict()
        self._quotas: dict[tuple[ProviderScope, WindowKind], QuotaState] = {}
        self._rows: deque[AttemptRecord] = deque(maxlen=max_rows)
        self._max_keys = max_keys
        self._max_scopes = max_scopes
        #: Number of attempts that were evicted for newer ones.
        self.dropped = 0
        _instances.add(self)

    # -- the ProviderState interface --------------------------------------------------------------

    def admit(self, request: AdmissionRequest) -> AdmissionResult:
        with self._lock:
            claims_key = request.idempotency_key is not None and request.attempt_number == 1
            if claims_key:
                claim_result = self._claim_key(request)
                if claim_result is not None:
                    return claim_result
            try:
                windows, permit = self._reserve(request)
            except ProviderError:
                # No attempt follows, so the claim on the key ends here; a provider call that was made stays unknown.
                self._end_key(
                    request, AttemptResult(now=request.now, is_last=True, outcome_unknown=request.outcome_unknown)
                )
                raise
            return AdmittedAttempt(request, permit, windows)

    def complete(self, admitted: AdmittedAttempt, result: AttemptResult) -> BreakerState | None:
        request, error = admitted.request, result.error
        with self._lock:
            if error is not None and not error.sent:
                self._refund(request.scope, admitted.windows)
            if result.is_last:
                self._end_key(request, result)
            fault = None if error is None and result.stored_result is None else breakers.is_provider_fault(error)
            before = self._breakers.get(request.scope, _NEW_BREAKER)
            after = breakers.record(before, request.policy.breaker, admitted.permit, result.now, fault=fault)
            self._put_breaker(request.scope, after)
            return None if after.state is before.state else after.state

    async def admit_async(self, request: AdmissionRequest) -> AdmissionResult:
        return self.admit(request)

    async def complete_async(self, admitted: AdmittedAttempt, result: AttemptResult) -> BreakerState | None:
        return self.complete(admitted, result)

    def record(self, row: AttemptRecord) -> None:
        rows = self._rows
        if len(rows) == rows.maxlen:
            self.dropped += 1
        rows.append(row)

    def blocked_until(self, scope: ProviderScope) -> float | None:
        snapshot = self._breakers.get(scope, _NEW_BREAKER)
        # Without the lock: a snapshot is immutable. The caller ignores a time in the past.
        return breakers.blocked_until(snapshot)

    # -- inspection -------------------------------------------------------------------------------

    def get_breaker(self, scope: ProviderScope) -> BreakerSnapshot:
        """Return the breaker as the last call left it."""
        with self._lock:
            return self._breakers.get(scope, _NEW_BREAKER)

    def get_quota(self, scope: ProviderScope, kind: WindowKind) -> QuotaState | None:
        """Return the window as the last call left it; None without a limit."""
        with self._lock:
            return self._quotas.get((scope, kind))

    def list_attempts(self) -> list[AttemptRecord]:
        """Return the last attempts, the oldest first."""
        return list(self._rows.copy())

    def get_hour(self, tenant_id: str, provider_name: str, capability: str, *, now: float) -> HourStats:
        """Return the statistics of the tenant's last hour, from the attempts that are still kept."""
        scope = (tenant_id, provider_name, capability)
        samples = [
            AttemptSample(row.created_at, row.outcome, row.duration_ms, row.reason_code)
            for row in self.list_attempts()
            if (row.tenant_id, row.provider_name, row.capability) == scope
        ]
        return HourStats.at(now, group_by_minute(samples))

    # -- steps; the lock is held --------------------------------------------------------------------

    def _claim_key(self, request: AdmissionRequest) -> ReplayedResult | KeyInFlight | None:
        key = _to_key(request)
        claim = idempotency.claim_key(
            self._keys.get(key),
            fingerprint=request.fingerprint,
            owner=request.owner,
            now=request.now,
            lease=request.lease,
        )
        if isinstance(claim, KeyClaimed):
            self._put_key(key, claim.entry, now=request.now)
            return None
        return KeyInFlight(claim.until) if isinstance(claim, KeyHeld) else ReplayedResult(_copy_result(claim))

    def _reserve(self, request: AdmissionRequest) -> tuple[tuple[Window, ...], Permit]:
        """Reserve quota, then the breaker's permit; nothing is written unless both admit the call."""
        scope, policy = request.scope, request.policy
        limits = policy.quota.limits
        states = self._reserve_windows(request) if limits else []
        decision = breakers.admit(self._breakers.get(scope, _NEW_BREAKER), policy.breaker, request.now)
        self._put_breaker(scope, decision.state)
        if not isinstance(decision, breakers.CallAdmitted):
            raise breakers.circuit_open_error(decision, request.now)
        for state in states:
            self._quotas[scope, state.window.kind] = state
        return tuple(state.window for state in states), decision.permit

    def _reserve_windows(self, request: AdmissionRequest) -> list[QuotaState]:
        """Return the state of every limited window of the scope after one more call."""
        now = datetime.fromtimestamp(request.now, UTC)
        states = []
        for kind, limit in request.policy.quota.limits:
            quota_key = request.scope, kind
            state = self._quotas.get(quota_key) or QuotaState.new(kind, limit, now=now)
            if state.limit_count != limit:
                state = state.with_limit(limit)
            try:
                states.append(state.reserve(now=now))
            except ProviderQuotaExceededError:
                self._quotas[quota_key] = state.mark_exhausted(now)
                raise
        if len(self._quotas) >= self._max_scopes:
            self._quotas = {quota_key: state for quota_key, state in self._quotas.items() if now < state.window.end}
        return states

    def _refund(self, scope: ProviderScope, windows: tuple[Window, ...]) -> None:
        for window in windows:
            quota_key = scope, window.kind
            self._quotas[quota_key] = self._quotas[quota_key].refund(window=window)

    def _end_key(self, request: AdmissionRequest, result: AttemptResult) -> None:
        """Store the result of the key's call, or record that it failed."""
        if request.idempotency_key is None:
            return
        key, until = _to_key(request), result.now + request.policy.keep
        before = self._keys.get(key)
        if result.stored_result is not None:
            after = idempotency.complete_key(
                before, owner=request.owner, stored_result=_copy_result(result.stored_result), until=until
            )
        else:
            after = idempotency.fail_key(
                before, owner=request.owner, outcome_unknown=result.outcome_unknown, until=until
            )
        if after is None:
            self._keys.pop(key, None)
        elif after is not before:
            self._put_key(key, after, now=result.now)

    def _put_key(self, key: _Key, entry: KeyEntry, *, now: float) -> None:
        self._keys[key] = entry
        self._keys.move_to_end(key)
        # Keys in flight are skipped once each, so the loop is bounded even if all of them are in flight.
        for _ in range(len(self._keys)):
            if len(self._keys) <= self._max_keys:
                return
            oldest_key, oldest_entry = self._keys.popitem(last=False)
            if isinstance(oldest_entry, KeyInFlightState) and now < oldest_entry.until:
                self._keys[oldest_key] = oldest_entry

    def _put_breaker(self, scope: ProviderScope, state: BreakerSnapshot) -> None:
        if self._breakers.get(scope, _NEW_BREAKER) is state:
            return
        self._breakers[scope] = state
        self._breakers.move_to_end(scope)
        for _ in range(len(self._breakers)):
            if len(self._breakers) <= self._max_scopes:
                return
            oldest_scope, oldest_breaker = self._breakers.popitem(last=False)
            if oldest_breaker.state is not BreakerState.CLOSED or oldest_breaker.override is not None:
                self._breakers[oldest_scope] = oldest_breaker

    def _reset_lock(self) -> None:
        """Replace the lock in a forked child: the thread that held it does not exist there."""
        self._lock = threading.Lock()


_NEW_BREAKER: Final = BreakerSnapshot()


def _to_key(request: AdmissionRequest) -> _Key:
    return request.tenant_id, request.scope.provider_name, request.idempotency_key or ""


def _copy_result(stored_result: StoredResult) -> StoredResult:
    """Copy the result, so that no caller shares it; JSON is copied as JSON, as a shared store would return it."""
    try:
        value: Any = json.loads(json.dumps(stored_result.value))
    except (TypeError, ValueError):
        value = copy.deepcopy(stored_result.value)
    return StoredResult(value, stored_result.http_status)


# -- forks --------------------------------------------------------------------------------------------

_instances: Final[WeakSet[MemoryProviderState]] = WeakSet()


def _reset_locks() -> None:
    for state in list(_instances):
        state._reset_lock()  # noqa: SLF001 - the class's own module


os.register_at_fork(after_in_child=_reset_locks)
