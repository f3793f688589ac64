"""The exam of places for contents: one suite that whatever keeps the bytes of artifacts takes.

In a program ``take(candidate)`` gives the marks; in a test file one line gives a test per check::

    test_my_place = exam(MyCandidate)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from ergon_framework.testing.conformance import sealing, uploading
from ergon_framework.testing.conformance.check import Check, Mark, Result
from ergon_framework.testing.conformance.client import Variant
from ergon_framework.testing.conformance.contents_candidate import ContentsCandidate, ContentsSitting
from ergon_framework.testing.conformance.marking import marked, paper

__all__ = ["CHECKS", "Check", "ContentsCandidate", "ContentsSitting", "Mark", "Result", "exam", "mark", "take"]

#: Every check, in the order in which they are taken.
CHECKS: Final[tuple[Check, ...]] = tuple(
    value for part in (sealing, uploading) for value in vars(part).values() if isinstance(value, Check)
)


def take(candidate: ContentsCandidate) -> list[Mark]:
    """Have *candidate* take the exam; not to be called on an event loop."""
    return [mark(check, candidate) for check in CHECKS]


def mark(check: Check, candidate: ContentsCandidate, variant: Variant = "sync") -> Mark:
    """What *candidate* does with one check; there is one variant, for all of it blocks."""
    return marked(check, ContentsSitting(candidate), variant)


def exam(
    candidate: Callable[[], ContentsCandidate] | str,
    *,
    checks: Iterable[Check] = CHECKS,
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """A test function for pytest: one test per check, with a candidate of its own or the fixture of that name.

    *marks* gives the pytest marks of a check. A check that does not apply passes, and says why.
    """
    return paper(candidate, mark, variants=("sync",), checks=checks, marks=marks)
