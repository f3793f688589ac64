"""Planned faults: which call of which step fails, so that a test plans it in one line."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, TypeAlias, TypeVar

from ergon_framework.errors import Category, ConnectionLostError
from ergon_framework.task.exceptions import TransactionException

T = TypeVar("T")

#: None plans no fault; a callable is called at its turn, and the error that it returns is raised, None is ignored.
Fault: TypeAlias = Callable[[], BaseException | None] | None

#: Step of each method of a task or connector.
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
    """Create a business error: the work is impossible."""
    return TransactionException("planned", Category.BUSINESS)


def system() -> BaseException:
    """Create a system error: the infrastructure failed."""
    return TransactionException("planned", Category.SYSTEM)


def timeout() -> BaseException:
    """Create a timeout error: a called service took too long."""
    return TransactionException("planned", Category.TIMEOUT)


def connection_lost() -> BaseException:
    """Create a connection error: the connection to the broker is lost."""
    return ConnectionLostError("planned")


class Faults:
    """Raises fault n of a step's list at call n of that step; later calls have no fault.

    ``calls`` counts the calls per step, ``steps`` has their order.
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

    def raise_next(self, step: str) -> None:
        """Count a call of *step*, and raise the fault planned for it."""
        with self._lock:
            number = self.calls[step]
            self.calls[step] += 1
            self.steps.append(step)
        planned = self._faults.get(step, ())
        fault = planned[number] if number < len(planned) else None
        error = None if fault is None else fault()
        if error is not None:
            raise error

    def patch(self, target: T) -> T:
        """Wrap every step of *target*, a task or a connector, to raise its faults first; changes *target* in place."""
        for method, step in STEPS.items():
            inner = getattr(target, method, None)
            if inner is not None:
                setattr(target, method, self._faulty(inner, step))
        return target

    def _faulty(self, inner: Callable[..., Any], step: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(inner):

            @wraps(inner)
            async def faulty_async(*args: Any, **kwargs: Any) -> Any:
                self.raise_next(step)
                return await inner(*args, **kwargs)

            return faulty_async

        @wraps(inner)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            self.raise_next(step)
            return inner(*args, **kwargs)

        return faulty
