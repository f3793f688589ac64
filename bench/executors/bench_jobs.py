"""The orchestrators that the benchmark runs with ``ergon run``; their settings are in the environment."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from ergon_framework import ConsumerPolicy
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator

EXAMPLES = Path(__file__).parents[2] / "examples" / "executors"
#: Executors by kind: their number, and the jobs that each has in flight.
KINDS = json.loads(os.environ["BENCH_KINDS"])
COMMANDS = {
    "node": ("node", str(EXAMPLES / "node" / "executor.mjs")),
    "python": (str(Path(sys.executable).parent / "ergon"), "executor", "run", "--handlers", "handlers:registry"),
}
COMMANDS["slow"] = COMMANDS["python"]


def build_executors(kind, size, in_flight):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(EXAMPLES / "python")}
    command = (shutil.which(COMMANDS[kind][0]) or COMMANDS[kind][0], *COMMANDS[kind][1:])
    return ExecutorGroup(
        command=ExecutorCommand(words=command, environment=environment),
        pool=PoolPolicy(size=size, max_in_flight=in_flight),
    )


orchestrator = Orchestrator(
    {kind: build_executors(kind, size, in_flight) for kind, (size, in_flight) in KINDS.items()},
    policy=ConsumerPolicy.load({"loop": {"streaming": True}}),
)
