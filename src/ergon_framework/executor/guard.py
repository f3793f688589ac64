"""Guard: a process that outlives its orchestrator by a moment, and takes the executors with it.

An orchestrator that is killed by SIGKILL can do nothing any more, and executors of strangers do not
end when their stdin is closed. The guard waits for its own stdin to end, which the system does for
the dead too, and then kills every process group that was entrusted to it.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import RLock, Thread
from typing import IO, Final, cast

from ergon_framework.errors import ConnectionLost
from ergon_framework.executor.descendants import MARK

# The standard library alone, so that it starts in a few milliseconds. A word is +GROUP or -GROUP, and comes back
# once it has been done.
_PROGRAM: Final = """
import os, signal, sys
marks = b"ERGON_EXECUTOR=" + sys.argv[1].encode() + b"."
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for word in sys.stdin.buffer:
    (groups.add if word[:1] == b"+" else groups.discard)(int(word[1:]))
    os.write(1, word)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
# Processes in sessions of their own; the environment of each names its executor, and so this guard.
for _ in range(20):
    killed = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            descriptor = os.pidfd_open(int(pid))
            try:
                with open(f"/proc/{pid}/environ", "rb") as environment:
                    if any(word.startswith(marks) for word in environment.read().split(b"\\0")):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        killed += 1
            finally:
                os.close(descriptor)
        except OSError:
            pass
    if not killed:
        break
"""


#: How many executors are started at once.
THREADS: Final = 4
#: Seconds in which the guard answers, or is killed and replaced. It answers at once; a machine that swaps takes longer.
PATIENCE: Final = 5.0


class Guard:
    """One for each orchestrator. Its methods wait for the guard's word, so they belong into threads.

    A guard that was killed itself is replaced at once, and told of all groups anew. One that does not
    answer within *patience* seconds is killed.
    """

    def __init__(self, *, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._lock = RLock()
        self._groups: set[int] = set()
        self._closed = False
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        #: Where its methods are called: not where a program's own calls may take all threads there are.
        self.threads = ThreadPoolExecutor(THREADS, "ergon-guard")
        self._process = self._started()

    @property
    def pid(self) -> int:
        return self._process.pid

    def create_mark(self) -> str:
        """Return what the environment of another executor names; all of one guard begin alike."""
        return f"{self._name}.{next(self._numbers)}"

    def add(self, group: int) -> None:
        """Have *group* killed when this process is gone; true as soon as this returns."""
        with self._lock:
            self._groups.add(group)
            self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """*group* is empty and forgotten."""
        with self._lock:
            self._groups.discard(group)
            if not self._closed:
                self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard, and whatever is still entrusted to it."""
        with self._lock:
            self._closed = True
            process, groups = self._process, set(self._groups)
        try:
            process.communicate(timeout=self._patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            for group in groups:
                with suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
        self.threads.shutdown(wait=False)

    def _tell(self, word: str) -> None:
        for _ in range(2):
            with suppress(OSError):
                self._put(self._process, word)
                return
            self._replace()
        raise ConnectionLost("the guard of the executors cannot be reached; no executor can be started")

    def _replace(self) -> None:
        """Start another one in the place of one that is gone, and entrust everything to it."""
        with self._lock:
            if self._closed or self._process.poll() is None:
                return
            for end in (self._process.stdin, self._process.stdout):
                cast("IO[bytes]", end).close()
            self._process = self._started()
            for group in self._groups:
                self._put(self._process, f"+{group}\n")

    def _started(self) -> subprocess.Popen[bytes]:
        # A session of its own: what is meant for the orchestrator's group must not reach it.
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-I", "-S", "-c", _PROGRAM, self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # Not that of an executor that starts executors itself: this guard has to outlive it by a moment.
            env={name: text for name, text in os.environ.items() if name != MARK},
        )
        Thread(target=self._watch, args=(process,), name="ergon-guard-watch", daemon=True).start()
        return process

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with suppress(OSError):
            self._replace()

    def _put(self, process: subprocess.Popen[bytes], word: str) -> None:
        told, heard = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        told.write(word.encode())
        told.flush()
        answer = select.poll()
        answer.register(heard, select.POLLIN)
        if not answer.poll(self._patience * 1000):
            # Whoever waits for it holds the lock: no executor would be started or forgotten any more.
            process.kill()
            process.wait()
            raise TimeoutError(errno.ETIMEDOUT, f"the guard has not answered within {self._patience:g} s")
        if heard.readline() != word.encode():
            process.wait()
            raise BrokenPipeError
