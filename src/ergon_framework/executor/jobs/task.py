"""JobTask: the consumer of one kind's queue; it brings jobs to executors and their outcomes to the database.

Attempts are the store's. One is counted there before anything is sent, and its end is written there before the message
is settled; whatever dies in between, the message comes back, and the row of the job says what is to become of it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from ergon_framework.connectors.base import Ack
from ergon_framework.engine.drivers.aio import Asyncio
from ergon_framework.errors import Category, ConfigurationError, ErgonError
from ergon_framework.executor.guard import Guard
from ergon_framework.executor.jobs import attempts, observe
from ergon_framework.executor.jobs.attempts import Claim, Conclusion, Decision, End, GiveBack, Kill, Started
from ergon_framework.executor.jobs.burial import JobFailed, acked, again, later, letter
from ergon_framework.executor.jobs.desk import Desk
from ergon_framework.executor.jobs.model import JobState
from ergon_framework.executor.jobs.observe import Ended
from ergon_framework.executor.jobs.queue import Held, JobQueue, Room
from ergon_framework.executor.jobs.rules import MOST_AHEAD, engine_rules, with_attempts
from ergon_framework.executor.pool import NOBODY, ExecutorPool, PoolClosed, PoolPolicy, Reservation
from ergon_framework.executor.process import Command
from ergon_framework.executor.protocol import ExecutionOutcome
from ergon_framework.executor.routing import NoRoute, route
from ergon_framework.executor.start import ExecutorNotStarted
from ergon_framework.executor.verdict import KILLED, Again, Blame, Bury, judge
from ergon_framework.failure import describe
from ergon_framework.schema.lines import Lines
from ergon_framework.task.base import AsyncTask
from ergon_framework.task.defaults import choose_policy
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.gates import Gate
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, OnOutcome
from ergon_framework.task.mixins.policies import ConsumerPolicy, RetryPolicy, SettlePolicy
from ergon_framework.task.report import Report
from ergon_framework.telemetry.context import outbound
from ergon_framework.telemetry.options import options_of
from ergon_framework.transaction import Transaction

#: Seconds between two looks for kills, while something runs; and between two rounds of throwing away what has expired.
LOOK: Final = 0.5
SWEEP: Final = 60.0
#: Seconds that a job waits here for an executor before another orchestrator may have it.
PATIENCE: Final = 2.0
#: Below so many seconds a job, attempts begin before an executor is free, so that none waits for the database.
BRISK: Final = 0.05
#: The weight of the last job in that average.
_WEIGHT: Final = 0.2
#: Seconds of work that are claimed beyond what runs, so that executors do not wait for the next claim. What takes long
#: is left to others.
AHEAD: Final = 0.05
#: Seconds that a body which was told to leave takes at most for giving its attempt back.
_LAST: Final = 2.0


class _Settled(ErgonError):
    """No error: the job has its end, and its message needs nothing but its ack."""


class _Attempt:
    """One that has begun and has no end yet."""

    __slots__ = ("claim", "kill", "started")

    def __init__(self, claim: Claim, started: Started) -> None:
        self.claim = claim
        self.started = started
        #: Somebody wants it killed.
        self.kill = False


class JobTask(AsyncConsumerMixin, AsyncTask):
    """Runs the jobs of the executors called *kind*, which *command* starts.

    Of the policy's process step, ``retry`` says how jobs are tried again, and how long an attempt may
    take, where a job does not say it itself. How many run at once is the pool's.
    """

    connector: JobQueue

    def __init__(
        self,
        kind: str,
        command: Command,
        *,
        pool: PoolPolicy | None = None,
        dsn: str | None = None,
        lease: float = 30.0,
        policy: ConsumerPolicy | None = None,
        gates: Sequence[Gate] | None = None,
        guard: Callable[[], Guard] | None = None,
    ) -> None:
        super().__init__(JobQueue(kind, dsn=dsn, lease=lease, room=self._room), policy=policy, gates=gates)
        self.kind = kind
        self.command = command
        self._rules = pool or PoolPolicy()
        self._guard = guard
        self._retry = RetryPolicy()
        self._settle = SettlePolicy()
        self._pool: ExecutorPool | None = None
        self._lines: Lines | None = None
        self._desk: Desk | None = None
        self._tally = observe.tally_of(self.name)
        #: By the job's id.
        self._begun: dict[str, _Attempt] = {}
        #: How many wait for an executor, or are in one.
        self._inside = 0
        #: How long a job has taken lately, in seconds; not known before the first.
        self._usual = BRISK

    @property
    def name(self) -> str:
        return self.connector.name

    # -- coming and going -------------------------------------------------------------------------

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[Mapping[str, Any] | None]:
        """The executors, the connections, and the look for kills."""
        guard = None if self._guard is None else self._guard()
        lines = self._lines = Lines(self.connector.address, most=4)
        try:
            # A database without the tables is found out here, and not by the first job.
            await lines.run_async(attempts.kills())
            async with ExecutorPool(self.command, policy=self._rules, name=self.kind, guard=guard) as pool:
                self._pool = pool
                watching = asyncio.create_task(self._watch(), name=f"{self.name}-watch")
                try:
                    yield None
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
        finally:
            if self._desk is not None:
                self._desk.close()
            self._pool = self._lines = self._desk = None
            await lines.close_async()

    async def consume_transactions(
        self,
        policy: ConsumerPolicy | None = None,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: OnOutcome | None = None,
        driver: Callable[[], Asyncio] = Asyncio,
    ) -> Report:
        """Consume until the policy says that it is enough; its process step is carried out by the store."""
        if self._lines is None or self._pool is None:
            raise ConfigurationError(f"the executors of {self.name} are not open; use run(), or opened()")
        policy = choose_policy(self, policy, ConsumerPolicy)
        retry = self._retry = policy.steps.process.retry
        self._settle = policy.steps.settle
        self._desk = Desk(
            self._lines, task=self.name, max_attempts=retry.max_attempts, timeout=retry.timeout, busy=self._busy
        )
        rules = engine_rules(policy, self._pool.places)
        return await super().consume_transactions(rules, gates=gates, on_outcome=on_outcome, driver=driver)

    async def _watch(self) -> None:
        """Look for kills while something runs, and now and then for what has expired."""
        swept = time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            desk = self._desk
            if desk is None:
                continue
            # A database that is out of reach is the loop's to complain about.
            with suppress(ErgonError):
                if self._begun:
                    self._kill(await desk.kills())
                if time.monotonic() >= swept + SWEEP:
                    swept = time.monotonic()
                    await desk.sweep()

    def _kill(self, wanted: set[str]) -> None:
        for job_id in wanted & self._begun.keys():
            attempt = self._begun[job_id]
            attempt.kill = True
            if self._pool is not None and self._pool.kill(job_id):
                observe.killed(self.name, job_id)

    # -- one job ----------------------------------------------------------------------------------

    async def process_transaction(self, transaction: Transaction) -> Any:
        """Begin an attempt, have an executor make it, and write how it ended."""
        if not isinstance(transaction.payload, Held) or self._pool is None or self._desk is None:
            raise ConfigurationError(f"{self.name} takes what its own queue brings, and nothing else")
        claim = Claim(transaction.id, transaction.payload.receipt)
        try:
            self._inside += 1
            try:
                verdict = await self._judged(self._pool, self._desk, transaction, claim=claim)
            except asyncio.CancelledError:
                # Told to leave, by whoever stops the loop: that is no fault of the job, so it does not count.
                await self._give_back(self._desk, claim)
                raise
            finally:
                self._inside -= 1
                self.connector.freed.set()
            return await self._ended(self._desk, claim, verdict)
        except _Settled:
            return Ack()
        finally:
            self._begun.pop(claim.job_id, None)

    def _busy(self) -> bool:
        """Whether others are about to end beside the one that has ended."""
        return len(self._begun) > self._rules.size * self._rules.max_in_flight

    def _room(self) -> Room:
        """How many more jobs are to be claimed."""
        places = self._rules.size * self._rules.max_in_flight
        most = places + math.ceil(places * min(MOST_AHEAD, AHEAD / max(self._usual, 1e-6)))
        return Room(most - self._inside, most // 4)

    async def _judged(self, pool: ExecutorPool, desk: Desk, transaction: Transaction, *, claim: Claim) -> Conclusion:
        attempt = await self._start(desk, claim) if self._usual < BRISK else None
        place = pool.reserve_now() or await self._place(pool)
        if place is None:
            untried = self._untried(pool)
            if attempt is not None:
                return untried
            raise later(untried.words, untried.delay, code=untried.code)
        with place:
            if attempt is None:
                attempt = await self._start(desk, claim)
            return await self._run(pool, transaction, attempt, place=place)

    async def _place(self, pool: ExecutorPool) -> Reservation | None:
        # An interpreter on a busy machine takes longer to start than a job is to wait for one that runs.
        await pool.tried()
        try:
            async with asyncio.timeout(PATIENCE):
                return await pool.reserve()
        except (TimeoutError, PoolClosed, ExecutorNotStarted):
            return None

    def _untried(self, pool: ExecutorPool) -> GiveBack:
        """Why there was no place, and when to look for one again: another orchestrator may have one meanwhile."""
        error = pool.unstarted
        if error is not None:
            return GiveBack(NOBODY, describe(error), ExecutorNotStarted.code)
        return GiveBack(0.0 if pool.pids else NOBODY, "no executor was free", "no_executor")

    async def _run(
        self, pool: ExecutorPool, transaction: Transaction, attempt: _Attempt, *, place: Reservation
    ) -> Conclusion:
        """What becomes of an attempt that has begun: whatever happens here is an end of it."""
        started, body = attempt.started, transaction.payload.body
        try:
            function, args, kwargs = _read(body)
            found = route(function, default=self.kind, executors=(self.kind,))
            if isinstance(found, NoRoute):
                return Bury(Blame(Category.SYSTEM, found.code, found.message, final=True), fatal=True)
            if attempt.kill:
                return Kill("killed before it was sent")
            began = time.monotonic()
            outcome = await pool.run(
                found.handler,
                args,
                kwargs,
                job_id=transaction.id,
                timeout=started.timeout,
                attempt_number=started.attempt_number,
                enqueued_at=transaction.created_at,
                queue_name=self.name,
                carrier=outbound() or transaction.trace,
                place=place,
            )
            self._usual += _WEIGHT * (time.monotonic() - began - self._usual)
            return self._conclude(outcome, attempt)
        except ErgonError as error:
            if error.later and not error.final:
                return GiveBack()
            return Bury(Blame(error.category, error.code or "not_sent", describe(error), final=True), fatal=True)
        except Exception as error:  # noqa: BLE001 - the boundary of an attempt: it is never left without an end
            told = Blame(Category.SYSTEM, "not_sent", describe(error), type(error).__name__, final=True)
            return Bury(told, fatal=True)

    def _conclude(self, outcome: ExecutionOutcome, attempt: _Attempt) -> Conclusion:
        """Decide what becomes of an attempt whose outcome has arrived."""
        if attempt.kill and outcome.error_type == KILLED:
            return Kill()
        if not options_of(self).record_tracebacks:
            outcome = outcome.model_copy(update={"error_traceback": None})
        started = attempt.started
        rules = with_attempts(self._retry, started.max_attempts)
        return judge(outcome, attempt_number=started.attempt_number, policy=rules, dice=random.random)

    async def _start(self, desk: Desk, claim: Claim) -> _Attempt:
        """Begin the attempt; whatever else the row says about this message is raised."""
        started = await desk.start(claim)
        decision = started.decision
        if decision in {Decision.RUN, Decision.BEGUN, Decision.REPLAYED}:
            attempt = self._begun[claim.job_id] = _Attempt(claim, started)
            return attempt
        if decision in {Decision.OVER, Decision.KILLED}:
            raise _Settled
        if decision in {Decision.BURIED, Decision.EXHAUSTED}:
            blame = started.blame or Blame(Category.SYSTEM, "failed", "the job has failed", final=True)
            self._tally.ended(Ended.FAILED)
            raise JobFailed(blame, started.attempt_number)
        if decision is Decision.EARLY:
            raise later("the job is not due yet", started.delay, code="early")
        if decision is Decision.UNKNOWN:
            words = f"there is no job {claim.job_id!r}; submit jobs with a JobClient, or ergon.submit_job"
            raise JobFailed(Blame(Category.BUSINESS, "no_job", words, final=True), 0)
        raise self._stale(claim)

    async def _ended(self, desk: Desk, claim: Claim, verdict: Conclusion) -> None:
        """Write the end, and have the message settled as the row says now."""
        attempt = self._begun.get(claim.job_id)
        attempts_made = 0 if attempt is None else attempt.started.attempt_number
        end = End(claim, verdict)
        try:
            state = await desk.finish(end)
        except asyncio.CancelledError:
            # What came out is worth more than to be gone at once; said twice it is written once.
            await self._last(desk.finish(end))
            raise
        if state is None:
            raise self._stale(claim)
        if state is JobState.SUCCEEDED:
            self._tally.ended(Ended.SUCCEEDED)
            return
        if state is JobState.PENDING:
            if isinstance(verdict, Again):
                self._tally.ended(Ended.RETRIED)
                raise again(verdict.blame, verdict.delay, attempts=attempts_made)
            self._tally.ended(Ended.GIVEN_BACK)
            back = verdict if isinstance(verdict, GiveBack) else GiveBack()
            raise later(back.words, back.delay, code=back.code)
        if state is JobState.FAILED and isinstance(verdict, Bury):
            self._tally.ended(Ended.FAILED)
            raise JobFailed(verdict.blame, attempts_made)
        self._tally.ended(Ended.KILLED)
        raise _Settled

    async def _give_back(self, desk: Desk, claim: Claim) -> None:
        """Where nothing has begun this changes nothing: it is fenced by the claim."""
        if await self._last(desk.finish(End(claim, GiveBack()))) is not None:
            self._tally.ended(Ended.GIVEN_BACK)

    async def _last(self, words: Awaitable[JobState | None]) -> JobState | None:
        with suppress(Exception):
            async with asyncio.timeout(_LAST):
                return await words
        return None

    def _stale(self, claim: Claim) -> TransactionException:
        observe.stale(self.name, claim.job_id)
        self._tally.ended(Ended.STALE)
        # If the claim is gone this changes nothing; if it is not, the message must not stay with somebody who is idle.
        return later("the claim is gone; somebody else has the job", 0.0, code="stale")

    # -- the dead letter --------------------------------------------------------------------------

    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        """The dead letter of a job says what its row says, attempts included; what the policy acks is acked."""
        if not isinstance(exc, JobFailed) or acked(exc.category, self._settle):
            return None
        return letter(self.name, transaction, exc, options_of(self))


def _read(body: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """What a message of a job says."""
    try:
        function, args, kwargs = body["function"], body["args"], body["kwargs"]
    except (TypeError, KeyError):
        function = args = kwargs = None
    if not (isinstance(function, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise TransactionException(
            "the message holds no function with args and kwargs", Category.BUSINESS, final=True, code="no_job"
        )
    return function, args, kwargs
