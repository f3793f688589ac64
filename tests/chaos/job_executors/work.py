"""The work of a job of the chaos run, as its argument says; its start and end are synced to disk.

The executors in other languages do the same.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

_FOREVER = 100_000


class JobFailedError(Exception):
    """The job must fail this time."""


class RetryRequestedError(Exception):
    """The job asks for a retry."""


def perform(instructions: dict[str, Any], job: str, attempt: int, language: str) -> dict[str, Any]:
    """Do what *instructions* say; attempts up to their ``until`` run in their mode, later ones echo."""
    record("start", job, attempt)
    time.sleep(instructions["takes"])
    mode = instructions["mode"] if attempt <= instructions["until"] else "echo"
    if mode == "hang":
        time.sleep(_FOREVER)
    if mode == "crash":
        os._exit(9)
    if mode == "kill":
        kill_orchestrator()
    if instructions["mode"] == "print":
        # On stdout this would be an outcome.
        print(json.dumps({"job_id": job, "status": "error", "error_message": "printed"}), flush=True)
    record("end", job, attempt)
    if mode == "fail":
        raise JobFailedError("not this time")
    if mode == "retry":
        raise RetryRequestedError
    return {"job": job, "attempt": attempt, "language": language}


def kill_orchestrator() -> None:
    """SIGKILL the orchestrator while it is the parent: a later parent has no part in this."""
    if os.getppid() == int(os.environ["CHAOS_PARENT"]):
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(_FOREVER)


_file: int | None = None


def record(event: str, job: str, attempt: int) -> None:
    """Sync the record before anything else happens; each process has a separate file."""
    global _file  # noqa: PLW0603 - opened by the first one
    if _file is None:
        path = f"{os.environ['CHAOS_JOURNALS']}/{os.getpid()}-{time.time_ns()}.journal"
        _file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(_file, json.dumps([time.time(), event, job, attempt]).encode() + b"\n")
    os.fdatasync(_file)
