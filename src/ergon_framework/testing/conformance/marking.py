"""Run one check with its result, and create the pytest tests of a suite."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ergon_framework.errors import error_message, require_extra
from ergon_framework.testing.conformance.check import (
    Check,
    CheckFailed,
    CheckResult,
    NotApplicable,
    Result,
    format_failure,
)
from ergon_framework.testing.conformance.client import Variant

#: Seconds after which a running check has failed.
LIMIT: Final = 120.0


def run_check_in_context(check: Check, sitting: Any, variant: Variant) -> CheckResult:
    """Run *check* in its *context*; must not be called on an event loop."""
    reason = ""
    try:
        asyncio.run(_sit(check, sitting))
    except NotApplicable as found:
        reason = error_message(found)
    except Exception as error:  # noqa: BLE001 - every exception is a failed check
        return CheckResult(check.name, variant, Result.FAILED, format_failure(error))
    return CheckResult(check.name, variant, Result.NOT_APPLICABLE if reason else Result.PASSED, reason)


async def _sit(check: Check, sitting: Any) -> None:
    run: Any = check.run
    try:
        async with asyncio.timeout(LIMIT) as limit:
            await run(sitting)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise CheckFailed(f"it has not ended after {LIMIT:g} s") from error


def make_pytest_suite(
    candidate: Callable[[], Any] | str,
    mark: Callable[[Check, Any, Variant], CheckResult],
    *,
    variants: Sequence[Variant],
    checks: Iterable[Check],
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """Create a pytest test function: one test per check and variant.

    Each test has a new system under test, or the one of the fixture with the given name.
    """
    pytest = require_extra("testing", "pytest")
    given = marks or (lambda _: ())
    params = [pytest.param(check, id=check.name, marks=given(check)) for check in checks]

    def test_exam(check: Check, variant: Variant, request: Any) -> None:
        made = request.getfixturevalue(candidate) if isinstance(candidate, str) else candidate()
        try:
            got = mark(check, made, variant)
        finally:
            # The fixture closes its own system under test.
            if not isinstance(candidate, str):
                made.close()
        request.node.user_properties.append(("mark", str(got)))
        print(got)  # noqa: T201 - pytest shows it with a failing test, or with -rP
        if got.result is Result.FAILED:
            pytest.fail(got.reason, pytrace=False)

    parametrize = pytest.mark.parametrize
    made: Callable[..., None] = parametrize("check", params)(parametrize("variant", variants)(test_exam))
    return made
