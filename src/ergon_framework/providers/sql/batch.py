"""Batches: attempts that are written together, at most once."""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

from ergon_framework.providers.execution import AttemptRecord
from ergon_framework.providers.sql.minutes import MinuteRollup, RollupAttempt, RollupKey, roll_up, to_attempt
from ergon_framework.providers.sql.sampling import Sampler

#: Tenant, provider and capability.
ScopeKey: TypeAlias = tuple[str, str, str]
#: Maximum length of a text column; a longer correlation would not fit into its index.
MAX_TEXT_CHARS: Final = 500


class PreparedAttempt(NamedTuple):
    """One attempt: as it is counted, and as it is stored if *is_stored* is set."""

    row: AttemptRecord
    attempt: RollupAttempt
    is_stored: bool


class AccountLastSeen(NamedTuple):
    """The last success and the last error of one scope in a batch."""

    last_success_at: datetime | None
    last_error_at: datetime | None
    last_error_code: str | None


@dataclass(slots=True)
class AttemptBatch:
    """Attempts under one batch id.

    *outcome_unknown* means that the commit was sent and not confirmed, *was_rejected* that the server rejected the
    batch once.
    """

    attempts: tuple[PreparedAttempt, ...]
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    outcome_unknown: bool = False
    was_rejected: bool = False

    def __len__(self) -> int:
        return len(self.attempts)

    def split(self) -> list[AttemptBatch]:
        """Split the attempts into two batches with new ids; only for a batch that was certainly not written."""
        middle = len(self.attempts) // 2
        return [AttemptBatch(part) for part in (self.attempts[:middle], self.attempts[middle:]) if part]

    def to_rows(self, executions: Collection[str]) -> list[tuple[Any, ...]]:
        """Return the stored rows, column by column of the table; rows can refer only to *executions*."""
        return [_to_row(prepared, executions) for prepared in self.attempts if prepared.is_stored]

    @property
    def executions(self) -> list[str]:
        """The task executions that the stored rows name."""
        names = {prepared.row.task_execution_id for prepared in self.attempts if prepared.is_stored}
        return sorted({_fit_text(name) for name in names if name is not None})

    def rollups(self) -> dict[RollupKey, MinuteRollup]:
        return roll_up(prepared.attempt for prepared in self.attempts)


def prepare_batch(rows: Iterable[AttemptRecord], sampler: Sampler) -> tuple[AttemptBatch, list[AttemptRecord]]:
    """Return a batch of *rows*, and the rows that no table can hold."""
    attempts, rejected = [], []
    for row in rows:
        try:
            # Values may exceed the calendar or the histogram, because callers can pass anything.
            prepared_attempt = math.isfinite(row.duration_ms) and PreparedAttempt(
                row, to_attempt(row), sampler.should_store(row)
            )
        except Exception:  # noqa: BLE001 - a row with arbitrary values can raise anything
            prepared_attempt = False
        if prepared_attempt:
            attempts.append(prepared_attempt)
        else:
            rejected.append(row)
    return AttemptBatch(tuple(attempts)), rejected


def last_seen(rollups: dict[RollupKey, MinuteRollup]) -> dict[ScopeKey, AccountLastSeen]:
    """Return the last success and the last error of each scope, in the order of the scopes."""
    last_seen_by_scope: dict[ScopeKey, AccountLastSeen] = {}
    for key, rollup in rollups.items():
        scope = key[:3]
        previous = last_seen_by_scope.get(scope, AccountLastSeen(None, None, None))
        error = max(
            ((entry.last_error_at, entry.last_error_code) for entry in (previous, rollup) if entry.last_error_at),
            default=(None, None),
        )
        success = max((entry.last_success_at for entry in (previous, rollup) if entry.last_success_at), default=None)
        last_seen_by_scope[scope] = AccountLastSeen(success, *error)
    return last_seen_by_scope


def _to_row(prepared: PreparedAttempt, executions: Collection[str]) -> tuple[Any, ...]:
    row = prepared.row
    execution_id = None if row.task_execution_id is None else _fit_text(row.task_execution_id)
    return (
        row.tenant_id,
        execution_id if execution_id in executions else None,
        row.provider_name,
        row.capability,
        _fit_text(row.operation),
        None if row.idempotency_key is None else _fit_text(row.idempotency_key),
        _fit_text(row.correlation_id),
        row.attempt_number,
        row.max_attempts,
        row.duration_ms,
        row.timeout_budget_ms,
        row.outcome.value,
        None if row.reason_code is None else row.reason_code.value,
        row.retryable,
        row.http_status,
        prepared.attempt.at,
    )


def _fit_text(text: str) -> str:
    """Return *text* as a column can hold it. Never used for scope names: two tenants must not become one."""
    return text[:MAX_TEXT_CHARS].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
