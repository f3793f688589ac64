"""One schedule of the cron chaos for tasks: ``ergon run tests.chaos.cron_schedule:tick``; settings name the queue."""

from __future__ import annotations

import os

from ergon_framework import cron, queue

QUEUE = "ticks"


@cron("* * * * * *", queue(QUEUE))
def tick() -> int:
    return os.getpid()
