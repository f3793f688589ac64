"""Check: one rule of a conformance suite, and CheckResult: its result."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from ergon_framework.connectors.base import Capabilities
from ergon_framework.errors import ErgonError, error_message
from ergon_framework.testing.conformance.candidate import ConnectorUnderTest

#: A lease that is longer than every check.
LONG: Final = 60.0
#: A lease whose end a check waits for.
SHORT: Final = 0.5

#: Returns why a check does not apply, or an empty string.
Need: TypeAlias = Callable[[ConnectorUnderTest, Capabilities], str]
#: Runs the check; the argument is the check context of its suite.
Run: TypeAlias = Callable[[Any], Awaitable[None]]


class CheckFailed(ErgonError, AssertionError):
    """The system under test violates the contract."""

    final = True
    code = "exam_failed"


class NotApplicable(ErgonError):
    """A check requires a feature that is missing, which was detected only while it ran."""

    final = True
    code = "exam_not_applicable"


def expect(holds: object, words: str) -> None:
    """Raise CheckFailed with *message* unless *condition* holds."""
    if not holds:
        raise CheckFailed(words)


@dataclass(frozen=True, slots=True)
class Check:
    """One rule: its name, its requirement ids, its preconditions, and the coroutine that checks it.

    ``lease`` is the lease of claims in its queue; None stands for the ``outage_lease`` of the system under test.
    """

    name: str
    ids: tuple[str, ...]
    needs: tuple[Need, ...]
    run: Run
    lease: float | None = LONG

    def applies(self, candidate: ConnectorUnderTest, capabilities: Capabilities) -> str:
        """Return why the check does not apply to *system*, or an empty string."""
        return next((reason for need in self.needs if (reason := need(candidate, capabilities))), "")


class Result(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check in one variant, with the reason."""

    check: str
    variant: str
    result: Result
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.check} ({self.variant}): {self.result}" + (f": {self.reason}" if self.reason else "")


def format_failure(error: Exception) -> str:
    """Describe a failure; for an unexpected exception also where it was raised."""
    if isinstance(error, CheckFailed):
        return error_message(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error_message(error)} ({last.filename}:{last.lineno} in {last.name})"


def check(*ids: str, needs: tuple[Need, ...] = (), lease: float = LONG) -> Callable[[Run], Check]:
    """Make a check from a coroutine function; its name becomes the name of the rule."""

    def make(run: Run) -> Check:
        return Check(run.__name__, ids, needs, run, lease)

    return make


# -- preconditions --------------------------------------------------------------------------------


def queue_mode(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.mode == "queue" else "mode is 'log'"


def log_mode(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.mode == "log" else "mode is 'queue'"


def leased(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.lease is not None else "lease is None: claims do not end by themselves"


def renewable(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.renewable else "renewable is False"


def free_release(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.release_uncounted else "release_uncounted is False"


def delays(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.delays else "delays is False"


def dead_letters(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.dead_letters else "dead_letters is False"


def ordered(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.ordered_by_key else "ordered_by_key is False"


def prioritised(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.priority else "priority is False"


def limited(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.max_payload is not None else "max_payload is None"


def repeatable(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "deduplicates_ids is True: an id cannot be dispatched again" if capabilities.deduplicates_ids else ""


def encoded(candidate: ConnectorUnderTest, _: Capabilities) -> str:
    return "" if candidate.encodes else "the candidate says that nothing is encoded"


def foreign(candidate: ConnectorUnderTest, _: Capabilities) -> str:
    return "" if candidate.receives else "the candidate offers no way to put foreign messages in"


def faulty(fault: str) -> Need:
    def need(candidate: ConnectorUnderTest, _: Capabilities) -> str:
        if candidate.server is None:
            return "the candidate has no server that the exam may touch"
        return "" if fault in candidate.faults else f"the candidate's server has no {fault!r}"

    return need
