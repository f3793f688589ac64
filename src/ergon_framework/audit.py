"""Audit: which operator acts, why, and what the row about it says.

An action of an operator (a replay, a discard, an edit, a pause, a kill) leaves a row. Code that acts for a person says
who it is with ``acting``; without it, the actor is the user of the process.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final

#: The longest texts that are kept, and the most ids.
MAX_NAME: Final = 200
MAX_REASON: Final = 1000
MAX_TARGETS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One action: who, why, what and how many; never a payload.

    ``action`` is one of a few words such as ``dlq.replay``; ``name`` is the queue, task or entry that it is about, and
    ``targets`` are the ids of transactions or jobs, or the places of dead letters whose ids are not known.
    ``selection`` are the filters that they were chosen by. ``outcome`` is ``done`` or ``failed``, None before the end.
    """

    action: str
    name: str
    actor: str
    reason: str = ""
    targets: tuple[str, ...] = ()
    selection: Mapping[str, Any] = field(default_factory=dict)
    count: int | None = None
    outcome: str | None = None
    error: str | None = None
    #: The host and process that acted.
    origin: str = ""

    def end(self, *, count: int | None = None, targets: Sequence[str] | None = None, error: str = "") -> AuditEntry:
        """Return this entry with its outcome: failed where there is an *error*, else done."""
        found = self.targets if targets is None else tuple(targets[:MAX_TARGETS])
        outcome = "failed" if error else "done"
        return replace(self, count=count, targets=found, outcome=outcome, error=error[:MAX_REASON] or None)


@dataclass(frozen=True, slots=True)
class _Acting:
    actor: str
    reason: str
    selection: Mapping[str, Any]
    #: The ids of transactions by the places of their dead letters.
    ids: Mapping[str, str]
    #: Whether the action has its row already, so that its parts need none.
    is_noted: bool = False


_acting: ContextVar[_Acting | None] = ContextVar("ergon_acting", default=None)


@contextmanager
def acting(
    actor: str = "",
    *,
    reason: str = "",
    selection: Mapping[str, Any] | None = None,
    ids: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Have what is done inside recorded as done by *actor* for *reason*; also on the tasks that are started inside."""
    token = _acting.set(_Acting(actor or current_user(), reason, selection or {}, ids or {}))
    try:
        yield
    finally:
        _acting.reset(token)


@contextmanager
def noted() -> Iterator[None]:
    """Have what is done inside leave no row of its own: it is part of an action that has one."""
    found = _acting.get() or _Acting(current_user(), "", {}, {})
    token = _acting.set(replace(found, is_noted=True))
    try:
        yield
    finally:
        _acting.reset(token)


def new_entry(
    action: str, name: str, targets: Sequence[str] = (), *, actor: str = "", reason: str = ""
) -> AuditEntry | None:
    """Return the entry of an action by the present operator; None where it is part of one that has a row.

    *actor* and *reason* are for actions that name them themselves.
    """
    found = _acting.get()
    if found is not None and found.is_noted:
        return None
    found = found or _Acting(actor or current_user(), reason, {}, {})
    return AuditEntry(
        action=action,
        name=name[:MAX_NAME],
        actor=(actor or found.actor)[:MAX_NAME],
        reason=(reason or found.reason)[:MAX_REASON],
        targets=tuple(found.ids.get(target, target) for target in targets[:MAX_TARGETS]),
        selection=dict(found.selection),
        origin=f"{socket.gethostname()}:{os.getpid()}"[:MAX_NAME],
    )


def current_user() -> str:
    """Return ``ERGON_ACTOR``, or the name of the system's user, or its number where it has no name."""
    try:
        return os.environ.get("ERGON_ACTOR") or getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container may have a user without a name
        return f"uid {os.getuid()}"
