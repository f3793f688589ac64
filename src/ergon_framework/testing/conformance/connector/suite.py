"""Conformance suite of connectors, sync and async.

In a program ``run_suite(system)`` returns the results; in a test file one line creates a test per check::

    test_my_connector = pytest_suite(MyConnectorUnderTest)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from ergon_framework.errors import error_message
from ergon_framework.testing.conformance.check import (
    Check,
    CheckFailed,
    CheckOutcome,
    CheckResult,
    NotApplicable,
    check,
    expect,
    format_failure,
)
from ergon_framework.testing.conformance.connector import (
    check_counts,
    check_delays,
    check_dispatch,
    check_fetch,
    check_loops,
    check_outages,
    check_settle,
)
from ergon_framework.testing.conformance.connector.adapter import ConnectorUnderTest, Outbox, Server
from ergon_framework.testing.conformance.connector.client import VARIANTS, CheckContext, Variant
from ergon_framework.testing.conformance.runner import make_pytest_suite

__all__ = [
    "CHECKS",
    "VARIANTS",
    "Check",
    "CheckContext",
    "CheckFailed",
    "CheckOutcome",
    "CheckResult",
    "ConnectorUnderTest",
    "NotApplicable",
    "Outbox",
    "Server",
    "Variant",
    "check",
    "expect",
    "pytest_suite",
    "run_suite",
]

_CHECK_MODULES = (check_fetch, check_settle, check_counts, check_dispatch, check_delays, check_loops)

#: Every check, in the order of execution.
CHECKS: Final[tuple[Check, ...]] = (
    *(value for part in _CHECK_MODULES for value in vars(part).values() if isinstance(value, Check)),
    *check_delays.CHECKS,
    *check_outages.CHECKS,
)
#: Seconds after which a running check has failed.
CHECK_TIMEOUT_SECONDS: Final = 180.0


def run_suite(
    system: ConnectorUnderTest, *, variant: Variant = "sync", only: Collection[str] | None = None
) -> list[CheckResult]:
    """Run all checks, or only the checks with these names; must not be called on an event loop.

    The system under test stays open.
    """
    checks = (*CHECKS, *system.checks)
    unknown = set(only or ()) - {check.name for check in checks}
    if unknown:
        raise ValueError(f"there is no check called {min(unknown)!r}; CHECKS lists them")
    return [run_check(check, system, variant) for check in checks if only is None or check.name in only]


def run_check(check: Check, system: ConnectorUnderTest, variant: Variant) -> CheckResult:
    """Run one check on *system*."""
    lease = system.outage_lease if check.lease is None else check.lease
    context = CheckContext(system, variant, lease=lease)
    try:
        reason = check.get_skip_reason(system, system.client(context.queue, lease=lease).capabilities)
        if not reason:
            asyncio.run(_run_with_timeout(check, context))
    except NotApplicable as not_applicable:
        reason = error_message(not_applicable)
    except Exception as error:  # noqa: BLE001 - every exception of a connector is a failed check
        return CheckResult(check.name, variant, CheckOutcome.FAILED, format_failure(error))
    return CheckResult(check.name, variant, CheckOutcome.NOT_APPLICABLE if reason else CheckOutcome.PASSED, reason)


async def _run_with_timeout(check: Check, context: CheckContext) -> None:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_SECONDS) as limit:
            await check.run(context)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise CheckFailed(f"the check did not end within {CHECK_TIMEOUT_SECONDS:g} s") from error
    finally:
        await context.close()


def pytest_suite(
    system: Callable[[], ConnectorUnderTest] | str,
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
    return make_pytest_suite(system, run_check, variants=variants, checks=checks, marks=marks)
