"""Start: what is said of an executor that was started and never answered, and what to do about it."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Sequence
from typing import Final

from ergon_framework.errors import ErgonError
from ergon_framework.failure import MESSAGE
from ergon_framework.telemetry.redaction import HIDDEN, masked, secret

#: How many lines of stderr are kept of one that has not answered, and how much of each.
LINES: Final = 10
LINE: Final = 300
#: How much of a command, and of what it wrote, is told: with the rest of the words it has to fit a failure record.
_COMMAND: Final = 72
_SAID: Final = 150
#: What a shell says of a program that it cannot execute, or not find.
_NO_PROGRAM: Final = ("exit code 126", "exit code 127")


class ExecutorNotStarted(ErgonError):
    """No executor is up, and the last that was started never answered; nothing was sent, and it costs no attempt.

    ``seen`` says what happened, and ``do`` what to do about it.
    """

    code = "executor_not_started"
    later = True

    def __init__(self, seen: str, do: str, *, retry_after: float) -> None:
        super().__init__(f"{seen}; {do}"[:MESSAGE], retry_after=retry_after)
        self.seen = seen
        self.do = do


class FailedStart:
    """One start that failed: what happened, and what to do; without credentials."""

    __slots__ = ("do", "how", "lines", "seen")

    def __init__(self, seen: str, do: str, *, how: str | None = None, said: LastLines | None = None) -> None:
        self.seen = seen
        self.do = do
        #: Its exit code or signal in words, if it has ended by itself.
        self.how = how
        #: All that is kept of what it wrote; None if that is nothing.
        self.lines = None if said is None else said.whole() or None

    def error(self, *, retry_after: float) -> ExecutorNotStarted:
        """What whoever waits for an executor is told."""
        return ExecutorNotStarted(self.seen, self.do, retry_after=retry_after)


class LastLines:
    """The last lines that a process wrote to stderr, without credentials."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES)
        #: The one that says most: a traceback goes on behind its error in some languages, and ends with it in others.
        self._telling = ""

    def add(self, line: bytes) -> None:
        words = masked(line.decode(errors="replace")).strip()[:LINE]
        if not any(map(str.isalnum, words)):
            return
        self._lines.append(words)
        if "rror" in words or "rror" not in self._telling:
            self._telling = words

    def whole(self) -> str:
        """All that is kept, the line that says most included."""
        first = () if not self._telling or self._telling in self._lines else (self._telling, "…")
        return " | ".join((*first, *self._lines))

    def __str__(self) -> str:
        """The line that says most, and then as many of the last ones as there is room for."""
        told = self._telling[:_SAID]
        rest: list[str] = []
        room = _SAID - len(told)
        for line in reversed(self._lines):
            if line == self._telling:
                continue
            room -= len(line) + len(" | ")
            if room < 0:
                break
            rest.append(line)
        return " | ".join((told, *reversed(rest)))


def refused(words: Sequence[str], why: str) -> FailedStart:
    """The system, or the guard, did not let it start."""
    return FailedStart(f"{_named(words)} cannot be started: {why}", "see its folder, and what the machine has left")


def ended(words: Sequence[str], how: str, said: LastLines) -> FailedStart:
    """It ended before it had answered; *how* is its exit code or signal in words."""
    do = _by_hand(words)
    if how in _NO_PROGRAM:
        do = "see that the program is there, and that the environment of its Command has the PATH to it"
    seen = f"{_named(words)} ended before its first answer, with {how}: {_wrote(said)}"
    return FailedStart(seen, do, how=how, said=said)


def silent(words: Sequence[str], within: float, said: LastLines, *, strays: int = 0) -> FailedStart:
    """It lived, and did not answer what a pool asks first; *strays* are the lines that it wrote instead."""
    instead = f" (it wrote {strays} other lines to stdout)" if strays else ""
    seen = f"{_named(words)} did not announce itself within {within:g} s{instead} and was killed: {_wrote(said)}"
    do = f"have it answer each line of stdin with one on stdout, and flush it; {_by_hand(words)}"
    return FailedStart(seen, do, said=said)


def starting(words: Sequence[str], within: float, said: LastLines) -> FailedStart:
    """It is being started, and whoever waits cannot wait any longer."""
    seen = f"{_named(words)} has not announced itself within {within:.3g} s: {_wrote(said)}"
    return FailedStart(seen, f"give the step more time if it starts slowly; {_by_hand(words)}", said=said)


def shown(words: Sequence[str]) -> str:
    """The command as it would be typed, without credentials.

    >>> shown(("node", "run.mjs", "--token", "abc", "--dsn=postgresql://me:pw@host/db"))
    'node run.mjs --token [hidden] --dsn=[hidden]'
    """
    told, hide = [], False
    for word in words:
        told.append(HIDDEN if hide else masked(shlex.quote(word)))
        # What follows the name of a secret is one.
        hide = word.startswith("-") and "=" not in word and secret(word)
    return " ".join(told)


def _named(words: Sequence[str]) -> str:
    told = shown(words)
    return f"'{told}'" if len(told) <= _COMMAND else f"'{_cut(told, _COMMAND - 1)}…'"


def _cut(text: str, length: int) -> str:
    """Cut redacted *text* at *length*, or behind a mark of redaction there: half of one would be redacted once more.

    >>> _cut("run --token [hidden] --fast", 15)
    'run --token [hidden] '
    """
    begin = text.rfind("[", 0, length)
    end = begin + len(HIDDEN)
    return f"{text[:end]} " if begin >= 0 and end > length and text.startswith(HIDDEN, begin) else text[:length]


def _wrote(said: LastLines) -> str:
    told = str(said)
    return f"it wrote {told}" if told else "it wrote nothing to stderr"


def _by_hand(words: Sequence[str]) -> str:
    told = shown(words)
    return f"try it: ergon executor check -- {told if len(told) <= _COMMAND else 'COMMAND'}"
