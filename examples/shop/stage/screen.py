"""Screen: a status line that is rewritten, and permanent lines above it."""

from __future__ import annotations

import sys
import threading
import time

#: Seconds between two lines where no terminal allows rewriting.
STATUS_INTERVAL_SECONDS = 5.0


class Screen:
    """On a terminal the last line is the status; elsewhere the status is printed at intervals."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terminal = sys.stderr.isatty()
        self._last = 0.0

    def show(self, line: str) -> None:
        with self._lock:
            if self._terminal:
                sys.stderr.write(f"\r\x1b[K{line}")
            elif time.monotonic() - self._last >= STATUS_INTERVAL_SECONDS:
                self._last = time.monotonic()
                sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    def say(self, line: str) -> None:
        with self._lock:
            sys.stderr.write(f"\r\x1b[K{line}\n" if self._terminal else f"{line}\n")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
