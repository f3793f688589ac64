"""Backlog: the cost of a claim with many pending jobs, and whether a slow kind of executors delays another one.

Both are measured in turns on two databases of one server, of which only one has the load.
"""

from __future__ import annotations

import statistics

import psycopg
from ground import (
    VALUE,
    WAIT_TIMEOUT_SECONDS,
    connect_client,
    create_database,
    echo_request,
    orchestrator,
    say,
    time_block,
)

from ergon_framework.connectors.base import Ack
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.executors.decision import Complete
from ergon_framework.jobs import store
from ergon_framework.jobs.model import JobRequest, job_parameters
from ergon_framework.jobs.queue import JobQueue
from ergon_framework.jobs.store import AttemptEnd, JobClaim

SMALL_BACKLOG, LARGE_BACKLOG = 1_000, 100_000
CLAIM_COUNT = 300
#: Jobs in one claim.
CLAIM_SIZE = 16
WAITING_JOBS = 1_000
LATENCY_SAMPLES = 100
BAR = 1.5
#: The function that every client submits with; called by the server, because the client is not measured here.
FILL = """
select count(*) from generate_series(1, %(count)s) as n cross join lateral ergon.submit_job(
    %(queue)s, 'fill-' || n, %(function)s, %(headers)s::jsonb || jsonb_build_object('ergon-id', 'fill-' || n),
    %(body)s, %(digest)s, 0, 0::smallint, null, null, null, null, null, %(retention)s
)
"""


class Claimer:
    """An orchestrator's part of a claim, by hand: take jobs and start an attempt at each."""

    def __init__(self, dsn, pending):
        self._jobs = connect_client(dsn)
        self._queue = JobQueue("python", dsn=dsn)
        self._lines = ConnectionPool(dsn)
        self._queue.open()
        self.durations = []
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                FILL, job_parameters(echo_request("python"), default=None, executors=None) | {"count": pending}
            )
            connection.execute("vacuum analyze ergon.job, ergon.ready, ergon.content")

    def claim(self):
        """Time one claim; then end its jobs and submit as many again, so that the backlog keeps its size."""
        with time_block(self.durations):
            deliveries = self._queue.fetch_transactions(CLAIM_SIZE)
            claims = [JobClaim(delivery.transaction.id, delivery.receipt) for delivery in deliveries]
            started = self._lines.run(store.start_attempts(claims, max_attempts=3, timeout=None))
        if [attempt.attempt_number for attempt in started] != [1] * CLAIM_SIZE:
            raise RuntimeError(f"{CLAIM_SIZE} first attempts were to begin, not {started}")
        self._lines.run(store.finish_attempts([AttemptEnd(claim, Complete(VALUE)) for claim in claims]))
        self._queue.settle([(delivery, Ack()) for delivery in deliveries])
        self._jobs.submit_many(echo_request("python") for _ in range(CLAIM_SIZE))

    def close(self):
        self._queue.close()
        self._lines.close()
        self._jobs.close()


def claims(postgres, count=CLAIM_COUNT):
    """Return median milliseconds of a claim by backlog, and their ratio."""
    claimers = {
        size: Claimer(create_database(postgres, f"backlog_{size}"), size) for size in (SMALL_BACKLOG, LARGE_BACKLOG)
    }
    for number in range(count + 20):
        for claimer in claimers.values():
            if number == 20:  # every statement is planned and cached now
                claimer.durations.clear()
            claimer.claim()
    medians = {size: statistics.median(claimer.durations) * 1e3 for size, claimer in claimers.items()}
    for claimer in claimers.values():
        claimer.close()
    say(
        f"claims: {SMALL_BACKLOG:,} pending {medians[SMALL_BACKLOG]:.2f} ms, {LARGE_BACKLOG:,} pending "
        f"{medians[LARGE_BACKLOG]:.2f} ms"
    )
    return {f"claim_{size}_ms": median for size, median in medians.items()} | {
        "claim_ratio": medians[LARGE_BACKLOG] / medians[SMALL_BACKLOG]
    }


def slow_kind(postgres, count=LATENCY_SAMPLES):
    """Return median milliseconds from submit to end of one kind's jobs, alone and next to many slow jobs."""
    kinds = {"python": (2, 1), "slow": (2, 1)}
    alone, loaded = create_database(postgres, "slow_none"), create_database(postgres, "slow_many")
    durations_ms = {alone: [], loaded: []}
    with (
        orchestrator(alone, kinds),
        orchestrator(loaded, kinds),
        connect_client(alone) as alone_jobs,
        connect_client(loaded) as loaded_jobs,
    ):
        nap = JobRequest(function="slow#conformance.sleep", args=(2.0,))
        ids = [job.id for job in loaded_jobs.submit_many([nap] * WAITING_JOBS)]
        _wait_until_started(loaded_jobs, ids[0])
        for number in range(count + 10):
            for dsn, jobs in ((alone, alone_jobs), (loaded, loaded_jobs)):
                record = jobs.wait(jobs.submit("python#conformance.echo", VALUE).id, timeout=WAIT_TIMEOUT_SECONDS)
                if number >= 10:  # all processes are running now
                    durations_ms[dsn].append((record.ended_at - record.created_at).total_seconds() * 1e3)
        remaining = len(loaded_jobs.list(states=["pending"], kind="slow", limit=WAITING_JOBS))
    if remaining < WAITING_JOBS // 2:
        raise RuntimeError(f"only {remaining} slow jobs were waiting at the end")
    medians = [statistics.median(durations_ms[dsn]) for dsn in (alone, loaded)]
    say(f"latency: alone {medians[0]:.2f} ms, beside {remaining} waiting slow jobs {medians[1]:.2f} ms")
    return {"alone_ms": medians[0], "beside_slow_ms": medians[1], "slow_ratio": medians[1] / medians[0]}


def _wait_until_started(jobs, job_id):
    while jobs.show(job_id).started_at is None:
        # Another job that takes a moment, rather than a sleep of a guessed length.
        jobs.wait(jobs.submit("python#conformance.echo", VALUE).id, timeout=WAIT_TIMEOUT_SECONDS)
