"""Conformance suite of content stores.

In a program ``run_suite(system)`` returns the results; in a test file one line creates a test per check::

    test_my_store = pytest_suite(MyContentStoreUnderTest)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from ergon_framework.testing.conformance import sealing, uploading
from ergon_framework.testing.conformance.check import Check, CheckResult, Result
from ergon_framework.testing.conformance.client import Variant
from ergon_framework.testing.conformance.contents_candidate import ContentCheckContext, ContentStoreUnderTest
from ergon_framework.testing.conformance.marking import make_pytest_suite, run_check_in_context

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "ContentCheckContext",
    "ContentStoreUnderTest",
    "Result",
    "exam",
    "mark",
    "take",
]

#: Every check, in the order of execution.
CHECKS: Final[tuple[Check, ...]] = tuple(
    value for part in (sealing, uploading) for value in vars(part).values() if isinstance(value, Check)
)


def take(candidate: ContentStoreUnderTest) -> list[CheckResult]:
    """Run all checks on *system*; must not be called on an event loop."""
    return [mark(check, candidate) for check in CHECKS]


def mark(check: Check, candidate: ContentStoreUnderTest, variant: Variant = "sync") -> CheckResult:
    """Run one check on *system*; there is one variant, because content stores block."""
    return run_check_in_context(check, ContentCheckContext(candidate), variant)


def exam(
    candidate: Callable[[], ContentStoreUnderTest] | str,
    *,
    checks: Iterable[Check] = CHECKS,
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """Create a pytest test function: one test per check, with a new system under test or the fixture of that name.

    *marks* returns the pytest marks of a check. A check that does not apply passes and reports the reason.
    """
    return make_pytest_suite(candidate, mark, variants=("sync",), checks=checks, marks=marks)
