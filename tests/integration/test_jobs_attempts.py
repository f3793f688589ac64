"""How attempts begin and end in the database: every decision, by a worker that is steered by hand."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Later, SettleResult
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.errors import Category
from ergon_framework.executor.jobs import attempts
from ergon_framework.executor.jobs.attempts import GiveBack
from ergon_framework.executor.jobs.client import JobClient
from ergon_framework.executor.jobs.model import JobState, queue_name
from ergon_framework.executor.verdict import Again, Blame, Bury, Complete
from ergon_framework.transaction import Transaction
from tests.integration.jobs import Store, rows

pytestmark = pytest.mark.invariant

BLAME = Blame(Category.TIMEOUT, "hard_timeout", "no outcome", "hard_timeout", "Traceback\0\ud800")


@pytest.fixture
def dsn(database):
    return database


@pytest.fixture
def client(dsn):
    with JobClient(dsn) as made:
        yield made


@pytest.fixture
def store(dsn):
    made = Store(dsn)
    yield made
    made.close()


@pytest.fixture
def other(dsn):
    """Another orchestrator."""
    made = Store(dsn, lease=29.0)  # another lease is another instance, also in one process
    yield made
    made.close()


@pytest.fixture
def taken_away(dsn, store, other):
    def take(delivery):
        worker = delivery.receipt.worker
        rows(dsn, "update ergon.worker set alive_until = now() - interval '1 second' where id = %s", worker)
        other.queue._home._reaped = float("-inf")
        return other.fetched()[0]

    return take


def decided(store, delivery, **options):
    return store.start(delivery, **options)[0]


# -- beginning ------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-19")
def test_an_attempt_is_counted_when_it_begins_and_says_what_it_may_take(client, store):
    client.submit("echo", 1, id="mine", max_attempts=7, timeout=2.5)
    client.submit("echo", 1, id="as-policy-says")
    own, by_policy = sorted(store.fetched(2), key=lambda one: one.transaction.id)[::-1]
    got = {one.transaction.id: decided(store, one, max_attempts=3, timeout=None) for one in (own, by_policy)}
    assert [got["mine"][:4], got["as-policy-says"][:4]] == [("run", 1, 7, 2.5), ("run", 1, 3, None)]
    job = client.show("mine")
    assert (job.state, job.attempts, job.started_at is not None) == (JobState.RUNNING, 1, True)


@pytest.mark.spec("EXE-19")
def test_many_begin_in_one_statement_each_with_its_own_answer(client, store):
    ids = [client.submit("echo", n).id for n in range(20)]
    client.cancel(ids[3])
    deliveries = store.fetched(20)
    got = dict(zip([one.transaction.id for one in deliveries], store.start(*deliveries), strict=True))
    assert [got[job_id].decision for job_id in ids] == ["run"] * 3 + ["over"] + ["run"] * 16


@pytest.mark.spec("EXE-19")
def test_asked_again_by_the_same_claim_it_answers_the_same_and_counts_once(client, store):
    client.submit("echo", id="a")
    [delivery] = store.fetched()
    assert decided(store, delivery)[:2] == ("run", 1)
    assert decided(store, delivery)[:2] == ("begun", 1)
    assert client.show("a").attempts == 1


@pytest.mark.spec("EXE-22")
def test_who_lost_its_claim_before_it_began_begins_nothing(client, store, other, taken_away):
    client.submit("echo", id="a")
    [mine] = store.fetched()
    theirs = taken_away(mine)
    assert decided(store, mine).decision == "stale"
    assert client.show("a").attempts == 0
    assert decided(other, theirs)[:2] == ("run", 1)
    assert decided(store, mine).decision == "stale"
    assert client.show("a").attempts == 1


@pytest.mark.spec("EXE-22")
def test_a_claim_that_was_settled_is_worth_nothing(client, store):
    client.submit("echo", id="a")
    [first] = store.fetched()
    assert store.queue.settle([(first, Later(0.0))]) == [SettleResult.SETTLED]
    [second] = store.fetched()
    assert [decided(store, one).decision for one in (first, second)] == ["stale", "run"]


@pytest.mark.spec("EXE-22")
def test_a_message_that_has_left_its_claim_is_nobodys_though_the_claim_is_there(client, store):
    for job_id in ("a", "b"):
        client.submit("echo", id=job_id)
    first, second = store.queue.fetch_transactions(10)
    assert (first.receipt.worker, first.receipt.token) == (second.receipt.worker, second.receipt.token)
    assert store.queue.settle([(first, Later(60.0))]) == [SettleResult.SETTLED]
    assert [started.decision for started in store.start(first, second)] == ["stale", "run"]
    assert client.show(first.transaction.id).attempts == 0


@pytest.mark.spec("EXE-19")
def test_a_job_whose_orchestrators_die_is_buried_after_exactly_its_attempts(client, store, other, taken_away):
    client.submit("echo", id="a", max_attempts=1)
    [mine] = store.fetched()
    assert decided(store, mine)[:2] == ("run", 1)
    theirs = taken_away(mine)
    started = decided(other, theirs)
    assert (started.decision, started.attempt_number, started.blame.code) == ("exhausted", 1, "orchestrator_died")
    job = client.show("a")
    assert (job.state, job.attempts, job.error.code) == (JobState.FAILED, 1, "orchestrator_died")
    # Whoever dies now has not buried the message: it comes back, and the row says what was to be done.
    assert decided(other, theirs)[:2] == ("buried", 1)


def test_what_is_not_due_yet_is_put_off_and_not_counted(client, store):
    client.submit("echo", id="a")
    [first] = store.fetched()
    decided(store, first)
    # The process dies between the two: the row says when, the message comes at once.
    assert store.finish(first, Again(30.0, BLAME)) is JobState.PENDING
    store.queue.settle([(first, Later(0.0))])
    [early] = store.fetched()
    got = decided(store, early)
    assert got.decision == "early"
    assert 29 < got.delay <= 30
    assert client.show("a").attempts == 1


@pytest.mark.parametrize("state", ["succeeded", "killed"])
def test_a_job_that_has_its_end_only_lets_its_message_go(client, store, dsn, state):
    client.submit("echo", id="a")
    [delivery] = store.fetched()
    rows(dsn, "update ergon.job set state = %s", state)
    assert decided(store, delivery).decision == "over"
    assert client.show("a").attempts == 0


def test_a_kill_that_outlived_its_orchestrator_is_carried_out_by_the_next(client, store, other, taken_away):
    client.submit("echo", id="a")
    [mine] = store.fetched()
    decided(store, mine)
    client.kill("a")
    theirs = taken_away(mine)
    assert decided(other, theirs).decision == "killed"
    job = client.show("a")
    assert (job.state, job.attempts, job.error.code) == (JobState.KILLED, 1, "killed")


def test_a_replayed_dead_letter_begins_anew(client, store):
    client.submit("echo", id="a", max_attempts=1)
    [delivery] = store.fetched()
    decided(store, delivery)
    store.finish(delivery, Bury(BLAME))
    assert decided(store, delivery).decision == "buried"
    store.queue.settle([(delivery, DeadLetter("hard_timeout"))])
    [letter] = store.queue.list_dead(DeadLetterQuery.load())
    store.queue.replay_dead([letter.place])
    [again] = store.fetched()
    assert decided(store, again)[:2] == ("replayed", 1)
    job = client.show("a")
    assert (job.state, job.attempts, job.error, job.ended_at) == (JobState.RUNNING, 1, None, None)


def test_a_message_that_is_no_job_is_not_one(store, dsn):
    stray = PostgresQueue(queue_name("python"), dsn=dsn)
    stray.dispatch([Transaction("stray", {})])
    stray.close()
    [delivery] = store.fetched()
    assert decided(store, delivery).decision == "unknown"


def test_a_second_message_of_a_job_that_runs_is_let_go(client, store, dsn):
    client.submit("echo", id="a")
    [first] = store.fetched()
    decided(store, first)
    stray = PostgresQueue(queue_name("python"), dsn=dsn)
    stray.dispatch([Transaction("a", {})])
    stray.close()
    [second] = store.fetched()
    assert decided(store, second).decision == "over"
    assert store.finish(first, Complete(1)) is JobState.SUCCEEDED


# -- ending ---------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-05", "EXE-24")
@pytest.mark.parametrize("result", [None, 0, "", [], {"a": 1}, "ä\u2028\0 \U0001f600", 10**400, 1.5e300, [[[]]]])
def test_a_result_is_kept_as_it_was(client, store, result):
    client.submit("echo", id="a")
    [delivery] = store.fetched()
    decided(store, delivery)
    assert store.finish(delivery, Complete(result)) is JobState.SUCCEEDED
    job = client.show("a")
    assert (job.result, type(job.result), job.error) == (result, type(result), None)
    assert (job.ended_at is not None, job.expires_at > job.ended_at) == (True, True)


@pytest.mark.spec("EXE-24")
def test_errors_are_kept_with_type_and_traceback_whatever_is_in_them(client, store):
    client.submit("echo", id="a")
    [delivery] = store.fetched()
    decided(store, delivery)
    assert store.finish(delivery, Bury(BLAME)) is JobState.FAILED
    error = client.show("a").error
    assert (error.category, error.code, error.message) == (Category.TIMEOUT, "hard_timeout", "no outcome")
    assert (error.type, error.traceback) == ("hard_timeout", "Traceback\ufffd?")


@pytest.mark.spec("EXE-19")
def test_what_was_not_sent_is_given_back_once(client, store):
    client.submit("echo", id="a")
    [delivery] = store.fetched()
    decided(store, delivery)
    assert [store.finish(delivery, GiveBack()) for _ in range(2)] == [JobState.PENDING] * 2
    assert client.show("a").attempts == 0


def test_what_an_earlier_attempt_said_is_kept_when_a_later_one_is_given_back(client, store):
    client.submit("echo", id="a")
    [first] = store.fetched()
    decided(store, first)
    store.finish(first, Again(0.0, BLAME))
    store.queue.settle([(first, Later(0.0))])
    [second] = store.fetched()
    assert decided(store, second)[:2] == ("run", 2)
    store.finish(second, GiveBack())
    job = client.show("a")
    assert (job.attempts, job.error.code) == (1, "hard_timeout")


@pytest.mark.spec("EXE-22")
@pytest.mark.parametrize("late", [Complete("old"), Again(0.0, BLAME), Bury(BLAME), GiveBack()])
def test_who_lost_its_claim_after_it_began_overwrites_nothing(client, store, other, taken_away, late):
    client.submit("echo", id="a")
    [mine] = store.fetched()
    decided(store, mine)
    theirs = taken_away(mine)
    assert decided(other, theirs)[:2] == ("run", 2)
    assert store.finish(mine, late) is None
    assert (client.show("a").state, client.show("a").attempts) == (JobState.RUNNING, 2)
    assert other.finish(theirs, Complete("new")) is JobState.SUCCEEDED
    assert store.finish(mine, late) is None
    job = client.show("a")
    assert (job.state, job.result, job.attempts, job.error) == (JobState.SUCCEEDED, "new", 2, None)
    assert store.queue.settle([(mine, Ack())]) == [SettleResult.LOST]


@pytest.mark.spec("EXE-22")
def test_a_claim_that_is_lost_but_not_yet_anybody_elses_may_still_say_how_it_ended(client, store, other, taken_away):
    client.submit("echo", id="a")
    [mine] = store.fetched()
    decided(store, mine)
    theirs = taken_away(mine)
    # Nobody has begun another attempt: this one is the last, and its result counts.
    assert store.finish(mine, Complete("done")) is JobState.SUCCEEDED
    assert decided(other, theirs).decision == "over"


@pytest.mark.spec("EXE-23")
@pytest.mark.parametrize(
    "verdict, state",
    [(Complete(1), "succeeded"), (Again(9.0, BLAME), "pending"), (Bury(BLAME), "failed"), (GiveBack(), "pending")],
)
def test_an_end_that_is_told_twice_is_written_once(client, store, verdict, state):
    client.submit("echo", id="a")
    [delivery] = store.fetched()
    decided(store, delivery)
    first = store.finish(delivery, verdict)
    before = client.show("a")
    assert (first, store.finish(delivery, verdict)) == (state, state)
    assert client.show("a") == before


def test_many_end_in_one_statement(client, store):
    ids = [client.submit("echo", n).id for n in range(20)]
    deliveries = store.fetched(20)
    store.start(*deliveries)
    ends = [attempts.End(store.claim(one), Complete(n)) for n, one in enumerate(deliveries)]
    stranger = attempts.End(attempts.Claim("nobody", deliveries[0].receipt), Complete(1))
    got = store.lines.run(attempts.finish([*ends, stranger]))
    assert got == [JobState.SUCCEEDED] * 20 + [None]
    assert {job.id for job in client.list(states=["succeeded"])} == set(ids)
