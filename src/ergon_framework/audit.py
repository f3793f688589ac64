"""Audit: the operator that acts, the reason, and the audit entry of the action.

Every action of an operator (a replay, a discard, an edit, a pause, a kill) writes an audit entry: this module builds
the entry, and the code that carries out the action writes it. Code that acts for a person names the person with
``act_as``; without it, the actor is the user of the process.
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

#: Maximum lengths of stored texts, and maximum number of stored ids.
MAX_NAME_CHARS: Final = 200
MAX_REASON_CHARS: Final = 1000
MAX_TARGETS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One action: actor, reason, target and count; never a payload.

    ``action`` is one of a fixed set of names such as ``dlq.replay``; ``name`` is the queue, task or entry of the
    action, and ``targets`` are ids of transactions or jobs, or handles of dead letters whose ids are not known.
    ``selection`` holds the filters that selected them. ``outcome`` is ``done`` or ``failed``, None before the end.
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
        """Return this entry with its outcome: failed if there is an *error*, else done."""
        kept_targets = self.targets if targets is None else tuple(targets[:MAX_TARGETS])
        outcome = "failed" if error else "done"
        return replace(self, count=count, targets=kept_targets, outcome=outcome, error=error[:MAX_REASON_CHARS] or None)


@dataclass(frozen=True, slots=True)
class _AuditContext:
    actor: str
    reason: str
    selection: Mapping[str, Any]
    #: Ids of transactions by the handles of their dead letters.
    ids: Mapping[str, str]
    #: Whether the action already has its entry, so that its parts write none.
    has_entry: bool = False


_current_context: ContextVar[_AuditContext | None] = ContextVar("ergon_acting", default=None)


@contextmanager
def act_as(
    actor: str = "",
    *,
    reason: str = "",
    selection: Mapping[str, Any] | None = None,
    ids: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Record actions inside the block as those of *actor* for *reason*, also on tasks that start inside."""
    token = _current_context.set(_AuditContext(actor or current_user(), reason, selection or {}, ids or {}))
    try:
        yield
    finally:
        _current_context.reset(token)


@contextmanager
def suppress_entries() -> Iterator[None]:
    """Write no audit entries inside the block: its actions are parts of one that has an entry."""
    context = _current_context.get() or _AuditContext(current_user(), "", {}, {})
    token = _current_context.set(replace(context, has_entry=True))
    try:
        yield
    finally:
        _current_context.reset(token)


def create_entry(
    action: str, name: str, targets: Sequence[str] = (), *, actor: str = "", reason: str = ""
) -> AuditEntry | None:
    """Return the entry of an action by the current operator; None if it is part of one that has an entry.

    *actor* and *reason* are for actions that name them explicitly.
    """
    context = _current_context.get()
    if context is not None and context.has_entry:
        return None
    context = context or _AuditContext(actor or current_user(), reason, {}, {})
    return AuditEntry(
        action=action,
        name=name[:MAX_NAME_CHARS],
        actor=(actor or context.actor)[:MAX_NAME_CHARS],
        reason=(reason or context.reason)[:MAX_REASON_CHARS],
        targets=tuple(context.ids.get(target, target) for target in targets[:MAX_TARGETS]),
        selection=dict(context.selection),
        origin=f"{socket.gethostname()}:{os.getpid()}"[:MAX_NAME_CHARS],
    )


def current_user() -> str:
    """Return ``ERGON_ACTOR``, or the name of the system's user, or its number if it has no name."""
    try:
        return os.environ.get("ERGON_ACTOR") or getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container may have a user without a name
        return f"uid {os.getuid()}"
