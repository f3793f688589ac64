"""The execution scope: what anything below a handler may know about the work it is part of."""

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

    ``deadline`` is in seconds of ``clock`` (monotonic); None means that nothing limits the
    attempt. ``cancelled`` turns true when the engine no longer waits for this attempt: whatever
    it still does is not counted, so long loops should look at it and leave.
    """

    __slots__ = ("_cancelled", "_names", "_parent", "attempt", "clock", "deadline", "step", "transaction")

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
        # One attempt is one set of names, however often its deadline is shortened.
        self._names: dict[str, object] = {} if parent is None else parent._names  # noqa: SLF001 - its own kind

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
        """The engine's word that nobody waits for this attempt any more."""
        self._cancelled = True

    def remaining(self) -> float | None:
        """Seconds left, never below 0; None where nothing limits the attempt."""
        return None if self.deadline is None else max(0.0, self.deadline - self.clock())

    def derive(self, name: str) -> str:
        """The id of the effect called *name*; asking twice within one attempt is an error.

        Two effects with one id would be taken for one: the second would silently repeat the
        first instead of happening.
        """
        mine = object()
        # One step, not a look and then a write: a handler may have threads of its own.
        if self._names.setdefault(name, mine) is not mine:
            raise ConfigurationError(
                f"a second effect named {name!r} in one attempt of transaction {self.transaction.id!r} would be "
                "taken for the first; give each its own name="
            )
        return self.transaction.derive(name)


def current() -> Scope | None:
    """The scope of the attempt that is running here, if any."""
    return _current.get()


#: Makes a scope the current one for the rest of this context; the variable's own method, because every attempt enters.
enter: Final[Callable[[Scope | None], object]] = _current.set


@contextmanager
def shorten(seconds: float) -> Iterator[Scope]:
    """A scope whose deadline is at most *seconds* away; a longer one cannot be had."""
    if not seconds >= 0:  # also refuses NaN, which no clock ever reaches
        raise ValueError(f"a scope can be shortened to a number of seconds >= 0, not {seconds!r}")
    outer = _current.get()
    if outer is None:
        raise ConfigurationError("there is no scope to shorten: this code does not run below a handler")
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
