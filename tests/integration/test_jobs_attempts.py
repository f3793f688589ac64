"""How attempts start and end in the database: every decision, by a worker that the test controls."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.errors import Category
from ergon_framework.executors.decision import Complete, Fail, FailureCause, Retry
from ergon_framework.jobs import store
from ergon_framework.jobs.client import JobClient
from ergon_framework.jobs.model import JobState, queue_name
from ergon_framework.jobs.store import ReleaseAttempt
from ergon_framework.transaction import Transaction
from tests.integration.jobs import ManualWorker, run_sql

pytestmark = pytest.mark.invariant

CAUSE = FailureCause(Category.TIMEOUT, "hard_timeout", "no outcome", "hard_timeout", "Traceback\0\ud800")


@pytest.fixture
def dsn(database):
    return database


@pytest.fixture
def client(dsn):
    with JobClient(dsn) as job_client:
        yield job_client


@pytest.fixture
def worker(dsn):
    manual_worker = ManualWorker(dsn)
    yield manual_worker
    manual_worker.close()


@pytest.fixture
def other_worker(dsn):
    """Another orchestrator."""
    manual_worker = ManualWorker(dsn, lease=29.0)  # another lease is another instance, also in one process
    yield manual_worker
    manual_worker.close()


@pytest.fixture
def take_over(dsn, worker, other_worker):
    def take(delivery):
        worker_id = delivery.receipt.worker
        run_sql(dsn, "update ergon.worker set alive_until = now() - interval '1 second' where id = %s", worker_id)
        other_worker.queue._client._last_reap = float("-inf")
        return other_worker.fetch()[0]

    return take


def start_attempt(worker, delivery, **options):
    return worker.start(delivery, **options)[0]


# -- starting -------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-19")
def test_an_attempt_is_counted_when_it_starts_and_has_the_limits_of_its_job(client, worker):
    client.submit("echo", 1, id="mine", max_attempts=7, timeout=2.5)
    client.submit("echo", 1, id="as-policy-says")
    with_own_limits, with_policy_limits = sorted(worker.fetch(2), key=lambda delivery: delivery.transaction.id)[::-1]
    started = {
        delivery.transaction.id: start_attempt(worker, delivery, max_attempts=3, timeout=None)
        for delivery in (with_own_limits, with_policy_limits)
    }
    assert [started["mine"][:4], started["as-policy-says"][:4]] == [("run", 1, 7, 2.5), ("run", 1, 3, None)]
    job = client.show("mine")
    assert (job.state, job.attempts, job.started_at is not None) == (JobState.RUNNING, 1, True)


@pytest.mark.spec("EXE-19")
def test_many_attempts_start_in_one_statement_each_with_its_own_decision(client, worker):
    ids = [client.submit("echo", n).id for n in range(20)]
    client.cancel(ids[3])
    deliveries = worker.fetch(20)
    started = dict(zip([delivery.transaction.id for delivery in deliveries], worker.start(*deliveries), strict=True))
    assert [started[job_id].decision for job_id in ids] == ["run"] * 3 + ["over"] + ["run"] * 16


@pytest.mark.spec("EXE-19")
def test_a_repeated_start_of_one_claim_is_counted_once(client, worker):
    client.submit("echo", id="a")
    [delivery] = worker.fetch()
    assert start_attempt(worker, delivery)[:2] == ("run", 1)
    assert start_attempt(worker, delivery)[:2] == ("begun", 1)
    assert client.show("a").attempts == 1


@pytest.mark.spec("EXE-22")
def test_a_worker_that_lost_its_claim_before_the_start_starts_no_attempt(client, worker, other_worker, take_over):
    client.submit("echo", id="a")
    [stale_delivery] = worker.fetch()
    new_delivery = take_over(stale_delivery)
    assert start_attempt(worker, stale_delivery).decision == "stale"
    assert client.show("a").attempts == 0
    assert start_attempt(other_worker, new_delivery)[:2] == ("run", 1)
    assert start_attempt(worker, stale_delivery).decision == "stale"
    assert client.show("a").attempts == 1


@pytest.mark.spec("EXE-22")
def test_a_settled_claim_starts_no_attempt(client, worker):
    client.submit("echo", id="a")
    [first] = worker.fetch()
    assert worker.queue.settle([(first, Defer(0.0))]) == [SettleResult.SETTLED]
    [second] = worker.fetch()
    assert [start_attempt(worker, delivery).decision for delivery in (first, second)] == ["stale", "run"]


@pytest.mark.spec("EXE-22")
def test_a_settled_message_of_a_valid_claim_starts_no_attempt(client, worker):
    for job_id in ("a", "b"):
        client.submit("echo", id=job_id)
    first, second = worker.queue.fetch_transactions(10)
    assert (first.receipt.worker, first.receipt.token) == (second.receipt.worker, second.receipt.token)
    assert worker.queue.settle([(first, Defer(60.0))]) == [SettleResult.SETTLED]
    assert [started.decision for started in worker.start(first, second)] == ["stale", "run"]
    assert client.show(first.transaction.id).attempts == 0


@pytest.mark.spec("EXE-19")
def test_a_job_whose_orchestrators_are_killed_fails_after_exactly_its_attempts(client, worker, other_worker, take_over):
    client.submit("echo", id="a", max_attempts=1)
    [stale_delivery] = worker.fetch()
    assert start_attempt(worker, stale_delivery)[:2] == ("run", 1)
    new_delivery = take_over(stale_delivery)
    started = start_attempt(other_worker, new_delivery)
    assert (started.decision, started.attempt_number, started.cause.code) == ("exhausted", 1, "orchestrator_died")
    job = client.show("a")
    assert (job.state, job.attempts, job.error.code) == (JobState.FAILED, 1, "orchestrator_died")
    # An orchestrator killed here has not dead-lettered the message: it is redelivered, and the row holds the decision.
    assert start_attempt(other_worker, new_delivery)[:2] == ("failed", 1)


def test_a_job_that_is_not_due_is_deferred_and_not_counted(client, worker):
    client.submit("echo", id="a")
    [first] = worker.fetch()
    start_attempt(worker, first)
    # The process is killed between the two: the row has the due time, the message is redelivered immediately.
    assert worker.finish(first, Retry(30.0, CAUSE)) is JobState.PENDING
    worker.queue.settle([(first, Defer(0.0))])
    [early_delivery] = worker.fetch()
    started = start_attempt(worker, early_delivery)
    assert started.decision == "early"
    assert 29 < started.delay <= 30
    assert client.show("a").attempts == 1


@pytest.mark.parametrize("state", ["succeeded", "killed"])
def test_the_message_of_a_finished_job_starts_no_attempt(client, worker, dsn, state):
    client.submit("echo", id="a")
    [delivery] = worker.fetch()
    run_sql(dsn, "update ergon.job set state = %s", state)
    assert start_attempt(worker, delivery).decision == "over"
    assert client.show("a").attempts == 0


def test_a_kill_request_left_by_a_lost_orchestrator_is_applied_by_the_next(client, worker, other_worker, take_over):
    client.submit("echo", id="a")
    [stale_delivery] = worker.fetch()
    start_attempt(worker, stale_delivery)
    client.kill("a")
    new_delivery = take_over(stale_delivery)
    assert start_attempt(other_worker, new_delivery).decision == "killed"
    job = client.show("a")
    assert (job.state, job.attempts, job.error.code) == (JobState.KILLED, 1, "killed")


def test_a_replayed_dead_letter_starts_with_attempt_one(client, worker):
    client.submit("echo", id="a", max_attempts=1)
    [delivery] = worker.fetch()
    start_attempt(worker, delivery)
    worker.finish(delivery, Fail(CAUSE))
    assert start_attempt(worker, delivery).decision == "failed"
    worker.queue.settle([(delivery, DeadLetter("hard_timeout"))])
    [letter] = worker.queue.list_dead(DeadLetterQuery.load())
    worker.queue.replay_dead([letter.handle])
    [replayed] = worker.fetch()
    assert start_attempt(worker, replayed)[:2] == ("replayed", 1)
    job = client.show("a")
    assert (job.state, job.attempts, job.error, job.ended_at) == (JobState.RUNNING, 1, None, None)


def test_a_message_without_a_job_is_unknown(worker, dsn):
    queue = PostgresQueue(queue_name("python"), dsn=dsn)
    queue.dispatch([Transaction({}, id="stray")])
    queue.close()
    [delivery] = worker.fetch()
    assert start_attempt(worker, delivery).decision == "unknown"


def test_a_second_message_of_a_running_job_starts_no_attempt(client, worker, dsn):
    client.submit("echo", id="a")
    [first] = worker.fetch()
    start_attempt(worker, first)
    queue = PostgresQueue(queue_name("python"), dsn=dsn)
    queue.dispatch([Transaction({}, id="a")])
    queue.close()
    [second] = worker.fetch()
    assert start_attempt(worker, second).decision == "over"
    assert worker.finish(first, Complete(1)) is JobState.SUCCEEDED


# -- ending ---------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-05", "EXE-24")
@pytest.mark.parametrize("result", [None, 0, "", [], {"a": 1}, "ä\u2028\0 \U0001f600", 10**400, 1.5e300, [[[]]]])
def test_a_result_is_stored_unchanged(client, worker, result):
    client.submit("echo", id="a")
    [delivery] = worker.fetch()
    start_attempt(worker, delivery)
    assert worker.finish(delivery, Complete(result)) is JobState.SUCCEEDED
    job = client.show("a")
    assert (job.result, type(job.result), job.error) == (result, type(result), None)
    assert (job.ended_at is not None, job.expires_at > job.ended_at) == (True, True)


@pytest.mark.spec("EXE-24")
def test_errors_are_stored_with_type_and_traceback_whatever_text_they_contain(client, worker):
    client.submit("echo", id="a")
    [delivery] = worker.fetch()
    start_attempt(worker, delivery)
    assert worker.finish(delivery, Fail(CAUSE)) is JobState.FAILED
    error = client.show("a").error
    assert (error.category, error.code, error.message) == (Category.TIMEOUT, "hard_timeout", "no outcome")
    assert (error.type, error.traceback) == ("hard_timeout", "Traceback\ufffd?")


@pytest.mark.spec("EXE-19")
def test_an_attempt_that_was_not_sent_is_released_once(client, worker):
    client.submit("echo", id="a")
    [delivery] = worker.fetch()
    start_attempt(worker, delivery)
    assert [worker.finish(delivery, ReleaseAttempt()) for _ in range(2)] == [JobState.PENDING] * 2
    assert client.show("a").attempts == 0


def test_the_error_of_an_earlier_attempt_is_kept_when_a_later_one_is_released(client, worker):
    client.submit("echo", id="a")
    [first] = worker.fetch()
    start_attempt(worker, first)
    worker.finish(first, Retry(0.0, CAUSE))
    worker.queue.settle([(first, Defer(0.0))])
    [second] = worker.fetch()
    assert start_attempt(worker, second)[:2] == ("run", 2)
    worker.finish(second, ReleaseAttempt())
    job = client.show("a")
    assert (job.attempts, job.error.code) == (1, "hard_timeout")


@pytest.mark.spec("EXE-22")
@pytest.mark.parametrize("late_outcome", [Complete("old"), Retry(0.0, CAUSE), Fail(CAUSE), ReleaseAttempt()])
def test_a_worker_that_lost_its_claim_after_the_start_overwrites_nothing(
    client, worker, other_worker, take_over, late_outcome
):
    client.submit("echo", id="a")
    [stale_delivery] = worker.fetch()
    start_attempt(worker, stale_delivery)
    new_delivery = take_over(stale_delivery)
    assert start_attempt(other_worker, new_delivery)[:2] == ("run", 2)
    assert worker.finish(stale_delivery, late_outcome) is None
    assert (client.show("a").state, client.show("a").attempts) == (JobState.RUNNING, 2)
    assert other_worker.finish(new_delivery, Complete("new")) is JobState.SUCCEEDED
    assert worker.finish(stale_delivery, late_outcome) is None
    job = client.show("a")
    assert (job.state, job.result, job.attempts, job.error) == (JobState.SUCCEEDED, "new", 2, None)
    assert worker.queue.settle([(stale_delivery, Ack())]) == [SettleResult.LOST]


@pytest.mark.spec("EXE-22")
def test_a_lost_claim_may_finish_its_attempt_until_another_attempt_starts(client, worker, other_worker, take_over):
    client.submit("echo", id="a")
    [stale_delivery] = worker.fetch()
    start_attempt(worker, stale_delivery)
    new_delivery = take_over(stale_delivery)
    # No other worker has started another attempt: this one is the last, and its result counts.
    assert worker.finish(stale_delivery, Complete("done")) is JobState.SUCCEEDED
    assert start_attempt(other_worker, new_delivery).decision == "over"


@pytest.mark.spec("EXE-23")
@pytest.mark.parametrize(
    "verdict, state",
    [
        (Complete(1), "succeeded"),
        (Retry(9.0, CAUSE), "pending"),
        (Fail(CAUSE), "failed"),
        (ReleaseAttempt(), "pending"),
    ],
)
def test_an_end_that_is_reported_twice_is_written_once(client, worker, verdict, state):
    client.submit("echo", id="a")
    [delivery] = worker.fetch()
    start_attempt(worker, delivery)
    first_state = worker.finish(delivery, verdict)
    job_before = client.show("a")
    assert (first_state, worker.finish(delivery, verdict)) == (state, state)
    assert client.show("a") == job_before


def test_many_attempts_end_in_one_statement(client, worker):
    ids = [client.submit("echo", n).id for n in range(20)]
    deliveries = worker.fetch(20)
    worker.start(*deliveries)
    ends = [store.AttemptEnd(worker.claim(delivery), Complete(n)) for n, delivery in enumerate(deliveries)]
    unknown_end = store.AttemptEnd(store.JobClaim("unknown", deliveries[0].receipt), Complete(1))
    states = worker.pool.run(store.finish_attempts([*ends, unknown_end]))
    assert states == [JobState.SUCCEEDED] * 20 + [None]
    assert {job.id for job in client.list(states=["succeeded"])} == set(ids)
