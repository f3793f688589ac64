"""Conformance suite of connectors, sync and async.

In a program ``run_suite(system)`` returns the results; in a test file one line creates a test per check::

    test_my_connector = pytest_suite(MyConnectorUnderTest)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from ergon_framework.errors import error_message
from ergon_framework.testing.conformance import (
    burying,
    counting,
    dispatching,
    failing,
    fetching,
    leasing,
    looping,
    measuring,
    messages,
    settling,
)
from ergon_framework.testing.conformance.candidate import ConnectorUnderTest, Outbox, Server
from ergon_framework.testing.conformance.check import (
    Check,
    CheckFailed,
    CheckResult,
    NotApplicable,
    Result,
    check,
    expect,
    format_failure,
)
from ergon_framework.testing.conformance.client import VARIANTS, Variant
from ergon_framework.testing.conformance.marking import make_pytest_suite
from ergon_framework.testing.conformance.sitting import CheckContext

__all__ = [
    "CHECKS",
    "VARIANTS",
    "Check",
    "CheckContext",
    "CheckFailed",
    "CheckResult",
    "ConnectorUnderTest",
    "NotApplicable",
    "Outbox",
    "Result",
    "Server",
    "Variant",
    "check",
    "expect",
    "pytest_suite",
    "run_suite",
]

_PARTS = (fetching, settling, counting, leasing, dispatching, messages, burying, measuring, looping)

#: Every check, in the order of execution.
CHECKS: Final[tuple[Check, ...]] = (
    *(value for part in _PARTS for value in vars(part).values() if isinstance(value, Check)),
    *failing.CHECKS,
)
#: Seconds after which a running check has failed.
LIMIT: Final = 180.0


def run_suite(
    candidate: ConnectorUnderTest, *, variant: Variant = "sync", only: Collection[str] | None = None
) -> list[CheckResult]:
    """Run all checks, or only the checks with these names; must not be called on an event loop.

    The system under test stays open.
    """
    checks = (*CHECKS, *candidate.checks)
    unknown = set(only or ()) - {check.name for check in checks}
    if unknown:
        raise ValueError(f"there is no check called {min(unknown)!r}; CHECKS lists them")
    return [run_check(check, candidate, variant) for check in checks if only is None or check.name in only]


def run_check(check: Check, candidate: ConnectorUnderTest, variant: Variant) -> CheckResult:
    """Run one check on *system*."""
    lease = candidate.outage_lease if check.lease is None else check.lease
    sitting = CheckContext(candidate, variant, lease=lease)
    try:
        reason = check.applies(candidate, candidate.client(sitting.queue, lease=lease).capabilities)
        if not reason:
            asyncio.run(_sit(check, sitting))
    except NotApplicable as found:
        reason = error_message(found)
    except Exception as error:  # noqa: BLE001 - every exception of a connector is a failed check
        return CheckResult(check.name, variant, Result.FAILED, format_failure(error))
    return CheckResult(check.name, variant, Result.NOT_APPLICABLE if reason else Result.PASSED, reason)


async def _sit(check: Check, sitting: CheckContext) -> None:
    try:
        async with asyncio.timeout(LIMIT) as limit:
            await check.run(sitting)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise CheckFailed(f"it has not ended after {LIMIT:g} s") from error
    finally:
        await sitting.close()


def pytest_suite(
    candidate: Callable[[], ConnectorUnderTest] | str,
    *,
    variants: Sequence[Variant] = VARIANTS,
    checks: Iterable[Check] = CHECKS,
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """Create a pytest test function: one test per check and variant.

    *system* creates a new system under test for each test, which is closed after it, or is the name of a
    fixture that provides one. *marks* returns the pytest marks of a check. A check that does not apply
    passes and reports the reason in the test's output and its properties.
    """
    return make_pytest_suite(candidate, run_check, variants=variants, checks=checks, marks=marks)
