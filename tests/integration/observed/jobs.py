"""An orchestrator with executors of which some die, and an entry for every second."""

import os
import sys

from ergon_framework import ConsumerPolicy
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.jobs.cron import Cron
from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator

POLICY = ConsumerPolicy.load(
    {
        "loop": {"streaming": True, "drain_timeout": 1.0, "empty_queue": {"backoff": 0.1, "cap": 0.1}},
        "steps": {"process": {"retry": {"max_attempts": 2, "backoff": 0.05, "timeout": 10.0}}},
    }
)
EXECUTORS = ExecutorGroup(
    command=ExecutorCommand(
        words=(sys.executable, "-S", os.environ["STUBBORN"]), environment={"PATH": os.environ["PATH"]}
    ),
    pool=PoolPolicy(size=1, grace=0.2),
)
orchestrator = Orchestrator(
    {"python": EXECUTORS}, policy=POLICY, crons=[Cron("pulse", "* * * * * *", "echo", ["beat"], misfire="skip")]
)
