"""The orchestrators that the bench runs with ``ergon run``: what they are made of is in the environment."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from ergon_framework import ConsumerPolicy
from ergon_framework.executor.jobs.orchestrator import Executors, Orchestrator
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import Command

EXAMPLES = Path(__file__).parents[2] / "examples" / "executors"
#: Executors by kind: how many, and how many jobs each has in flight.
KINDS = json.loads(os.environ["BENCH_KINDS"])
WORDS = {
    "node": ("node", str(EXAMPLES / "node" / "executor.mjs")),
    "python": (str(Path(sys.executable).parent / "ergon"), "executor", "run", "--handlers", "handlers:registry"),
}
WORDS["slow"] = WORDS["python"]


def executors(kind, size, in_flight):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(EXAMPLES / "python")}
    words = (shutil.which(WORDS[kind][0]) or WORDS[kind][0], *WORDS[kind][1:])
    return Executors(
        command=Command(words=words, environment=environment), pool=PoolPolicy(size=size, max_in_flight=in_flight)
    )


orchestrator = Orchestrator(
    {kind: executors(kind, size, in_flight) for kind, (size, in_flight) in KINDS.items()},
    policy=ConsumerPolicy.load({"loop": {"streaming": True}}),
)
