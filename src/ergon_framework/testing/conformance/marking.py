"""Marking: how one check is tried and what came of it, and the tests that an exam is in a test file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ergon_framework.errors import extra, text
from ergon_framework.testing.conformance.check import Check, Failed, Mark, NotApplicable, Result, told
from ergon_framework.testing.conformance.client import Variant

#: Seconds within which a check has come to an end; one that has not has failed.
LIMIT: Final = 120.0


def marked(check: Check, sitting: Any, variant: Variant) -> Mark:
    """What comes of *check* in its *sitting*; not to be called on an event loop."""
    reason = ""
    try:
        asyncio.run(_sit(check, sitting))
    except NotApplicable as found:
        reason = text(found)
    except Exception as error:  # noqa: BLE001 - whatever is raised is an answer, and it is told
        return Mark(check.name, variant, Result.FAILED, told(error))
    return Mark(check.name, variant, Result.NOT_APPLICABLE if reason else Result.PASSED, reason)


async def _sit(check: Check, sitting: Any) -> None:
    run: Any = check.run
    try:
        async with asyncio.timeout(LIMIT) as limit:
            await run(sitting)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise Failed(f"it has not ended after {LIMIT:g} s") from error


def paper(
    candidate: Callable[[], Any] | str,
    mark: Callable[[Check, Any, Variant], Mark],
    *,
    variants: Sequence[Variant],
    checks: Iterable[Check],
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """A test function for pytest: one test per check and variant.

    Each has a candidate of its own, or that of a fixture which is given by its name.
    """
    pytest = extra("testing", "pytest")
    given = marks or (lambda _: ())
    params = [pytest.param(check, id=check.name, marks=given(check)) for check in checks]

    def test_exam(check: Check, variant: Variant, request: Any) -> None:
        made = request.getfixturevalue(candidate) if isinstance(candidate, str) else candidate()
        try:
            got = mark(check, made, variant)
        finally:
            # A fixture's candidate is not over yet, and the fixture's to close.
            if not isinstance(candidate, str):
                made.close()
        request.node.user_properties.append(("mark", str(got)))
        print(got)  # noqa: T201 - pytest shows it with a failing test, or with -rP
        if got.result is Result.FAILED:
            pytest.fail(got.reason, pytrace=False)

    parametrize = pytest.mark.parametrize
    made: Callable[..., None] = parametrize("check", params)(parametrize("variant", variants)(test_exam))
    return made
