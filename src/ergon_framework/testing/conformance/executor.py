"""Conformance suite of executors, for every executor in any language.

``run_suite(command)`` starts the executor again for each check and returns the results. It must have the
handlers that ``HANDLERS`` lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.testing.conformance import asking, ending, refusing
from ergon_framework.testing.conformance.check import CheckFailed, Result, expect
from ergon_framework.testing.conformance.examinee import (
    HANDLERS,
    ExecutorCheck,
    ExecutorUnderTest,
    checks_in,
    executor_check,
)

__all__ = [
    "HANDLERS",
    "PATIENCE",
    "QUESTIONS",
    "ExecutorCheck",
    "ExecutorCheckResult",
    "ExecutorUnderTest",
    "executor_check",
    "expect",
    "report",
    "take",
]

#: Every check, in the order of execution.
QUESTIONS: Final[tuple[ExecutorCheck, ...]] = tuple(
    each for part in (asking, refusing, ending) for each in checks_in(part)
)
#: Seconds that an executor has for each answer, its start included.
PATIENCE: Final = 10.0


@dataclass(frozen=True, slots=True)
class ExecutorCheckResult:
    """The result of one check, with the reason."""

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
    on_mark: Callable[[ExecutorCheckResult], None] | None = None,
) -> list[ExecutorCheckResult]:
    """Run all checks, or only the checks with these names, on the executor that *command* starts."""
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


def mark(asked: ExecutorCheck, command: Sequence[str], *, patience: float = PATIENCE) -> ExecutorCheckResult:
    """Run one check."""
    began = time.monotonic()
    try:
        with ExecutorUnderTest(command, patience=patience) as examinee:
            asked.run(examinee)
    except CheckFailed as failed:
        return ExecutorCheckResult(
            asked.name, asked.ids, Result.FAILED, error_message(failed), time.monotonic() - began
        )
    except OSError as error:
        raise ConfigurationError(f"{command[0]!r} cannot be started: {error.strerror}") from error
    return ExecutorCheckResult(asked.name, asked.ids, Result.PASSED, seconds=time.monotonic() - began)


def report(command: Sequence[str], marks: Sequence[ExecutorCheckResult]) -> dict[str, Any]:
    """Return the results as plain data."""
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
