"""Sweeping: what any process does now and then for all of them, a little at a time."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from ergon_framework.providers.books import Account
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.sql import statements
from ergon_framework.providers.sql.names import account_of
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: The most rows that one statement takes.
_MOST: Final = 500
#: The most statements in a row: others want the connection too.
_ROUNDS: Final = 10
#: Tenants whose windows one statement looks at.
_TENANTS: Final = 100
_DAY: Final = 86_400.0
#: Seconds for which a window is kept after its end, and a lost reservation after it was found.
WINDOWS: Final = _DAY
LOST: Final = 30 * _DAY

_KINDS: Final = tuple(WindowKind)


@dataclass(frozen=True, slots=True)
class LostRow:
    """A reservation whose owner let it lapse: a call, or a block of them, of which nobody knows whether it was made."""

    id: int
    account: Account
    windows: tuple[tuple[WindowKind, datetime], ...]
    owner: str
    calls: int
    until: datetime
    lost_at: datetime | None
    created_at: datetime

    @classmethod
    def of(cls, row: Any) -> LostRow:
        """One row of ``RECONCILE``, or with the same columns."""
        number, tenant, provider, capability, starts, owner, calls, until, lost_at, created_at = row
        windows = tuple(window_of(start) for start in starts)
        account = account_of(tenant, provider, capability)
        return cls(number, account, windows, owner, calls, until, lost_at, created_at)


def window_of(start: datetime) -> tuple[WindowKind, datetime]:
    """The kind of a window and its true start, from the start as it is written: see ``provider_window_start``."""
    return _KINDS[start.microsecond], start.astimezone(UTC).replace(microsecond=0)


#: More than any number of a reservation.
EVERY: Final = 2**63 - 1


def reconciled(upto: int = EVERY) -> Operation[list[LostRow]]:
    """Mark the reservations that lapsed: they stay booked as used, and are listed."""
    rows = yield Query(statements.RECONCILE, {"upto": upto, "most": _MOST})
    found = [LostRow.of(row) for row in rows]
    if found:
        logs.say(
            logging.WARNING,
            "provider reservations lost",
            {"reservations": len(found), "calls": sum(one.calls for one in found)},
            to=_log,
        )
    return found


class Sweeper:
    """One process's turn: it goes on where it left off."""

    def __init__(self) -> None:
        self._upto = EVERY
        self._after = ""

    def swept(self) -> Operation[None]:
        """Mark what is lost, remove what is older than it is to get."""
        yield from reconciled(self._upto)
        ((self._upto,),) = yield Query(statements.NEWEST)
        for sql in (statements.FORGET_KEYS, statements.FORGET_LOST):
            for _ in range(_ROUNDS):
                ((gone,),) = yield Query(sql, {"seconds": LOST, "most": _MOST})
                if gone < _MOST:
                    break
        parameters = {"after": self._after, "tenants": _TENANTS, "seconds": WINDOWS, "most": _MOST}
        ((_, last),) = yield Query(statements.FORGET_WINDOWS, parameters)
        self._after = last or ""
