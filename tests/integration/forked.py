"""Forked: a run of something that never ends by itself, as a fork of this process; it says lines through a pipe."""

from __future__ import annotations

import contextlib
import os
import select
import signal


class Forked:
    """A run of *work*, which is given the pipe to say its lines into."""

    def __init__(self, work):
        self._reading, writing = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._reading)
            with contextlib.suppress(BaseException):
                work(writing)
            os._exit(1)
        os.close(writing)
        self._said = b""

    def listen(self, seconds):
        """Whether it has said something; None when it is dead."""
        if not select.select([self._reading], [], [], seconds)[0]:
            return False
        piece = os.read(self._reading, 65536)
        self._said += piece
        return True if piece else None

    def await_lines(self, count, *, patience):
        """Until it has said so many lines, or nothing for *patience* seconds."""
        while self._said.count(b"\n") < count and self.listen(patience):
            pass

    def kill(self):
        """End it here and now; all that it has said."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        while piece := os.read(self._reading, 65536):
            self._said += piece
        os.close(self._reading)
        return [line.split() for line in self._said.decode().split("\n")[:-1]]
