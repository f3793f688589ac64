"""The exam of boundary stores: one suite that any store of facts and artifacts takes, in both variants.

In a program ``take(candidate)`` gives the marks; in a test file one line gives a test per check::

    test_my_store = exam(MyCandidate)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from ergon_framework.errors import extra, text
from ergon_framework.testing.conformance import appending, objects, reading
from ergon_framework.testing.conformance.boundary_candidate import BoundaryCandidate
from ergon_framework.testing.conformance.boundary_client import BoundaryClient, BoundarySitting
from ergon_framework.testing.conformance.check import Check, Failed, Mark, NotApplicable, Result, expect, rule, told
from ergon_framework.testing.conformance.client import VARIANTS, Variant

__all__ = [
    "CHECKS",
    "VARIANTS",
    "BoundaryCandidate",
    "BoundaryClient",
    "BoundarySitting",
    "Check",
    "Failed",
    "Mark",
    "NotApplicable",
    "Result",
    "exam",
    "expect",
    "mark",
    "rule",
    "take",
]

#: Every check, in the order in which they are taken.
CHECKS: Final[tuple[Check, ...]] = tuple(
    value for part in (appending, reading, objects) for value in vars(part).values() if isinstance(value, Check)
)
#: Seconds within which a check has come to an end; one that has not has failed.
LIMIT: Final = 120.0


def take(candidate: BoundaryCandidate, *, variant: Variant = "sync", only: Collection[str] | None = None) -> list[Mark]:
    """Have *candidate* take the exam, or only the checks of these names; not to be called on an event loop."""
    unknown = set(only or ()) - {check.name for check in CHECKS}
    if unknown:
        raise ValueError(f"there is no check called {min(unknown)!r}; CHECKS lists them")
    return [mark(check, candidate, variant) for check in CHECKS if only is None or check.name in only]


def mark(check: Check, candidate: BoundaryCandidate, variant: Variant) -> Mark:
    """What *candidate* does with one check."""
    reason = ""
    try:
        asyncio.run(_sit(check, BoundarySitting(candidate, variant)))
    except NotApplicable as found:
        reason = text(found)
    except Exception as error:  # noqa: BLE001 - whatever a store raises is an answer, and it is told
        return Mark(check.name, variant, Result.FAILED, told(error))
    return Mark(check.name, variant, Result.NOT_APPLICABLE if reason else Result.PASSED, reason)


async def _sit(check: Check, sitting: BoundarySitting) -> None:
    run: Any = check.run
    try:
        async with asyncio.timeout(LIMIT) as limit:
            await run(sitting)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise Failed(f"it has not ended after {LIMIT:g} s") from error


def exam(
    candidate: Callable[[], BoundaryCandidate],
    *,
    variants: Sequence[Variant] = VARIANTS,
    checks: Iterable[Check] = CHECKS,
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """A test function for pytest: one test per check and variant, each with a candidate of its own.

    *marks* gives the pytest marks of a check. A check that does not apply passes, and says why.
    """
    pytest = extra("testing", "pytest")
    given = marks or (lambda _: ())
    params = [pytest.param(check, id=check.name, marks=given(check)) for check in checks]

    def test_exam(check: Check, variant: Variant, request: Any) -> None:
        made = candidate()
        try:
            got = mark(check, made, variant)
        finally:
            made.close()
        request.node.user_properties.append(("mark", str(got)))
        print(got)  # noqa: T201 - pytest shows it with a failing test, or with -rP
        if got.result is Result.FAILED:
            pytest.fail(got.reason, pytrace=False)

    parametrize = pytest.mark.parametrize
    tests: Callable[..., None] = parametrize("check", params)(parametrize("variant", variants)(test_exam))
    return tests
