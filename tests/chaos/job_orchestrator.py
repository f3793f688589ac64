"""One orchestrator process of the chaos run, with executors in every language for which it gets a command."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ergon_framework import ConsumerPolicy
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.jobs.batched_store import BatchedJobStore
from ergon_framework.jobs.model import JobState
from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator
from ergon_framework.jobs.store import AttemptEnd
from ergon_framework.worker.policies import RetryPolicy

#: Attempts of a job that sets none itself: attempts lost to faults must not exhaust it.
MAX_ATTEMPTS = 12


def make_policy() -> ConsumerPolicy:
    return ConsumerPolicy.load(
        {
            "loop": {"streaming": True, "drain_timeout": 10.0, "empty_queue": {"backoff": 0.05, "cap": 0.3}},
            "steps": {
                "process": {
                    "retry": {"max_attempts": MAX_ATTEMPTS, "timeout": 15.0, "backoff": 0.1, "cap": 1.0, "jitter": 0.5}
                },
                "fetch": {"retry": {"backoff": 0.1, "cap": 0.5}},
            },
        }
    )


def make_executors(kind: str, command: list[str], environment: dict[str, str]) -> ExecutorGroup:
    is_stubborn = kind == "stubborn"
    pool = PoolPolicy(
        size=1 if is_stubborn else 2,
        grace=0.3,
        # The orchestrator would only wait for an executor that ignores the end of its input.
        max_jobs=None if is_stubborn else 300,
        restart=RetryPolicy(backoff=0.05, multiplier=2.0, cap=1.0),
    )
    return ExecutorGroup(command=ExecutorCommand(words=tuple(command), environment=environment), pool=pool)


def record_ends(path: Path) -> None:
    """Record which claim reported which outcome, and the answer."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    original_finish = BatchedJobStore._finish

    async def finish_and_record(self: BatchedJobStore, ends: Sequence[AttemptEnd]) -> Sequence[JobState | None]:
        states = await original_finish(self, ends)
        for (claim, verdict), state in zip(ends, states, strict=True):
            fields = [claim.job_id, claim.receipt.worker, claim.receipt.token, type(verdict).__name__, state]
            os.write(file, json.dumps(fields).encode() + b"\n")
        return states

    BatchedJobStore._finish = finish_and_record  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--lease", type=float, required=True)
    parser.add_argument("--commands", type=json.loads, required=True, help="a command for each kind, as JSON")
    options = parser.parse_args()
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(message)s %(transaction_id)s", defaults={"transaction_id": ""})
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    record_ends(Path(os.environ["CHAOS_JOURNALS"]) / f"{os.environ['CHAOS_LIFE']}.ends")
    inherited = ("PATH", "CHAOS_MARK", "CHAOS_LIFE", "CHAOS_JOURNALS")
    environment = {name: os.environ[name] for name in inherited} | {"CHAOS_PARENT": str(os.getpid())}
    executors_by_kind = {kind: make_executors(kind, command, environment) for kind, command in options.commands.items()}
    task = Orchestrator(executors_by_kind, dsn=options.dsn, lease=options.lease, policy=make_policy())
    signal.signal(signal.SIGTERM, lambda *_: task.stop())
    asyncio.run(task.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
