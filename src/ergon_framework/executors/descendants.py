"""Processes that an executor has started, found by their parents and by an environment variable.

A process in its own session leaves the process group of its executor, and a process whose parent has ended leaves its
process tree. The environment stays: every child inherits the variable unless it is started without it. Linux only.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

#: The environment variable that identifies the executor to every process that it starts.
EXECUTOR_VARIABLE: Final = "ERGON_EXECUTOR"
#: Maximum number of searches: a process that is found may have started another one in the meantime.
MAX_KILL_ROUNDS: Final = 20
#: Fields of /proc/PID/stat after the program name: the parent, and the start time in ticks.
_STAT_PARENT, _STAT_START = 1, 19


class Descendant(NamedTuple):
    """A process identified by its pid and start time, because the system reuses pids."""

    pid: int
    start: str


def list_children(root: int) -> list[Descendant]:
    """Return the processes below *root* whose parents are alive; must be fast, because it runs in the event loop."""
    read_children = _read_children if Path("/proc/thread-self/children").exists() else _index_parents().__getitem__
    descendants = [Descendant(pid, _read_stat(pid)[1]) for pid in read_children(root)]
    for each in descendants:
        descendants += [Descendant(pid, _read_stat(pid)[1]) for pid in read_children(each.pid)]
    return descendants


def _read_children(pid: int) -> list[int]:
    """Return the children of all threads of a process; some kernels do not report them."""
    with suppress(OSError):
        return [
            int(pid_text)
            for thread_path in Path(f"/proc/{pid}/task").iterdir()
            for pid_text in _read_words(thread_path / "children")
        ]
    return []


def _read_words(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="ascii").split()
    return []


def _index_parents() -> dict[int, list[int]]:
    """Return the children of every process by reading the parent of each process."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid in _list_pids():
        children[_read_stat(pid)[0]].append(pid)
    return children


def kill_marked(mark: str) -> None:
    """Kill every process whose environment contains *mark*, and processes that these start in the meantime."""
    for _ in range(MAX_KILL_ROUNDS):
        killed = [_kill(each) for each in _list_marked(mark)]
        if not any(killed):
            return


def kill_all(descendants: set[Descendant]) -> None:
    """Kill those of *descendants* that are still alive."""
    for each in descendants:
        _kill(each)


def _list_marked(mark: str) -> Iterator[Descendant]:
    assignment = f"{EXECUTOR_VARIABLE}={mark}".encode()
    for pid in _list_pids():
        # The start is read first: the environment read after it belongs to that process, or the kill below fails.
        _, start = _read_stat(pid)
        with suppress(OSError):
            if assignment in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield Descendant(pid, start)


def _kill(descendant: Descendant) -> bool:
    """Kill the process; return False if it has ended. The pidfd ensures that no other process has reused its pid."""
    try:
        descriptor = os.pidfd_open(descendant.pid)
    except OSError:
        return False
    try:
        if _read_stat(descendant.pid)[1] != descendant.start:
            return False
        with suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return True
        return False
    finally:
        os.close(descriptor)


def _list_pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _read_stat(pid: int) -> tuple[int, str]:
    """Return the parent and the start time of a process; 0 and an empty string for one that has ended."""
    try:
        # The program name is in brackets, and may itself contain blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return (int(fields[_STAT_PARENT]), fields[_STAT_START]) if fields[0] != "Z" else (0, "")
    except (OSError, ValueError, IndexError):
        return 0, ""
