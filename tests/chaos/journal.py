"""Journal: what a worker process did, one line each, on disk before the process continues."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """An append-only file of JSON lines; lines that are written at the same time share one sync."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._changed = threading.Condition()
        self._pending: list[tuple[bytes, Callable[[], None] | None]] = []
        threading.Thread(target=self._write_pending, name="journal", daemon=True).start()

    def write_soon(self, *values: Any, done: Callable[[], None] | None = None) -> None:
        """Write *values* with the time soon; *done* is called on another thread when they are on disk."""
        line = json.dumps([time.time(), *values]).encode() + b"\n"
        with self._changed:
            self._pending.append((line, done))
            self._changed.notify()

    def write(self, *values: Any) -> None:
        """Return when *values* are on disk."""
        written = threading.Event()
        self.write_soon(*values, done=written.set)
        written.wait()

    async def write_async(self, *values: Any) -> None:
        loop = asyncio.get_running_loop()
        written = asyncio.Event()
        self.write_soon(*values, done=lambda: loop.call_soon_threadsafe(written.set))
        await written.wait()

    def _write_pending(self) -> None:
        while True:
            with self._changed:
                while not self._pending:
                    self._changed.wait()
                pending, self._pending = self._pending, []
            data = b"".join(line for line, _ in pending)
            while data:
                data = data[os.write(self._file, data) :]
            os.fdatasync(self._file)
            for _, done in pending:
                if done is not None:
                    done()


def read_journal(path: Path) -> list[list[Any]]:
    """Read the lines of a journal, except one that was cut off by the end of its writer."""
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
