"""The stable names for dashboards, alerts and queries: spans, attributes, metrics and log events.

Like the names in policies, they are only added to and never renamed. docs/telemetry.md lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

#: The instrumentation scope of all spans and metrics, and the root of all logger names.
LIBRARY: Final = "ergon_framework"


class Span:
    """Names of spans."""

    CONSUME_TRANSACTIONS: Final = "consume_transactions"
    FETCH_TRANSACTIONS: Final = "fetch_transactions"
    FETCH_TRANSACTIONS_ATTEMPT: Final = "fetch_transactions.attempt"
    START_PROCESSING: Final = "start_processing"
    PROCESS: Final = "process"
    PROCESS_ATTEMPT: Final = "process.attempt"
    HANDLE_SUCCESS: Final = "handle_success"
    HANDLE_SUCCESS_ATTEMPT: Final = "handle_success.attempt"
    HANDLE_EXCEPTION: Final = "handle_exception"
    HANDLE_EXCEPTION_ATTEMPT: Final = "handle_exception.attempt"
    PRODUCE_TRANSACTIONS: Final = "produce_transactions"
    START_PRODUCING: Final = "start_producing"
    PRODUCE: Final = "produce"
    PRODUCE_ATTEMPT: Final = "produce.attempt"
    HANDLE_PRODUCE_SUCCESS: Final = "handle_produce_success"
    HANDLE_PRODUCE_SUCCESS_ATTEMPT: Final = "handle_produce_success.attempt"
    HANDLE_PRODUCE_EXCEPTION: Final = "handle_produce_exception"
    HANDLE_PRODUCE_EXCEPTION_ATTEMPT: Final = "handle_produce_exception.attempt"
    PROVIDER_CALL: Final = "provider_call"
    PROVIDER_CALL_ATTEMPT: Final = "provider_call.attempt"
    #: The name in the executor document, which other runtimes use too.
    EXECUTOR: Final = "rrq.executor"


class ExceptionEvent:
    """The event of a span that records an error, as the semantic conventions of OpenTelemetry name it."""

    NAME: Final = "exception"
    TYPE: Final = "exception.type"
    MESSAGE: Final = "exception.message"
    STACKTRACE: Final = "exception.stacktrace"


class Attribute:
    """Keys of attributes, of spans and of metrics."""

    TASK: Final = "ergon.task"
    STEP: Final = "ergon.step"
    ATTEMPT: Final = "ergon.attempt"
    ATTEMPTS: Final = "ergon.attempts"
    MAX_ATTEMPTS: Final = "ergon.max_attempts"
    RETRY: Final = "ergon.retry"
    RETRY_TIMEOUT: Final = "ergon.retry.timeout"
    RETRY_BACKOFF: Final = "ergon.retry.backoff"
    RETRY_MULTIPLIER: Final = "ergon.retry.multiplier"
    RETRY_CAP: Final = "ergon.retry.cap"
    RETRY_JITTER: Final = "ergon.retry.jitter"
    TRANSACTION_ID: Final = "ergon.transaction.id"
    PAYLOAD: Final = "ergon.transaction.payload"
    OUTCOME: Final = "ergon.outcome"
    CATEGORY: Final = "ergon.category"
    CODE: Final = "ergon.code"
    REASON: Final = "ergon.reason"
    EXCEPTION_TYPE: Final = "ergon.exception.type"
    EXCEPTION_MESSAGE: Final = "ergon.exception.message"
    RESULT_TYPE: Final = "ergon.result.type"
    RESULT_SIZE: Final = "ergon.result.size"
    RESULT_VALUE: Final = "ergon.result.value"
    CONCURRENCY: Final = "ergon.concurrency"
    BATCH_SIZE: Final = "ergon.batch.size"
    BATCH_ASKED: Final = "ergon.batch.asked"
    BATCH_FETCHED: Final = "ergon.batch.fetched"
    END: Final = "ergon.end"
    RESULT: Final = "ergon.settle.result"
    STATE: Final = "ergon.slot.state"
    QUEUE_STATE: Final = "ergon.queue.state"
    PROVIDER: Final = "ergon.provider.name"
    CAPABILITY: Final = "ergon.provider.capability"
    OPERATION: Final = "ergon.provider.operation"
    HTTP_STATUS: Final = "ergon.provider.http_status"
    REPLAYED: Final = "ergon.provider.replayed"
    BREAKER_STATE: Final = "ergon.provider.breaker.state"
    HANDLER: Final = "ergon.executor.handler"
    QUEUE: Final = "ergon.executor.queue"
    EXECUTOR: Final = "ergon.executor.kind"
    BUFFER: Final = "ergon.fact.buffer"
    ZONE: Final = "ergon.fact.zone"
    REPLICA: Final = "ergon.fact.replica"
    FROM_ZONE: Final = "ergon.fact.from_zone"
    TO_ZONE: Final = "ergon.fact.to_zone"
    STATUS: Final = "ergon.fact.status"
    ROOM: Final = "ergon.fact.room"
    METHOD: Final = "ergon.fact.method"
    #: The upper bound of a bucket; spelled as histogram readers expect it.
    LE: Final = "le"


@dataclass(frozen=True, slots=True)
class Metric:
    """One instrument: a counter that only rises, or a gauge with the current value."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    description: str
    attributes: tuple[str, ...] = (Attribute.TASK,)
    #: How the values of several processes are merged: the sum where each process has its own part, the maximum where
    #: all processes observe the same thing.
    across: Literal["sum", "max"] = "sum"


