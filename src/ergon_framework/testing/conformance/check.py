"""Check: one rule of a conformance suite, and CheckResult: its result.

A precondition of a check is a capability that the system under test must have, for example delayed redelivery. A claim
is a client's exclusive right to a fetched message; a claim with a lease expires unless it is renewed. A variant is the
sync or the async form of the interface under test.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from ergon_framework.connectors.base import Capabilities
from ergon_framework.errors import ErgonError, error_message
from ergon_framework.testing.conformance.connector.adapter import ConnectorUnderTest

#: A lease that is longer than every check.
LONG_LEASE_SECONDS: Final = 60.0
#: A lease whose end a check waits for.
SHORT_LEASE_SECONDS: Final = 0.5

#: Returns why a check does not apply, or an empty string.
Precondition: TypeAlias = Callable[[ConnectorUnderTest, Capabilities], str]
#: Runs the check; the argument is the check context of its suite.
CheckFunction: TypeAlias = Callable[[Any], Awaitable[None]]


class CheckFailed(ErgonError, AssertionError):
    """The system under test violates the contract."""

    final = True
    code = "conformance_check_failed"


class NotApplicable(ErgonError):
    """A check requires a feature that is missing, which was detected only while it ran."""

    final = True
    code = "conformance_check_not_applicable"


def expect(condition: object, message: str) -> None:
    """Raise CheckFailed with *message* unless *condition* holds."""
    if not condition:
        raise CheckFailed(message)


@dataclass(frozen=True, slots=True)
class Check:
    """One rule: its name, its requirement ids, its preconditions, and the coroutine that checks it.

    ``lease`` is the lease of claims in its queue; None stands for the ``outage_lease`` of the system under test.
    """

    name: str
    ids: tuple[str, ...]
    needs: tuple[Precondition, ...]
    run: CheckFunction
    lease: float | None = LONG_LEASE_SECONDS

    def get_skip_reason(self, system: ConnectorUnderTest, capabilities: Capabilities) -> str:
        """Return why the check does not apply to *system*, or an empty string."""
        return next((reason for need in self.needs if (reason := need(system, capabilities))), "")


class CheckOutcome(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check in one variant, with the reason."""

    check: str
    variant: str
    result: CheckOutcome
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.check} ({self.variant}): {self.result}" + (f": {self.reason}" if self.reason else "")


def format_failure(error: Exception) -> str:
    """Describe a failure; for an unexpected exception also where it was raised."""
    if isinstance(error, CheckFailed):
        return error_message(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error_message(error)} ({frame.filename}:{frame.lineno} in {frame.name})"


def check(
    *rule_ids: str, needs: tuple[Precondition, ...] = (), lease: float = LONG_LEASE_SECONDS
) -> Callable[[CheckFunction], Check]:
    """Make a check from a coroutine function; its name becomes the name of the rule."""

    def decorate(run: CheckFunction) -> Check:
        return Check(run.__name__, rule_ids, needs, run, lease)

    return decorate


# -- preconditions --------------------------------------------------------------------------------


def require_queue_mode(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.mode == "queue" else "mode is 'log'"


def require_log_mode(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.mode == "log" else "mode is 'queue'"


def require_leases(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.lease is not None else "lease is None: claims do not expire"


def require_renewal(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.renewable else "renewable is False"


def require_uncounted_release(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.release_uncounted else "release_uncounted is False"


def require_delays(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.delays else "delays is False"


def require_dead_letters(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.dead_letters else "dead_letters is False"


def require_key_order(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.ordered_by_key else "ordered_by_key is False"


def require_priority(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.priority else "priority is False"


def require_payload_limit(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "" if capabilities.max_payload is not None else "max_payload is None"


def require_repeatable_ids(_: ConnectorUnderTest, capabilities: Capabilities) -> str:
    return "deduplicates_ids is True: an id cannot be dispatched again" if capabilities.deduplicates_ids else ""


def require_encoding(system: ConnectorUnderTest, _: Capabilities) -> str:
    return "" if system.encodes else "the system under test encodes nothing"


def require_external_messages(system: ConnectorUnderTest, _: Capabilities) -> str:
    return "" if system.receives else "the system under test cannot receive third-party messages"


def require_server_fault(fault: str) -> Precondition:
    def precondition(system: ConnectorUnderTest, _: Capabilities) -> str:
        if system.server is None:
            return "the system under test has no server that the suite may stop"
        return "" if fault in system.faults else f"the server of the system under test does not support {fault!r}"

    return precondition
