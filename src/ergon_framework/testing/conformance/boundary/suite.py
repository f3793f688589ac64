"""Conformance suite of boundary stores, for every store of facts and artifacts, sync and async.

A boundary store keeps the facts that one zone, a site, sends to another, and the files (artifacts) that they name.
In a program ``run_suite(system)`` returns the results; in a test file one line creates a test per check::

    test_my_store = pytest_suite(MyStoreUnderTest)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from ergon_framework.testing.conformance.boundary import check_append, check_artifacts, check_readers
from ergon_framework.testing.conformance.boundary.client import (
    BoundaryCheckClient,
    BoundaryCheckContext,
    BoundaryUnderTest,
)
from ergon_framework.testing.conformance.check import (
    Check,
    CheckFailed,
    CheckOutcome,
    CheckResult,
    NotApplicable,
    check,
    expect,
)
from ergon_framework.testing.conformance.connector.client import VARIANTS, Variant
from ergon_framework.testing.conformance.runner import make_pytest_suite, run_check_in_context

__all__ = [
    "CHECKS",
    "VARIANTS",
    "BoundaryCheckClient",
    "BoundaryCheckContext",
    "BoundaryUnderTest",
    "Check",
    "CheckFailed",
    "CheckOutcome",
    "CheckResult",
    "NotApplicable",
    "check",
    "expect",
    "pytest_suite",
    "run_check",
    "run_suite",
]

#: Every check, in the order of execution.
CHECKS: Final[tuple[Check, ...]] = tuple(
    value
    for part in (check_append, check_readers, check_artifacts)
    for value in vars(part).values()
    if isinstance(value, Check)
)


def run_suite(
    system: BoundaryUnderTest, *, variant: Variant = "sync", only: Collection[str] | None = None
) -> list[CheckResult]:
    """Run all checks, or only the checks with these names; must not be called on an event loop."""
    unknown = set(only or ()) - {check.name for check in CHECKS}
    if unknown:
        raise ValueError(f"there is no check called {min(unknown)!r}; CHECKS lists them")
    return [run_check(check, system, variant) for check in CHECKS if only is None or check.name in only]


def run_check(check: Check, system: BoundaryUnderTest, variant: Variant) -> CheckResult:
    """Run one check on *system*."""
    return run_check_in_context(check, BoundaryCheckContext(system, variant), variant)


def pytest_suite(
    system: Callable[[], BoundaryUnderTest] | str,
    *,
    variants: Sequence[Variant] = VARIANTS,
    checks: Iterable[Check] = CHECKS,
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """Create a pytest test function: one test per check and variant, each with a new system under test.

    *system* creates it, or is the name of a fixture. *marks* returns the pytest marks of a check. A check that
    does not apply passes and reports the reason.
    """
    return make_pytest_suite(system, run_check, variants=variants, checks=checks, marks=marks)
