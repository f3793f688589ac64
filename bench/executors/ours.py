"""Ours: jobs per second end to end through PostgreSQL, by one client, one orchestrator and its executors."""

from __future__ import annotations

import time
import uuid

from ground import PATIENCE, VALUE, client, database, echo, orchestrator

#: Jobs that are submitted in one database transaction.
BULK = 500
WARM = 200


def ours(postgres, jobs, kinds):
    """Jobs per second, from the first submit to the last result seen; in a new database, as peers have a new Redis."""
    dsn = database(postgres, f"bench_{uuid.uuid4().hex[:12]}")
    with orchestrator(dsn, kinds), client(dsn) as asked:
        # Everybody is awake before the clock runs.
        measured(asked, WARM, list(kinds))
        return measured(asked, jobs, list(kinds))


def measured(asked, jobs, kinds):
    began = time.perf_counter()
    ids = []
    for start in range(0, jobs, BULK):
        numbers = range(start, min(start + BULK, jobs))
        ids += [made.id for made in asked.submit_many(echo(kinds[n % len(kinds)]) for n in numbers)]
    found = asked.wait_many(ids, timeout=PATIENCE)
    rate = jobs / (time.perf_counter() - began)
    if any(job.result != VALUE for job in found):
        raise RuntimeError("some results are not what was sent")
    return rate
