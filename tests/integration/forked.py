"""ForkedRun: a fork of this process that runs an endless function and writes lines to a pipe."""

from __future__ import annotations

import contextlib
import os
import select
import signal


class ForkedRun:
    """A run of *work*, which gets the pipe that it writes its lines to."""

    def __init__(self, work):
        self._read_end, write_end = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._read_end)
            with contextlib.suppress(BaseException):
                work(write_end)
            os._exit(1)
        os.close(write_end)
        self._output = b""

    def poll_output(self, seconds):
        """Return whether it has written something; None when it has exited."""
        if not select.select([self._read_end], [], [], seconds)[0]:
            return False
        chunk = os.read(self._read_end, 65536)
        self._output += chunk
        return True if chunk else None

    def wait_for_lines(self, count, *, patience):
        """Wait until it has written *count* lines, or nothing for *patience* seconds."""
        while self._output.count(b"\n") < count and self.poll_output(patience):
            pass

    def kill(self):
        """Kill it immediately and return all that it has written."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        while chunk := os.read(self._read_end, 65536):
            self._output += chunk
        os.close(self._read_end)
        return [line.split() for line in self._output.decode().split("\n")[:-1]]