_STEP: Final = (Attribute.TASK, Attribute.STEP)

TRANSACTIONS: Final = Metric(
    "ergon.transactions",
    "counter",
    "{transaction}",
    "Transactions that have their outcome.",
    (Attribute.TASK, Attribute.OUTCOME, Attribute.CATEGORY),
)
ATTEMPTS: Final = Metric("ergon.attempts", "counter", "{attempt}", "Attempts at a step.", _STEP)
RETRIES: Final = Metric("ergon.retries", "counter", "{attempt}", "Attempts after the first of a step.", _STEP)
WAITS: Final = Metric("ergon.waits", "counter", "{wait}", "Waits before a further attempt.", _STEP)
WAITED: Final = Metric("ergon.waits.duration", "counter", "s", "Seconds of those waits.", _STEP)
STEPS: Final = Metric("ergon.step.duration.count", "counter", "{step}", "Steps that are over.", _STEP)
STEP_SECONDS: Final = Metric(
    "ergon.step.duration.sum", "counter", "s", "Seconds that steps took, waits included.", _STEP
)
STEP_BUCKETS: Final = Metric(
    "ergon.step.duration.bucket",
    "counter",
    "{step}",
    "Steps that took no longer than le seconds.",
    (*_STEP, Attribute.LE),
)
FETCHES: Final = Metric("ergon.fetches", "counter", "{fetch}", "Fetches that were answered.")
EMPTY_FETCHES: Final = Metric("ergon.fetches.empty", "counter", "{fetch}", "Fetches that brought nothing.")
FAILED_FETCHES: Final = Metric("ergon.fetches.failed", "counter", "{fetch}", "Fetches that failed for good.")
REFUSED: Final = Metric(
    "ergon.refused",
    "counter",
    "{delivery}",
    "Deliveries that were settled before any lifecycle.",
    (Attribute.TASK, Attribute.REASON),
)
SETTLED: Final = Metric(
    "ergon.settled", "counter", "{delivery}", "Answers to settlements.", (Attribute.TASK, Attribute.RESULT)
)
BREACHES: Final = Metric("ergon.breaches", "counter", "{fetch}", "Fetches that brought more than was asked for.")
ABANDONED: Final = Metric(
    "ergon.bodies.abandoned", "counter", "{body}", "Bodies that timed out and did not leave within the grace."
)
FENCED: Final = Metric("ergon.bodies.fenced", "counter", "{body}", "Bodies that came back when nobody waited any more.")
SLOTS: Final = Metric(
    "ergon.slots",
    "gauge",
    "{slot}",
    "Slots that run a lifecycle or hold an abandoned body, and deliveries held for want of one.",
    (Attribute.TASK, Attribute.STATE),
)
QUEUE_AGE: Final = Metric(
    "ergon.queue.age", "gauge", "s", "Age of the oldest transaction of the last fetch.", across="max"
)
QUEUE_AGE_MAX: Final = Metric(
    "ergon.queue.age.max", "gauge", "s", "Largest age at a fetch since the gauge was last read.", across="max"
)
QUEUE_DEPTH: Final = Metric(
    "ergon.queue.depth",
    "gauge",
    "{transaction}",
    "Transactions in the queue of a task, as its broker counts them.",
    (Attribute.TASK, Attribute.QUEUE_STATE),
    across="max",
)
QUEUE_LAG: Final = Metric(
    "ergon.queue.lag", "gauge", "s", "Age of the oldest transaction that waits in the queue of a task.", across="max"
)
QUEUE_WAITS: Final = Metric(
    "ergon.queue.wait.count", "counter", "{fetch}", "Fetches that brought a transaction whose age is known."
)
QUEUE_WAITED: Final = Metric(
    "ergon.queue.wait.sum", "counter", "s", "Seconds that the oldest transaction of each of them had waited."
)
QUEUE_WAIT_BUCKETS: Final = Metric(
    "ergon.queue.wait.bucket",
    "counter",
    "{fetch}",
    "Fetches whose oldest transaction had waited no longer than le seconds.",
    (Attribute.TASK, Attribute.LE),
)
PAUSED: Final = Metric(
    "ergon.paused", "gauge", "{loop}", "Loops that a gate holds back.", (Attribute.TASK, Attribute.REASON)
)
BLOCKED: Final = Metric(
    "ergon.loop.blocked", "counter", "{time}", "Times that something held the event loop for too long.", _STEP
)
PROCESSES: Final = Metric("ergon.processes", "gauge", "{process}", "Processes of `ergon run` that run the task.")
PROCESSES_DIED: Final = Metric(
    "ergon.processes.died", "counter", "{process}", "Processes that ended without having been told to."
)

