"""The jobs of the chaos run: what each does and how it must end, drawn from a seed, and their sender."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from ergon_framework.jobs.client import JobClient
from tests.chaos.job_orchestrator import MAX_ATTEMPTS

BATCH_SIZE = 20
#: Per thousand; the rest echoes.
MODE_SHARES = {"fail": 70, "retry": 40, "print": 20, "crash": 10, "hang": 8}
#: One in this number kills its orchestrator every time, and at least one does.
JOBS_PER_KILLER = 1_600
#: Per thousand, those for executors that ignore the end of their input and signals.
STUBBORN_PER_THOUSAND = 30
#: A number of bad attempts after which there is no good one.
ENDLESS_BAD_ATTEMPTS = 1_000


@dataclass(frozen=True)
class JobOrder:
    """One job to submit."""

    id: str
    kind: str
    mode: str
    #: The last attempt that must fail.
    last_bad_attempt: int
    seconds: float
    max_attempts: int
    timeout: float | None

    @property
    def must_succeed(self) -> bool:
        return self.last_bad_attempt < ENDLESS_BAD_ATTEMPTS

    def submit(self, client: JobClient, connection: psycopg.Connection) -> bool:
        """Submit it; return whether it is new."""
        return client.submit_on(
            connection,
            f"{self.kind}#chaos.work",
            {"mode": self.mode, "until": self.last_bad_attempt, "takes": self.seconds},
            id=self.id,
            max_attempts=None if self.max_attempts == MAX_ATTEMPTS else self.max_attempts,
            timeout=self.timeout,
        ).created


def draw_jobs(count: int, languages: Sequence[str], rng: random.Random, *, deadly: int) -> list[JobOrder]:
    """Draw *count* jobs in random order; killers, with *deadly* attempts, are spread over the first half."""
    orders = [_draw_job(f"job-{number}", languages, rng) for number in range(count)]
    killers = max(1, count // JOBS_PER_KILLER)
    for number in range(killers):
        index = int(count * 0.5 * (number + rng.random()) / killers)
        kind = languages[number % len(languages)]
        orders[index] = JobOrder(orders[index].id, kind, "kill", ENDLESS_BAD_ATTEMPTS, 0.0, deadly, None)
    return orders


def _draw_job(job_id: str, languages: Sequence[str], rng: random.Random) -> JobOrder:
    kind = "stubborn" if rng.random() * 1000 < STUBBORN_PER_THOUSAND else rng.choice(languages)
    # Some still run when the lease of a stopped orchestrator expires.
    seconds = rng.uniform(*rng.choices([(0.0, 0.03), (0.2, 1.0), (1.5, 4.0)], [83, 14, 3])[0])
    (mode,) = rng.choices(["echo", *MODE_SHARES], [1000 - sum(MODE_SHARES.values()), *MODE_SHARES.values()])
    if mode in {"echo", "print"}:
        return JobOrder(job_id, kind, mode, 0, seconds, MAX_ATTEMPTS, None)
    timeout = 1.5 if mode == "hang" else None
    # Most succeed in the end, which takes the bad attempts and those that faults use up.
    if rng.random() < 0.7:
        return JobOrder(job_id, kind, mode, rng.randint(1, 2), min(seconds, 0.3), MAX_ATTEMPTS, timeout)
    return JobOrder(job_id, kind, mode, ENDLESS_BAD_ATTEMPTS, min(seconds, 0.3), rng.randint(2, 4), timeout)


class JobSender:
    """Submits all jobs evenly over some seconds; unconfirmed ones are submitted again."""

    def __init__(self, dsn: str, orders: list[JobOrder]) -> None:
        self.orders = orders
        self.sent = 0
        self.outages = 0
        #: How many were already there when they were submitted again.
        self.submitted_twice = 0
        self._dsn = dsn

    def run(self, seconds: float) -> None:
        started_at, client = time.monotonic(), JobClient(self._dsn)
        for first in range(0, len(self.orders), BATCH_SIZE):
            time.sleep(max(0.0, started_at + seconds * first / len(self.orders) - time.monotonic()))
            batch = self.orders[first : first + BATCH_SIZE]
            while True:
                try:
                    with psycopg.connect(self._dsn, connect_timeout=5) as connection:
                        created: list[Any] = [order.submit(client, connection) for order in batch]
                    break
                except psycopg.Error:
                    self.outages += 1
                    time.sleep(0.2)
            self.sent += len(batch)
            self.submitted_twice += created.count(False)
