"""Faults for tests of a task: what fails at which call of which place; the test harness raises them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Final, TypeAlias

from ergon_framework.errors import ConfigurationError, ConnectionLostError

#: Virtual seconds of a hanging call: longer than any configured timeout and any lease.
HUNG: Final = 86_400.0

#: Places of the framework, in the order in which a transaction passes them.
PLACES: Final = ("fetch", "process", "success", "exception", "dispatch", "settle", "extend")


class Kind(StrEnum):
    """Kinds of faults of one call."""

    RAISES = "raises"
    LOSES = "loses_response"
    TAKES = "takes_longer"
    HANGS = "hangs"
    ANSWERS = "returns"
    DIES = "worker_dies_before"
    DIES_AFTER = "worker_dies_after"


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault, created by the functions below."""

    kind: Kind
    error: BaseException | None = None
    seconds: float = 0.0
    value: Any = None

    def __str__(self) -> str:
        """Return the expression that creates the fault in a test."""
        given = {
            Kind.RAISES: repr(self.error),
            Kind.TAKES: f"{self.seconds:g}",
            Kind.ANSWERS: repr(self.value),
        }
        return f"{self.kind}({given.get(self.kind, '')})"


def raises(error: BaseException) -> Fault:
    """Raise *error* instead of making the call."""
    return Fault(Kind.RAISES, error=error)


def loses_response(error: BaseException | None = None) -> Fault:
    """Make the call and lose its response: raise *error* after it, by default ConnectionLostError."""
    return Fault(Kind.LOSES, error=error or ConnectionLostError("planned: the answer was lost"))


def takes_longer(seconds: float) -> Fault:
    """Add *seconds* of virtual time to the duration of the call."""
    if not 0 <= seconds <= HUNG:
        raise ConfigurationError(f"a call can take from 0 to {HUNG:g} seconds, not {seconds!r}; use hangs() for more")
    return Fault(Kind.TAKES, seconds=seconds)


def hangs() -> Fault:
    """Delay the call's return by a day, so that its caller times out."""
    return Fault(Kind.HANGS, seconds=HUNG)


def returns(value: Any) -> Fault:
    """Return *value* without making the call, for services that a test cannot call."""
    return Fault(Kind.ANSWERS, value=value)


def worker_dies_before() -> Fault:
    """Kill the worker before the call; another worker starts."""
    return Fault(Kind.DIES)


def worker_dies_after() -> Fault:
    """Make the call and kill the worker before its result is received; another worker starts."""
    return Fault(Kind.DIES_AFTER)


#: For each place the fault of call n, counted from 0; or one fault for every call.
Plan: TypeAlias = Mapping[str, Mapping[int, Fault] | Fault]


def check_plan(plan: Plan, known: Mapping[str, Any]) -> None:
    """Reject a plan with an unknown place or a negative call number; *watched* maps names to recorded objects."""
    for place, planned in plan.items():
        _check_place(place, known)
        if isinstance(planned, Fault):
            continue
        for number, mishap in planned.items():
            if number < 0 or not isinstance(mishap, Fault):
                raise ConfigurationError(
                    f"the plan for {place!r} says {number!r}: {mishap!r}; calls count from 0, and what happens to one "
                    "is made by raises(), loses_response(), takes_longer(), hangs(), returns(), worker_dies_before() "
                    "or worker_dies_after()"
                )


def _check_place(place: str, known: Mapping[str, Any]) -> None:
    if place in PLACES or (place in known and inspect.isroutine(known[place])):
        return
    name, dot, method = place.partition(".")
    if not dot or name not in known:
        places = ", ".join(
            [*PLACES, *(one if inspect.isroutine(given) else f"{one}.METHOD" for one, given in known.items())]
        )
        hint = f"; give the trial {name!r} as a service, {name}=…, or in watch=" if dot else ""
        raise ConfigurationError(f"nothing can go wrong at {place!r}; known places are {places}{hint}")
    there = methods_of(known[name])
    if method not in there:
        near = get_close_matches(method, there, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(there) or 'none that can be watched'}"
        raise ConfigurationError(f"{name!r} has no public method {method!r} that something could happen to; {hint}")


def methods_of(target: Any) -> list[str]:
    """Return the public methods that can be recorded on an object; empty if it has no instance attributes."""
    if inspect.isroutine(target) or inspect.isclass(target) or not hasattr(target, "__dict__"):
        return []
    kind = type(target)
    return [name for name in dir(kind) if not name.startswith("_") and inspect.isroutine(getattr(kind, name))]


def format_plan(plan: Plan) -> str:
    """Format *plan* as the source code of a test."""
    lines = []
    for place, planned in plan.items():
        inside = (
            str(planned)
            if isinstance(planned, Fault)
            else "{" + ", ".join(f"{number}: {mishap}" for number, mishap in sorted(planned.items())) + "}"
        )
        lines.append(f"    {place!r}: {inside},\n")
    return "{\n" + "".join(lines) + "}" if lines else "{}"
