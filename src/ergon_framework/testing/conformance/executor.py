"""The exam of executors: one suite that any executor takes, in whatever language it is written.

``take(command)`` starts the executor anew for each question and gives the marks. It must have the
handlers that ``HANDLERS`` lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, text
from ergon_framework.testing.conformance import asking, ending, refusing
from ergon_framework.testing.conformance.check import Failed, Result, expect
from ergon_framework.testing.conformance.examinee import HANDLERS, Examinee, Question, question, questions

__all__ = ["HANDLERS", "PATIENCE", "QUESTIONS", "Examinee", "Mark", "Question", "expect", "question", "report", "take"]

#: Every question, in the order in which they are asked.
QUESTIONS: Final[tuple[Question, ...]] = tuple(each for part in (asking, refusing, ending) for each in questions(part))
#: Seconds that an executor has for whatever it is asked, its start included.
PATIENCE: Final = 10.0


@dataclass(frozen=True, slots=True)
class Mark:
    """What came of one question, and why."""

    question: str
    ids: tuple[str, ...]
    result: Result
    reason: str = ""
    seconds: float = 0.0


def take(
    command: Sequence[str],
    *,
    patience: float = PATIENCE,
    only: Collection[str] | None = None,
    on_mark: Callable[[Mark], None] | None = None,
) -> list[Mark]:
    """Have the executor that *command* starts take the exam, or only the questions of these names."""
    unknown = set(only or ()) - {each.name for each in QUESTIONS}
    if unknown:
        raise ValueError(f"there is no question called {min(unknown)!r}; QUESTIONS lists them")
    marks = []
    for each in QUESTIONS:
        if only is None or each.name in only:
            marks.append(mark(each, command, patience=patience))
            if on_mark is not None:
                on_mark(marks[-1])
    return marks


def mark(asked: Question, command: Sequence[str], *, patience: float = PATIENCE) -> Mark:
    """What becomes of one question."""
    began = time.monotonic()
    try:
        with Examinee(command, patience=patience) as examinee:
            asked.run(examinee)
    except Failed as failed:
        return Mark(asked.name, asked.ids, Result.FAILED, text(failed), time.monotonic() - began)
    except OSError as error:
        raise ConfigurationError(f"{command[0]!r} cannot be started: {error.strerror}") from error
    return Mark(asked.name, asked.ids, Result.PASSED, seconds=time.monotonic() - began)


def report(command: Sequence[str], marks: Sequence[Mark]) -> dict[str, Any]:
    """The marks as plain data."""
    failed = [each for each in marks if each.result is Result.FAILED]
    return {
        "command": list(command),
        "passed": len(marks) - len(failed),
        "failed": len(failed),
        "marks": [
            {
                "question": each.question,
                "requirements": list(each.ids),
                "result": each.result.value,
                "reason": each.reason,
                "seconds": round(each.seconds, 3),
            }
            for each in marks
        ],
    }
