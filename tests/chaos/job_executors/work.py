"""Work: what a job of the chaos run does, as its argument says; its start and end are on the disk.

The executors in other languages do the same.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

_FOREVER = 100_000


class Refused(Exception):
    """The job is to fail this time."""


class Wanted(Exception):
    """The job asks to be tried again."""


def perform(told: dict[str, Any], job: str, attempt: int, language: str) -> dict[str, Any]:
    """Do what is *told*, in an attempt that is as bad as it should be until there were enough of those."""
    note("start", job, attempt)
    time.sleep(told["takes"])
    mode = told["mode"] if attempt <= told["until"] else "echo"
    if mode == "hang":
        time.sleep(_FOREVER)
    if mode == "crash":
        os._exit(9)
    if mode == "kill":
        kill_orchestrator()
    if told["mode"] == "print":
        # On stdout this would be an outcome.
        print(json.dumps({"job_id": job, "status": "error", "error_message": "printed"}), flush=True)
    note("end", job, attempt)
    if mode == "fail":
        raise Refused("not this time")
    if mode == "retry":
        raise Wanted
    return {"job": job, "attempt": attempt, "language": language}


def kill_orchestrator() -> None:
    """SIGKILL it, as long as it is there: whoever is the parent afterwards has done nothing."""
    if os.getppid() == int(os.environ["CHAOS_PARENT"]):
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(_FOREVER)


_file: int | None = None


def note(what: str, job: str, attempt: int) -> None:
    """Have it on the disk before anything else happens; each process has a file of its own."""
    global _file  # noqa: PLW0603 - opened by the first one
    if _file is None:
        path = f"{os.environ['CHAOS_JOURNALS']}/{os.getpid()}-{time.time_ns()}.journal"
        _file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(_file, json.dumps([time.time(), what, job, attempt]).encode() + b"\n")
    os.fdatasync(_file)
