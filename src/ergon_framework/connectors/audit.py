"""Audit rows of actions on brokers that are not a database: the intent before the action, the outcome after it.

They go to the database that the configuration names. Without one, and while it does not take them, the log is the
record: an event ``audit`` at the level of warnings.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from ergon_framework.audit import AuditEntry, new_entry, noted
from ergon_framework.errors import ErgonError
from ergon_framework.failure import describe
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

VARIABLE: Final = "ERGON_POSTGRES__DSN"
#: Imported when there is a database: its driver may not be installed.
_WRITER: Final = "ergon_framework.connectors.postgres.audit"
#: By the method of a connector, the action that it is.
ACTIONS: Final = {"replay_dead": "dlq.replay", "discard_dead": "dlq.discard", "replace_dead": "dlq.edit"}
_MOVED: Final = ("replayed", "discarded")

_database: list[str] = []


def use_database(dsn: str | None) -> None:
    """Have the rows of this process written to *dsn*; None for the database that the environment names."""
    _database[:] = [dsn] if dsn else []


def log_entry(entry: AuditEntry, *, problem: str = "") -> None:
    """Write *entry* to the log; *problem* says why it is not in a database that is configured."""
    fields = {
        "action": entry.action,
        "subject": entry.name,
        "actor": entry.actor,
        "reason": entry.reason or None,
        "targets": ",".join(entry.targets) or None,
        "selection": json.dumps(entry.selection, default=str) if entry.selection else None,
        "count": entry.count,
        "outcome": entry.outcome or "begun",
        "error": entry.error,
        "origin": entry.origin,
        "not_in_database": problem or None,
    }
    logs.say(logging.WARNING, "audit", fields, to=_log)


class _Intent:
    """An action that has begun."""

    def __init__(self, entry: AuditEntry) -> None:
        self._entry = entry
        self._dsn = next(iter(_database), None) or os.environ.get(VARIABLE)
        self._number = self._write(entry)

    def end(self, *, count: int | None = None, error: str = "") -> None:
        self._write(self._entry.end(count=count, error=error), intent=self._number)

    def _write(self, entry: AuditEntry, *, intent: int | None = None) -> int | None:
        """Write *entry* where rows go; its number, None where that is the log."""
        problem = ""
        if self._dsn:
            try:
                number: int | None = import_module(_WRITER).write_row(self._dsn, entry, intent=intent)
            except ErgonError as error:
                # An outage of the database must not keep an operator from repairing something else.
                problem = describe(error)
            else:
                if number is not None:
                    return number
                problem = "its schema has no table for it; run: ergon db upgrade"
        log_entry(entry, problem=problem)
        return None


class Counted:
    """How many things an action has changed."""

    count: int | None = None


@contextmanager
def audited(entry: AuditEntry | None) -> Iterator[Counted]:
    """Leave the rows of *entry*, the intent at once and the outcome at the end; nothing if it is None."""
    counted = Counted()
    if entry is None:
        yield counted
        return
    intent = _Intent(entry)
    try:
        with noted():
            yield counted
    except BaseException as error:
        intent.end(error=type(error).__name__)
        raise
    intent.end(count=counted.count)


# -- around the methods of connectors ---------------------------------------------------------------


def leave_rows(connector: type) -> None:
    """Have replays, discards and edits of the class *connector* leave rows, in both flavours."""
    for name, action in ACTIONS.items():
        for method in (name, f"{name}_async"):
            if method in vars(connector):
                own = vars(connector)[method]
                wrap = _wrap_async if inspect.iscoroutinefunction(own) else _wrap
                setattr(connector, method, wrap(own, action))


def _wrap(method: Callable[..., Any], action: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, places: Any, *more: Any) -> Any:
        with audited(new_entry(action, self.name, _targets(places, more))) as counted:
            results = method(self, places, *more)
            counted.count = _count(results)
        return results

    return call


def _wrap_async(method: Callable[..., Any], action: str) -> Callable[..., Any]:
    @functools.wraps(method)
    async def call(self: Any, places: Any, *more: Any) -> Any:
        entry = new_entry(action, self.name, _targets(places, more))
        if entry is None:
            return await method(self, places, *more)
        intent = await asyncio.to_thread(_Intent, entry)
        try:
            with noted():
                results = await method(self, places, *more)
        except BaseException as error:
            # Not awaited: a task that was cancelled may not wait any more.
            intent.end(error=type(error).__name__)
            raise
        await asyncio.to_thread(intent.end, count=_count(results))
        return results

    return call


def _targets(places: Any, more: Sequence[Any]) -> Sequence[str]:
    """Return the places, or for one that is replaced the id of the transaction that comes instead."""
    return [more[0].id] if more else places


def _count(results: Any) -> int:
    many = results if isinstance(results, Sequence) else [results]
    return sum(result.became in _MOVED for result in many)
