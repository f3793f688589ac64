"""``ergon why``: for each kind of work, what happened to it, where it is, and what to do next."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.cli.app import app
from ergon_framework.cli.why_work import WhyExit
from ergon_framework.connectors.base import Ack, ConnectorError, DeadLetter, Later
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres import tracing as queues
from ergon_framework.errors import Category, ConnectionLost, ErgonError
from ergon_framework.executor.jobs.registrations import register
from ergon_framework.executor.jobs.statements import SHOW
from ergon_framework.executor.verdict import Again, Blame, Bury, Complete
from ergon_framework.facts.model import Cursor, Envelope, Fact, Pair
from ergon_framework.facts.stores import postgres_tracing as facts
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.failure import Attempt, Failure
from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.sql import tracing as calls
from ergon_framework.providers.sql.writer import MetricsWriter
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Query
from ergon_framework.schema.snapshot import in_one_snapshot
from ergon_framework.transaction import Transaction
from tests.integration.jobs import Client, Store
from tests.integration.metering import ask, attempt
from tests.servers.postgres import free_port

SECRET = "open-sesame"
PAST = (
    Attempt(
        attempt=0, category=Category.SYSTEM, code="refused", error="no \x1b[31mline", at=1_700_000_000.0, delay=1.5
    ),
    Attempt(attempt=1, category=Category.TIMEOUT, code="slow", error="took 20 s", at=1_700_000_002.0, delay=3.0),
)


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


@pytest.fixture
def queue(dsn):
    made = PostgresQueue("orders", dsn=dsn, inbox=True)
    made.open()
    yield made
    made.close()


@pytest.fixture
def store(dsn):
    made = Store(dsn)
    yield made
    made.close()


def why(*words, code=WhyExit.OK):
    done = CliRunner().invoke(app, ["why", *words])
    assert done.exit_code == code, done.output
    assert SECRET not in done.output
    return done


def told(*words, code=WhyExit.OK):
    return json.loads(why(*words, "--json", code=code).stdout)


def only(*words):
    [history] = told(*words)["histories"]
    return history


def sent(queue, name="order-1", **fields):
    queue.dispatch([Transaction(name, {"card": SECRET}, **fields)])


def taken(queue):
    [delivery] = queue.fetch_transactions(1, wait=5.0)
    return delivery


def failure(**fields):
    plain = {
        "task_name": "charge",
        "reason_code": "refused",
        "error_type": "ConnectionError",
        "error_message": "no line",
        "attempts": 3,
        "occurred_at": 1_700_000_009.0,
        "transaction_id": "order-1",
        "category": Category.SYSTEM,
        "step": "process",
        "history": PAST,
    }
    return Failure(**plain | fields)


# -- transactions -------------------------------------------------------------------------------------


@pytest.mark.spec("RUN-06")
def test_one_that_nobody_has_taken_is_ready(queue):
    sent(queue, type="order", tenant="acme", correlation="c-7")
    found = only("order-1")
    assert (found["kind"], found["where"], found["place"]["state"]) == ("transaction", "orders", "ready")
    assert found["about"] == {"type": "order", "tenant": "acme", "correlation": "c-7", "deliveries ended": 0}
    assert "queued" in [event["what"] for event in found["events"]]
    assert found["now"].startswith("it is ready in orders and waits for a worker")
    assert "ergon run" in found["next"]


@pytest.mark.spec("RUN-06")
def test_one_that_failed_waits_with_its_attempts_and_their_delays(queue):
    sent(queue)
    queue.settle([(taken(queue), Later(600.0, attempts=2, history=PAST))])
    found = only("order-1")
    assert found["place"]["state"] == "delayed"
    assert found["place"]["until"] == pytest.approx(time.time() + 600, abs=60)
    tries = [event for event in found["events"] if event["what"].startswith("attempt")]
    assert [(one["what"], one["verdict"], one["values"]) for one in tries] == [
        ("attempt 1", "SYSTEM", {"delay": 1.5}),
        ("attempt 2", "TIMEOUT", {"delay": 3.0}),
    ]
    assert found["about"]["attempts"] == 2
    shown = why("order-1").stdout
    assert "10 minutes from now" in shown
    assert "\x1b" not in shown


@pytest.mark.spec("RUN-06")
def test_one_in_hand_names_the_worker_and_its_lease(queue):
    sent(queue)
    delivery = taken(queue)
    place = only("order-1")["place"]
    assert place["state"] == "held"
    assert place["holder"].startswith("worker ")
    assert 0 < place["until"] - time.time() < 60
    queue.settle([(delivery, Ack())])


@pytest.mark.spec("RUN-06")
def test_what_a_dead_worker_held_is_said_to_come_back(dsn, queue):
    sent(queue)
    taken(queue)
    ask(dsn, "update ergon.worker set alive_until = now() - interval '1 minute'")
    assert "had it and is gone; it comes back" in only("order-1")["now"]


@pytest.mark.spec("RUN-06")
def test_one_of_a_key_waits_behind_its_elder(queue):
    sent(queue, "order-1", key="k")
    sent(queue, "order-2", key="k")
    first = taken(queue)
    queue.settle([(first, Later(600.0))])
    assert queue.fetch_transactions(1) == []
    found = only("order-2")
    assert (found["place"]["state"], found["about"]["key"]) == ("behind", "k")
    assert "behind an older one of its key 'k'" in found["now"]


@pytest.mark.spec("RUN-06")
def test_a_dead_letter_has_its_attempts_and_the_command_that_replays_it(queue):
    sent(queue)
    queue.settle([(taken(queue), DeadLetter("refused", failure()))])
    found = only("order-1")
    assert found["place"]["state"] == "dead letter"
    assert [event["what"] for event in found["events"] if event["what"] != "created"] == [
        "attempt 1",
        "attempt 2",
        "dead letter",
    ]
    assert (found["about"]["task"], found["about"]["attempts"]) == ("charge", 3)
    assert found["next"].endswith("ergon dlq replay MODULE:NAME --id=order-1")
    shown = why("order-1").stdout.splitlines()
    assert shown[0] == "transaction order-1 in orders"
    assert shown[-2].startswith("  now: it is a dead letter of orders since ")
    assert shown[-1].startswith("  next: mend the cause")


@pytest.mark.spec("RUN-06")
def test_one_that_has_succeeded_is_known_by_the_inbox(queue):
    sent(queue)
    queue.settle([(taken(queue), Ack())])
    found = only("order-1")
    assert found["place"]["state"] == "done"
    assert "has succeeded in orders since" in found["now"]


@pytest.mark.spec("RUN-06")
def test_the_last_ten_attempts_travel_with_it(queue):
    rules = {"steps": {"process": {"retry": {"max_attempts": 12, "backoff": 0.0}}}}

    @consumer(queue, policy=ConsumerPolicy.load(rules))
    def charge(_):
        raise ConnectionError("the bank hung up")

    sent(queue)
    charge.run()
    tries = [event["what"] for event in only("order-1")["events"] if event["what"].startswith("attempt")]
    assert tries == [f"attempt {number}" for number in range(3, 13)]


def test_a_replayed_one_is_told_of_wherever_it_is(queue):
    sent(queue)
    queue.settle([(taken(queue), DeadLetter("refused", failure()))])
    sent(queue)
    states = [history["place"]["state"] for history in told("order-1")["histories"]]
    assert states == ["dead letter", "ready"]


# -- with the connector of a task ------------------------------------------------------------------------

APP = """
from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.base import DeadLetter
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres import tracing as queues
from ergon_framework.transaction import Transaction

