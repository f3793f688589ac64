"""Journal: what a worker process did, one line each, on the disk before anybody goes on."""

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
    """An append-only file of JSON lines; those that are written at the same time share one sync."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._changed = threading.Condition()
        self._pending: list[tuple[bytes, Callable[[], None] | None]] = []
        threading.Thread(target=self._keep, name="journal", daemon=True).start()

    def note(self, *words: Any, done: Callable[[], None] | None = None) -> None:
        """Have *words*, with the time, written soon; *done* is called on another thread when they are on the disk."""
        line = json.dumps([time.time(), *words]).encode() + b"\n"
        with self._changed:
            self._pending.append((line, done))
            self._changed.notify()

    def write(self, *words: Any) -> None:
        """Return when *words* are on the disk."""
        written = threading.Event()
        self.note(*words, done=written.set)
        written.wait()

    async def write_async(self, *words: Any) -> None:
        loop = asyncio.get_running_loop()
        written = asyncio.Event()
        self.note(*words, done=lambda: loop.call_soon_threadsafe(written.set))
        await written.wait()

    def _keep(self) -> None:
        while True:
            with self._changed:
                while not self._pending:
                    self._changed.wait()
                pending, self._pending = self._pending, []
            text = b"".join(line for line, _ in pending)
            while text:
                text = text[os.write(self._file, text) :]
            os.fdatasync(self._file)
            for _, done in pending:
                if done is not None:
                    done()


def read(path: Path) -> list[list[Any]]:
    """The lines of a journal; one that its writer did not live to end is left out."""
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