_PROVIDER: Final = (Attribute.PROVIDER, Attribute.CAPABILITY)
PROVIDER_CALLS: Final = Metric(
    "ergon.provider.calls",
    "counter",
    "{call}",
    "Calls of a provider that are over, with all their attempts.",
    (*_PROVIDER, Attribute.OUTCOME, Attribute.CODE),
)
PROVIDER_ATTEMPTS: Final = Metric(
    "ergon.provider.attempts",
    "counter",
    "{attempt}",
    "Attempts at a call of a provider, those included that quota or breaker held back.",
    (*_PROVIDER, Attribute.OUTCOME, Attribute.CODE),
)
PROVIDER_SECONDS: Final = Metric(
    "ergon.provider.attempts.duration", "counter", "s", "Seconds that those attempts took.", _PROVIDER
)
PROVIDER_BREAKERS: Final = Metric(
    "ergon.provider.breaker.transitions",
    "counter",
    "{transition}",
    "States that breakers have entered.",
    (*_PROVIDER, Attribute.BREAKER_STATE),
)
PROVIDER_OPEN: Final = Metric(
    "ergon.provider.breaker.open",
    "gauge",
    "{breaker}",
    "1 while a breaker is known to be open, for any tenant; 0 otherwise.",
    _PROVIDER,
    across="max",
)
PROVIDER_EXHAUSTED: Final = Metric(
    "ergon.provider.quota.exhausted",
    "gauge",
    "{quota}",
    "1 while a quota is known to be used up, for any tenant; 0 otherwise.",
    _PROVIDER,
    across="max",
)
PROVIDER_ROWS_DROPPED: Final = Metric(
    "ergon.provider.rows.dropped",
    "counter",
    "{row}",
    "Attempts that are in no table: there was no room, the server refused them, or the writer was closed.",
    (*_PROVIDER, Attribute.REASON),
)

