"""Exit codes: what a process of ours says about itself when it is gone."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Self

from ergon_framework.connectors.base import SettleResult
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.exceptions import LoopTimeout
from ergon_framework.task.report import Report


class ExitCode(IntEnum):
    """Exit codes that say what they mean; each command has its own."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class Exit(ExitCode):
    """Every exit code of ``ergon run`` with what it means; a consumer's failed transaction changes none."""

    OK = 0, "ended well: the queue or the input was empty, the limit was reached, or a signal came and all was settled"
    FAILED = 1, "the loop, the lifespan or transactions of a producer failed, or its input was not sent to its end"
    USAGE = 2, "the command line, the policy file or the task is wrong; nothing was fetched"
    TIMEOUT = 3, "the loop's own time, `loop.timeout`, was over"
    LEFT_BEHIND = (
        4,
        "ended, but handlers still ran or outcomes could not be settled; the queue delivers those again",
    )
    FLAPPING = 5, "one of several processes died at once, too often in a row; the message says how"
    FORCED = 70, "the loop or the lifespan did not end within the grace; the process left without it"


def exit_of(report: Report | None, error: BaseException | None = None, *, forced: bool = False) -> Exit:
    """The one code for how a run ended; what failed comes before what was left behind."""
    if forced:
        return Exit.FORCED
    if isinstance(error, LoopTimeout):
        return Exit.TIMEOUT
    if isinstance(error, ConfigurationError) and report is None:
        return Exit.USAGE
    if error is not None or report is None:
        return Exit.FAILED
    return Exit.LEFT_BEHIND if report.abandoned or report.settled.get(SettleResult.FAILED) else Exit.OK


#: What says most about a run comes first.
_GRAVITY = (Exit.USAGE, Exit.FLAPPING, Exit.FORCED, Exit.FAILED, Exit.TIMEOUT, Exit.LEFT_BEHIND, Exit.OK)


def worst(codes: Iterable[int]) -> Exit:
    """The one code for several processes; a code that is none of ours, or a signal, is a failure."""
    known = {code.value: code for code in Exit}
    found = {known.get(code, Exit.FAILED) for code in codes}
    return next((code for code in _GRAVITY if code in found), Exit.OK)
