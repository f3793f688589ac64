"""Two pipes between a parent, the supervisor of ``ergon run``, and one of its worker processes.

The parent sends commands through one pipe. When the parent ends, the system closes that pipe, even if the parent was
killed, so the child reads the end of the pipe. The child sends reports (its health, its metrics, its end) through the
other pipe. Both pipes carry lines: a command is one word, a report is JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock, Thread
from typing import Any

from ergon_framework.runner.process import ParentCommand

#: Maximum length of a line in bytes; a longer line is skipped.
MAX_LINE_BYTES = 1_000_000


class ParentPipe:
    """The child's end of the two pipes."""

    def __init__(self, commands: int, reports: int) -> None:
        for pipe in (commands, reports):
            # Child processes of the task must not use this pipe, and would keep it open.
            os.set_inheritable(pipe, False)  # noqa: FBT003 - its only argument
        self._commands = commands
        self._reports = reports
        self._lock = Lock()

    def listen(self, on_command: Callable[[ParentCommand], None]) -> None:
        """Call *on_command* with every command in a thread; the end of the parent counts as STOP."""

        def receive() -> None:
            commands_by_word = {command.value: command for command in ParentCommand}
            for line in read_lines(self._commands):
                command = commands_by_word.get(line.decode(errors="replace"))
                if command is not None:
                    on_command(command)
            on_command(ParentCommand.STOP)

        Thread(target=receive, name="ergon-lifeline", daemon=True).start()

    def report(self, kind: str, fields: dict[str, Any]) -> None:
        """Send a report to the parent; blocks while the parent does not read, never fails if it has ended."""
        data = memoryview(f"{json.dumps({'kind': kind, **fields})}\n".encode())
        with self._lock, suppress(OSError):
            while data:
                data = data[os.write(self._reports, data) :]


def read_lines(pipe: int) -> Iterator[bytes]:
    """Yield the lines of a pipe until its write ends are closed; then close *pipe*."""
    buffer = b""
    skipping = False
    try:
        while data := os.read(pipe, 65_536):
            *complete, buffer = (buffer + data).split(b"\n")
            for line in complete:
                if not skipping and len(line) <= MAX_LINE_BYTES:
                    yield line
                skipping = False
            if len(buffer) > MAX_LINE_BYTES:
                buffer, skipping = b"", True
    finally:
        os.close(pipe)


def read_reports(pipe: int) -> Iterator[dict[str, Any]]:
    """Yield the reports of a pipe; invalid lines are skipped."""
    for line in read_lines(pipe):
        with suppress(ValueError, RecursionError):
            report = json.loads(line)
            if isinstance(report, dict):
                yield report
