"""Exit codes of the framework's processes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Self

from ergon_framework.connectors.base import SettleResult
from ergon_framework.errors import ConfigurationError
from ergon_framework.worker.exceptions import LoopTimeout
from ergon_framework.worker.report import Report


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

    OK = 0, "ended cleanly: queue or input was empty, the limit was reached, or a signal arrived and all was settled"
    FAILED = 1, "the loop, the lifespan or transactions of a producer failed, or its input was not sent completely"
    USAGE = 2, "the command line, the policy file or the task is invalid; nothing was fetched"
    TIMEOUT = 3, "the loop reached its time limit, `loop.timeout`"
    LEFT_BEHIND = (
        4,
        "ended, but handlers were still running or outcomes were not settled; the queue redelivers those",
    )
    FLAPPING = 5, "a worker process exited soon after its start too often in a row; the message gives its exit code"
    FORCED = 70, "the loop or the lifespan did not end within its grace period; the process exited anyway"


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
    return RunExit.LEFT_BEHIND if report.still_running or report.settled.get(SettleResult.FAILED) else RunExit.OK


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
