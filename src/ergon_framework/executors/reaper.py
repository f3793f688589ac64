"""Reaper process: it outlives its orchestrator briefly and kills the orchestrator's executors.

An orchestrator sends jobs to executors, processes in any language that run handlers. Each executor has its own process
group, and a mark, an environment variable that its children inherit.

An orchestrator that is killed by SIGKILL cannot clean up, and third-party executors do not end when their stdin is
closed. The reaper waits for the end of its own stdin, which the system closes even for a killed process, and then
kills every registered process group.
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

from ergon_framework.errors import ConnectionLostError
from ergon_framework.executors.descendants import EXECUTOR_VARIABLE

# Only the standard library, so that it starts in a few milliseconds. A command is +GROUP or -GROUP; the reaper echoes
# it after execution.
_REAPER_PROGRAM: Final = """
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
# Processes in separate sessions; the environment of each names its executor, and so this reaper.
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


#: Maximum number of executors that are started concurrently.
MAX_CONCURRENT_STARTS: Final = 4
#: Seconds for the reaper's answer before it is killed and replaced. It answers immediately unless the machine swaps.
ANSWER_TIMEOUT_SECONDS: Final = 5.0


class ProcessReaper:
    """The reaper of one orchestrator. Its methods wait for the reaper's answer, so callers use threads.

    A reaper that was killed is replaced immediately, and all groups are registered again. A reaper that does not
    answer within *answer_timeout* seconds is killed.
    """

    def __init__(self, *, answer_timeout: float = ANSWER_TIMEOUT_SECONDS) -> None:
        self._answer_timeout = answer_timeout
        self._lock = RLock()
        self._groups: set[int] = set()
        self._closed = False
        self._name = uuid.uuid4().hex
        self._mark_numbers = itertools.count(1)
        #: Threads for calls of its methods, separate from pools that the program itself may exhaust.
        self.threads = ThreadPoolExecutor(MAX_CONCURRENT_STARTS, "ergon-guard")
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def create_mark(self) -> str:
        """Return the environment value that identifies one more executor; all marks of one reaper share a prefix."""
        return f"{self._name}.{next(self._mark_numbers)}"

    def add(self, group: int) -> None:
        """Register *group* to be killed when this process has ended; in effect when this method returns."""
        with self._lock:
            self._groups.add(group)
            self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Remove the empty process group *group* from the reaper."""
        with self._lock:
            self._groups.discard(group)
            if not self._closed:
                self._send(f"-{group}\n")

    def close(self) -> None:
        """End the reaper and all process groups that are still registered."""
        with self._lock:
            self._closed = True
            process, groups = self._process, set(self._groups)
        try:
            process.communicate(timeout=self._answer_timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            for group in groups:
                with suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
        self.threads.shutdown(wait=False)

    def _send(self, command: str) -> None:
        """Send *command* to the reaper, or to a new one if the reaper has ended or does not answer."""
        for _ in range(2):
            with suppress(OSError):
                self._exchange(self._process, command)
                return
            self._replace()
        raise ConnectionLostError(
            "the reaper process, which kills the executors of a killed orchestrator, is unavailable: no executor can "
            "be started; check the load and the process limit of this host"
        )

    def _replace(self) -> None:
        """Start a new reaper in place of one that has ended, and register all groups again."""
        with self._lock:
            if self._closed or self._process.poll() is None:
                return
            for pipe in (self._process.stdin, self._process.stdout):
                cast("IO[bytes]", pipe).close()
            self._process = self._start()
            for group in self._groups:
                self._exchange(self._process, f"+{group}\n")

    def _start(self) -> subprocess.Popen[bytes]:
        # A separate session: signals to the orchestrator's group must not reach the reaper.
        process = subprocess.Popen(  # noqa: S603 - the framework's own program
            [sys.executable, "-I", "-S", "-c", _REAPER_PROGRAM, self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # Without the mark of an executor that itself starts executors: this reaper has to outlive it briefly.
            env={name: text for name, text in os.environ.items() if name != EXECUTOR_VARIABLE},
        )
        Thread(target=self._watch, args=(process,), name="ergon-guard-watch", daemon=True).start()
        return process

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with suppress(OSError):
            self._replace()

    def _exchange(self, process: subprocess.Popen[bytes], command: str) -> None:
        commands, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        commands.write(command.encode())
        commands.flush()
        poller = select.poll()
        poller.register(answers, select.POLLIN)
        if not poller.poll(self._answer_timeout * 1000):
            # The caller holds the lock: without the kill, no executor could be started or removed any more.
            process.kill()
            process.wait()
            raise TimeoutError(
                errno.ETIMEDOUT, f"the reaper process has not answered within {self._answer_timeout:g} s"
            )
        if answers.readline() != command.encode():
            process.wait()
            raise BrokenPipeError
