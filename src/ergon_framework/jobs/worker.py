"""The worker of one kind's queue; it sends jobs to executors and writes their outcomes to the database.

A job is a stored call of a handler: a row in the database, which is authoritative, and a message in a queue. An
executor is a process that runs handlers; a pool keeps the executors of one kind running. A claim is the right to
process a message. The job store counts attempts: an attempt is counted there before anything is sent, and its end is
written there before the message is settled. If a process is killed in between, the message is redelivered, and the row
decides.

To settle a message is to ack, release, defer or dead-letter it. The process step therefore has one attempt for each
delivery, and the pool limits the concurrency. The message of a failed job is dead-lettered, or acked if the policy says
so; that of a deferred job is redelivered.

Errors tell the engine what to do with the message: one with ``not_attempted`` redelivers it after ``retry_after``
seconds without counting an attempt, and a final one ends in the dead letter that ``handle_transaction_exception``
returns. ``StartDecision`` and the state that ``finish`` returns are read from the row.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, Final

from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.engine.aio import AsyncioDriver
from ergon_framework.errors import Category, ConfigurationError, ErgonError
from ergon_framework.executors.decision import KILLED, Fail, FailureCause, Retry, UnroutableJob, decide, route_job
from ergon_framework.executors.pool import (
    NO_EXECUTOR_RETRY_SECONDS,
    ExecutorPool,
    PoolClosed,
    PoolPolicy,
    Reservation,
)
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.executors.protocol import ExecutionOutcome
from ergon_framework.executors.reaper import ProcessReaper
from ergon_framework.executors.startup import ExecutorNotStarted
from ergon_framework.failure import Failure, describe_error, get_error_type
from ergon_framework.gates import Gate
from ergon_framework.jobs import metrics, store
from ergon_framework.jobs.batched_store import BatchedJobStore
from ergon_framework.jobs.metrics import AttemptOutcome
from ergon_framework.jobs.model import JobState
from ergon_framework.jobs.queue import ClaimedJob, FetchCapacity, JobQueue
from ergon_framework.jobs.store import (
    AttemptConclusion,
    AttemptEnd,
    JobClaim,
    KillAttempt,
    ReleaseAttempt,
    StartDecision,
    StartedAttempt,
)
from ergon_framework.task.base import AsyncTask
from ergon_framework.task.consumer import AsyncConsumerMixin, OnOutcome
from ergon_framework.task.context import choose_policy
from ergon_framework.telemetry.context import current_ids, inject_carrier
from ergon_framework.telemetry.options import DEFAULT_OPTIONS, TelemetryOptions, get_options
from ergon_framework.telemetry.tracebacks import format_traceback
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerPolicy,
    ProcessPolicy,
    RetryPolicy,
    SettlePolicy,
)
from ergon_framework.worker.report import Report


class JobFailed(TransactionException):
    """The job has failed, and its row records the failure."""

    def __init__(self, cause: FailureCause, attempts: int) -> None:
        super().__init__(cause.message, cause.category, final=True, code=cause.code)
        self.cause = cause
        self.attempts_made = attempts
        self.error_type = cause.error_type
        if cause.traceback is not None:
            self.details = {"traceback": cause.traceback}


def defer(message: str, delay: float, *, code: str) -> TransactionException:
    """Return an error that redelivers the message after *delay* seconds; no attempt was made."""
    return TransactionException(message, Category.SYSTEM, not_attempted=True, retry_after=delay, code=code)


def retry_later(cause: FailureCause, delay: float, *, attempts: int) -> TransactionException:
    """Return an error that redelivers the message after *delay* seconds for a retry; *attempts* were made."""
    error = TransactionException(cause.message, cause.category, not_attempted=True, retry_after=delay, code=cause.code)
    error.attempts_made, error.error_type = attempts, cause.error_type
    return error


def dead_letter(
    task: str, transaction: Transaction, error: JobFailed, options: TelemetryOptions = DEFAULT_OPTIONS
) -> DeadLetter:
    """Return the dead letter of a job, with the same data as its row, attempts included."""
    code, ids = error.code or error.category.value.lower(), current_ids()
    failure = Failure(
        task_name=task,
        transaction_id=transaction.id,
        source=transaction.source,
        tenant_id=transaction.tenant,
        correlation_id=transaction.correlation or transaction.id,
        idempotency_key=transaction.id,
        reason_code=code,
        error_type=get_error_type(error),
        error_message=describe_error(error),
        attempts=error.attempts_made or 0,
        occurred_at=time.time(),
        category=error.category,
        step="process",
        final=error.cause.final,
        trace_id=None if ids is None else ids[0],
        traceback=format_traceback(error, options),
    )
    return DeadLetter(code, failure)


def acks_failure(category: Category, policy: SettlePolicy) -> bool:
    """Return whether *policy* acks failures of this category instead of dead-lettering them."""
    on = {
        Category.BUSINESS: policy.on_business,
        Category.SYSTEM: policy.on_system,
        Category.TIMEOUT: policy.on_timeout,
    }
    return on[category] == "ack"


# -- policies ---------------------------------------------------------------------------------------

#: Maximum number of jobs per slot that are claimed beyond the running ones.
MAX_CLAIMS_AHEAD: Final = 16
#: The store counts attempts; deliveries of a message are not limited.
_MAX_DELIVERIES: Final = 2**31 - 1
#: One attempt, without a timeout and without a delay after it.
_SINGLE_ATTEMPT: Final = {"max_attempts": 1, "timeout": None, "backoff": 0.0, "jitter": 0.0}


def engine_policy(policy: ConsumerPolicy, slot_count: int) -> ConsumerPolicy:
    """Return *policy* with a process step that has one attempt and no timeout."""
    process = ProcessPolicy(retry=policy.steps.process.retry.model_copy(update=_SINGLE_ATTEMPT))
    max_claims = slot_count * (1 + MAX_CLAIMS_AHEAD)
    loop = {
        "concurrency": ConcurrencyPolicy(value=max_claims),
        "batch": BatchPolicy(size=max_claims),
        "max_deliveries": _MAX_DELIVERIES,
        "transaction_timeout": None,
    }
    return policy.model_copy(
        update={
            "loop": policy.loop.model_copy(update=loop),
            "steps": policy.steps.model_copy(update={"process": process}),
        }
    )


def with_default_streaming(policy: ConsumerPolicy | None) -> ConsumerPolicy:
    """Return *policy*, or the default one; its loop continues at an empty queue, unless it says otherwise."""
    policy = policy or ConsumerPolicy()
    if "streaming" in policy.loop.model_fields_set:
        return policy
    return policy.model_copy(update={"loop": policy.loop.model_copy(update={"streaming": True})})


def with_max_attempts(policy: RetryPolicy, max_attempts: int) -> RetryPolicy:
    """Return *policy* with *max_attempts* attempts."""
    return policy if policy.max_attempts == max_attempts else _copy_with_max_attempts(policy, max_attempts)


@lru_cache(64)
def _copy_with_max_attempts(policy: RetryPolicy, max_attempts: int) -> RetryPolicy:
    return policy.model_copy(update={"max_attempts": max_attempts})


# -- the worker -------------------------------------------------------------------------------------

#: Seconds between two polls for kill requests while a job runs, and between two deletions of expired jobs.
KILL_POLL_SECONDS: Final = 0.5
DELETE_INTERVAL_SECONDS: Final = 60.0
#: Seconds that a job waits here for an executor before it is released to another orchestrator.
EXECUTOR_WAIT_SECONDS: Final = 2.0
#: Below this average job duration, attempts begin before an executor is free, so that none waits for the database.
SHORT_JOB_SECONDS: Final = 0.05
#: The weight of the last job in that moving average.
_LAST_JOB_WEIGHT: Final = 0.2
#: Seconds of work that are claimed beyond the running jobs, so that executors do not wait for the next claim. Long jobs
#: are left to other workers.
CLAIM_AHEAD_SECONDS: Final = 0.05
#: Maximum seconds that a cancelled handler call takes to release its attempt.
_RELEASE_TIMEOUT_SECONDS: Final = 2.0


class _AckOnly(ErgonError):
    """Control flow, not an error: the job is final, and its message only needs its ack."""


class _RunningAttempt:
    """An attempt that has begun and has not ended."""

    __slots__ = ("claim", "kill", "started")

    def __init__(self, claim: JobClaim, started: StartedAttempt) -> None:
        self.claim = claim
        self.started = started
        #: Whether a kill was requested.
        self.kill = False


class JobWorker(AsyncConsumerMixin, AsyncTask):
    """Runs the jobs of the executors *kind*, which *command* starts.

    ``retry`` of the policy's process step sets the retries and the timeout of an attempt for jobs that do not set their
    own. The pool limits the concurrency.
    """

    connector: JobQueue

    def __init__(
        self,
        kind: str,
        command: ExecutorCommand,
        *,
        pool: PoolPolicy | None = None,
        dsn: str | None = None,
        lease: float = 30.0,
        policy: ConsumerPolicy | None = None,
        gates: Sequence[Gate] | None = None,
        get_reaper: Callable[[], ProcessReaper] | None = None,
    ) -> None:
        super().__init__(
            JobQueue(kind, dsn=dsn, lease=lease, get_capacity=self._get_capacity), policy=policy, gates=gates
        )
        self.kind = kind
        self.command = command
        self._pool_policy = pool or PoolPolicy()
        self._get_reaper = get_reaper
        #: Set by ``consume_transactions`` from its policy.
        self._retry_policy = RetryPolicy()
        self._settle_policy = SettlePolicy()
        self._pool: ExecutorPool | None = None
        self._connection_pool: ConnectionPool | None = None
        self._store: BatchedJobStore | None = None
        self._metrics = metrics.job_metrics(self.name)
        #: By job id.
        self._running_attempts: dict[str, _RunningAttempt] = {}
        #: The number of jobs that wait for an executor or run in one.
        self._active_jobs = 0
        #: The moving average of a job's duration in seconds; unknown before the first job.
        self._average_seconds = SHORT_JOB_SECONDS

    @property
    def name(self) -> str:
        return self.connector.name

    # -- lifespan ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[Mapping[str, Any] | None]:
        """Open the executors and the connections, and poll for kill requests."""
        reaper = None if self._get_reaper is None else self._get_reaper()
        connection_pool = self._connection_pool = ConnectionPool(self.connector.dsn, max_size=4)
        try:
            # A database without the tables fails here, not at the first job.
            await connection_pool.run_async(store.jobs_to_kill())
            async with ExecutorPool(self.command, policy=self._pool_policy, name=self.kind, reaper=reaper) as pool:
                self._pool = pool
                housekeeping = asyncio.create_task(self._run_housekeeping(), name=f"{self.name}-watch")
                try:
                    yield None
                finally:
                    housekeeping.cancel()
                    await asyncio.gather(housekeeping, return_exceptions=True)
        finally:
            if self._store is not None:
                self._store.close()
            self._pool = self._connection_pool = self._store = None
            await connection_pool.close_async()

    async def consume_transactions(
        self,
        policy: ConsumerPolicy | None = None,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: OnOutcome | None = None,
        driver: Callable[[], AsyncioDriver] = AsyncioDriver,
    ) -> Report:
        """Consume until the policy ends the loop; the job store replaces the retries of its process step."""
        if self._connection_pool is None or self._pool is None:
            raise ConfigurationError(f"the executors of {self.name} are not open: use run() or open()")
        policy = choose_policy(self, policy, ConsumerPolicy)
        retry = self._retry_policy = policy.steps.process.retry
        self._settle_policy = policy.steps.settle
        self._store = BatchedJobStore(
            self._connection_pool,
            task=self.name,
            max_attempts=retry.max_attempts,
            timeout=retry.timeout,
            is_busy=self._is_busy,
        )
        consumer_policy = engine_policy(policy, self._pool.slot_count)
        return await super().consume_transactions(consumer_policy, gates=gates, on_outcome=on_outcome, driver=driver)

    async def _run_housekeeping(self) -> None:
        """Poll for kill requests while jobs run, and delete expired jobs from time to time."""
        deleted_at = time.monotonic()
        while True:
            await asyncio.sleep(KILL_POLL_SECONDS)
            job_store = self._store
            if job_store is None:
                continue
            # The consume loop reports a database that is unavailable.
            with suppress(ErgonError):
                if self._running_attempts:
                    self._request_kills(await job_store.jobs_to_kill())
                if time.monotonic() >= deleted_at + DELETE_INTERVAL_SECONDS:
                    deleted_at = time.monotonic()
                    await job_store.delete_expired()

    def _request_kills(self, job_ids: set[str]) -> None:
        for job_id in job_ids & self._running_attempts.keys():
            attempt = self._running_attempts[job_id]
            attempt.kill = True
            if self._pool is not None and self._pool.kill(job_id):
                metrics.log_killed(self.name, job_id)

    # -- one job ----------------------------------------------------------------------------------

    async def process_transaction(self, transaction: Transaction) -> Any:
        """Begin an attempt, run it in an executor, and write how it ended."""
        if not isinstance(transaction.payload, ClaimedJob) or self._pool is None or self._store is None:
            raise ConfigurationError(f"{self.name} processes only messages of its own queue")
        claim = JobClaim(transaction.id, transaction.payload.receipt)
        try:
            self._active_jobs += 1
            try:
                conclusion = await self._run_job(self._pool, self._store, transaction, claim=claim)
            except asyncio.CancelledError:
                # Cancelled because the loop stops, not by a fault of the job, so the attempt does not count.
                await self._release_attempt(self._store, claim)
                raise
            finally:
                self._active_jobs -= 1
                self.connector.capacity_freed.set()
            return await self._finish(self._store, claim, conclusion)
        except _AckOnly:
            return Ack()
        finally:
            self._running_attempts.pop(claim.job_id, None)

    def _is_busy(self) -> bool:
        """Return whether more attempts are about to end soon after the one that has ended."""
        return len(self._running_attempts) > self._pool_policy.size * self._pool_policy.max_in_flight

    def _get_capacity(self) -> FetchCapacity:
        """Return the number of jobs that can still be claimed."""
        slot_count = self._pool_policy.size * self._pool_policy.max_in_flight
        max_claims = slot_count + math.ceil(
            slot_count * min(MAX_CLAIMS_AHEAD, CLAIM_AHEAD_SECONDS / max(self._average_seconds, 1e-6))
        )
        return FetchCapacity(max_claims - self._active_jobs, max_claims // 4)

    async def _run_job(
        self, pool: ExecutorPool, job_store: BatchedJobStore, transaction: Transaction, *, claim: JobClaim
    ) -> AttemptConclusion:
        # Of short jobs the attempt begins before a slot is free; without a slot it is released.
        attempt = await self._start(job_store, claim) if self._average_seconds < SHORT_JOB_SECONDS else None
        reservation = pool.reserve_now() or await self._reserve_slot(pool)
        if reservation is None:
            release = self._no_slot_release(pool)
            if attempt is not None:
                return release
            raise defer(release.message, release.delay, code=release.code)
        with reservation:
            if attempt is None:
                attempt = await self._start(job_store, claim)
            return await self._run_attempt(pool, transaction, attempt, reservation=reservation)

    async def _reserve_slot(self, pool: ExecutorPool) -> Reservation | None:
        # On a busy machine an interpreter takes longer to start than a job may wait for a running executor.
        await pool.wait_first_start()
        try:
            async with asyncio.timeout(EXECUTOR_WAIT_SECONDS):
                return await pool.reserve()
        except (TimeoutError, PoolClosed, ExecutorNotStarted):
            return None

    def _no_slot_release(self, pool: ExecutorPool) -> ReleaseAttempt:
        """Return why no slot was free, and when to retry: another orchestrator may have a slot meanwhile."""
        error = pool.startup_error
        if error is not None:
            return ReleaseAttempt(NO_EXECUTOR_RETRY_SECONDS, describe_error(error), ExecutorNotStarted.code)
        return ReleaseAttempt(0.0 if pool.pids else NO_EXECUTOR_RETRY_SECONDS, "no executor was free", "no_executor")

    async def _run_attempt(
        self, pool: ExecutorPool, transaction: Transaction, attempt: _RunningAttempt, *, reservation: Reservation
    ) -> AttemptConclusion:
        """Return the conclusion of an attempt that has begun; every event here ends it."""
        started, body = attempt.started, transaction.payload.body
        try:
            function, args, kwargs = _parse_body(body)
            routing = route_job(function, default=self.kind, executors=(self.kind,))
            if isinstance(routing, UnroutableJob):
                return Fail(FailureCause(Category.SYSTEM, routing.code, routing.message, final=True), fatal=True)
            # Set by _request_kills while this call waited for a slot.
            if attempt.kill:
                return KillAttempt("killed before it was sent")
            began = time.monotonic()
            outcome = await pool.run(
                routing.handler,
                args,
                kwargs,
                job_id=transaction.id,
                timeout=started.timeout,
                attempt_number=started.attempt_number,
                enqueued_at=transaction.created_at,
                queue_name=self.name,
                carrier=inject_carrier() or transaction.trace,
                reservation=reservation,
            )
            self._average_seconds += _LAST_JOB_WEIGHT * (time.monotonic() - began - self._average_seconds)
            return self._conclude(outcome, attempt)
        except ErgonError as error:
            if error.not_attempted and not error.final:
                return ReleaseAttempt()
            return Fail(
                FailureCause(error.category, error.code or "not_sent", describe_error(error), final=True), fatal=True
            )
        except Exception as error:  # noqa: BLE001 - the boundary of an attempt: it always gets an end
            cause = FailureCause(Category.SYSTEM, "not_sent", describe_error(error), type(error).__name__, final=True)
            return Fail(cause, fatal=True)

    def _conclude(self, outcome: ExecutionOutcome, attempt: _RunningAttempt) -> AttemptConclusion:
        """Return the conclusion of an attempt whose outcome has arrived."""
        # The pool reports KILLED for a killed executor; a result that arrived before the kill counts instead.
        if attempt.kill and outcome.error_type == KILLED:
            return KillAttempt()
        if not get_options(self).record_tracebacks:
            outcome = outcome.model_copy(update={"error_traceback": None})
        started = attempt.started
        job_policy = with_max_attempts(self._retry_policy, started.max_attempts)
        return decide(outcome, attempt_number=started.attempt_number, policy=job_policy, random_source=random.random)

    async def _start(self, job_store: BatchedJobStore, claim: JobClaim) -> _RunningAttempt:
        """Begin the attempt; raise an error for every other decision about this message."""
        started = await job_store.start(claim)
        decision = started.decision
        if decision in {StartDecision.RUN, StartDecision.ALREADY_STARTED, StartDecision.REPLAYED}:
            attempt = self._running_attempts[claim.job_id] = _RunningAttempt(claim, started)
            return attempt
        if decision in {StartDecision.FINAL, StartDecision.KILLED}:
            raise _AckOnly
        if decision in {StartDecision.FAILED, StartDecision.EXHAUSTED}:
            cause = started.cause or FailureCause(Category.SYSTEM, "failed", "the job has failed", final=True)
            self._metrics.record_attempt(AttemptOutcome.FAILED)
            raise JobFailed(cause, started.attempt_number)
        if decision is StartDecision.NOT_DUE:
            raise defer("the job is not due yet", started.delay, code="early")
        if decision is StartDecision.UNKNOWN:
            message = f"there is no job {claim.job_id!r}; submit jobs with a JobClient, or ergon.submit_job"
            raise JobFailed(FailureCause(Category.BUSINESS, "no_job", message, final=True), 0)
        raise self._stale_claim_error(claim)

    async def _finish(self, job_store: BatchedJobStore, claim: JobClaim, conclusion: AttemptConclusion) -> None:
        """Write the end of the attempt, and have the message settled according to the job's state."""
        attempt = self._running_attempts.get(claim.job_id)
        attempts_made = 0 if attempt is None else attempt.started.attempt_number
        end = AttemptEnd(claim, conclusion)
        try:
            state = await job_store.finish(end)
        except asyncio.CancelledError:
            # The outcome is worth a short delay of the exit; a repeated call writes nothing more.
            await self._finish_before_exit(job_store.finish(end))
            raise
        if state is None:
            raise self._stale_claim_error(claim)
        if state is JobState.SUCCEEDED:
            self._metrics.record_attempt(AttemptOutcome.SUCCEEDED)
            return
        if state is JobState.PENDING:
            if isinstance(conclusion, Retry):
                self._metrics.record_attempt(AttemptOutcome.RETRIED)
                raise retry_later(conclusion.cause, conclusion.delay, attempts=attempts_made)
            self._metrics.record_attempt(AttemptOutcome.RELEASED)
            release = conclusion if isinstance(conclusion, ReleaseAttempt) else ReleaseAttempt()
            raise defer(release.message, release.delay, code=release.code)
        if state is JobState.FAILED and isinstance(conclusion, Fail):
            self._metrics.record_attempt(AttemptOutcome.FAILED)
            raise JobFailed(conclusion.cause, attempts_made)
        self._metrics.record_attempt(AttemptOutcome.KILLED)
        raise _AckOnly

    async def _release_attempt(self, job_store: BatchedJobStore, claim: JobClaim) -> None:
        """Release the attempt; fenced by the claim, so it changes nothing if no attempt has begun."""
        if await self._finish_before_exit(job_store.finish(AttemptEnd(claim, ReleaseAttempt()))) is not None:
            self._metrics.record_attempt(AttemptOutcome.RELEASED)

    async def _finish_before_exit(self, finishing: Awaitable[JobState | None]) -> JobState | None:
        with suppress(Exception):
            async with asyncio.timeout(_RELEASE_TIMEOUT_SECONDS):
                return await finishing
        return None

    def _stale_claim_error(self, claim: JobClaim) -> TransactionException:
        metrics.log_stale_claim(self.name, claim.job_id)
        self._metrics.record_attempt(AttemptOutcome.STALE)
        # If the claim is lost, this changes nothing; otherwise the message must not stay with an idle worker.
        return defer("the claim is lost; another worker has the job", 0.0, code="stale")

    # -- the dead letter --------------------------------------------------------------------------

    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        """Return the dead letter of a failed job, with the data of its row; None if the policy acks the failure."""
        if not isinstance(exc, JobFailed) or acks_failure(exc.category, self._settle_policy):
            return None
        return dead_letter(self.name, transaction, exc, get_options(self))


def _parse_body(body: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the function, the args and the kwargs of a job's message."""
    try:
        function, args, kwargs = body["function"], body["args"], body["kwargs"]
    except (TypeError, KeyError):
        function = args = kwargs = None
    if not (isinstance(function, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise TransactionException(
            "the message contains no function with args and kwargs", Category.BUSINESS, final=True, code="no_job"
        )
    return function, args, kwargs
