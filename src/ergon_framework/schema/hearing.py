"""Hearing: a thread waits for what a server says unasked, and can be woken meanwhile.

The driver's own way of waiting looks around ten times a second, which is most of what a process costs that has nothing
to do.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ergon_framework.schema.line import Line


class Hearing:
    """Of one thread, which closes it; everybody may wake it."""

    def __init__(self) -> None:
        self._woken, self._wake = socket.socketpair()
        self._woken.settimeout(0)
        self._wake.settimeout(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._woken.close()
        self._wake.close()

    def wake(self) -> None:
        """Have the thread go on, now or when it waits next; one that has ended is not disturbed."""
        with suppress(OSError):  # also where it has been told so often that there is no room for more
            self._wake.send(b"!")

    def wait(self, seconds: float) -> None:
        """For so long, or until it is woken."""
        self._wait(seconds)

    def notices(self, line: Line, seconds: float) -> list[str]:
        """What is said on the channels that *line* listens to, at the latest after *seconds*, or when it is woken.

        A line that was lost says so.
        """
        # What came beside an answer lies with the driver, where no poll sees it.
        found = _drained(line)
        if found:
            return found
        self._wait(seconds, line.pgconn.socket)
        return _drained(line)

    def _wait(self, seconds: float, *others: int) -> None:
        poll = select.poll()
        for file in (self._woken.fileno(), *others):
            poll.register(file, select.POLLIN)
        poll.poll(1000 * max(0.0, seconds))
        with suppress(BlockingIOError):
            self._woken.recv(4096)


def _drained(line: Line) -> list[str]:
    return [notice.payload for notice in line.notifies(timeout=0)]