JOBS: Final = Metric(
    "ergon.jobs",
    "counter",
    "{attempt}",
    "Attempts at jobs that are over: succeeded, retried, failed, killed, given_back, or stale and not written.",
    (Attribute.TASK, Attribute.OUTCOME),
)
CRON_TICKS: Final = Metric(
    "ergon.cron.ticks",
    "counter",
    "{tick}",
    "Scheduled times of cron entries: fired, or repeated and not fired again.",
    (Attribute.TASK, Attribute.OUTCOME),
)
_EXECUTOR: Final = (Attribute.EXECUTOR,)
EXECUTORS: Final = Metric(
    "ergon.executors", "gauge", "{process}", "Executors that run, starting ones included.", _EXECUTOR
)
EXECUTOR_JOBS: Final = Metric("ergon.executor.jobs", "gauge", "{job}", "Jobs that executors have.", _EXECUTOR)
EXECUTOR_QUEUE: Final = Metric(
    "ergon.executor.jobs.waiting", "gauge", "{job}", "Jobs that wait for an executor.", _EXECUTOR
)
EXECUTOR_WAITS: Final = Metric(
    "ergon.executor.waits", "counter", "{job}", "Jobs that were given an executor, at once or after a wait.", _EXECUTOR
)
EXECUTOR_WAITED: Final = Metric(
    "ergon.executor.waits.duration", "counter", "s", "Seconds that those jobs waited for it.", _EXECUTOR
)
EXECUTORS_STARTED: Final = Metric("ergon.executors.started", "counter", "{process}", "Executors started.", _EXECUTOR)
EXECUTORS_FAILED: Final = Metric(
    "ergon.executors.failed",
    "counter",
    "{process}",
    "Executors that could not be started, or never got ready.",
    _EXECUTOR,
)
EXECUTORS_RETIRED: Final = Metric(
    "ergon.executors.retired",
    "counter",
    "{process}",
    "Executors replaced between jobs, for wear or distrust.",
    _EXECUTOR,
)
EXECUTORS_KILLED: Final = Metric(
    "ergon.executors.killed",
    "counter",
    "{process}",
    "Executors killed for a job that took too long or was left.",
    _EXECUTOR,
)
EXECUTORS_DIED: Final = Metric(
    "ergon.executors.died", "counter", "{process}", "Executors that ended without having been told to.", _EXECUTOR
)
EXECUTOR_STRAYS: Final = Metric(
    "ergon.executor.strays",
    "counter",
    "{line}",
    "Lines of executors that are no outcome of a job they have.",
    (Attribute.EXECUTOR, Attribute.REASON),
)

FACTS: Final = Metric(
    "ergon.facts",
    "counter",
    "{fact}",
    "Facts that a store was given: stored, repeated, conflict, refused or full.",
    (Attribute.BUFFER, Attribute.OUTCOME),
)
ARTIFACTS: Final = Metric(
    "ergon.artifacts",
    "counter",
    "{artifact}",
    "Artifacts that a store was given: stored, repeated, conflict, refused, full or broken off.",
    (Attribute.BUFFER, Attribute.OUTCOME),
)
ARTIFACTS_LOST: Final = Metric(
    "ergon.artifacts.lost",
    "counter",
    "{artifact}",
    "Readings of an artifact that a fact names and that is missing or damaged, by the zone of the fact.",
    (Attribute.BUFFER, Attribute.ZONE),
)

_REPLICA: Final = (Attribute.REPLICA, Attribute.FROM_ZONE, Attribute.TO_ZONE)
REPLICA_LAG: Final = Metric(
    "ergon.replica.lag",
    "gauge",
    "{fact}",
    "Facts that the source has and this zone has not, as last asked.",
    _REPLICA,
    across="max",
)
REPLICA_LAG_BYTES: Final = Metric("ergon.replica.lag.size", "gauge", "By", "Bytes of their objects.", _REPLICA, "max")
REPLICA_LAG_SECONDS: Final = Metric(
    "ergon.replica.lag.duration",
    "gauge",
    "s",
    "Seconds since the oldest of them was stored, or since the source was last heard of if that is longer ago.",
    _REPLICA,
    across="max",
)
REPLICA_STATUS: Final = Metric(
    "ergon.replica.status",
    "gauge",
    "{replica}",
    "1 for the state that it is in.",
    (*_REPLICA, Attribute.STATUS),
    across="max",
)
REPLICA_FACTS: Final = Metric("ergon.replica.facts", "counter", "{fact}", "Facts that were forwarded.", _REPLICA)
REPLICA_ARTIFACTS: Final = Metric(
    "ergon.replica.artifacts", "counter", "{artifact}", "Artifacts that were copied.", _REPLICA
)
REPLICA_BYTES: Final = Metric(
    "ergon.replica.artifacts.size", "counter", "By", "Bytes of artifacts that went over the line.", _REPLICA
)
REPLICA_TROUBLES: Final = Metric(
    "ergon.replica.troubles",
    "counter",
    "{failure}",
    "Calls that failed, by what they mean for the replica.",
    (*_REPLICA, Attribute.STATUS),
)
ROOM: Final = Metric(
    "ergon.facts.room", "gauge", "1", "Share of a limit that is used.", (Attribute.BUFFER, Attribute.ROOM), "max"
)
ROOM_ALERTS: Final = Metric(
    "ergon.facts.room.alert",
    "gauge",
    "{limit}",
    "1 while a limit is nearly reached, 0 otherwise.",
    (Attribute.BUFFER, Attribute.ROOM),
    across="max",
)
FACT_CALLS: Final = Metric(
    "ergon.facts.calls",
    "counter",
    "{call}",
    "Calls of the facts service that are over: answered, left by the caller, or the status they were refused with.",
    (Attribute.METHOD, Attribute.OUTCOME),
)

