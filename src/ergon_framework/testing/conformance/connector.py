"""The exam of connectors: one suite that any connector takes, in both variants.

In a program ``take(candidate)`` gives the marks; in a test file one line gives a test per check::

    test_my_connector = exam(MyCandidate)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from ergon_framework.errors import text
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
from ergon_framework.testing.conformance.candidate import Candidate, Outbox, Server
from ergon_framework.testing.conformance.check import Check, Failed, Mark, NotApplicable, Result, expect, rule, told
from ergon_framework.testing.conformance.client import VARIANTS, Variant
from ergon_framework.testing.conformance.marking import paper
from ergon_framework.testing.conformance.sitting import Sitting

__all__ = [
    "CHECKS",
    "VARIANTS",
    "Candidate",
    "Check",
    "Failed",
    "Mark",
    "NotApplicable",
    "Outbox",
    "Result",
    "Server",
    "Sitting",
    "Variant",
    "exam",
    "expect",
    "rule",
    "take",
]

_PARTS = (fetching, settling, counting, leasing, dispatching, messages, burying, measuring, looping)

#: Every check, in the order in which they are taken.
CHECKS: Final[tuple[Check, ...]] = (
    *(value for part in _PARTS for value in vars(part).values() if isinstance(value, Check)),
    *failing.CHECKS,
)
#: Seconds within which a check has come to an end; one that has not has failed.
LIMIT: Final = 180.0


def take(candidate: Candidate, *, variant: Variant = "sync", only: Collection[str] | None = None) -> list[Mark]:
    """Have *candidate* take the exam, or only the checks of these names; not to be called on an event loop.

    The candidate stays open.
    """
    checks = (*CHECKS, *candidate.checks)
    unknown = set(only or ()) - {check.name for check in checks}
    if unknown:
        raise ValueError(f"there is no check called {min(unknown)!r}; CHECKS lists them")
    return [mark(check, candidate, variant) for check in checks if only is None or check.name in only]


def mark(check: Check, candidate: Candidate, variant: Variant) -> Mark:
    """What *candidate* does with one check."""
    lease = candidate.outage_lease if check.lease is None else check.lease
    sitting = Sitting(candidate, variant, lease=lease)
    try:
        reason = check.applies(candidate, candidate.client(sitting.queue, lease=lease).capabilities)
        if not reason:
            asyncio.run(_sit(check, sitting))
    except NotApplicable as found:
        reason = text(found)
    except Exception as error:  # noqa: BLE001 - whatever a connector raises is an answer, and it is told
        return Mark(check.name, variant, Result.FAILED, told(error))
    return Mark(check.name, variant, Result.NOT_APPLICABLE if reason else Result.PASSED, reason)


async def _sit(check: Check, sitting: Sitting) -> None:
    try:
        async with asyncio.timeout(LIMIT) as limit:
            await check.run(sitting)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise Failed(f"it has not ended after {LIMIT:g} s") from error
    finally:
        await sitting.close()


def exam(
    candidate: Callable[[], Candidate] | str,
    *,
    variants: Sequence[Variant] = VARIANTS,
    checks: Iterable[Check] = CHECKS,
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """A test function for pytest: one test per check and variant.

    *candidate* makes a new candidate for each test, which is closed after it, or is the name of a
    fixture that has one. *marks* gives the pytest marks of a check. A check that does not apply
    passes, and says why in the test's output and its properties.
    """
    return paper(candidate, mark, variants=variants, checks=checks, marks=marks)