orders = PostgresQueue("orders")
other = MemoryConnector("other")
policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 7, "backoff": 0.25}}}})

@consumer(orders, policy=policy)
def charge(order):
    raise RuntimeError

@consumer(other)
def refuse(order):
    return DeadLetter("declined")

other.dispatch([Transaction("odd", {"card": "open-sesame"})])
refuse.run()
other.dispatch([Transaction("even", 2)])
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    name = f"shop_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.spec("RUN-06")
def test_a_named_task_brings_its_policy_and_its_name(queue, shop):
    sent(queue)
    queue.settle([(taken(queue), DeadLetter("refused", failure()))])
    found = only("order-1", "--task", f"{shop}:charge")
    assert found["about"]["policy.process.retry.max_attempts"] == 7
    assert found["about"]["policy.process.retry.backoff"] == 0.25
    assert found["next"].endswith(f"ergon dlq replay {shop}:charge --id=order-1")
    assert "process.retry.max_attempts 7" in why("order-1", "--task", f"{shop}:charge").stdout


MOVES = """
from ergon_framework import consumer
from ergon_framework.connectors.postgres import PostgresQueue

class Moving(PostgresQueue):
    def trace(self, transaction_id):
        self.fetch_transactions(1)
        return super().trace(transaction_id)

@consumer(Moving("orders"))
def charge(order): ...
"""


