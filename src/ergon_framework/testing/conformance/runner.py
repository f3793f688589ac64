"""Run one check of a conformance suite and return its result, and create the pytest tests of a suite."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ergon_framework.errors import error_message, require_extra
from ergon_framework.testing.conformance.check import (
    Check,
    CheckFailed,
    CheckOutcome,
    CheckResult,
    NotApplicable,
    format_failure,
)
from ergon_framework.testing.conformance.connector.client import Variant

#: Seconds after which a running check has failed.
CHECK_TIMEOUT_SECONDS: Final = 120.0


def run_check_in_context(check: Check, context: Any, variant: Variant) -> CheckResult:
    """Run *check* in its *context*; must not be called on an event loop."""
    reason = ""
    try:
        asyncio.run(_run_with_timeout(check, context))
    except NotApplicable as not_applicable:
        reason = error_message(not_applicable)
    except Exception as error:  # noqa: BLE001 - every exception is a failed check
        return CheckResult(check.name, variant, CheckOutcome.FAILED, format_failure(error))
    return CheckResult(check.name, variant, CheckOutcome.NOT_APPLICABLE if reason else CheckOutcome.PASSED, reason)


async def _run_with_timeout(check: Check, context: Any) -> None:
    run: Any = check.run
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_SECONDS) as limit:
            await run(context)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise CheckFailed(f"the check did not end within {CHECK_TIMEOUT_SECONDS:g} s") from error


def make_pytest_suite(
    system: Callable[[], Any] | str,
    run_check: Callable[[Check, Any, Variant], CheckResult],
    *,
    variants: Sequence[Variant],
    checks: Iterable[Check],
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """Create a pytest test function: one test per check and variant.

    Each test has a new system under test, or the one of the fixture with the given name.
    """
    pytest = require_extra("testing", "pytest")
    get_marks = marks or (lambda _: ())
    params = [pytest.param(check, id=check.name, marks=get_marks(check)) for check in checks]

    def test_conformance(check: Check, variant: Variant, request: Any) -> None:
        instance = request.getfixturevalue(system) if isinstance(system, str) else system()
        try:
            result = run_check(check, instance, variant)
        finally:
            # The fixture closes its own system under test.
            if not isinstance(system, str):
                instance.close()
        request.node.user_properties.append(("mark", str(result)))
        print(result)  # noqa: T201 - pytest shows it with a failing test, or with -rP
        if result.result is CheckOutcome.FAILED:
            pytest.fail(result.reason, pytrace=False)

    parametrize = pytest.mark.parametrize
    test: Callable[..., None] = parametrize("check", params)(parametrize("variant", variants)(test_conformance))
    return test
