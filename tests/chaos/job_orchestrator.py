"""One orchestrator process of the chaos run, with executors in every language that it is given a command for."""

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
from ergon_framework.executor.jobs.attempts import End
from ergon_framework.executor.jobs.desk import Desk
from ergon_framework.executor.jobs.model import JobState
from ergon_framework.executor.jobs.orchestrator import Executors, Orchestrator
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import Command
from ergon_framework.task.mixins.policies import RetryPolicy

#: Attempts of a job that does not say it itself: what it loses to the chaos must not be its end.
MAX_ATTEMPTS = 12


def policy() -> ConsumerPolicy:
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


def executors(kind: str, words: list[str], environment: dict[str, str]) -> Executors:
    stubborn = kind == "stubborn"
    pool = PoolPolicy(
        size=1 if stubborn else 2,
        grace=0.3,
        # One that does not end with its input would only be waited for.
        max_jobs=None if stubborn else 300,
        restart=RetryPolicy(backoff=0.05, multiplier=2.0, cap=1.0),
    )
    return Executors(command=Command(words=tuple(words), environment=environment), pool=pool)


def note_ends(path: Path) -> None:
    """Write down which claim said what about which job, and what it was answered."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    finish = Desk._finish

    async def noted(self: Desk, ends: Sequence[End]) -> Sequence[JobState | None]:
        states = await finish(self, ends)
        for (claim, verdict), state in zip(ends, states, strict=True):
            words = [claim.job_id, claim.receipt.worker, claim.receipt.token, type(verdict).__name__, state]
            os.write(file, json.dumps(words).encode() + b"\n")
        return states

    Desk._finish = noted  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--lease", type=float, required=True)
    parser.add_argument("--commands", type=json.loads, required=True, help="a command for each kind, as JSON")
    given = parser.parse_args()
    said = logging.StreamHandler()
    said.setFormatter(logging.Formatter("%(asctime)s %(message)s %(transaction_id)s", defaults={"transaction_id": ""}))
    logging.basicConfig(level=logging.WARNING, handlers=[said])
    note_ends(Path(os.environ["CHAOS_JOURNALS"]) / f"{os.environ['CHAOS_LIFE']}.ends")
    kept = ("PATH", "CHAOS_MARK", "CHAOS_LIFE", "CHAOS_JOURNALS")
    environment = {name: os.environ[name] for name in kept} | {"CHAOS_PARENT": str(os.getpid())}
    kinds = {kind: executors(kind, words, environment) for kind, words in given.commands.items()}
    task = Orchestrator(kinds, dsn=given.dsn, lease=given.lease, policy=policy())
    signal.signal(signal.SIGTERM, lambda *_: task.stop())
    asyncio.run(task.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
