"""One orchestrator of the cron chaos: ``ergon run tests.chaos.cron_fleet:orchestrator``."""

from __future__ import annotations

from ergon_framework.jobs.cron import Cron
from tests.integration import jobs

#: Each orchestrator declares it.
TICK = Cron("tick", "* * * * * *", "echo", ["tick"])
orchestrator = jobs.make_orchestrator(None, size=1, crons=[TICK])