@pytest.mark.spec("RUN-06", "DX-44")
@pytest.mark.parametrize("option", ["--task", "--queue"])
def test_one_that_moves_while_it_is_looked_for_is_shown_once(queue, tmp_path, monkeypatch, option):
    sent(queue)
    (tmp_path / f"moves_{option[2:]}.py").write_text(MOVES)
    monkeypatch.syspath_prepend(tmp_path)
    assert only("order-1", option, f"moves_{option[2:]}:charge")["place"]["state"] == "ready"


@pytest.mark.spec("RUN-06")
def test_other_brokers_are_asked_by_their_contract(tmp_path, monkeypatch, shop):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    dead, waiting = only("odd", "--queue", f"{shop}:other"), only("even", "--queue", f"{shop}:other")
    assert (dead["place"]["state"], dead["place"]["words"]) == ("dead letter", "declined")
    assert (waiting["place"]["state"], waiting["where"]) == ("queued", "other")


# -- jobs ---------------------------------------------------------------------------------------------

BLAME = Blame(Category.SYSTEM, "executor_error", "no line", "LookupError", "Traceback")


def job(dsn, **told_):
    client = Client("sync", dsn)
    made = client.submit("charge", {"card": SECRET}, **told_)
    client.end()
    return made.id


def begun(store):
    [delivery] = store.fetched()
    store.start(delivery)
    return delivery


@pytest.fixture
def served(dsn):
    """An orchestrator of the executor python runs."""
    lines = Lines(dsn)
    lines.run(register(["python"]), within=20)
    lines.close()


@pytest.mark.spec("RUN-06")
@pytest.mark.usefixtures("served")
def test_a_job_is_told_of_in_every_state(dsn, store):
    name = job(dsn, max_attempts=4, timeout=2.5, correlation="c-7")

    def now():
        return next(one for one in told(name)["histories"] if one["kind"] == "job")

    found = now()
    assert (found["place"]["state"], found["where"]) == ("pending", "python")
    assert (found["about"]["max attempts"], found["about"]["timeout"]) == (4, 2.5)
    delivery = begun(store)
    assert now()["place"]["state"] == "running"
    store.finish(delivery, Again(600.0, BLAME))
    found = now()
    assert (found["place"]["state"], found["events"][-1]["verdict"]) == ("pending", "SYSTEM")
    assert "from now" in found["now"]


@pytest.mark.spec("RUN-06")
def test_a_job_says_that_no_orchestrator_has_run_yet(dsn, store):
    found = next(one for one in told(job(dsn))["histories"] if one["kind"] == "job")
    assert "no orchestrator has run with this database yet; start one that serves 'python'" in found["now"]


@pytest.mark.spec("RUN-06")
@pytest.mark.usefixtures("served")
def test_a_job_that_is_due_says_whom_it_waits_for(dsn, store):
    first, second, third = (job(dsn) for _ in range(3))
    job(dsn, delay=600.0)

    def now(name):
        found = next(one for one in told(name)["histories"] if one["kind"] == "job")
        return found["now"].partition(";")[0], found["next"].partition(",")[0]

    assert now(first) == ("it waits for its turn", "nothing")
    assert now(third) == ("it waits for its turn behind 2 of its kind", "nothing")
    taken, *_ = store.fetched()
    store.start(taken)
    assert taken.transaction.id == first
    assert now(third) == ("it waits for its turn behind 1 of its kind", "nothing; jobs of its kind are being run")
    assert now(second)[0] == "it waits for its turn"


