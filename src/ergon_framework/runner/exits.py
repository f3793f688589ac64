"""Exit codes of the framework's processes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Self

from ergon_framework.connectors.base import SettleResult
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.exceptions import LoopTimeout
from ergon_framework.task.report import Report


class ExitCode(IntEnum):
    """Exit codes with their meaning; each command has its own."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class RunExit(ExitCode):
    """Every exit code of ``ergon run`` with its meaning; a consumer's failed transaction does not affect it."""

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


def exit_code_for(report: Report | None, error: BaseException | None = None, *, forced: bool = False) -> RunExit:
    """Return the exit code of a run; a failure takes precedence over abandoned work."""
    if forced:
        return RunExit.FORCED
    if isinstance(error, LoopTimeout):
        return RunExit.TIMEOUT
    if isinstance(error, ConfigurationError) and report is None:
        return RunExit.USAGE
    if error is not None or report is None:
        return RunExit.FAILED
    return RunExit.LEFT_BEHIND if report.abandoned or report.settled.get(SettleResult.FAILED) else RunExit.OK


#: The most severe code first.
_EXITS_BY_SEVERITY = (
    RunExit.USAGE,
    RunExit.FLAPPING,
    RunExit.FORCED,
    RunExit.FAILED,
    RunExit.TIMEOUT,
    RunExit.LEFT_BEHIND,
    RunExit.OK,
)


def most_severe(codes: Iterable[int]) -> RunExit:
    """Return one exit code for several processes; an unknown code, or a signal, is a failure."""
    exits_by_code = {code.value: code for code in RunExit}
    exits = {exits_by_code.get(code, RunExit.FAILED) for code in codes}
    return next((code for code in _EXITS_BY_SEVERITY if code in exits), RunExit.OK)
