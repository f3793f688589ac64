"""A batch: attempts that are written together, once."""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.sql.minutes import Attempt, Place, Tally, attempt_of, tallied
from ergon_framework.providers.sql.sampling import Sampler

#: Tenant, provider and capability.
Account: TypeAlias = tuple[str, str, str]
#: The longest text of a row; a correlation that is longer would not fit into its index.
LONGEST: Final = 500


class Ready(NamedTuple):
    """One attempt: as it is counted, and as it is stored if it is *kept*."""

    row: AttemptRow
    attempt: Attempt
    kept: bool


class Seen(NamedTuple):
    """What a batch knows of one account's last moments."""

    last_success_at: datetime | None
    last_error_at: datetime | None
    last_error_code: str | None


@dataclass(slots=True)
class Batch:
    """Some attempts under one id.

    *doubt* says that its commit was sent and never answered, *refused* that the server did not want it once before.
    """

    ready: tuple[Ready, ...]
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    doubt: bool = False
    refused: bool = False

    def __len__(self) -> int:
        return len(self.ready)

    def halves(self) -> list[Batch]:
        """The same attempts in two batches of their own; only for one that was certainly not written."""
        middle = len(self.ready) // 2
        return [Batch(part) for part in (self.ready[:middle], self.ready[middle:]) if part]

    def rows(self, executions: Collection[str]) -> list[tuple[Any, ...]]:
        """Return what is stored, column by column of the table; only *executions* can be referred to."""
        return [_stored(one, executions) for one in self.ready if one.kept]

    @property
    def executions(self) -> list[str]:
        """The executions that the stored rows name."""
        named = {one.row.task_execution_id for one in self.ready if one.kept}
        return sorted({_short(name) for name in named if name is not None})

    def tallies(self) -> dict[Place, Tally]:
        return tallied(one.attempt for one in self.ready)


def prepared(rows: Iterable[AttemptRow], sampler: Sampler) -> tuple[Batch, list[AttemptRow]]:
    """A batch of *rows*, and those of them that no table could hold."""
    ready, refused = [], []
    for row in rows:
        try:
            # Figures that no calendar and no histogram has; or whatever else a stranger may have put there.
            fits = math.isfinite(row.duration_ms) and Ready(row, attempt_of(row), sampler.keeps(row))
        except Exception:  # noqa: BLE001 - as above
            fits = False
        if fits:
            ready.append(fits)
        else:
            refused.append(row)
    return Batch(tuple(ready)), refused


def seen(tallies: dict[Place, Tally]) -> dict[Account, Seen]:
    """The last moments of each account, in the order of the accounts."""
    found: dict[Account, Seen] = {}
    for place, tally in tallies.items():
        account = place[:3]
        before = found.get(account, Seen(None, None, None))
        error = max(
            ((one.last_error_at, one.last_error_code) for one in (before, tally) if one.last_error_at),
            default=(None, None),
        )
        success = max((one.last_success_at for one in (before, tally) if one.last_success_at), default=None)
        found[account] = Seen(success, *error)
    return found


def _stored(one: Ready, executions: Collection[str]) -> tuple[Any, ...]:
    row = one.row
    execution = None if row.task_execution_id is None else _short(row.task_execution_id)
    return (
        row.tenant_id,
        execution if execution in executions else None,
        row.provider_name,
        row.capability,
        _short(row.operation),
        None if row.idempotency_key is None else _short(row.idempotency_key),
        _short(row.correlation_id),
        row.attempt_number,
        row.max_attempts,
        row.duration_ms,
        row.timeout_budget_ms,
        row.outcome.value,
        None if row.reason_code is None else row.reason_code.value,
        row.retryable,
        row.http_status,
        one.attempt.at,
    )


def _short(text: str) -> str:
    """*text* as a column can hold it. Never used for whose a row is: two tenants must not become one."""
    return text[:LONGEST].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
