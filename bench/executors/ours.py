"""Ergon: jobs per second end to end through PostgreSQL, by one client, one orchestrator and its executors."""

from __future__ import annotations

import time
import uuid

from ground import VALUE, WAIT_TIMEOUT_SECONDS, connect_client, create_database, echo_request, orchestrator

#: Jobs that are submitted in one database transaction.
SUBMIT_BATCH = 500
WARM_UP_JOBS = 200


def measure_ours(postgres, jobs, kinds):
    """Return jobs per second, from first submit to last result; in a new database, as peers have a new Redis."""
    dsn = create_database(postgres, f"bench_{uuid.uuid4().hex[:12]}")
    with orchestrator(dsn, kinds), connect_client(dsn) as jobs_client:
        # All processes run before the measurement starts.
        measure_rate(jobs_client, WARM_UP_JOBS, list(kinds))
        return measure_rate(jobs_client, jobs, list(kinds))


def measure_rate(jobs_client, jobs, kinds):
    began = time.perf_counter()
    ids = []
    for start in range(0, jobs, SUBMIT_BATCH):
        numbers = range(start, min(start + SUBMIT_BATCH, jobs))
        ids += [job.id for job in jobs_client.submit_many(echo_request(kinds[n % len(kinds)]) for n in numbers)]
    jobs_done = jobs_client.wait_many(ids, timeout=WAIT_TIMEOUT_SECONDS)
    rate = jobs / (time.perf_counter() - began)
    if any(job.result != VALUE for job in jobs_done):
        raise RuntimeError("some results are not what was sent")
    return rate
