"""Check: one question of the exam, and Mark: what came of it."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from ergon_framework.connectors.base import Capabilities
from ergon_framework.errors import ErgonError, text
from ergon_framework.testing.conformance.candidate import Candidate

#: A lease that no check outlasts.
LONG: Final = 60.0
#: A lease whose end a check waits for.
SHORT: Final = 0.5

#: Says why a check does not apply, or nothing.
Need: TypeAlias = Callable[[Candidate, Capabilities], str]
#: Tries it; what it is given is the sitting of its exam.
Run: TypeAlias = Callable[[Any], Awaitable[None]]


class Failed(ErgonError, AssertionError):
    """The connector does not do what the contract says."""

    final = True
    code = "exam_failed"


class NotApplicable(ErgonError):
    """A check found only while it ran that it asks for something which is not there."""

    final = True
    code = "exam_not_applicable"


def expect(holds: object, words: str) -> None:
    """Fail with *words* unless *holds*."""
    if not holds:
        raise Failed(words)


@dataclass(frozen=True, slots=True)
class Check:
    """One rule: its name, the requirements it belongs to, when it applies, and how it is tried.

    ``lease`` is the length of the claims in its queue; without one it is the candidate's ``outage_lease``.
    """

    name: str
    ids: tuple[str, ...]
    needs: tuple[Need, ...]
    run: Run
    lease: float | None = LONG

    def applies(self, candidate: Candidate, capabilities: Capabilities) -> str:
        """Why it does not apply to *candidate*; empty when it does."""
        return next((reason for need in self.needs if (reason := need(candidate, capabilities))), "")


class Result(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Mark:
    """What came of one check in one variant, and why."""

    check: str
    variant: str
    result: Result
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.check} ({self.variant}): {self.result}" + (f": {self.reason}" if self.reason else "")


def told(error: Exception) -> str:
    """What failed; for what is no failure of a check, where it came from too."""
    if isinstance(error, Failed):
        return text(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text(error)} ({last.filename}:{last.lineno} in {last.name})"


def rule(*ids: str, needs: tuple[Need, ...] = (), lease: float = LONG) -> Callable[[Run], Check]:
    """Make a check of a coroutine function; its name is the rule."""

    def make(run: Run) -> Check:
        return Check(run.__name__, ids, needs, run, lease)

    return make


# -- what a check may need ------------------------------------------------------------------------


def queue_mode(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.mode == "queue" else "mode is 'log'"


def log_mode(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.mode == "log" else "mode is 'queue'"


def leased(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.lease is not None else "lease is None: claims do not end by themselves"


def renewable(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.renewable else "renewable is False"


def free_release(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.release_is_free else "release_is_free is False"


def delays(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.delays else "delays is False"


def dead_letters(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.dead_letters else "dead_letters is False"


def ordered(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.ordered_by_key else "ordered_by_key is False"


def prioritised(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.priority else "priority is False"


def limited(_: Candidate, capabilities: Capabilities) -> str:
    return "" if capabilities.max_payload is not None else "max_payload is None"


def repeatable(_: Candidate, capabilities: Capabilities) -> str:
    return "once_per_id is True: an id cannot be dispatched again" if capabilities.once_per_id else ""


def encoded(candidate: Candidate, _: Capabilities) -> str:
    return "" if candidate.encodes else "the candidate says that nothing is encoded"


def foreign(candidate: Candidate, _: Capabilities) -> str:
    return "" if candidate.receives else "the candidate offers no way to put foreign messages in"


def faulty(fault: str) -> Need:
    def need(candidate: Candidate, _: Capabilities) -> str:
        if candidate.server is None:
            return "the candidate has no server that the exam may touch"
        return "" if fault in candidate.faults else f"the candidate's server has no {fault!r}"

    return need
