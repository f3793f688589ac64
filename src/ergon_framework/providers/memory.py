"""Books in memory: for tests, for programs of one process, and as the measure for the shared ones."""

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
from ergon_framework.providers.books import (
    Account,
    Admission,
    Admitted,
    Asked,
    AsyncBooks,
    Books,
    Busy,
    Concluded,
    Replayed,
)
from ergon_framework.providers.circuit_breaker import BreakerState, Pass, Snapshot
from ergon_framework.providers.errors import ProviderError, ProviderQuotaExceededError
from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.health import Hour, Row, minutes
from ergon_framework.providers.idempotency import Claimed, Entry, Held, InFlight, Kept
from ergon_framework.providers.quota import QuotaState, Window, WindowKind

#: Tenant, provider and key.
_Key: TypeAlias = tuple[str, str, str]


class MemoryBooks(Books, AsyncBooks):
    """Quota, breakers and keys of one process; safe from any thread and any event loop.

    It is bounded: of results at most *keys* are kept for their keys and of attempts the last *rows*
    for health, in both cases the newest. A key whose call is in flight, a breaker that is not closed
    and a quota whose window lasts are never given up. All of it ends with the process.
    """

    waits = False

    def __init__(self, *, keys: int = 10_000, rows: int = 10_000, accounts: int = 10_000) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[_Key, Entry] = OrderedDict()
        self._breakers: OrderedDict[Account, Snapshot] = OrderedDict()
        self._quotas: dict[tuple[Account, WindowKind], QuotaState] = {}
        self._rows: deque[AttemptRow] = deque(maxlen=rows)
        self._max_keys = keys
        self._max_accounts = accounts
        #: How many attempts had to make room for newer ones.
        self.dropped = 0
        _everybody.add(self)

    # -- the port ---------------------------------------------------------------------------------

    def admit(self, asked: Asked) -> Admission:
        with self._lock:
            first = asked.idempotency_key is not None and asked.attempt_number == 1
            if first:
                taken = self._claim(asked)
                if taken is not None:
                    return taken
            try:
                windows, leave = self._reserve(asked)
            except ProviderError:
                self._end_key(asked, Concluded(now=asked.now, last=True, doubt=asked.doubt))
                raise
            return Admitted(asked, leave, windows)

    def conclude(self, admitted: Admitted, concluded: Concluded) -> BreakerState | None:
        asked, error = admitted.asked, concluded.error
        with self._lock:
            if error is not None and not error.sent:
                self._refund(asked.account, admitted.windows)
            if concluded.last:
                self._end_key(asked, concluded)
            fault = None if error is None and concluded.kept is None else breakers.fault_of(error)
            before = self._breakers.get(asked.account, _NEW)
            after = breakers.record(before, asked.policy.breaker, admitted.leave, concluded.now, fault=fault)
            self._put_breaker(asked.account, after)
            return None if after.state is before.state else after.state

    async def admit_async(self, asked: Asked) -> Admission:
        return self.admit(asked)

    async def conclude_async(self, admitted: Admitted, concluded: Concluded) -> BreakerState | None:
        return self.conclude(admitted, concluded)

    def record(self, row: AttemptRow) -> None:
        rows = self._rows
        if len(rows) == rows.maxlen:
            self.dropped += 1
        rows.append(row)

    def held_until(self, account: Account) -> float | None:
        found = self._breakers.get(account, _NEW)
        return breakers.held_until(found)

    # -- what it shows ----------------------------------------------------------------------------

    def breaker(self, account: Account) -> Snapshot:
        """The breaker as it was left by the last call."""
        with self._lock:
            return self._breakers.get(account, _NEW)

    def quota(self, account: Account, kind: WindowKind) -> QuotaState | None:
        """The window as it was left by the last call; None where there is no limit."""
        with self._lock:
            return self._quotas.get((account, kind))

    def rows(self) -> list[AttemptRow]:
        """The last attempts, the oldest first."""
        return list(self._rows.copy())

    def hour(self, tenant_id: str, provider_name: str, capability: str, *, now: float) -> Hour:
        """What the last hour was like for that tenant, as far as its attempts are still here."""
        wanted = (tenant_id, provider_name, capability)
        told = [
            Row(row.created_at, row.outcome, row.duration_ms, row.reason_code)
            for row in self.rows()
            if (row.tenant_id, row.provider_name, row.capability) == wanted
        ]
        return Hour.at(now, minutes(told))

    # -- the parts; the lock is held ----------------------------------------------------------------

    def _claim(self, asked: Asked) -> Replayed | Busy | None:
        key = _key(asked)
        answer = idempotency.claim(
            self._keys.get(key), fingerprint=asked.fingerprint, owner=asked.owner, now=asked.now, lease=asked.lease
        )
        if isinstance(answer, Claimed):
            self._put_key(key, answer.entry, now=asked.now)
            return None
        return Busy(answer.until) if isinstance(answer, Held) else Replayed(_copied(answer))

    def _reserve(self, asked: Asked) -> tuple[tuple[Window, ...], Pass]:
        """Quota, then breaker; only what both allow is written."""
        account, policy = asked.account, asked.policy
        limits = policy.quota.limits
        states = self._quota_states(asked) if limits else []
        answer = breakers.admit(self._breakers.get(account, _NEW), policy.breaker, asked.now)
        self._put_breaker(account, answer.state)
        if not isinstance(answer, breakers.Admitted):
            raise breakers.refusal(answer, asked.now)
        for state in states:
            self._quotas[account, state.window.kind] = state
        return tuple(state.window for state in states), answer.leave

    def _quota_states(self, asked: Asked) -> list[QuotaState]:
        """Every limited window of the account with one call more."""
        now = datetime.fromtimestamp(asked.now, UTC)
        states = []
        for kind, limit in asked.policy.quota.limits:
            place = asked.account, kind
            state = self._quotas.get(place) or QuotaState.new(kind, limit, now=now)
            if state.limit_count != limit:
                state = state.with_limit(limit)
            try:
                states.append(state.reserve(now=now))
            except ProviderQuotaExceededError:
                self._quotas[place] = state.exhausted(now)
                raise
        if len(self._quotas) >= self._max_accounts:
            self._quotas = {place: state for place, state in self._quotas.items() if now < state.window.end}
        return states

    def _refund(self, account: Account, windows: tuple[Window, ...]) -> None:
        for window in windows:
            place = account, window.kind
            self._quotas[place] = self._quotas[place].refund(window=window)

    def _end_key(self, asked: Asked, concluded: Concluded) -> None:
        if asked.idempotency_key is None:
            return
        key, until = _key(asked), concluded.now + asked.policy.keep
        before = self._keys.get(key)
        if concluded.kept is not None:
            after = idempotency.succeed(before, owner=asked.owner, kept=_copied(concluded.kept), until=until)
        else:
            after = idempotency.fail(before, owner=asked.owner, doubt=concluded.doubt, until=until)
        if after is None:
            self._keys.pop(key, None)
        elif after is not before:
            self._put_key(key, after, now=concluded.now)

    def _put_key(self, key: _Key, entry: Entry, *, now: float) -> None:
        self._keys[key] = entry
        self._keys.move_to_end(key)
        # Whoever is in flight is passed over, once each: at most all of them are.
        for _ in range(len(self._keys)):
            if len(self._keys) <= self._max_keys:
                return
            eldest, found = self._keys.popitem(last=False)
            if isinstance(found, InFlight) and now < found.until:
                self._keys[eldest] = found

    def _put_breaker(self, account: Account, state: Snapshot) -> None:
        if self._breakers.get(account, _NEW) is state:
            return
        self._breakers[account] = state
        self._breakers.move_to_end(account)
        for _ in range(len(self._breakers)):
            if len(self._breakers) <= self._max_accounts:
                return
            eldest, found = self._breakers.popitem(last=False)
            if found.state is not BreakerState.CLOSED or found.override is not None:
                self._breakers[eldest] = found

    def _begin_anew(self) -> None:
        """After a fork: whoever held the lock is not here."""
        self._lock = threading.Lock()


_NEW: Final = Snapshot()


def _key(asked: Asked) -> _Key:
    return asked.tenant_id, asked.account.provider_name, asked.idempotency_key or ""


def _copied(kept: Kept) -> Kept:
    """A value that nobody else holds; plain JSON is copied as such, as a shared store would have it."""
    try:
        value: Any = json.loads(json.dumps(kept.value))
    except (TypeError, ValueError):
        value = copy.deepcopy(kept.value)
    return Kept(value, kept.http_status)


# -- the books of this process ------------------------------------------------------------------------

_everybody: Final[WeakSet[MemoryBooks]] = WeakSet()


def _forked() -> None:
    for books in list(_everybody):
        books._begin_anew()  # noqa: SLF001 - their own module


os.register_at_fork(after_in_child=_forked)
