"""Audit rows of actions on brokers that are not a database: the intent before the action, the outcome after it.

An audit row records which operator did what to which queue, for example replayed dead letters. The rows go to the
database that the configuration names. Without a database, and while it does not accept them, the log is the record: an
event ``audit`` at level WARNING.

``create_entry`` builds the row of an action by the current operator. It returns None inside ``suppress_entries``, where
the calls are parts of an action that has a row already.
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

from ergon_framework.audit import AuditEntry, create_entry, suppress_entries
from ergon_framework.errors import ErgonError, require_extra
from ergon_framework.failure import describe_error
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

DSN_VARIABLE: Final = "ERGON_POSTGRES__DSN"
#: Imported only when there is a database: its driver may not be installed.
_WRITER_MODULE: Final = "ergon_framework.connectors.postgres.audit"
#: The audit action of each connector method.
ACTION_BY_METHOD: Final = {"replay_dead": "dlq.replay", "discard_dead": "dlq.discard", "replace_dead": "dlq.edit"}
#: The outcomes of dead letters that an action has changed.
_MOVED_OUTCOMES: Final = ("replayed", "discarded")

_database_dsn: list[str] = []


def use_database(dsn: str | None) -> None:
    """Write the rows of this process to *dsn*; None selects the database that the environment names."""
    _database_dsn[:] = [dsn] if dsn else []


def log_entry(entry: AuditEntry, *, problem: str = "") -> None:
    """Write *entry* to the log; *problem* says why it is not in the configured database."""
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
        "database_error": problem or None,
    }
    logs.log_event(logging.WARNING, "audit", fields, to=_log)


class _AuditIntent:
    """An action that has begun, with the number of its intent row."""

    def __init__(self, entry: AuditEntry) -> None:
        self._entry = entry
        self._dsn = next(iter(_database_dsn), None) or os.environ.get(DSN_VARIABLE)
        self._number = self._write(entry)

    def end(self, *, count: int | None = None, error: str = "") -> None:
        self._write(self._entry.end(count=count, error=error), intent=self._number)

    def _write(self, entry: AuditEntry, *, intent: int | None = None) -> int | None:
        """Write *entry* to the database or else to the log; return its row number, None for the log."""
        problem = ""
        if self._dsn:
            try:
                require_extra("postgres", "psycopg")
                number: int | None = import_module(_WRITER_MODULE).write_row(self._dsn, entry, intent=intent)
            except ErgonError as error:
                # An outage of the database must not keep an operator from repairing something else.
                problem = describe_error(error)
            else:
                if number is not None:
                    return number
                problem = "its schema has no table for it; run: ergon db upgrade"
        log_entry(entry, problem=problem)
        return None


class ChangeCount:
    """The number of things that an action has changed; the caller of ``audit_action`` sets it."""

    count: int | None = None


@contextmanager
def audit_action(entry: AuditEntry | None) -> Iterator[ChangeCount]:
    """Write the rows of *entry*, the intent immediately and the outcome at the end; nothing if it is None."""
    changes = ChangeCount()
    if entry is None:
        yield changes
        return
    intent = _AuditIntent(entry)
    try:
        with suppress_entries():  # the calls inside are parts of this action and write no rows of their own
            yield changes
    except BaseException as error:
        intent.end(error=type(error).__name__)
        raise
    intent.end(count=changes.count)


# -- wrappers for the methods of connectors ---------------------------------------------------------


def audit_methods(connector: type) -> None:
    """Wrap replays, discards and edits of the class *connector*, sync and async, so that they write audit rows."""
    for name, action in ACTION_BY_METHOD.items():
        for method in (name, f"{name}_async"):
            if method in vars(connector):
                original = vars(connector)[method]
                wrap = _wrap_async if inspect.iscoroutinefunction(original) else _wrap
                setattr(connector, method, wrap(original, action))


def _wrap(method: Callable[..., Any], action: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, handles: Any, *args: Any) -> Any:
        with audit_action(create_entry(action, self.name, _select_targets(handles, args))) as changes:
            results = method(self, handles, *args)
            changes.count = _count_moved(results)
        return results

    return call


def _wrap_async(method: Callable[..., Any], action: str) -> Callable[..., Any]:
    @functools.wraps(method)
    async def call(self: Any, handles: Any, *args: Any) -> Any:
        entry = create_entry(action, self.name, _select_targets(handles, args))
        if entry is None:
            return await method(self, handles, *args)
        intent = await asyncio.to_thread(_AuditIntent, entry)
        try:
            with suppress_entries():
                results = await method(self, handles, *args)
        except BaseException as error:
            # Written without await, although that blocks the loop: another cancellation must not lose the row.
            intent.end(error=type(error).__name__)
            raise
        await asyncio.to_thread(intent.end, count=_count_moved(results))
        return results

    return call


def _select_targets(handles: Any, args: Sequence[Any]) -> Sequence[str]:
    """Return the handles, or for a replacement the id of the transaction that takes its place."""
    return [args[0].id] if args else handles


def _count_moved(results: Any) -> int:
    all_results = results if isinstance(results, Sequence) else [results]
    return sum(result.outcome in _MOVED_OUTCOMES for result in all_results)
