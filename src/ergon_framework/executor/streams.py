"""The protocol's two pipes, isolated from all other code in the process."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock

from ergon_framework.errors import ConfigurationError
from ergon_framework.executor.lines import LineSplitter, OverlongLine

#: Bytes of one read; a pipe of Linux holds no more.
READ_BYTES = 65_536


class ProtocolStreams:
    """Reads requests from one descriptor and writes outcomes to another; no child inherits either of them."""

    def __init__(self, requests: int, outcomes: int) -> None:
        self._requests = requests
        self._outcomes = outcomes
        self._lock = Lock()
        self._stop_read_fd, self._stop_write_fd = os.pipe()
        os.set_blocking(requests, True)
        os.set_blocking(outcomes, True)

    @classmethod
    def take_over_stdio(cls) -> ProtocolStreams:
        """Take over stdin and stdout; the caller calls this before it imports user code.

        Afterwards descriptor 0 is empty and descriptor 1 is stderr, for this process and its children: output of a
        print, a native library or a child that writes to stdout goes to the logs, and a child that reads stdin
        consumes no request.
        """
        _flush()
        try:
            requests, outcomes = os.dup(0), os.dup(1)  # not inherited, unlike 0 and 1
        except OSError as error:
            raise ConfigurationError("stdin or stdout is closed; an executor is started with pipes to both") from error
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 0)
        try:
            os.dup2(2, 1)
        except OSError:  # stderr is closed: the logs are not wanted
            os.dup2(devnull, 1)
        os.close(devnull)
        if sys.stdout is not None:
            # It was set up for a pipe, and would buffer a print for long.
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        streams = cls(requests, outcomes)
        # A fork has copies of all descriptors and would keep the pipes open.
        os.register_at_fork(after_in_child=streams.close)
        return streams

    def read_lines(self) -> Iterator[bytes | OverlongLine]:
        """Yield each line until the input ends or ``stop`` is called."""
        splitter = LineSplitter()
        while data := self._read():
            yield from splitter.feed(data)

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._requests, self._stop_read_fd], [], [])
        return b"" if self._stop_read_fd in ready else os.read(self._requests, READ_BYTES)

    def stop(self) -> None:
        """End ``read_lines``; thread-safe."""
        with suppress(OSError):
            os.write(self._stop_write_fd, b".")

    def write(self, line: bytes) -> None:
        """Write all of *line*; raise BrokenPipeError if the pipe has no reader."""
        data = memoryview(line)
        with self._lock:
            while data:
                data = data[os.write(self._outcomes, data) :]

    def close(self) -> None:
        for descriptor in (self._requests, self._outcomes, self._stop_read_fd, self._stop_write_fd):
            with suppress(OSError):
                os.close(descriptor)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