@pytest.mark.spec("RUN-06")
def test_a_job_that_failed_says_how_it_is_replayed(dsn, store):
    name = job(dsn)
    delivery = begun(store)
    store.finish(delivery, Bury(BLAME))
    store.queue.settle([(delivery, DeadLetter("executor_error"))])
    kinds = {one["kind"]: one for one in told(name)["histories"]}
    assert kinds["job"]["place"]["state"] == "failed"
    assert kinds["job"]["next"].endswith(f"ergon job replay {name}")
    assert kinds["transaction"]["next"] == f"ergon job replay {name}"


@pytest.mark.spec("RUN-06")
@pytest.mark.parametrize("end", ["succeeded", "cancelled", "killed"])
def test_a_job_that_is_over_says_how(dsn, store, end):
    name = job(dsn)
    if end == "succeeded":
        store.finish(begun(store), Complete({"card": SECRET}))
    else:
        ask(dsn, "update ergon.job set state = %s, ended_at = now() where id = %s", end, name)
    found = next(one for one in told(name)["histories"] if one["kind"] == "job")
    assert (found["place"]["state"], found["events"][-1]["what"]) == (end, end)


# -- provider calls -------------------------------------------------------------------------------------


def called(dsn, *rows):
    writer = MetricsWriter(dsn)
    for row in rows:
        writer.record(row)
    assert writer.close(20)


@pytest.mark.spec("RUN-06")
def test_the_calls_of_a_transaction_come_with_breaker_and_quota(dsn, queue):
    at = time.time()
    sent(queue, correlation="c-7")
    mine = {"correlation_id": "c-7", "idempotency_key": "key-1"}
    slow = {"outcome": Outcome.RETRY, "reason_code": ReasonCode.TIMEOUT, "retryable": True, "http_status": None}
    called(
        dsn,
        attempt(created_at=at - 2, **mine, **slow),
        attempt(created_at=at, attempt_number=2, **mine),
        attempt(correlation_id="c-8"),
    )
    ask(
        dsn,
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end, "
        "limit_count, used_count, remaining_count) select 'acme', 'pay', 'charging', "
        "ergon.provider_window_start(4, to_timestamp(%s)), ergon.provider_window_end(4, to_timestamp(%s)), 100, 40, 60",
        at,
        at,
    )
    ask(
        dsn,
        "insert into ergon.provider_breakers (tenant_id, provider_name, capability, state, consecutive_failures, "
        "open_until) values ('acme', 'pay', 'charging', 'open', 5, now() + interval '1 minute')",
    )
    call = told("order-1")["histories"][-1]
    assert (call["kind"], call["where"], call["place"]["state"]) == ("provider call", "pay.charge", "succeeded")
    assert call["about"]["breaker"].startswith("open, 5 faults in a row, open until ")
    assert (call["about"]["max attempts"], call["about"]["timeout budget"]) == (3, 30.0)
    first, second = call["events"]
    assert (first["what"], first["verdict"], first["words"]) == ("attempt 1 of 3", "retry", "timeout")
    assert second["values"]["quota per month"] == "40/100"
    assert len(told("c-7")["histories"]) == 1


@pytest.mark.spec("RUN-06")
def test_a_call_in_doubt_and_an_operators_word_are_told(dsn):
    called(
        dsn,
        attempt(correlation_id="c-7", idempotency_key="key-1", outcome=Outcome.FAILED, reason_code=ReasonCode.TIMEOUT),
    )
    ask(
        dsn,
        "insert into ergon.provider_keys (tenant_id, provider_name, key, fingerprint, state, owner, until, sweep_at, "
        "value) values ('acme', 'pay', 'key-1', 'f', 'unknown', 'w', now() + interval '1 hour', now(), %s)",
        json.dumps({"card": SECRET}),
    )
    ask(
        dsn,
        "insert into ergon.provider_overrides (at, tenant_id, provider_name, capability, action, actor, reason) "
        "values (now() - interval '1 hour', 'acme', 'pay', 'charging', 'force_open', 'ops', 'INC-7')",
    )
    found = only("c-7")
    assert found["place"]["state"] == "doubtful"
    assert found["next"].startswith("ask the provider whether pay.charge was carried out")
    assert found["events"][0]["words"] == "force_open"


