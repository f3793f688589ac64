"""Maintenance of the provider state, which any process does at intervals for all, in small steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from ergon_framework.providers.books import ProviderScope
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.sql import statements
from ergon_framework.providers.sql.names import parse_scope_key
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Maximum number of rows of one statement.
_MAX_ROWS: Final = 500
#: Maximum number of consecutive statements, because other work shares the connection.
_MAX_STATEMENTS: Final = 10
#: Number of tenants whose windows one statement examines.
_TENANTS_PER_STATEMENT: Final = 100
_DAY_SECONDS: Final = 86_400.0
#: Seconds for which a window is kept after its end, and a lost reservation after it was marked.
WINDOW_RETENTION_SECONDS: Final = _DAY_SECONDS
LOST_RETENTION_SECONDS: Final = 30 * _DAY_SECONDS

_WINDOW_KINDS: Final = tuple(WindowKind)


@dataclass(frozen=True, slots=True)
class LostReservation:
    """A reservation of one or more calls that its owner let expire: whether the calls were made is unknown."""

    id: int
    account: ProviderScope
    windows: tuple[tuple[WindowKind, datetime], ...]
    owner: str
    calls: int
    until: datetime
    lost_at: datetime | None
    created_at: datetime

    @classmethod
    def from_row(cls, row: Any) -> LostReservation:
        """Create it from a row of ``RECONCILE``, or a row with the same columns."""
        number, tenant, provider, capability, starts, owner, calls, until, lost_at, created_at = row
        windows = tuple(parse_window(start) for start in starts)
        scope = parse_scope_key(tenant, provider, capability)
        return cls(number, scope, windows, owner, calls, until, lost_at, created_at)


def parse_window(start: datetime) -> tuple[WindowKind, datetime]:
    """Return the kind and the start of a window from its stored start: see ``provider_window_start``."""
    return _WINDOW_KINDS[start.microsecond], start.astimezone(UTC).replace(microsecond=0)


#: Greater than any reservation's id.
MAX_RESERVATION_ID: Final = 2**63 - 1


def reconcile_reservations(max_id: int = MAX_RESERVATION_ID) -> Operation[list[LostReservation]]:
    """Mark the expired reservations: they stay counted as used, and are listed."""
    rows = yield Query(statements.RECONCILE, {"upto": max_id, "most": _MAX_ROWS})
    lost_reservations = [LostReservation.from_row(row) for row in rows]
    if lost_reservations:
        logs.log_event(
            logging.WARNING,
            "provider reservations lost",
            {
                "reservations": len(lost_reservations),
                "calls": sum(reservation.calls for reservation in lost_reservations),
            },
            to=_log,
        )
    return lost_reservations


class Maintenance:
    """The maintenance by one process; each run continues where the last one ended."""

    def __init__(self) -> None:
        self._max_id = MAX_RESERVATION_ID
        self._after_tenant = ""

    def run(self) -> Operation[None]:
        """Mark lost reservations, and delete expired keys, reservations and windows."""
        yield from reconcile_reservations(self._max_id)
        ((self._max_id,),) = yield Query(statements.SELECT_NEWEST_RESERVATION)
        for sql in (statements.DELETE_KEYS, statements.DELETE_LOST):
            for _ in range(_MAX_STATEMENTS):
                ((deleted,),) = yield Query(sql, {"seconds": LOST_RETENTION_SECONDS, "most": _MAX_ROWS})
                if deleted < _MAX_ROWS:
                    break
        parameters = {
            "after": self._after_tenant,
            "tenants": _TENANTS_PER_STATEMENT,
            "seconds": WINDOW_RETENTION_SECONDS,
            "most": _MAX_ROWS,
        }
        ((_, last),) = yield Query(statements.DELETE_WINDOWS, parameters)
        self._after_tenant = last or ""
