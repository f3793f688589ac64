"""A real ``ergon run`` process and its output, for tests that send it signals."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Self

#: -P keeps Python from adding the folder to the path automatically: ergon has to do that.
ERGON = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()"]
TIMEOUT_SECONDS = 20.0

#: A queue that writes each fetch and each settlement to a file, so that they outlive the process.
HARNESS_MODULE = """
import asyncio, sys, threading, time
from contextlib import asynccontextmanager, contextmanager
from ergon_framework import *
from ergon_framework.scope import current

def note(line):
    with open("notes", "a") as file:
        file.write(line + chr(10))

def say(line):
    # One write: lines of two threads are never mixed.
    print(line + chr(10), end="", flush=True)

def heard():
    sys.stdin.readline()

async def heard_async():
    # A thread of our own: the default executor's would be waited for at the end.
    done = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (heard(), loop.call_soon_threadsafe(done.set_result, None)), daemon=True).start()
    await done

class Noted(MemoryConnector):
    def fetch_transactions(self, batch_size, **extra):
        note("fetch")
        say("fetch")
        return super().fetch_transactions(batch_size, **extra)

    async def fetch_transactions_async(self, batch_size, **extra):
        note("fetch")
        say("fetch")
        return await super().fetch_transactions_async(batch_size, **extra)

    def settle(self, settlings):
        results = super().settle(settlings)
        for (delivery, settlement), result in zip(settlings, results):
            note(f"{type(settlement).__name__} {delivery.transaction.id} {result}")
        return results

queue = Noted("orders")

def orders(count):
    queue.dispatch([Transaction({}, id=f"order-{n}") for n in range(1, count + 1)])

def policy(drain=0.4, streaming=True, concurrency=1, retry=None, **loop):
    return ConsumerPolicy.load({
        "loop": {"drain_timeout": drain, "streaming": streaming, "concurrency": {"value": concurrency},
                 "empty_queue": {"backoff": 60.0, "cap": 0.0}, **loop},
        "steps": {"process": {"retry": retry or {}}, "fetch": {"retry": {"max_attempts": 1}}},
    })
"""


class ErgonProcess:
    """One process of ``ergon run app:task`` in *folder*, or of another command."""

    def __init__(self, folder: Path, source: str, *options: str, command: Sequence[str] = ("run", "app:task")) -> None:
        (folder / "noted.py").write_text(HARNESS_MODULE, encoding="utf-8")
        (folder / "app.py").write_text(f"from noted import *\n{source}", encoding="utf-8")
        self._notes = folder / "notes"
        self._line_queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.output: list[str] = []
        self._process = subprocess.Popen(
            [*ERGON, *command, *options],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self.signal_time = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._line_queue.put(line.rstrip())

    def wait_for(self, text: str) -> None:
        """Return once a line that holds *text* has been printed."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            try:
                line = self._line_queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"never said {text!r}, but: {self.output}") from None
            self.output.append(line)
            if text in line:
                return

    def send_signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.signal_time = time.monotonic()
        self._process.send_signal(number)

    def send_line(self) -> None:
        """Write the line on stdin that the process waits for."""
        self._process.stdin.write("go\n")

    def wait_for_exit(self) -> tuple[int, float]:
        """Return the exit code, and the seconds between the last signal and the exit."""
        code = self._process.wait(TIMEOUT_SECONDS)
        seconds = time.monotonic() - self.signal_time
        self._reader.join()
        while not self._line_queue.empty():
            self.output.append(self._line_queue.get())
        return code, seconds

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def notes(self) -> list[str]:
        return self._notes.read_text(encoding="utf-8").splitlines() if self._notes.exists() else []