@pytest.mark.spec("RUN-06")
def test_the_dead_letter_of_a_call_is_found_by_its_task_and_by_its_correlation(dsn):
    called(dsn, attempt(correlation_id="c-7", outcome=Outcome.DEAD_LETTER, reason_code=ReasonCode.TIMEOUT))
    ask(
        dsn,
        "insert into ergon.provider_dead_letters (tenant_id, task_name, provider_name, capability, operation, "
        "correlation_id, reason_code, error_type, error_message, attempts, task_id) values "
        "('acme', 'bill', 'pay', 'charging', 'charge', 'c-7', 'timeout', 'TimeoutError', 'late', 3, 'celery-1')",
    )
    by_task = only("celery-1")
    assert (by_task["place"]["state"], by_task["about"]["task"]) == ("dead letter", "bill")
    assert [one["place"]["state"] for one in told("c-7")["histories"]] == ["failed", "dead letter"]


# -- facts --------------------------------------------------------------------------------------------


@pytest.mark.spec("RUN-06")
def test_a_fact_is_found_by_its_id_and_by_its_correlation(dsn):
    pair = Pair("shop", "bank")
    with PostgresBoundary(dsn, side="outer", accept_loss=True) as boundary:
        for number in (1, 2):
            envelope = Envelope(
                message_id=f"fact-{number}",
                from_zone="shop",
                to_zone="bank",
                produced_at_unix_ms=1_700_000_000_000,
                correlation_id="c-7" if number == 1 else None,
            )
            boundary.append_fact(envelope, Fact(subject="order/1", predicate="paid", object_json=json.dumps(SECRET)))
        [first, _] = boundary.fetch_facts("books", pair, 10)
        boundary.confirm_receipt("books", pair, Cursor(first.epoch, first.offset))
    found = only("fact-1")
    assert (found["kind"], found["where"], found["place"]["state"]) == ("fact", "shop to bank", "stored")
    assert found["place"]["words"] == "1 of 1 readers have confirmed it"
    assert [event["what"] for event in found["events"]] == ["produced", "stored", "confirmed"]
    assert only("c-7")["id"] == "fact-1"
    assert only("fact-2")["about"]["reader books"] == "is 1 before it, at 1"


# -- when nobody knows ------------------------------------------------------------------------------------


@pytest.mark.spec("RUN-06")
def test_an_id_that_nobody_knows_says_who_was_asked(dsn, shop):
    done = why("order-9", "--queue", f"{shop}:other", code=WhyExit.UNKNOWN)
    assert "nobody knows 'order-9'; asked: queues of the database, jobs of the database" in done.stderr
    assert f"{shop}:other" in done.stderr
    found = told("order-9", code=WhyExit.UNKNOWN)
    assert (found["histories"], [one["found"] for one in found["asked"]]) == ([], [0, 0, 0, 0, 0])


def test_whoever_does_not_answer_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://owner:{SECRET}@127.0.0.1:{free_port()}/none")
    done = why("order-1", code=WhyExit.UNANSWERED)
    assert "queues of the database, jobs of the database, " in done.stderr
    assert done.stderr.count("did not answer: the database is out of reach") == 1
    assert "nobody of those who answered knows" in done.stderr


def test_a_question_ends_in_time_and_the_next_one_is_answered(dsn):
    lines = Lines(dsn, other=ConnectorError)

    def slow():
        return (yield Query("select pg_sleep(30)"))

    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="statement timeout"):
        lines.run(in_one_snapshot(slow(), patience=0.2), within=20)
    assert time.monotonic() - began < 15
    assert lines.run(queues.trace("x"), within=20) == []
    lines.close()


def test_a_question_writes_nothing(dsn):
    lines = Lines(dsn, other=ConnectorError)

    def rude():
        yield Query("delete from ergon.ready")

    with pytest.raises(ErgonError):
        lines.run(in_one_snapshot(rude()), within=20)
    lines.close()


def test_both_flavours_of_a_queue_tell_the_same(queue, dsn):
    sent(queue)

    async def asked():
        other = PostgresQueue("orders", dsn=dsn)
        try:
            return await other.trace_async("order-1")
        finally:
            await other.close_async()

    assert asyncio.run(asked()) == queue.trace("order-1") != []


def test_a_source_that_fails_spoils_no_other(queue, dsn):
    sent(queue)
    ask(dsn, "alter table ergon.fact_ids rename to elsewhere")
    try:
        found = told("order-1")
    finally:
        ask(dsn, "alter table ergon.elsewhere rename to fact_ids")
    assert [one["place"]["state"] for one in found["histories"]] == ["ready"]
    assert "ergon db upgrade" in found["asked"][-1]["error"]