METRICS: Final = (
    TRANSACTIONS,
    ATTEMPTS,
    RETRIES,
    WAITS,
    WAITED,
    STEPS,
    STEP_SECONDS,
    STEP_BUCKETS,
    FETCHES,
    EMPTY_FETCHES,
    FAILED_FETCHES,
    REFUSED,
    SETTLED,
    BREACHES,
    ABANDONED,
    FENCED,
    SLOTS,
    QUEUE_AGE,
    QUEUE_AGE_MAX,
    QUEUE_DEPTH,
    QUEUE_LAG,
    QUEUE_WAITS,
    QUEUE_WAITED,
    QUEUE_WAIT_BUCKETS,
    PAUSED,
    BLOCKED,
    PROCESSES,
    PROCESSES_DIED,
    PROVIDER_CALLS,
    PROVIDER_ATTEMPTS,
    PROVIDER_SECONDS,
    PROVIDER_BREAKERS,
    PROVIDER_OPEN,
    PROVIDER_EXHAUSTED,
    PROVIDER_ROWS_DROPPED,
    JOBS,
    CRON_TICKS,
    EXECUTORS,
    EXECUTOR_JOBS,
    EXECUTOR_QUEUE,
    EXECUTOR_WAITS,
    EXECUTOR_WAITED,
    EXECUTORS_STARTED,
    EXECUTORS_FAILED,
    EXECUTORS_RETIRED,
    EXECUTORS_KILLED,
    EXECUTORS_DIED,
    EXECUTOR_STRAYS,
    FACTS,
    ARTIFACTS,
    ARTIFACTS_LOST,
    REPLICA_LAG,
    REPLICA_LAG_BYTES,
    REPLICA_LAG_SECONDS,
    REPLICA_STATUS,
    REPLICA_FACTS,
    REPLICA_ARTIFACTS,
    REPLICA_BYTES,
    REPLICA_TROUBLES,
    ROOM,
    ROOM_ALERTS,
    FACT_CALLS,
)


class Event:
    """Messages of log records: one event each, with its details as fields."""

    ATTEMPT_FAILED: Final = "attempt failed"
    TRANSACTION_FAILED: Final = "transaction failed"
    TRANSACTION_DEFERRED: Final = "transaction deferred"
    TRANSACTION_RELEASED: Final = "transaction released"
    TRANSACTION_REFUSED: Final = "transaction refused"
    FETCH_FAILED: Final = "fetch failed"
    LOOP_PAUSED: Final = "loop paused"
    LOOP_RESUMED: Final = "loop resumed"
    LOOP_ENDED: Final = "loop ended"
    LOOP_BLOCKED: Final = "event loop blocked"
    LOOP_FREE: Final = "event loop free"
    MODULE_SHADOWED: Final = "module shadowed"
    WORKER_STARTED: Final = "worker started"
    PROCESS_STARTED: Final = "process started"
    PROCESS_DIED: Final = "process died"
    PROCESS_STOPPING: Final = "process stopping"
    CONTRACT_BREACH: Final = "contract breach"
    CONNECTION_LOST: Final = "connection lost"
    CONNECTION_RESTORED: Final = "connection restored"
    TELEMETRY_FAILED: Final = "telemetry failed"
    CALLBACK_FAILED: Final = "on_outcome failed"
    PROVIDER_CALL_FAILED: Final = "provider call failed"
    BREAKER_CHANGED: Final = "breaker changed"
    BOOKS_FAILED: Final = "books failed"
    ROWS_DROPPED: Final = "provider rows dropped"
    ROWS_WAIT: Final = "provider rows wait"
    RETENTION_FAILED: Final = "provider retention failed"
    HEALTH_FAILED: Final = "provider health failed"
    PROVIDER_ATTEMPT: Final = "provider attempt"
    PROVIDER_TASK_ENDED: Final = "provider task ended"
    LEDGER_FAILED: Final = "ledger failed"
    DEAD_LETTERS_WAIT: Final = "dead letters wait"
    LINE_REFUSED: Final = "executor line refused"
    EXECUTOR_STOPPING: Final = "executor stopping"
    EXECUTOR_STRAY: Final = "executor stray line"
    EXECUTOR_SAID: Final = "executor said"
    EXECUTOR_ENDED: Final = "executor ended"
    EXECUTOR_NOT_STARTED: Final = "executor not started"
    EXECUTOR_UNKNOWN: Final = "executor unknown"
    REGISTRATION_FAILED: Final = "executor registration failed"
    JOB_STALE: Final = "job stale"
    JOB_KILLED: Final = "job killed"
    JOBS_UNWRITTEN: Final = "jobs unwritten"
    CRON_MISSED: Final = "cron missed"
    CRON_UNFIRED: Final = "cron unfired"
    EPOCH_CHANGED: Final = "fact epoch changed"
    ARTIFACT_LOST: Final = "artifact lost"
    REPLICA_CHANGED: Final = "replica changed"
    REPLICA_HALTED: Final = "replica halted"
    ROOM_ENDS: Final = "room ends"
    ROOM_AGAIN: Final = "room again"
    PRUNED: Final = "facts pruned"
    PRUNING_FAILED: Final = "pruning failed"
    ACCESS_DENIED: Final = "access denied"
    LIMIT_REACHED: Final = "limit reached"
    CALL_FAILED: Final = "facts call failed"
    CERTIFICATES_UNREADABLE: Final = "certificates unreadable"
    REVOCATION_WEAK: Final = "revocation list weak"


