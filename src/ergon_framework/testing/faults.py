"""Faults by plan: what goes wrong at which call of which step, so that a test says it in one line."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, TypeAlias, TypeVar

from ergon_framework.errors import Category, ConnectionLost
from ergon_framework.task.exceptions import TransactionException

T = TypeVar("T")

#: None is "all is well"; anything else is called at its turn, raises what it makes, and goes on if it made nothing.
Fault: TypeAlias = Callable[[], BaseException | None] | None

#: Method of a task or connector -> the step it belongs to.
STEPS: Final = {
    "process_transaction": "process",
    "handle_transaction_success": "success",
    "handle_transaction_exception": "exception",
    "produce_transaction": "produce",
    "handle_produce_success": "success",
    "handle_produce_exception": "exception",
    "fetch_transactions": "fetch",
    "fetch_transactions_async": "fetch",
    "settle": "settle",
    "settle_async": "settle",
    "extend": "extend",
    "extend_async": "extend",
    "dispatch": "dispatch",
    "dispatch_async": "dispatch",
}


def business() -> BaseException:
    """The work is impossible."""
    return TransactionException("planned", Category.BUSINESS)


def system() -> BaseException:
    """The machinery broke."""
    return TransactionException("planned", Category.SYSTEM)


def timeout() -> BaseException:
    """Something below took too long."""
    return TransactionException("planned", Category.TIMEOUT)


def lost() -> BaseException:
    """The line to the broker is down."""
    return ConnectionLost("planned")


class Faults:
    """Call n of a step meets fault n of that step's list; beyond the list all is well.

    ``calls`` counts what was called, ``steps`` keeps the order.
    """

    def __init__(self, faults: Mapping[str, Sequence[Fault]]) -> None:
        unknown = set(faults) - set(STEPS.values())
        if unknown:
            known = ", ".join(sorted(set(STEPS.values())))
            raise ValueError(f"no step is called {min(unknown)!r}; known are {known}")
        self._faults = {step: tuple(planned) for step, planned in faults.items()}
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.steps: list[str] = []

    def meet(self, step: str) -> None:
        """Count a call of *step*, and raise what is planned for it."""
        with self._lock:
            number = self.calls[step]
            self.calls[step] += 1
            self.steps.append(step)
        planned = self._faults.get(step, ())
        fault = planned[number] if number < len(planned) else None
        error = None if fault is None else fault()
        if error is not None:
            raise error

    def plague(self, target: T) -> T:
        """Have every step of *target*, a task or a connector, meet its faults first; *target* itself is changed."""
        for method, step in STEPS.items():
            inner = getattr(target, method, None)
            if inner is not None:
                setattr(target, method, self._faulty(inner, step))
        return target

    def _faulty(self, inner: Callable[..., Any], step: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(inner):

            @wraps(inner)
            async def faulty_async(*args: Any, **kwargs: Any) -> Any:
                self.meet(step)
                return await inner(*args, **kwargs)

            return faulty_async

        @wraps(inner)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            self.meet(step)
            return inner(*args, **kwargs)

        return faulty
