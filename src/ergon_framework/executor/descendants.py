"""Processes that an executor has started: found by their parents and by a variable of their environment.

A process in a session of its own leaves the group of its executor, and one whose parent has ended leaves its tree. The
environment stays: every child inherits the variable unless it is started without it. Linux only.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

#: Names the executor to all that it starts.
MARK: Final = "ERGON_EXECUTOR"
#: How often processes are searched for: one that is found may have started another in the meantime.
ROUNDS: Final = 20
#: The fields of /proc/PID/stat behind the name of the program: the parent, and the start in ticks.
_PARENT, _START = 1, 19


class Descendant(NamedTuple):
    """A process, with its start: the system gives a number away again."""

    pid: int
    start: str


def list_children(root: int) -> list[Descendant]:
    """Return the processes below *root*, as long as each of their parents lives; it runs in the event loop."""
    find = _read_children if Path("/proc/thread-self/children").exists() else _index_parents().__getitem__
    found = [Descendant(pid, _read_stat(pid)[1]) for pid in find(root)]
    for each in found:
        found += [Descendant(pid, _read_stat(pid)[1]) for pid in find(each.pid)]
    return found


def _read_children(pid: int) -> list[int]:
    """Return the children of all threads of a process; some kernels do not tell them."""
    with suppress(OSError):
        return [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in _read_words(task / "children")]
    return []


def _read_words(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="ascii").split()
    return []


def _index_parents() -> dict[int, list[int]]:
    """Return the children of every process, by looking at all."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid in _list_pids():
        children[_read_stat(pid)[0]].append(pid)
    return children


def kill_marked(mark: str) -> None:
    """Kill every process whose environment names *mark*, and what it starts in the meantime."""
    for _ in range(ROUNDS):
        killed = [_kill(each) for each in _list_marked(mark)]
        if not any(killed):
            return


def kill_all(descendants: set[Descendant]) -> None:
    """Kill those of *descendants* that still live."""
    for each in descendants:
        _kill(each)


def _list_marked(mark: str) -> Iterator[Descendant]:
    wanted = f"{MARK}={mark}".encode()
    for pid in _list_pids():
        # The start first: an environment that is read after it belongs to that process, or the kill below fails.
        _, start = _read_stat(pid)
        with suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield Descendant(pid, start)


def _kill(descendant: Descendant) -> bool:
    """Kill it; False if it has ended. The descriptor makes sure that no other process has its number by then."""
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
    """Return the parent and the start of a process; 0 and an empty text for one that has ended."""
    try:
        # The name of the program is in brackets, and may hold blanks and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return (int(fields[_PARENT]), fields[_START]) if fields[0] != "Z" else (0, "")
    except (OSError, ValueError, IndexError):
        return 0, ""
