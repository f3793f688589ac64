"""Jobs: work that executors run, stored in PostgreSQL; jobs can also be submitted on a schedule.

A job is a stored call of a handler. An executor is a process, in any language, that runs handlers; an orchestrator
sends jobs to executors. Executors of one kind, usually of one language, share a queue.
"""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.jobs.client import AsyncJobClient, JobClient
    from ergon_framework.jobs.cron import Cron
    from ergon_framework.jobs.model import Job, JobConflict, JobError, JobNotFound, JobRequest, JobState, JobWaitTimeout
    from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "client": ("AsyncJobClient", "JobClient"),
            "cron": ("Cron",),
            "model": ("Job", "JobConflict", "JobError", "JobNotFound", "JobRequest", "JobState", "JobWaitTimeout"),
            "orchestrator": ("ExecutorGroup", "Orchestrator"),
        },
        # The optional extra and the library that a module needs.
        extras={
            "client": ("postgres", "psycopg"),
            "orchestrator": ("postgres", "psycopg"),
        },
    )

__all__ = [
    "AsyncJobClient",
    "Cron",
    "ExecutorGroup",
    "Job",
    "JobClient",
    "JobConflict",
    "JobError",
    "JobNotFound",
    "JobRequest",
    "JobState",
    "JobWaitTimeout",
    "Orchestrator",
]
