"""The stable names for dashboards, alerts and queries: spans, attributes, metrics and log events.

They are only added to and never renamed, like the keys of policies; a constant of this module may be renamed, its value
may not. docs/telemetry.md lists and explains them.

A task consumes or produces transactions in a loop. A transaction passes through steps (process, success, exception),
and each step has attempts. A provider is an external service, an executor a process that runs jobs, and a fact a
statement that one zone, a site with its own store, sends to another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

#: The instrumentation scope of all spans and metrics, and the root of all logger names.
LIBRARY: Final = "ergon_framework"


class Span:
    """Names of spans; the span of a step has one child for each of its attempts."""

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
    #: A job in an executor; the executor protocol sets this name for the runtimes of all languages.
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
    BATCH_REQUESTED: Final = "ergon.batch.requested"
    BATCH_FETCHED: Final = "ergon.batch.fetched"
    STOP_REASON: Final = "ergon.stop_reason"
    SETTLE_RESULT: Final = "ergon.settle.result"
    SLOT_STATE: Final = "ergon.slot.state"
    QUEUE_STATE: Final = "ergon.queue.state"
    PROVIDER: Final = "ergon.provider.name"
    CAPABILITY: Final = "ergon.provider.capability"
    OPERATION: Final = "ergon.provider.operation"
    HTTP_STATUS: Final = "ergon.provider.http_status"
    REPLAYED: Final = "ergon.provider.replayed"
    BREAKER_STATE: Final = "ergon.provider.breaker.state"
    EXECUTOR_HANDLER: Final = "ergon.executor.handler"
    EXECUTOR_QUEUE: Final = "ergon.executor.queue"
    #: The name of an executor pool; all executors of a pool are of one kind.
    EXECUTOR_KIND: Final = "ergon.executor.kind"
    #: One of the four stores of facts of a zone: ISB, IFB, ESB or EFB (ingress or egress, store or forward).
    FACT_BUFFER: Final = "ergon.fact.buffer"
    ZONE: Final = "ergon.fact.zone"
    REPLICA: Final = "ergon.fact.replica"
    FROM_ZONE: Final = "ergon.fact.from_zone"
    TO_ZONE: Final = "ergon.fact.to_zone"
    STATUS: Final = "ergon.fact.status"
    CAPACITY: Final = "ergon.fact.capacity"
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
    "Transactions processed, by outcome.",
    (Attribute.TASK, Attribute.OUTCOME, Attribute.CATEGORY),
)
ATTEMPTS: Final = Metric("ergon.attempts", "counter", "{attempt}", "Attempts of steps.", _STEP)
RETRIES: Final = Metric("ergon.retries", "counter", "{attempt}", "Attempts after the first of a step.", _STEP)
RETRY_BACKOFFS: Final = Metric("ergon.retry.backoff", "counter", "{delay}", "Backoff delays before retries.", _STEP)
RETRY_BACKOFF_SECONDS: Final = Metric(
    "ergon.retry.backoff.duration", "counter", "s", "Total seconds of backoff delays before retries.", _STEP
)
STEPS: Final = Metric("ergon.step.duration.count", "counter", "{step}", "Completed steps.", _STEP)
STEP_SECONDS: Final = Metric(
    "ergon.step.duration.sum", "counter", "s", "Total seconds of completed steps, including backoff delays.", _STEP
)
STEP_BUCKETS: Final = Metric(
    "ergon.step.duration.bucket",
    "counter",
    "{step}",
    "Completed steps that took at most le seconds.",
    (*_STEP, Attribute.LE),
)
FETCHES: Final = Metric("ergon.fetches", "counter", "{fetch}", "Successful fetches.")
EMPTY_FETCHES: Final = Metric(
    "ergon.fetches.empty", "counter", "{fetch}", "Successful fetches that returned no messages."
)
FAILED_FETCHES: Final = Metric("ergon.fetches.failed", "counter", "{fetch}", "Fetches that failed after all retries.")
REJECTED_DELIVERIES: Final = Metric(
    "ergon.deliveries.rejected",
    "counter",
    "{delivery}",
    "Deliveries settled without calling the handler, by reason; done is a duplicate.",
    (Attribute.TASK, Attribute.REASON),
)
SETTLED: Final = Metric(
    "ergon.settled",
    "counter",
    "{delivery}",
    "Settled deliveries, by result.",
    (Attribute.TASK, Attribute.SETTLE_RESULT),
)
OVERSIZED_FETCHES: Final = Metric(
    "ergon.fetch.oversized", "counter", "{fetch}", "Fetches that returned more messages than requested."
)
ABANDONED_CALLS: Final = Metric(
    "ergon.handler.abandoned",
    "counter",
    "{call}",
    "Handler calls that timed out and did not exit within the grace period.",
)
LATE_RESULTS: Final = Metric(
    "ergon.handler.late_results",
    "counter",
    "{call}",
    "Handler calls that returned after their timeout; their results were discarded.",
)
SLOTS: Final = Metric(
    "ergon.slots",
    "gauge",
    "{slot}",
    "Slots with a running transaction or an abandoned handler call, and deliveries waiting for a slot.",
    (Attribute.TASK, Attribute.SLOT_STATE),
)
# A fetched transaction has an age: the seconds since it was created. The age of the oldest one of each fetch is a
# gauge (``age``) and a histogram (``wait``). The lag is the same for what still waits in the queue, as the broker
# reports it without a fetch.
QUEUE_AGE: Final = Metric(
    "ergon.queue.age", "gauge", "s", "Age of the oldest transaction in the last fetch.", across="max"
)
QUEUE_AGE_MAX: Final = Metric(
    "ergon.queue.age.max", "gauge", "s", "Highest age at a fetch since the previous collection.", across="max"
)
QUEUE_DEPTH: Final = Metric(
    "ergon.queue.depth",
    "gauge",
    "{transaction}",
    "Transactions in the queue of a task, as counted by its broker.",
    (Attribute.TASK, Attribute.QUEUE_STATE),
    across="max",
)
QUEUE_LAG: Final = Metric(
    "ergon.queue.lag", "gauge", "s", "Age of the oldest transaction waiting in the queue of a task.", across="max"
)
QUEUE_WAITS: Final = Metric(
    "ergon.queue.wait.count", "counter", "{fetch}", "Fetches that returned a transaction with a known age."
)
QUEUE_WAIT_SECONDS: Final = Metric(
    "ergon.queue.wait.sum",
    "counter",
    "s",
    "Total age in seconds of the oldest transaction of each fetch that ergon.queue.wait.count counts.",
)
QUEUE_WAIT_BUCKETS: Final = Metric(
    "ergon.queue.wait.bucket",
    "counter",
    "{fetch}",
    "Fetches whose oldest transaction was at most le seconds old.",
    (Attribute.TASK, Attribute.LE),
)
# A gate is a function of the task that can pause its loop.
PAUSED: Final = Metric("ergon.paused", "gauge", "{loop}", "Loops paused by a gate.", (Attribute.TASK, Attribute.REASON))
EVENT_LOOP_BLOCKED: Final = Metric(
    "ergon.loop.blocked", "counter", "{time}", "Times the event loop was blocked for longer than the limit.", _STEP
)
# A solo run: a transaction on its last permitted delivery runs alone in its process.
SOLO_RUNS: Final = Metric(
    "ergon.solo.runs", "counter", "{transaction}", "Transactions that started on their last permitted delivery."
)
SOLO_PAUSES: Final = Metric(
    "ergon.solo.pauses", "counter", "{pause}", "Pauses of a loop for such a transaction of another task."
)
SOLO_PAUSE_SECONDS: Final = Metric(
    "ergon.solo.pauses.duration", "counter", "s", "Total seconds of pauses for such a transaction of another task."
)
SOLO_TIMEOUTS: Final = Metric(
    "ergon.solo.timeouts",
    "counter",
    "{time}",
    "Times a limit ended the wait of such a transaction for other tasks, or a pause for it.",
)
LOOPS_RESTARTED: Final = Metric(
    "ergon.loop.restarts", "counter", "{time}", "Times a streaming loop ended with an error and was restarted."
)
PROCESSES: Final = Metric("ergon.processes", "gauge", "{process}", "Processes of `ergon run` for the task.")
PROCESSES_DIED: Final = Metric("ergon.processes.died", "counter", "{process}", "Processes that exited unexpectedly.")

_PROVIDER: Final = (Attribute.PROVIDER, Attribute.CAPABILITY)
PROVIDER_CALLS: Final = Metric(
    "ergon.provider.calls",
    "counter",
    "{call}",
    "Completed provider calls, each with all its attempts.",
    (*_PROVIDER, Attribute.OUTCOME, Attribute.CODE),
)
PROVIDER_ATTEMPTS: Final = Metric(
    "ergon.provider.attempts",
    "counter",
    "{attempt}",
    "Attempts of provider calls, including those blocked by a quota or circuit breaker.",
    (*_PROVIDER, Attribute.OUTCOME, Attribute.CODE),
)
PROVIDER_SECONDS: Final = Metric(
    "ergon.provider.attempts.duration", "counter", "s", "Total seconds of attempts of provider calls.", _PROVIDER
)
PROVIDER_BREAKERS: Final = Metric(
    "ergon.provider.breaker.transitions",
    "counter",
    "{transition}",
    "Circuit breaker transitions, by new state.",
    (*_PROVIDER, Attribute.BREAKER_STATE),
)
PROVIDER_OPEN: Final = Metric(
    "ergon.provider.breaker.open",
    "gauge",
    "{breaker}",
    "1 while a circuit breaker is known to be open, for any tenant; 0 otherwise.",
    _PROVIDER,
    across="max",
)
PROVIDER_EXHAUSTED: Final = Metric(
    "ergon.provider.quota.exhausted",
    "gauge",
    "{quota}",
    "1 while a quota is known to be exhausted, for any tenant; 0 otherwise.",
    _PROVIDER,
    across="max",
)
PROVIDER_ROWS_DROPPED: Final = Metric(
    "ergon.provider.rows.dropped",
    "counter",
    "{row}",
    "Attempts that were not stored: write queue full, rejected, outcome unknown, or writer closed.",
    (*_PROVIDER, Attribute.REASON),
)

# Attempts, although the name says jobs: names are stable.
JOBS: Final = Metric(
    "ergon.jobs",
    "counter",
    "{attempt}",
    "Completed job attempts: succeeded, retried, failed, killed, released, or stale and not written.",
    (Attribute.TASK, Attribute.OUTCOME),
)
CRON_TICKS: Final = Metric(
    "ergon.cron.ticks",
    "counter",
    "{tick}",
    "Scheduled times of cron entries: fired, or repeated and not fired again.",
    (Attribute.TASK, Attribute.OUTCOME),
)
_EXECUTOR: Final = (Attribute.EXECUTOR_KIND,)
EXECUTORS: Final = Metric(
    "ergon.executors", "gauge", "{process}", "Running executors, including starting ones.", _EXECUTOR
)
EXECUTOR_JOBS: Final = Metric("ergon.executor.jobs", "gauge", "{job}", "Jobs running in executors.", _EXECUTOR)
EXECUTOR_QUEUE: Final = Metric(
    "ergon.executor.jobs.waiting", "gauge", "{job}", "Jobs waiting for an executor.", _EXECUTOR
)
EXECUTOR_ACQUISITIONS: Final = Metric(
    "ergon.executor.acquisitions", "counter", "{job}", "Jobs that acquired an executor.", _EXECUTOR
)
EXECUTOR_ACQUISITION_SECONDS: Final = Metric(
    "ergon.executor.acquisitions.duration",
    "counter",
    "s",
    "Total seconds that jobs waited until they acquired an executor.",
    _EXECUTOR,
)
EXECUTORS_STARTED: Final = Metric("ergon.executors.started", "counter", "{process}", "Executors started.", _EXECUTOR)
EXECUTORS_FAILED: Final = Metric(
    "ergon.executors.failed",
    "counter",
    "{process}",
    "Executors that failed to start or never became ready.",
    _EXECUTOR,
)
EXECUTORS_RETIRED: Final = Metric(
    "ergon.executors.retired",
    "counter",
    "{process}",
    "Executors replaced between jobs because of a usage limit or a protocol violation.",
    _EXECUTOR,
)
EXECUTORS_KILLED: Final = Metric(
    "ergon.executors.killed",
    "counter",
    "{process}",
    "Executors killed because a job timed out or was abandoned.",
    _EXECUTOR,
)
EXECUTORS_DIED: Final = Metric(
    "ergon.executors.died", "counter", "{process}", "Executors that exited unexpectedly.", _EXECUTOR
)
EXECUTOR_UNEXPECTED_LINES: Final = Metric(
    "ergon.executor.unexpected_lines",
    "counter",
    "{line}",
    "Executor output lines that are not the outcome of a running job.",
    (Attribute.EXECUTOR_KIND, Attribute.REASON),
)

FACTS: Final = Metric(
    "ergon.facts",
    "counter",
    "{fact}",
    "Facts sent to a store, by outcome: stored, repeated, conflict, rejected or full.",
    (Attribute.FACT_BUFFER, Attribute.OUTCOME),
)
ARTIFACTS: Final = Metric(
    "ergon.artifacts",
    "counter",
    "{artifact}",
    "Artifacts sent to a store, by outcome: stored, repeated, conflict, rejected, full or interrupted.",
    (Attribute.FACT_BUFFER, Attribute.OUTCOME),
)
ARTIFACTS_LOST: Final = Metric(
    "ergon.artifacts.lost",
    "counter",
    "{artifact}",
    "Reads of a missing or damaged artifact that a fact references, by zone of the fact.",
    (Attribute.FACT_BUFFER, Attribute.ZONE),
)

_REPLICATION: Final = (Attribute.REPLICA, Attribute.FROM_ZONE, Attribute.TO_ZONE)
REPLICATION_LAG: Final = Metric(
    "ergon.replication.lag",
    "gauge",
    "{fact}",
    "Facts of the source that are missing in this zone, as of the last poll.",
    _REPLICATION,
    across="max",
)
REPLICATION_LAG_BYTES: Final = Metric(
    "ergon.replication.lag.size", "gauge", "By", "Bytes of the missing facts, without artifacts.", _REPLICATION, "max"
)
REPLICATION_LAG_SECONDS: Final = Metric(
    "ergon.replication.lag.duration",
    "gauge",
    "s",
    "Seconds since the oldest missing fact was stored, or since the last contact with the source if that is earlier.",
    _REPLICATION,
    across="max",
)
REPLICATION_STATUS: Final = Metric(
    "ergon.replication.status",
    "gauge",
    "{replica}",
    "1 for the current status of the replica.",
    (*_REPLICATION, Attribute.STATUS),
    across="max",
)
REPLICATED_FACTS: Final = Metric(
    "ergon.replication.facts", "counter", "{fact}", "Facts copied, including repeats.", _REPLICATION
)
REPLICATED_ARTIFACTS: Final = Metric(
    "ergon.replication.artifacts", "counter", "{artifact}", "Artifacts copied.", _REPLICATION
)
REPLICATED_BYTES: Final = Metric(
    "ergon.replication.artifacts.size", "counter", "By", "Bytes of artifacts transferred.", _REPLICATION
)
REPLICATION_ERRORS: Final = Metric(
    "ergon.replication.errors",
    "counter",
    "{failure}",
    "Failed replication calls, by the resulting status.",
    (*_REPLICATION, Attribute.STATUS),
)
CAPACITY_USED_RATIO: Final = Metric(
    "ergon.facts.capacity.used_ratio",
    "gauge",
    "1",
    "Used fraction of a storage limit, from 0 to 1.",
    (Attribute.FACT_BUFFER, Attribute.CAPACITY),
    across="max",
)
CAPACITY_NEAR_LIMIT: Final = Metric(
    "ergon.facts.capacity.near_limit",
    "gauge",
    "{limit}",
    "1 while usage is near a storage limit, 0 otherwise.",
    (Attribute.FACT_BUFFER, Attribute.CAPACITY),
    across="max",
)
FACT_CALLS: Final = Metric(
    "ergon.facts.calls",
    "counter",
    "{call}",
    "Completed calls of the facts service: answered, cancelled by the caller, or the error status.",
    (Attribute.METHOD, Attribute.OUTCOME),
)

METRICS: Final = (
    TRANSACTIONS,
    ATTEMPTS,
    RETRIES,
    RETRY_BACKOFFS,
    RETRY_BACKOFF_SECONDS,
    STEPS,
    STEP_SECONDS,
    STEP_BUCKETS,
    FETCHES,
    EMPTY_FETCHES,
    FAILED_FETCHES,
    REJECTED_DELIVERIES,
    SETTLED,
    OVERSIZED_FETCHES,
    ABANDONED_CALLS,
    LATE_RESULTS,
    SLOTS,
    QUEUE_AGE,
    QUEUE_AGE_MAX,
    QUEUE_DEPTH,
    QUEUE_LAG,
    QUEUE_WAITS,
    QUEUE_WAIT_SECONDS,
    QUEUE_WAIT_BUCKETS,
    PAUSED,
    EVENT_LOOP_BLOCKED,
    LOOPS_RESTARTED,
    SOLO_RUNS,
    SOLO_PAUSES,
    SOLO_PAUSE_SECONDS,
    SOLO_TIMEOUTS,
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
    EXECUTOR_ACQUISITIONS,
    EXECUTOR_ACQUISITION_SECONDS,
    EXECUTORS_STARTED,
    EXECUTORS_FAILED,
    EXECUTORS_RETIRED,
    EXECUTORS_KILLED,
    EXECUTORS_DIED,
    EXECUTOR_UNEXPECTED_LINES,
    FACTS,
    ARTIFACTS,
    ARTIFACTS_LOST,
    REPLICATION_LAG,
    REPLICATION_LAG_BYTES,
    REPLICATION_LAG_SECONDS,
    REPLICATION_STATUS,
    REPLICATED_FACTS,
    REPLICATED_ARTIFACTS,
    REPLICATED_BYTES,
    REPLICATION_ERRORS,
    CAPACITY_USED_RATIO,
    CAPACITY_NEAR_LIMIT,
    FACT_CALLS,
)


class Event:
    """Messages of log records: one event each, with its details as fields."""

    ATTEMPT_FAILED: Final = "attempt failed"
    TRANSACTION_FAILED: Final = "transaction failed"
    TRANSACTION_DEFERRED: Final = "transaction deferred"
    TRANSACTION_RELEASED: Final = "transaction released"
    TRANSACTION_REJECTED: Final = "transaction rejected"
    FETCH_FAILED: Final = "fetch failed"
    LOOP_PAUSED: Final = "loop paused"
    LOOP_RESUMED: Final = "loop resumed"
    LOOP_ENDED: Final = "loop ended"
    LOOP_RESTARTED: Final = "loop restarted"
    SOLO_RUN_STARTED: Final = "solo run started"
    SOLO_RUN_TIMED_OUT: Final = "solo run timed out"
    EVENT_LOOP_BLOCKED: Final = "event loop blocked"
    EVENT_LOOP_FREE: Final = "event loop free"
    MODULE_SHADOWED: Final = "module shadowed"
    WORKER_STARTED: Final = "worker started"
    PROCESS_STARTED: Final = "process started"
    PROCESS_EXITED: Final = "process exited unexpectedly"
    PROCESS_STOPPING: Final = "process stopping"
    FETCH_OVERSIZED: Final = "fetch oversized"
    CONNECTION_LOST: Final = "connection lost"
    CONNECTION_RESTORED: Final = "connection restored"
    TELEMETRY_FAILED: Final = "telemetry failed"
    CALLBACK_FAILED: Final = "on_outcome failed"
    MIDDLEWARE_FAILED: Final = "middleware failed"
    PROVIDER_CALL_FAILED: Final = "provider call failed"
    BREAKER_CHANGED: Final = "breaker changed"
    PROVIDER_STATE_FAILED: Final = "provider state update failed"
    ROWS_DROPPED: Final = "provider rows dropped"
    ROWS_WAITING: Final = "provider rows waiting"
    RETENTION_FAILED: Final = "provider retention failed"
    HEALTH_FAILED: Final = "provider health failed"
    PROVIDER_ATTEMPT: Final = "provider attempt"
    PROVIDER_TASK_ENDED: Final = "provider task ended"
    #: The ledger is the table of Celery tasks: their delivery counts, and how each ended.
    LEDGER_FAILED: Final = "ledger failed"
    DEAD_LETTERS_WAITING: Final = "dead letters waiting"
    LINE_REJECTED: Final = "executor line rejected"
    EXECUTOR_STOPPING: Final = "executor stopping"
    EXECUTOR_UNEXPECTED_LINE: Final = "executor line unexpected"
    EXECUTOR_STDERR: Final = "executor stderr"
    EXECUTOR_EXITED: Final = "executor exited unexpectedly"
    EXECUTOR_NOT_STARTED: Final = "executor not started"
    EXECUTOR_UNKNOWN: Final = "executor unknown"
    REGISTRATION_FAILED: Final = "executor registration failed"
    JOB_STALE: Final = "job stale"
    JOB_KILLED: Final = "job killed"
    JOB_STORE_UNAVAILABLE: Final = "job store unavailable"
    CRON_MISSED: Final = "cron schedule missed"
    CRON_NOT_FIRED: Final = "cron schedule not fired"
    EPOCH_CHANGED: Final = "fact epoch changed"
    ARTIFACT_LOST: Final = "artifact lost"
    REPLICATION_CHANGED: Final = "replication state changed"
    REPLICATION_HALTED: Final = "replication halted"
    STORAGE_NEAR_LIMIT: Final = "storage near limit"
    STORAGE_BELOW_LIMIT: Final = "storage below limit"
    PRUNED: Final = "facts pruned"
    PRUNING_FAILED: Final = "pruning failed"
    ACCESS_DENIED: Final = "access denied"
    LIMIT_REACHED: Final = "limit reached"
    CALL_FAILED: Final = "facts call failed"
    CERTIFICATES_UNREADABLE: Final = "certificates unreadable"
    REVOCATION_INCOMPLETE: Final = "revocation list incomplete"


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
    STOP_REASON: Final = "stop_reason"
    REQUESTED: Final = "requested"
    RETURNED: Final = "returned"
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
    MIDDLEWARE: Final = "middleware"
    ADDRESS: Final = "address"
    #: Host and port of one server of the address.
    HOST: Final = "host"
    #: The campaign of a provider call, if the caller has named one: a group of calls.
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
    CAPACITY: Final = "capacity"
    USED: Final = "used"
    LIMIT: Final = "limit"
    COUNT: Final = "count"
    LOADED: Final = "loaded"
    IGNORED: Final = "ignored"


def values_of(names: type) -> list[str]:
    """Return the values of one of the classes above."""
    return [value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)]
