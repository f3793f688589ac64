"""The execution scope: the attempt that code inside a handler is part of, with its deadline and its effect names.

An attempt is one call of a handler for one step of a transaction. An effect is a side effect of the handler, such as a
payment; its id is derived from the transaction and its name, so that a second run of the handler uses the same id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from ergon_framework.errors import ConfigurationError

if TYPE_CHECKING:
    from ergon_framework.transaction import Transaction

_current: ContextVar[Scope | None] = ContextVar("ergon_scope", default=None)


class Scope:
    """One attempt at one step of one transaction.

    ``deadline`` is in seconds of ``clock`` (monotonic); None means that nothing limits the attempt. ``cancelled``
    becomes true when the engine no longer waits for this attempt: its result is discarded from then on, so long
    loops should check it and exit.
    """

    __slots__ = ("_cancelled", "_parent", "_used_names", "attempt", "clock", "deadline", "step", "transaction")

    def __init__(  # noqa: PLR0917 - keywords cost more, and one is made for every attempt
        self,
        transaction: Transaction,
        step: str,
        attempt: int,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        parent: Scope | None = None,
    ) -> None:
        self.transaction = transaction
        self.step = step
        self.attempt = attempt
        self.deadline = deadline
        self.clock = clock
        self._parent = parent
        self._cancelled = False
        # All scopes of one attempt share one set of names, however often its deadline is shortened.
        self._used_names: dict[str, object] = {} if parent is None else parent._used_names  # noqa: SLF001 - the same class

    @property
    def transaction_id(self) -> str:
        return self.transaction.id

    @property
    def correlation(self) -> str:
        return self.transaction.correlation or self.transaction.id

    @property
    def tenant(self) -> str | None:
        return self.transaction.tenant

    @property
    def cancelled(self) -> bool:
        return self._cancelled or (self._parent is not None and self._parent.cancelled)

    def cancel(self) -> None:
        """Record that the engine no longer waits for this attempt."""
        self._cancelled = True

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, never below 0; None if nothing limits the attempt."""
        return None if self.deadline is None else max(0.0, self.deadline - self.clock())

    def derive(self, name: str) -> str:
        """Return the id of the effect called *name*; a second call with the same name in one attempt is an error.

        Two effects with one id would count as one: the second would silently repeat the first instead of happening.
        """
        marker = object()
        # One atomic operation, not a check and a write: a handler may use several threads.
        if self._used_names.setdefault(name, marker) is not marker:
            raise ConfigurationError(
                f"effect name {name!r} is used twice in one attempt of transaction {self.transaction.id!r}: "
                "the second would be ignored as a repetition; pass a different name= for each"
            )
        return self.transaction.derive(name)


def current() -> Scope | None:
    """Return the scope of the attempt that runs in this context, or None."""
    return _current.get()


#: Makes a scope the current one of this context; the variable's own method, because every attempt calls it.
set_scope: Final[Callable[[Scope | None], object]] = _current.set


@contextmanager
def deadline_within(seconds: float) -> Iterator[Scope]:
    """Enter a scope whose deadline is at most *seconds* away; the current deadline is never extended."""
    if not seconds >= 0:  # also rejects NaN, which no clock ever reaches
        raise ValueError(f"seconds must be >= 0, got {seconds!r}")
    outer = _current.get()
    if outer is None:
        raise ConfigurationError("there is no scope to shorten: this code does not run inside a handler")
    due = outer.clock() + seconds
    inner = Scope(
        outer.transaction,
        step=outer.step,
        attempt=outer.attempt,
        deadline=due if outer.deadline is None else min(due, outer.deadline),
        clock=outer.clock,
        parent=outer,
    )
    token = _current.set(inner)
    try:
        yield inner
    finally:
        _current.reset(token)
