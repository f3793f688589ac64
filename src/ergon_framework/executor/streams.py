"""Streams: the protocol's two pipes, out of reach of everything else in the process."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock

from ergon_framework.errors import ConfigurationError
from ergon_framework.executor.lines import Overlong, Splitter

#: How much is read at once; a pipe of Linux holds no more.
CHUNK = 65_536


class Streams:
    """Requests come out of one descriptor, outcomes go into the other; neither is inherited by any child."""

    def __init__(self, requests: int, outcomes: int) -> None:
        self._requests = requests
        self._outcomes = outcomes
        self._lock = Lock()
        self._woken, self._wake = os.pipe()
        os.set_blocking(requests, True)
        os.set_blocking(outcomes, True)

    @classmethod
    def seize(cls) -> Streams:
        """Take stdin and stdout over; to be called before any code of a user is imported.

        Afterwards descriptor 0 is empty and descriptor 1 is stderr, for this process and its
        children: a print, a native library and a child that writes to stdout all end in the logs,
        and a child that reads stdin takes no request away.
        """
        _flush()
        try:
            requests, outcomes = os.dup(0), os.dup(1)  # not inherited, unlike 0 and 1
        except OSError as error:
            raise ConfigurationError("stdin or stdout is closed; an executor is started with pipes to both") from error
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        try:
            os.dup2(2, 1)
        except OSError:  # stderr is closed: nobody wants the logs
            os.dup2(nothing, 1)
        os.close(nothing)
        if sys.stdout is not None:
            # It was set up for a pipe, and would keep a print until much later.
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        streams = cls(requests, outcomes)
        # A fork has copies of all descriptors, and would keep the pipes open.
        os.register_at_fork(after_in_child=streams.close)
        return streams

    def lines(self) -> Iterator[bytes | Overlong]:
        """Each line that comes, until there are no more or ``stop`` is called."""
        splitter = Splitter()
        while data := self._read():
            yield from splitter.feed(data)

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._requests, self._woken], [], [])
        return b"" if self._woken in ready else os.read(self._requests, CHUNK)

    def stop(self) -> None:
        """Have ``lines`` end; any thread may ask."""
        with suppress(OSError):
            os.write(self._wake, b".")

    def write(self, line: bytes) -> None:
        """Write the whole of *line*; BrokenPipeError if nobody reads it."""
        data = memoryview(line)
        with self._lock:
            while data:
                data = data[os.write(self._outcomes, data) :]

    def close(self) -> None:
        for end in (self._requests, self._outcomes, self._woken, self._wake):
            with suppress(OSError):
                os.close(end)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