@pytest.mark.parametrize("name", ["x" * 257, "", "a\nb", "a\0b"])
def test_what_cannot_be_an_id_is_refused(dsn, name):
    assert "1 to 256 characters" in told(name, code=WhyExit.USAGE)["error"]


def test_without_anybody_to_ask_it_says_what_to_give(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    assert "there is nobody to ask" in why("order-1", code=WhyExit.USAGE).stderr
    assert "no module" in why("order-1", "--queue", "nowhere_at_all:orders", code=WhyExit.USAGE).stderr


def test_on_a_terminal_it_is_a_table(queue, monkeypatch, capsys):
    sent(queue)
    queue.settle([(taken(queue), DeadLetter("refused", failure(error_message="[bold]x[/bold]\x1b[31m")))])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        app(["why", "order-1"])
    shown = capsys.readouterr().out
    assert "┃" in shown
    assert "[bold]x[/bold]\\x1b[31m" in "".join(shown.split())


# -- what it costs ------------------------------------------------------------------------------------

#: Tables that grow with all that was ever done, and what is asked of each.
FULL = {
    "dead_letter": (
        (
            "insert into ergon.dead_letter (queue, transaction_id, reason, deliveries, readable, headers, body) "
            "select q.id, 'x-' || n, 'r', 1, true, '{}', '' from ergon.queue q, generate_series(1, 20000) n"
        ),
        queues.BURIED,
    ),
    "inbox": (
        (
            "insert into ergon.inbox (queue, transaction_id) "
            "select q.id, 'x-' || n from ergon.queue q, generate_series(1, 20000) n"
        ),
        queues.MARKED,
    ),
    "job": (
        (
            "insert into ergon.job (id, queue, function_name, digest, retention) "
            "select 'x-' || n, q.id, 'f', '', 1 from ergon.queue q, generate_series(1, 20000) n"
        ),
        SHOW,
    ),
    "provider_execution_metrics": (
        (
            "insert into ergon.provider_execution_metrics (tenant_id, provider_name, capability, operation, "
            "correlation_id, attempt_number, max_attempts, duration_ms, timeout_budget_ms, outcome, retryable, "
            "created_at) select 't', 'p', 'c', 'o', 'x-' || n, 1, 1, 1, 1, 'success', false, now() "
            "from generate_series(1, 20000) n"
        ),
        calls.ATTEMPTS,
    ),
    "provider_dead_letters": (
        (
            "insert into ergon.provider_dead_letters (tenant_id, task_name, correlation_id, reason_code, error_type, "
            "error_message, attempts, task_id, occurred_at) select 't', 'n', 'x-' || n, 'r', 'e', 'm', 1, 'x-' || n, "
            "now() - n * interval '1 minute' from generate_series(1, 20000) n"
        ),
        calls.DEAD,
    ),
    "fact_ids": (
        (
            "with l as (insert into ergon.fact_log (from_zone, to_zone) values ('a', 'b') returning id) "
            "insert into ergon.fact_ids (from_zone, message_id, digest, log, fact_offset, epoch, kept_at) "
            "select 'a', 'x-' || n, '', l.id, n, 1, 0 from l, generate_series(1, 20000) n"
        ),
        facts.BY_ID,
    ),
}


@pytest.mark.spec("RUN-06")
@pytest.mark.parametrize("table", FULL)
def test_what_is_kept_is_read_by_its_indexes(dsn, queue, table):
    fill, question = FULL[table]
    ask(dsn, fill)
    ask(dsn, f"analyze ergon.{table}")
    given = {"id": "x-77", "queue": None, "most": 100, "names": ["x-77"], "tenants": ["t"], "whose": ["t"]}
    moments = {"first": datetime.now(UTC) - timedelta(hours=1), "last": datetime.now(UTC)}
    with psycopg.connect(dsn) as connection:
        lines = connection.execute(f"explain (analyze, costs off) {question}", given | moments).fetchall()
    plan = [line for (line,) in lines]
    assert any("Index" in line and table in line for line in plan), plan
    assert not [line for line in plan if "Seq Scan" in line and f"on {table}" in line], plan
