"""Backlog: what a claim costs with many jobs behind it, and whether a slow kind of executors delays another one.

Both are measured side by side: in turns on two databases of one server, of which only one has the burden.
"""

from __future__ import annotations

import statistics

import psycopg
from ground import PATIENCE, VALUE, client, clocked, database, echo, orchestrator, say

from ergon_framework.connectors.base import Ack
from ergon_framework.executor.jobs import attempts
from ergon_framework.executor.jobs.attempts import Claim, End
from ergon_framework.executor.jobs.queue import JobQueue
from ergon_framework.executor.jobs.request import Request, parameters
from ergon_framework.executor.verdict import Complete
from ergon_framework.schema.lines import Lines

SMALL, LARGE = 1_000, 100_000
CLAIMS = 300
#: Jobs in one claim.
SIZE = 16
WAITING = 1_000
LATENCIES = 100
BAR = 1.5
#: By the function that every client submits with; called for by the server, because the client's part is not the point.
FILL = """
select count(*) from generate_series(1, %(count)s) as n cross join lateral ergon.submit_job(
    %(queue)s, 'fill-' || n, %(function)s, %(headers)s::jsonb || jsonb_build_object('ergon-id', 'fill-' || n),
    %(body)s, %(digest)s, 0, 0::smallint, null, null, null, null, null, %(retention)s
)
"""


class Claimer:
    """An orchestrator's part of a claim, by hand: take jobs and begin an attempt at each."""

    def __init__(self, dsn, pending):
        self._jobs = client(dsn)
        self._queue = JobQueue("python", dsn=dsn)
        self._lines = Lines(dsn)
        self._queue.open()
        self.took = []
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(FILL, parameters(echo("python"), default=None, executors=None) | {"count": pending})
            connection.execute("vacuum analyze ergon.job, ergon.ready, ergon.content")

    def claim(self):
        """One claim, timed; its jobs are ended, and as many submitted again, so that the backlog stays what it was."""
        with clocked(self.took):
            found = self._queue.fetch_transactions(SIZE)
            claims = [Claim(delivery.transaction.id, delivery.receipt) for delivery in found]
            started = self._lines.run(attempts.start(claims, max_attempts=3, timeout=None))
        if [one.attempt_number for one in started] != [1] * SIZE:
            raise RuntimeError(f"{SIZE} first attempts were to begin, not {started}")
        self._lines.run(attempts.finish([End(claim, Complete(VALUE)) for claim in claims]))
        self._queue.settle([(delivery, Ack()) for delivery in found])
        self._jobs.submit_many(echo("python") for _ in range(SIZE))

    def close(self):
        self._queue.close()
        self._lines.close()
        self._jobs.close()


def claims(postgres, times=CLAIMS):
    """Median milliseconds of a claim by backlog, and their ratio."""
    sides = {size: Claimer(database(postgres, f"backlog_{size}"), size) for size in (SMALL, LARGE)}
    for turn in range(times + 20):
        for side in sides.values():
            if turn == 20:  # everything is planned and cached by now
                side.took.clear()
            side.claim()
    medians = {size: statistics.median(side.took) * 1e3 for size, side in sides.items()}
    for side in sides.values():
        side.close()
    say(f"claims: {SMALL:,} pending {medians[SMALL]:.2f} ms, {LARGE:,} pending {medians[LARGE]:.2f} ms")
    return {f"claim_{size}_ms": median for size, median in medians.items()} | {
        "claim_ratio": medians[LARGE] / medians[SMALL]
    }


def slow_kind(postgres, times=LATENCIES):
    """Median milliseconds from submit to end of one kind's jobs, alone and beside a kind with many slow ones."""
    kinds = {"python": (2, 1), "slow": (2, 1)}
    alone, beside = database(postgres, "slow_none"), database(postgres, "slow_many")
    took = {alone: [], beside: []}
    with orchestrator(alone, kinds), orchestrator(beside, kinds), client(alone) as one, client(beside) as other:
        nap = Request(function="slow#exam.sleep", args=(2.0,))
        ids = [made.id for made in other.submit_many([nap] * WAITING)]
        _until_begun(other, ids[0])
        for turn in range(times + 10):
            for dsn, jobs in ((alone, one), (beside, other)):
                ended = jobs.wait(jobs.submit("python#exam.echo", VALUE).id, timeout=PATIENCE)
                if turn >= 10:  # everybody is awake by then
                    took[dsn].append((ended.ended_at - ended.created_at).total_seconds() * 1e3)
        left = len(other.list(states=["pending"], kind="slow", limit=WAITING))
    if left < WAITING // 2:
        raise RuntimeError(f"only {left} slow jobs were waiting at the end")
    medians = [statistics.median(took[dsn]) for dsn in (alone, beside)]
    say(f"latency: alone {medians[0]:.2f} ms, beside {left} waiting slow jobs {medians[1]:.2f} ms")
    return {"alone_ms": medians[0], "beside_slow_ms": medians[1], "slow_ratio": medians[1] / medians[0]}


def _until_begun(jobs, job_id):
    while jobs.show(job_id).started_at is None:
        # Anything else that takes a moment, rather than a sleep of a length that somebody guessed.
        jobs.wait(jobs.submit("python#exam.echo", VALUE).id, timeout=PATIENCE)