class Field:
    """Fields of log records."""

    EVENT: Final = "event"
    TASK: Final = "task"
    TRANSACTION_ID: Final = "transaction_id"
    SOURCE: Final = "source"
    CORRELATION_ID: Final = "correlation_id"
    TENANT_ID: Final = "tenant_id"
    STEP: Final = "step"
    ATTEMPT: Final = "attempt"
    OUTCOME: Final = "outcome"
    CATEGORY: Final = "category"
    CODE: Final = "code"
    REASON: Final = "reason"
    ATTEMPTS: Final = "attempts"
    STILL_RUNNING: Final = "still_running"
    STARTED: Final = "started"
    ERROR: Final = "error"
    ERROR_TYPE: Final = "error_type"
    HANDLER_ERROR: Final = "handler_error"
    HANDLER_ERROR_TYPE: Final = "handler_error_type"
    TRACE_ID: Final = "trace_id"
    SPAN_ID: Final = "span_id"
    END: Final = "end"
    ASKED: Final = "asked"
    GOT: Final = "got"
    DELIVERIES: Final = "deliveries"
    DELAY: Final = "delay"
    SECONDS: Final = "seconds"
    FUNCTIONS: Final = "functions"
    NUMBER: Final = "number"
    PID: Final = "pid"
    CONCURRENCY: Final = "concurrency"
    VERSION: Final = "version"
    STAGE: Final = "stage"
    EXIT_CODE: Final = "exit_code"
    QUEUE: Final = "queue"
    ADDRESS: Final = "address"
    CAMPAIGN_ID: Final = "campaign_id"
    PROVIDER_NAME: Final = "provider_name"
    CAPABILITY: Final = "capability"
    OPERATION: Final = "operation"
    IDEMPOTENCY_KEY: Final = "idempotency_key"
    REASON_CODE: Final = "reason_code"
    BREAKER_STATE: Final = "breaker_state"
    ROWS: Final = "rows"
    BYTES: Final = "bytes"
    LINE: Final = "line"
    EXECUTOR: Final = "executor"
    CRON: Final = "cron"
    EPOCH: Final = "epoch"
    ZONE: Final = "zone"
    MESSAGE_ID: Final = "message_id"
    BUCKET: Final = "bucket"
    KEY: Final = "key"
    REPLICA: Final = "replica"
    FROM_ZONE: Final = "from_zone"
    TO_ZONE: Final = "to_zone"
    STATUS: Final = "status"
    OFFSET: Final = "offset"
    ACTION: Final = "action"
    FACTS: Final = "facts"
    ARTIFACTS: Final = "artifacts"
    ROOM: Final = "room"
    USED: Final = "used"
    LIMIT: Final = "limit"
    COUNT: Final = "count"
    LOADED: Final = "loaded"
    IGNORED: Final = "ignored"


def values_of(names: type) -> list[str]:
    """Return the values of one of the classes above."""
    return [value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)]
