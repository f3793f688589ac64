"""Startup failures: the description of an executor that was started and never answered, and the remedy.

An executor is a process that answers requests on stdin. Its first request is the readiness probe, which names a handler
that no executor has: an executor that answers it is ready.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Sequence
from typing import Final

from ergon_framework.errors import ErgonError
from ergon_framework.failure import MAX_MESSAGE_CHARS
from ergon_framework.telemetry.redaction import HIDDEN, is_secret_name, mask_credentials

#: The number of stderr lines that are kept before the first answer, and the characters of each.
MAX_STDERR_LINES: Final = 10
MAX_STDERR_LINE_CHARS: Final = 300
#: Characters of a command and of its stderr in a message: the whole message has to fit a failure record.
_MAX_COMMAND_CHARS: Final = 72
_MAX_STDERR_CHARS: Final = 150
#: Exit codes of a shell for a program that it cannot execute or not find.
_NO_PROGRAM_EXITS: Final = ("exit code 126", "exit code 127")


class ExecutorNotStarted(ErgonError):
    """No executor is running, and the last start got no answer; nothing was sent, and no attempt is counted.

    ``problem`` describes what happened, and ``remedy`` what to do about it.
    """

    code = "executor_not_started"
    not_attempted = True

    def __init__(self, problem: str, remedy: str, *, retry_after: float) -> None:
        super().__init__(f"{problem}; {remedy}"[:MAX_MESSAGE_CHARS], retry_after=retry_after)
        self.problem = problem
        self.remedy = remedy


class StartupFailure:
    """One failed start: the problem and the remedy, without credentials."""

    __slots__ = ("exit_description", "lines", "problem", "remedy")

    def __init__(
        self, problem: str, remedy: str, *, exit_description: str | None = None, stderr_tail: StderrTail | None = None
    ) -> None:
        self.problem = problem
        self.remedy = remedy
        #: The description of its exit code or signal, if it exited without being killed.
        self.exit_description = exit_description
        #: The stderr lines that are kept; None if there are none.
        self.lines = None if stderr_tail is None else stderr_tail.join_lines() or None

    def error(self, *, retry_after: float) -> ExecutorNotStarted:
        """Return the error for callers that wait for an executor."""
        return ExecutorNotStarted(self.problem, self.remedy, retry_after=retry_after)


class StderrTail:
    """The last lines that a process wrote to stderr, without credentials."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_STDERR_LINES)
        #: The most informative line: some languages print the error before the traceback, others after it.
        self._key_line = ""

    def add(self, line: bytes) -> None:
        text = mask_credentials(line.decode(errors="replace")).strip()[:MAX_STDERR_LINE_CHARS]
        if not any(map(str.isalnum, text)):
            return
        self._lines.append(text)
        # "error" or "Error", also within the name of an exception.
        if "rror" in text or "rror" not in self._key_line:
            self._key_line = text

    def join_lines(self) -> str:
        """Return all lines that are kept, including the most informative one."""
        first = () if not self._key_line or self._key_line in self._lines else (self._key_line, "…")
        return " | ".join((*first, *self._lines))

    def __str__(self) -> str:
        """Return the most informative line, followed by as many of the last lines as fit."""
        key_line = self._key_line[:_MAX_STDERR_CHARS]
        rest: list[str] = []
        remaining = _MAX_STDERR_CHARS - len(key_line)
        for line in reversed(self._lines):
            if line == self._key_line:
                continue
            remaining -= len(line) + len(" | ")
            if remaining < 0:
                break
            rest.append(line)
        return " | ".join((key_line, *reversed(rest)))


def start_rejected(command: Sequence[str], reason: str) -> StartupFailure:
    """Return the failure of a start that the system or the reaper rejected."""
    return StartupFailure(
        f"{_quote_command(command)} cannot be started: {reason}", "check its folder and the machine's resources"
    )


def exited_early(command: Sequence[str], exit_description: str, stderr_tail: StderrTail) -> StartupFailure:
    """Return the failure of a start that exited before its first answer; *exit_description* is its code or signal."""
    remedy = _check_command_hint(command)
    if exit_description in _NO_PROGRAM_EXITS:
        remedy = "check that the program exists, and that the environment of its ExecutorCommand has the PATH to it"
    problem = (
        f"{_quote_command(command)} exited before its first answer, with {exit_description}: "
        f"{_describe_stderr(stderr_tail)}"
    )
    return StartupFailure(problem, remedy, exit_description=exit_description, stderr_tail=stderr_tail)


def no_answer(
    command: Sequence[str], timeout: float, stderr_tail: StderrTail, *, other_lines: int = 0
) -> StartupFailure:
    """Return the failure of a start that did not answer the probe; *other_lines* is the number of lines it wrote."""
    instead = f" (it wrote {other_lines} other lines to stdout)" if other_lines else ""
    problem = (
        f"{_quote_command(command)} did not answer within {timeout:g} s{instead} and was killed: "
        f"{_describe_stderr(stderr_tail)}"
    )
    remedy = f"it must answer each line of stdin with one line on stdout and flush it; {_check_command_hint(command)}"
    return StartupFailure(problem, remedy, stderr_tail=stderr_tail)


def still_starting(command: Sequence[str], timeout: float, stderr_tail: StderrTail) -> StartupFailure:
    """Return the failure of a start that is still running when the waiting caller reaches its limit."""
    problem = f"{_quote_command(command)} has not answered within {timeout:.3g} s: {_describe_stderr(stderr_tail)}"
    return StartupFailure(
        problem, f"give the step more time if it starts slowly; {_check_command_hint(command)}", stderr_tail=stderr_tail
    )


def display_command(command: Sequence[str]) -> str:
    """Return the command as it would be typed, without credentials.

    >>> display_command(("node", "run.mjs", "--token", "abc", "--dsn=postgresql://me:pw@host/db"))
    'node run.mjs --token [hidden] --dsn=[hidden]'
    """
    parts, hide = [], False
    for word in command:
        parts.append(HIDDEN if hide else mask_credentials(shlex.quote(word)))
        # The word after the name of a secret is a secret.
        hide = word.startswith("-") and "=" not in word and is_secret_name(word)
    return " ".join(parts)


def _quote_command(command: Sequence[str]) -> str:
    display = display_command(command)
    return (
        f"'{display}'"
        if len(display) <= _MAX_COMMAND_CHARS
        else f"'{_truncate_redacted(display, _MAX_COMMAND_CHARS - 1)}…'"
    )


def _truncate_redacted(text: str, length: int) -> str:
    """Truncate redacted *text* at *length*, or after a redaction marker there: a partial one would be redacted again.

    >>> _truncate_redacted("run --token [hidden] --fast", 15)
    'run --token [hidden] '
    """
    begin = text.rfind("[", 0, length)
    end = begin + len(HIDDEN)
    return f"{text[:end]} " if begin >= 0 and end > length and text.startswith(HIDDEN, begin) else text[:length]


def _describe_stderr(stderr_tail: StderrTail) -> str:
    tail_text = str(stderr_tail)
    return f"it wrote {tail_text}" if tail_text else "it wrote nothing to stderr"


def _check_command_hint(command: Sequence[str]) -> str:
    display = display_command(command)
    return f"run: ergon executor check -- {display if len(display) <= _MAX_COMMAND_CHARS else 'COMMAND'}"
