"""Input and output of an executor process: the protocol's two pipes, signals, and the end of the parent process.

The pipes are isolated from all other code in the process. A separate thread watches signals and the parent process,
because a handler may occupy the main thread.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Final

from ergon_framework.errors import ConfigurationError
from ergon_framework.executors.json_lines import LineSplitter, OverlongLine

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


# -- signals and the parent process -----------------------------------------------------------------

#: Seconds between two checks of the parent where the system cannot report its end.
PARENT_POLL_SECONDS: Final = 0.5
#: The exit code of a process that exited while its handler was running.
FORCED_EXIT_CODE: Final = 70
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class SignalWatcher:
    """Calls *stop* at the first signal, and exits *grace* seconds later, at a second signal, or as an orphan.

    A process whose parent has ended (an orphan) exits immediately: its outcome would have no reader, and its job is
    redelivered to another orchestrator.
    """

    def __init__(
        self, stop: Callable[[str], None], *, grace: float, exit_process: Callable[[int], Any] = os._exit
    ) -> None:
        self._stop = stop
        self._grace = grace
        self._exit_process = exit_process
        self._signal_read_fd, self._signal_write_fd = os.pipe()
        os.set_blocking(self._signal_write_fd, False)
        self._parent = os.getppid()
        self._pidfd = _open_pidfd(self._parent)
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        Thread(target=self._watch, name="ergon-executor-watch", daemon=True).start()

    def _on_signal(self, number: int, _frame: object) -> None:
        with suppress(BlockingIOError):
            os.write(self._signal_write_fd, bytes([number]))

    def stop(self) -> None:
        """Restore the previous signal handlers; the process is about to exit."""
        for number, previous in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _watch(self) -> None:
        deadline: float | None = None
        while True:
            received, orphaned = self._wait(deadline)
            is_late = deadline is not None and time.monotonic() >= deadline
            if orphaned or is_late or (received and deadline is not None):
                self._exit_process(FORCED_EXIT_CODE)
                return
            if received:
                deadline = time.monotonic() + self._grace
                # The grace ends even if the call fails.
                with suppress(Exception):
                    self._stop(signal.Signals(received[0]).name)

    def _wait(self, deadline: float | None) -> tuple[bytes, bool]:
        """Return the received signal, if any, and whether the parent has ended."""
        waits = [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        if self._pidfd is None:
            waits.append(PARENT_POLL_SECONDS)
        watched = [self._signal_read_fd] if self._pidfd is None else [self._signal_read_fd, self._pidfd]
        ready, _, _ = select.select(watched, [], [], min(waits, default=None))
        # Another process may have adopted this one, even before its parent could be watched.
        orphaned = self._pidfd in ready or os.getppid() != self._parent
        return os.read(self._signal_read_fd, 1) if self._signal_read_fd in ready else b"", orphaned


def _open_pidfd(parent: int) -> int | None:
    """Return a descriptor that becomes readable when *parent* ends; None where the system has none."""
    try:
        return os.pidfd_open(parent)
    except (AttributeError, OSError):
        return None
