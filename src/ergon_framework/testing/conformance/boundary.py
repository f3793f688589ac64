"""The exam of boundary stores: one suite that any store of facts and artifacts takes, in both variants.

In a program ``take(candidate)`` gives the marks; in a test file one line gives a test per check::

    test_my_store = exam(MyCandidate)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from ergon_framework.testing.conformance import appending, objects, owners, reading
from ergon_framework.testing.conformance.boundary_candidate import BoundaryCandidate
from ergon_framework.testing.conformance.boundary_client import BoundaryClient, BoundarySitting
from ergon_framework.testing.conformance.check import Check, Failed, Mark, NotApplicable, Result, expect, rule
from ergon_framework.testing.conformance.client import VARIANTS, Variant
from ergon_framework.testing.conformance.marking import marked, paper

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
    value for part in (appending, reading, objects, owners) for value in vars(part).values() if isinstance(value, Check)
)


def take(candidate: BoundaryCandidate, *, variant: Variant = "sync", only: Collection[str] | None = None) -> list[Mark]:
    """Have *candidate* take the exam, or only the checks of these names; not to be called on an event loop."""
    unknown = set(only or ()) - {check.name for check in CHECKS}
    if unknown:
        raise ValueError(f"there is no check called {min(unknown)!r}; CHECKS lists them")
    return [mark(check, candidate, variant) for check in CHECKS if only is None or check.name in only]


def mark(check: Check, candidate: BoundaryCandidate, variant: Variant) -> Mark:
    """What *candidate* does with one check."""
    return marked(check, BoundarySitting(candidate, variant), variant)


def exam(
    candidate: Callable[[], BoundaryCandidate] | str,
    *,
    variants: Sequence[Variant] = VARIANTS,
    checks: Iterable[Check] = CHECKS,
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """A test function for pytest: one test per check and variant, each with a candidate of its own.

    It may also be the name of a fixture. *marks* gives the pytest marks of a check. A check that does not
    apply passes, and says why.
    """
    return paper(candidate, mark, variants=variants, checks=checks, marks=marks)
