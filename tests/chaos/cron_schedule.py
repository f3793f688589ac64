"""One schedule of the cron chaos: ``ergon run tests.chaos.cron_schedule:tick``; the queue is that of ``CRON_QUEUE``."""

from __future__ import annotations

import os

from ergon_framework import cron, queue


@cron("* * * * * *", queue("ticks"), name="tick")
def tick() -> str:
    return f"process {os.getpid()}"
