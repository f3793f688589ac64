"""Planned faults for tests of tasks: a test plans in one line which call fails.

A place is a kind of call that can fail: a step of the framework such as ``fetch`` or ``process``, or a method of a
service such as ``bank.charge``. The test harness raises the faults of a plan, which maps places and call numbers to
faults. ``Faults``, in the second part, is separate from such plans: it patches a task or a connector directly, and
raises a list of errors for each step, which may also be ``produce``.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import wraps
from typing import Any, Final, TypeAlias, TypeVar

from ergon_framework.errors import Category, ConfigurationError, ConnectionLostError
from ergon_framework.worker.exceptions import TransactionException

#: Virtual seconds of a hanging call: longer than any configured timeout and any lease.
HANG_SECONDS: Final = 86_400.0

#: Places of the framework, in the order in which a transaction passes them.
PLACES: Final = ("fetch", "process", "success", "exception", "dispatch", "settle", "extend")


class FaultKind(StrEnum):
    """Kinds of faults of one call."""

    RAISES = "raises"
    LOSES_RESPONSE = "loses_response"
    TAKES_LONGER = "takes_longer"
    HANGS = "hangs"
    RETURNS = "returns"
    WORKER_DIES_BEFORE = "worker_dies_before"
    WORKER_DIES_AFTER = "worker_dies_after"


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault, created by the functions below."""

    kind: FaultKind
    error: BaseException | None = None
    seconds: float = 0.0
    value: Any = None

    def __str__(self) -> str:
        """Return the expression that creates the fault in a test; it leaves out the error of ``loses_response``."""
        arguments = {
            FaultKind.RAISES: repr(self.error),
            FaultKind.TAKES_LONGER: f"{self.seconds:g}",
            FaultKind.RETURNS: repr(self.value),
        }
        return f"{self.kind}({arguments.get(self.kind, '')})"


def raises(error: BaseException) -> Fault:
    """Raise *error* instead of making the call."""
    return Fault(FaultKind.RAISES, error=error)


def loses_response(error: BaseException | None = None) -> Fault:
    """Make the call and lose its response: raise *error* after it, by default ConnectionLostError."""
    return Fault(FaultKind.LOSES_RESPONSE, error=error or ConnectionLostError("planned: the response was lost"))


def takes_longer(seconds: float) -> Fault:
    """Add *seconds* of virtual time to the duration of the call."""
    if not 0 <= seconds <= HANG_SECONDS:
        raise ConfigurationError(f"seconds must be from 0 to {HANG_SECONDS:g}, got {seconds!r}; use hangs() for more")
    return Fault(FaultKind.TAKES_LONGER, seconds=seconds)


def hangs() -> Fault:
    """Delay the call's return by a day, so that its caller times out."""
    return Fault(FaultKind.HANGS, seconds=HANG_SECONDS)


def returns(value: Any) -> Fault:
    """Return *value* without making the call, for services that a test cannot call."""
    return Fault(FaultKind.RETURNS, value=value)


def worker_dies_before() -> Fault:
    """Kill the worker before the call; another worker starts."""
    return Fault(FaultKind.WORKER_DIES_BEFORE)


def worker_dies_after() -> Fault:
    """Make the call and kill the worker before its result is received; another worker starts."""
    return Fault(FaultKind.WORKER_DIES_AFTER)


#: For each place the fault of call n, counted from 0; or one fault for every call.
Plan: TypeAlias = Mapping[str, Mapping[int, Fault] | Fault]


def check_plan(plan: Plan, watched: Mapping[str, Any]) -> None:
    """Reject a plan with an unknown place or a negative call number; *watched* has the services and objects by name."""
    for place, planned in plan.items():
        _check_place(place, watched)
        if isinstance(planned, Fault):
            continue
        for number, fault in planned.items():
            if number < 0 or not isinstance(fault, Fault):
                raise ConfigurationError(
                    f"invalid fault plan for {place!r}: call {number!r} has {fault!r}; calls count from 0; faults are "
                    "raises(), loses_response(), takes_longer(), hangs(), returns(), worker_dies_before() and "
                    "worker_dies_after()"
                )


def _check_place(place: str, watched: Mapping[str, Any]) -> None:
    """Reject a place that is neither a step of the framework nor a watched service or one of its methods."""
    if place in PLACES or (place in watched and inspect.isroutine(watched[place])):
        return
    name, dot, method = place.partition(".")
    if not dot or name not in watched:
        places = ", ".join(
            [
                *PLACES,
                *(
                    watched_name if inspect.isroutine(target) else f"{watched_name}.METHOD"
                    for watched_name, target in watched.items()
                ),
            ]
        )
        hint = f"; pass {name!r} to the harness as a service, {name}=…, or in watch=" if dot else ""
        raise ConfigurationError(f"unknown place {place!r}: known places are {places}{hint}")
    methods = list_methods(watched[name])
    if method not in methods:
        close_matches = get_close_matches(method, methods, n=1)
        hint = (
            f"did you mean {close_matches[0]!r}?"
            if close_matches
            else f"it has {', '.join(methods) or 'no public method'}"
        )
        raise ConfigurationError(f"{name!r} has no public method {method!r} to plan a fault for; {hint}")


def list_methods(target: Any) -> list[str]:
    """Return the public methods of an object that can be wrapped, to count their calls and to raise faults.

    Empty if the object has no instance attributes, because the wrappers replace the methods there.
    """
    if inspect.isroutine(target) or inspect.isclass(target) or not hasattr(target, "__dict__"):
        return []
    target_class = type(target)
    return [
        name
        for name in dir(target_class)
        if not name.startswith("_") and inspect.isroutine(getattr(target_class, name))
    ]


def format_plan(plan: Plan) -> str:
    """Format *plan* as the source code of a test."""
    lines = []
    for place, planned in plan.items():
        entry = (
            str(planned)
            if isinstance(planned, Fault)
            else "{" + ", ".join(f"{number}: {fault}" for number, fault in sorted(planned.items())) + "}"
        )
        lines.append(f"    {place!r}: {entry},\n")
    return "{\n" + "".join(lines) + "}" if lines else "{}"


# -- faults of a patched task or connector ----------------------------------------------------------

T = TypeVar("T")

#: None plans no fault; a callable is called at its turn, and the error that it returns is raised, None is ignored.
FaultFactory: TypeAlias = Callable[[], BaseException | None] | None

#: Step of each method of a task or connector.
STEPS_BY_METHOD: Final = {
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

    def __init__(self, faults: Mapping[str, Sequence[FaultFactory]]) -> None:
        unknown = set(faults) - set(STEPS_BY_METHOD.values())
        if unknown:
            step_names = ", ".join(sorted(set(STEPS_BY_METHOD.values())))
            raise ValueError(f"unknown step {min(unknown)!r}: valid steps are {step_names}")
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
        for method, step in STEPS_BY_METHOD.items():
            inner = getattr(target, method, None)
            if inner is not None:
                setattr(target, method, self._wrap(inner, step))
        return target

    def _wrap(self, inner: Callable[..., Any], step: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(inner):

            @wraps(inner)
            async def wrapper_async(*args: Any, **kwargs: Any) -> Any:
                self.raise_next(step)
                return await inner(*args, **kwargs)

            return wrapper_async

        @wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.raise_next(step)
            return inner(*args, **kwargs)

        return wrapper
