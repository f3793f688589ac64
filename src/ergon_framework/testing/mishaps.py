"""Mishaps: what goes wrong at which call of which place, for tests of a task; ``trial`` has them happen."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Final, TypeAlias

from ergon_framework.errors import ConfigurationError, ConnectionLost

#: Virtual seconds that whatever hangs takes: longer than any limit of time that somebody would set, and no lease lasts.
HUNG: Final = 86_400.0

#: Places of the machinery, in the order in which a transaction comes by.
PLACES: Final = ("fetch", "process", "success", "exception", "dispatch", "settle", "extend")


class Kind(StrEnum):
    """What may go wrong with one call."""

    RAISES = "raises"
    LOSES = "loses"
    TAKES = "takes"
    HANGS = "hangs"
    ANSWERS = "answers"
    DIES = "dies"
    DIES_AFTER = "dies_after"


@dataclass(frozen=True, slots=True)
class Mishap:
    """One thing that goes wrong; the functions below make them."""

    kind: Kind
    error: BaseException | None = None
    seconds: float = 0.0
    value: Any = None

    def __str__(self) -> str:
        """As it is written in a test."""
        given = {
            Kind.RAISES: repr(self.error),
            Kind.TAKES: f"{self.seconds:g}",
            Kind.ANSWERS: repr(self.value),
        }
        return f"{self.kind}({given.get(self.kind, '')})"


def raises(error: BaseException) -> Mishap:
    """The call is not made; *error* is raised in its place."""
    return Mishap(Kind.RAISES, error=error)


def loses(error: BaseException | None = None) -> Mishap:
    """The call is carried out and its answer is lost: *error* is raised after it, ConnectionLost unless given."""
    return Mishap(Kind.LOSES, error=error or ConnectionLost("planned: the answer was lost"))


def takes(seconds: float) -> Mishap:
    """The call takes *seconds* of virtual time more."""
    if not 0 <= seconds <= HUNG:
        raise ConfigurationError(f"a call can take from 0 to {HUNG:g} seconds, not {seconds!r}; use hangs() for more")
    return Mishap(Kind.TAKES, seconds=seconds)


def hangs() -> Mishap:
    """The call does not come back for a day; what waits for it has to give up."""
    return Mishap(Kind.HANGS, seconds=HUNG)


def answers(value: Any) -> Mishap:
    """The call is not made, and *value* is its answer: for what a test cannot call."""
    return Mishap(Kind.ANSWERS, value=value)


def dies() -> Mishap:
    """The worker is gone before the call, as if it was killed; another one begins."""
    return Mishap(Kind.DIES)


def dies_after() -> Mishap:
    """The call is carried out, and the worker is gone before anybody hears of it; another one begins."""
    return Mishap(Kind.DIES_AFTER)


#: For each place the mishap of call n, counted from 0; or one mishap that happens to every call.
Plan: TypeAlias = Mapping[str, Mapping[int, Mishap] | Mishap]


def check_plan(plan: Plan, known: Mapping[str, Any]) -> None:
    """Refuse a plan for a place that there is not, or for a call before the first; *known* is what is watched."""
    for place, planned in plan.items():
        _check_place(place, known)
        if isinstance(planned, Mishap):
            continue
        for number, mishap in planned.items():
            if number < 0 or not isinstance(mishap, Mishap):
                raise ConfigurationError(
                    f"the plan for {place!r} says {number!r}: {mishap!r}; calls count from 0, and what happens to one "
                    "is made by raises(), loses(), takes(), hangs(), answers(), dies() or dies_after()"
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
    """The public methods of an object that can be watched on it: none where it has no attributes of its own."""
    if inspect.isroutine(target) or inspect.isclass(target) or not hasattr(target, "__dict__"):
        return []
    kind = type(target)
    return [name for name in dir(kind) if not name.startswith("_") and inspect.isroutine(getattr(kind, name))]


def written(plan: Plan) -> str:
    """*plan* as it is written in a test."""
    lines = []
    for place, planned in plan.items():
        inside = (
            str(planned)
            if isinstance(planned, Mishap)
            else "{" + ", ".join(f"{number}: {mishap}" for number, mishap in sorted(planned.items())) + "}"
        )
        lines.append(f"    {place!r}: {inside},\n")
    return "{\n" + "".join(lines) + "}" if lines else "{}"
