"""Conformance suite of boundary stores, for every store of facts and artifacts, sync and async.

In a program ``run_suite(system)`` returns the results; in a test file one line creates a test per check::

    test_my_store = pytest_suite(MyStoreUnderTest)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from ergon_framework.testing.conformance import appending, objects, owners, reading
from ergon_framework.testing.conformance.boundary_candidate import BoundaryUnderTest
from ergon_framework.testing.conformance.boundary_client import BoundaryCheckContext, BoundaryClient
from ergon_framework.testing.conformance.check import (
    Check,
    CheckFailed,
    CheckResult,
    NotApplicable,
    Result,
    check,
    expect,
)
from ergon_framework.testing.conformance.client import VARIANTS, Variant
from ergon_framework.testing.conformance.marking import make_pytest_suite, run_check_in_context

__all__ = [
    "CHECKS",
    "VARIANTS",
    "BoundaryCheckContext",
    "BoundaryClient",
    "BoundaryUnderTest",
    "Check",
    "CheckFailed",
    "CheckResult",
    "NotApplicable",
    "Result",
    "check",
    "exam",
    "expect",
    "mark",
    "take",
]

#: Every check, in the order of execution.
CHECKS: Final[tuple[Check, ...]] = tuple(
    value for part in (appending, reading, objects, owners) for value in vars(part).values() if isinstance(value, Check)
)


def take(
    candidate: BoundaryUnderTest, *, variant: Variant = "sync", only: Collection[str] | None = None
) -> list[CheckResult]:
    """Run all checks, or only the checks with these names; must not be called on an event loop."""
    unknown = set(only or ()) - {check.name for check in CHECKS}
    if unknown:
        raise ValueError(f"there is no check called {min(unknown)!r}; CHECKS lists them")
    return [mark(check, candidate, variant) for check in CHECKS if only is None or check.name in only]


def mark(check: Check, candidate: BoundaryUnderTest, variant: Variant) -> CheckResult:
    """Run one check on *system*."""
    return run_check_in_context(check, BoundaryCheckContext(candidate, variant), variant)


def exam(
    candidate: Callable[[], BoundaryUnderTest] | str,
    *,
    variants: Sequence[Variant] = VARIANTS,
    checks: Iterable[Check] = CHECKS,
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """Create a pytest test function: one test per check and variant, each with a new system under test.

    *system* creates it, or is the name of a fixture. *marks* returns the pytest marks of a check. A check that
    does not apply passes and reports the reason.
    """
    return make_pytest_suite(candidate, mark, variants=variants, checks=checks, marks=marks)
