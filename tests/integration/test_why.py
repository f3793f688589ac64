"""Check ``ergon why``: for each kind of work, what happened to it, where it is, and what to do next."""

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
from ergon_framework.cli.why import WhyExit
from ergon_framework.connectors.base import Ack, ConnectorError, DeadLetter, Defer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres import lookup as queues
from ergon_framework.database.operation import Query, in_snapshot
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import Category, ConnectionLostError, ErgonError
from ergon_framework.executors.decision import Complete, Fail, FailureCause, Retry
from ergon_framework.facts.model import Cursor, Envelope, Fact, ZonePair
from ergon_framework.facts.stores.postgres import lookup as facts
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from ergon_framework.failure import Attempt, Failure
from ergon_framework.jobs.registrations import register
from ergon_framework.jobs.sql import GET_JOB
from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.providers.postgres import lookup as calls
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from ergon_framework.transaction import Transaction
from tests.integration.jobs import BlockingJobClient, ManualWorker
from tests.integration.metering import make_attempt, query
from tests.servers.postgres import free_port

SECRET = "open-sesame"
PAST_ATTEMPTS = (
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
    queue = PostgresQueue("orders", dsn=dsn, inbox=True)
    queue.open()
    yield queue
    queue.close()


@pytest.fixture
def store(dsn):
    store = ManualWorker(dsn)
    yield store
    store.close()


def run_why(*arguments, code=WhyExit.OK):
    result = CliRunner().invoke(app, ["why", *arguments])
    assert result.exit_code == code, result.output
    assert SECRET not in result.output
    return result


def run_why_json(*arguments, code=WhyExit.OK):
    return json.loads(run_why(*arguments, "--json", code=code).stdout)


def read_history(*arguments):
    [history] = run_why_json(*arguments)["histories"]
    return history


def dispatch(queue, name="order-1", **fields):
    queue.dispatch([Transaction({"card": SECRET}, id=name, **fields)])


def fetch_one(queue):
    [delivery] = queue.fetch_transactions(1, wait=5.0)
    return delivery


def make_failure(**fields):
    defaults = {
        "task_name": "charge",
        "reason_code": "refused",
        "error_type": "ConnectionError",
        "error_message": "no line",
        "attempts": 3,
        "occurred_at": 1_700_000_009.0,
        "transaction_id": "order-1",
        "category": Category.SYSTEM,
        "step": "process",
        "history": PAST_ATTEMPTS,
    }
    return Failure(**defaults | fields)


# -- transactions -------------------------------------------------------------------------------------


@pytest.mark.spec("RUN-06")
def test_an_unclaimed_transaction_is_ready(queue):
    dispatch(queue, type="order", tenant="acme", correlation="c-7")
    history = read_history("order-1")
    assert (history["kind"], history["where"], history["location"]["state"]) == ("transaction", "orders", "ready")
    assert history["attributes"] == {"type": "order", "tenant": "acme", "correlation": "c-7", "deliveries ended": 0}
    assert "queued" in [event["event"] for event in history["events"]]
    assert history["status"].startswith("queued in orders for ")
    assert history["status"].endswith(" s, waiting for a worker")
    assert "ergon run" in history["remedy"]


@pytest.mark.spec("RUN-06")
def test_a_failed_transaction_waits_with_its_attempts_and_their_delays(queue):
    dispatch(queue)
    queue.settle([(fetch_one(queue), Defer(600.0, attempts=2, history=PAST_ATTEMPTS))])
    history = read_history("order-1")
    assert history["location"]["state"] == "delayed"
    assert history["location"]["until"] == pytest.approx(time.time() + 600, abs=60)
    attempts = [event for event in history["events"] if event["event"].startswith("attempt")]
    assert [(item["event"], item["result"], item["values"]) for item in attempts] == [
        ("attempt 1", "SYSTEM", {"delay": 1.5}),
        ("attempt 2", "TIMEOUT", {"delay": 3.0}),
    ]
    assert history["attributes"]["attempts"] == 2
    output = run_why("order-1").stdout
    assert "10 min from now" in output
    assert "\x1b" not in output


@pytest.mark.spec("RUN-06")
def test_a_claimed_transaction_names_the_worker_and_its_lease(queue):
    dispatch(queue)
    delivery = fetch_one(queue)
    state = read_history("order-1")["location"]
    assert state["state"] == "claimed"
    assert state["holder"].startswith("worker ")
    assert 0 < state["until"] - time.time() < 60
    queue.settle([(delivery, Ack())])


@pytest.mark.spec("RUN-06")
def test_a_transaction_claimed_by_a_dead_worker_is_reported_to_return(dsn, queue):
    dispatch(queue)
    fetch_one(queue)
    query(dsn, "update ergon.worker set alive_until = now() - interval '1 minute'")
    assert (
        ", whose lease has expired; another worker of orders receives the redelivery"
        in read_history("order-1")["status"]
    )


@pytest.mark.spec("RUN-06")
def test_a_transaction_with_a_key_waits_behind_an_older_one(queue):
    dispatch(queue, "order-1", key="k")
    dispatch(queue, "order-2", key="k")
    first = fetch_one(queue)
    queue.settle([(first, Defer(600.0))])
    assert queue.fetch_transactions(1) == []
    history = read_history("order-2")
    assert (history["location"]["state"], history["attributes"]["key"]) == ("blocked by key", "k")
    assert history["status"] == "waiting in orders behind an older transaction of its key 'k'"


@pytest.mark.spec("RUN-06")
def test_a_dead_letter_has_its_attempts_and_the_command_that_replays_it(queue):
    dispatch(queue)
    queue.settle([(fetch_one(queue), DeadLetter("refused", make_failure()))])
    history = read_history("order-1")
    assert history["location"]["state"] == "dead letter"
    assert [event["event"] for event in history["events"] if event["event"] != "created"] == [
        "attempt 1",
        "attempt 2",
        "dead letter",
    ]
    assert (history["attributes"]["task"], history["attributes"]["attempts"]) == ("charge", 3)
    assert history["remedy"].endswith("ergon dlq replay MODULE:NAME --id=order-1")
    lines = run_why("order-1").stdout.splitlines()
    assert lines[0] == "transaction order-1 in orders"
    assert lines[-2].startswith("  status: dead letter of orders since ")
    assert lines[-1].startswith("  next: fix the cause")


@pytest.mark.spec("RUN-06")
def test_a_succeeded_transaction_is_known_by_the_inbox(queue):
    dispatch(queue)
    queue.settle([(fetch_one(queue), Ack())])
    history = read_history("order-1")
    assert history["location"]["state"] == "done"
    assert history["status"].startswith("succeeded in orders at ")
    assert history["status"].endswith("Z, not run again")


@pytest.mark.spec("RUN-06")
def test_the_last_ten_attempts_are_kept_with_the_transaction(queue):
    options = {"steps": {"process": {"retry": {"max_attempts": 12, "backoff": 0.0}}}}

    @consumer(queue, policy=ConsumerPolicy.load(options))
    def charge(_):
        raise ConnectionError("the bank hung up")

    dispatch(queue)
    charge.run()
    attempts = [event["event"] for event in read_history("order-1")["events"] if event["event"].startswith("attempt")]
    assert attempts == [f"attempt {number}" for number in range(3, 13)]


def test_a_replayed_transaction_is_reported_wherever_it_is(queue):
    dispatch(queue)
    queue.settle([(fetch_one(queue), DeadLetter("refused", make_failure()))])
    dispatch(queue)
    states = [history["location"]["state"] for history in run_why_json("order-1")["histories"]]
    assert states == ["dead letter", "ready"]


# -- with the connector of a task ------------------------------------------------------------------------

APP_MODULE = """
from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.base import DeadLetter
from ergon_framework.connectors.postgres import PostgresQueue
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

other.dispatch([Transaction({"card": "open-sesame"}, id="odd")])
refuse.run()
other.dispatch([Transaction(2, id="even")])
"""


@pytest.fixture
def shop_module(tmp_path, monkeypatch):
    name = f"shop_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(APP_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.spec("RUN-06")
def test_a_named_task_adds_its_policy_and_its_name(queue, shop_module):
    dispatch(queue)
    queue.settle([(fetch_one(queue), DeadLetter("refused", make_failure()))])
    history = read_history("order-1", "--task", f"{shop_module}:charge")
    assert history["attributes"]["policy.process.retry.max_attempts"] == 7
    assert history["attributes"]["policy.process.retry.backoff"] == 0.25
    assert history["remedy"].endswith(f"ergon dlq replay {shop_module}:charge --id=order-1")
    assert "process.retry.max_attempts 7" in run_why("order-1", "--task", f"{shop_module}:charge").stdout


MOVING_APP = """
from ergon_framework import consumer
from ergon_framework.connectors.postgres import PostgresQueue

class Moving(PostgresQueue):
    def lookup(self, transaction_id):
        self.fetch_transactions(1)
        return super().lookup(transaction_id)

@consumer(Moving("orders"))
def charge(order): ...
"""


@pytest.mark.spec("RUN-06", "DX-44")
@pytest.mark.parametrize("option", ["--task", "--queue"])
def test_a_transaction_that_moves_during_the_query_is_shown_once(queue, tmp_path, monkeypatch, option):
    dispatch(queue)
    (tmp_path / f"moves_{option[2:]}.py").write_text(MOVING_APP)
    monkeypatch.syspath_prepend(tmp_path)
    assert read_history("order-1", option, f"moves_{option[2:]}:charge")["location"]["state"] == "ready"


@pytest.mark.spec("RUN-06")
def test_other_brokers_are_queried_through_their_contract(tmp_path, monkeypatch, shop_module):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    dead, waiting = (
        read_history("odd", "--queue", f"{shop_module}:other"),
        read_history("even", "--queue", f"{shop_module}:other"),
    )
    assert (dead["location"]["state"], dead["location"]["details"]) == ("dead letter", "declined")
    assert (waiting["location"]["state"], waiting["where"]) == ("queued", "other")


# -- jobs ---------------------------------------------------------------------------------------------

SYSTEM_BLAME = FailureCause(Category.SYSTEM, "executor_error", "no line", "LookupError", "Traceback")


def submit_job(dsn, **options):
    client = BlockingJobClient("sync", dsn)
    submitted = client.submit("charge", {"card": SECRET}, **options)
    client.end()
    return submitted.id


def start_next_job(store):
    [delivery] = store.fetch()
    store.start(delivery)
    return delivery


@pytest.fixture
def registered_executor(dsn):
    """Register an orchestrator that runs the executor python."""
    pool = ConnectionPool(dsn)
    pool.run(register(["python"]), timeout_seconds=20)
    pool.close()


@pytest.mark.spec("RUN-06")
@pytest.mark.usefixtures("registered_executor")
def test_a_job_is_reported_in_every_state(dsn, store):
    name = submit_job(dsn, max_attempts=4, timeout=2.5, correlation="c-7")

    def read_job_history():
        return next(history for history in run_why_json(name)["histories"] if history["kind"] == "job")

    history = read_job_history()
    assert (history["location"]["state"], history["where"]) == ("pending", "python")
    assert (history["attributes"]["max attempts"], history["attributes"]["timeout"]) == (4, 2.5)
    delivery = start_next_job(store)
    assert read_job_history()["location"]["state"] == "running"
    store.finish(delivery, Retry(600.0, SYSTEM_BLAME))
    history = read_job_history()
    assert (history["location"]["state"], history["events"][-1]["result"]) == ("pending", "SYSTEM")
    assert "from now" in history["status"]


@pytest.mark.spec("RUN-06")
def test_a_job_reports_that_no_orchestrator_has_run_yet(dsn, store):
    history = next(item for item in run_why_json(submit_job(dsn))["histories"] if item["kind"] == "job")
    assert "no orchestrator has run with this database yet; start one that serves 'python'" in history["status"]


@pytest.mark.spec("RUN-06")
@pytest.mark.usefixtures("registered_executor")
def test_a_due_job_reports_its_position(dsn, store):
    first, second, third = (submit_job(dsn) for _ in range(3))
    submit_job(dsn, delay=600.0)

    def read_job_status(name):
        history = next(item for item in run_why_json(name)["histories"] if item["kind"] == "job")
        return history["status"].partition(", due since ")[0], history["remedy"].partition(",")[0]

    suggestion = "nothing if an orchestrator runs and its executors start (see ergon doctor); otherwise run: ergon run"
    assert read_job_status(first) == ("waiting for its turn", suggestion)
    assert read_job_status(third) == ("waiting for its turn behind 2 of its kind", suggestion)
    delivery, *_ = store.fetch()
    store.start(delivery)
    assert delivery.transaction.id == first
    assert read_job_status(third) == (
        "waiting for its turn behind 1 of its kind",
        "nothing; 1 jobs of this kind are running",
    )
    assert read_job_status(second)[0] == "waiting for its turn"


@pytest.mark.spec("RUN-06")
def test_a_failed_job_names_its_replay_command(dsn, store):
    name = submit_job(dsn)
    delivery = start_next_job(store)
    store.finish(delivery, Fail(SYSTEM_BLAME))
    store.queue.settle([(delivery, DeadLetter("executor_error"))])
    histories = {history["kind"]: history for history in run_why_json(name)["histories"]}
    assert histories["job"]["location"]["state"] == "failed"
    assert histories["job"]["remedy"].endswith(f"ergon job replay {name}")
    assert histories["transaction"]["remedy"] == f"ergon job replay {name}"


@pytest.mark.spec("RUN-06")
@pytest.mark.parametrize("outcome", ["succeeded", "cancelled", "killed"])
def test_an_ended_job_reports_its_outcome(dsn, store, outcome):
    name = submit_job(dsn)
    if outcome == "succeeded":
        store.finish(start_next_job(store), Complete({"card": SECRET}))
    else:
        query(dsn, "update ergon.job set state = %s, ended_at = now() where id = %s", outcome, name)
    history = next(item for item in run_why_json(name)["histories"] if item["kind"] == "job")
    assert (history["location"]["state"], history["events"][-1]["event"]) == (outcome, outcome)


# -- provider calls -------------------------------------------------------------------------------------


def record_calls(dsn, *rows):
    writer = MetricsWriter(dsn)
    for row in rows:
        writer.record(row)
    assert writer.close(20)


@pytest.mark.spec("RUN-06")
def test_provider_calls_of_a_transaction_are_shown_with_breaker_and_quota(dsn, queue):
    at = time.time()
    dispatch(queue, correlation="c-7")
    own_fields = {"correlation_id": "c-7", "idempotency_key": "key-1"}
    timeout_fields = {
        "outcome": AttemptOutcome.RETRY,
        "reason_code": ReasonCode.TIMEOUT,
        "retryable": True,
        "http_status": None,
    }
    record_calls(
        dsn,
        make_attempt(created_at=at - 2, **own_fields, **timeout_fields),
        make_attempt(created_at=at, attempt_number=2, **own_fields),
        make_attempt(correlation_id="c-8"),
    )
    query(
        dsn,
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end, "
        "limit_count, used_count, remaining_count) select 'acme', 'pay', 'charging', "
        "ergon.provider_window_start(4, to_timestamp(%s)), ergon.provider_window_end(4, to_timestamp(%s)), 100, 40, 60",
        at,
        at,
    )
    query(
        dsn,
        "insert into ergon.provider_breakers (tenant_id, provider_name, capability, state, consecutive_failures, "
        "open_until) values ('acme', 'pay', 'charging', 'open', 5, now() + interval '1 minute')",
    )
    call = run_why_json("order-1")["histories"][-1]
    assert (call["kind"], call["where"], call["location"]["state"]) == ("provider call", "pay.charge", "succeeded")
    assert call["attributes"]["breaker"].startswith("open, 5 consecutive faults, open until ")
    assert (call["attributes"]["max attempts"], call["attributes"]["timeout budget"]) == (3, 30.0)
    first, second = call["events"]
    assert (first["event"], first["result"], first["details"]) == ("attempt 1 of 3", "retry", "timeout")
    assert second["values"]["quota per month"] == "40/100"
    assert len(run_why_json("c-7")["histories"]) == 1


@pytest.mark.spec("RUN-06")
def test_a_call_with_unknown_outcome_and_an_override_are_reported(dsn):
    record_calls(
        dsn,
        make_attempt(
            correlation_id="c-7", idempotency_key="key-1", outcome=AttemptOutcome.FAILED, reason_code=ReasonCode.TIMEOUT
        ),
    )
    query(
        dsn,
        "insert into ergon.provider_keys (tenant_id, provider_name, key, fingerprint, state, owner, until, cleanup_at, "
        "value) values ('acme', 'pay', 'key-1', 'f', 'unknown', 'w', now() + interval '1 hour', now(), %s)",
        json.dumps({"card": SECRET}),
    )
    query(
        dsn,
        "insert into ergon.provider_overrides (at, tenant_id, provider_name, capability, action, actor, reason) "
        "values (now() - interval '1 hour', 'acme', 'pay', 'charging', 'force_open', 'ops', 'INC-7')",
    )
    history = read_history("c-7")
    assert history["location"]["state"] == "outcome unknown"
    assert history["remedy"].startswith("check with the provider whether pay.charge was executed")
    assert history["events"][0]["details"] == "force_open"


@pytest.mark.spec("RUN-06")
def test_the_dead_letter_of_a_call_is_found_by_its_task_and_by_its_correlation(dsn):
    record_calls(
        dsn, make_attempt(correlation_id="c-7", outcome=AttemptOutcome.DEAD_LETTER, reason_code=ReasonCode.TIMEOUT)
    )
    query(
        dsn,
        "insert into ergon.provider_dead_letters (tenant_id, task_name, provider_name, capability, operation, "
        "correlation_id, reason_code, error_type, error_message, attempts, task_id) values "
        "('acme', 'bill', 'pay', 'charging', 'charge', 'c-7', 'timeout', 'TimeoutError', 'late', 3, 'celery-1')",
    )
    by_task = read_history("celery-1")
    assert (by_task["location"]["state"], by_task["attributes"]["task"]) == ("dead letter", "bill")
    assert [history["location"]["state"] for history in run_why_json("c-7")["histories"]] == ["failed", "dead letter"]


# -- facts --------------------------------------------------------------------------------------------


@pytest.mark.spec("RUN-06")
def test_a_fact_is_found_by_its_id_and_by_its_correlation(dsn):
    pair = ZonePair("shop", "bank")
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
        [first, _] = boundary.fetch_facts("ledger", pair, 10)
        boundary.confirm_receipt("ledger", pair, Cursor(first.epoch, first.offset))
    history = read_history("fact-1")
    assert (history["kind"], history["where"], history["location"]["state"]) == ("fact", "shop to bank", "stored")
    assert history["location"]["details"] == "confirmed by 1 of 1 readers"
    assert [event["event"] for event in history["events"]] == ["produced", "stored", "confirmed"]
    assert read_history("c-7")["id"] == "fact-1"
    assert read_history("fact-2")["attributes"]["reader ledger"] == "1 behind, at offset 1"


# -- unknown ids and unavailable sources ------------------------------------------------------------------


@pytest.mark.spec("RUN-06")
def test_an_unknown_id_lists_the_queried_sources(dsn, shop_module):
    result = run_why("order-9", "--queue", f"{shop_module}:other", code=WhyExit.UNKNOWN)
    assert "'order-9' not found. Searched: PostgreSQL queues, jobs, journal, " in result.stderr
    assert f"{shop_module}:other" in result.stderr
    report = run_why_json("order-9", code=WhyExit.UNKNOWN)
    assert (report["histories"], [source["found"] for source in report["sources"]]) == ([], [0, 0, 0, 0, 0])


def test_an_unavailable_source_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://owner:{SECRET}@127.0.0.1:{free_port()}/none")
    result = run_why("order-1", code=WhyExit.UNANSWERED)
    assert "PostgreSQL queues, jobs, journal, " in result.stderr
    assert result.stderr.count("did not answer: the database is unavailable") == 1
    assert "'order-1' not found in the sources that answered. Searched: none. " in result.stderr


def test_a_slow_query_times_out_and_the_next_one_is_answered(dsn):
    pool = ConnectionPool(dsn, error_type=ConnectorError)

    def run_slow_query():
        return (yield Query("select pg_sleep(30)"))

    started_at = time.monotonic()
    with pytest.raises(ConnectionLostError, match="statement timeout"):
        pool.run(in_snapshot(run_slow_query(), timeout_seconds=0.2), timeout_seconds=20)
    assert time.monotonic() - started_at < 15
    assert pool.run(queues.lookup_transaction("x"), timeout_seconds=20) == []
    pool.close()


def test_a_query_cannot_write(dsn):
    pool = ConnectionPool(dsn, error_type=ConnectorError)

    def run_delete():
        yield Query("delete from ergon.ready")

    with pytest.raises(ErgonError):
        pool.run(in_snapshot(run_delete()), timeout_seconds=20)
    pool.close()


def test_both_variants_of_a_queue_return_the_same_trace(queue, dsn):
    dispatch(queue)

    async def trace():
        other = PostgresQueue("orders", dsn=dsn)
        try:
            return await other.lookup_async("order-1")
        finally:
            await other.close_async()

    assert asyncio.run(trace()) == queue.lookup("order-1") != []


def test_a_failed_source_does_not_affect_the_others(queue, dsn):
    dispatch(queue)
    query(dsn, "alter table ergon.fact_ids rename to elsewhere")
    try:
        report = run_why_json("order-1")
    finally:
        query(dsn, "alter table ergon.elsewhere rename to fact_ids")
    assert [history["location"]["state"] for history in report["histories"]] == ["ready"]
    assert "ergon db upgrade" in report["sources"][-1]["error"]


@pytest.mark.parametrize("name", ["x" * 257, "", "a\nb", "a\0b"])
def test_an_invalid_id_is_rejected(dsn, name):
    assert "1 to 256 printable characters" in run_why_json(name, code=WhyExit.USAGE)["error"]


def test_without_a_source_the_command_names_the_options(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    assert "no source to query" in run_why("order-1", code=WhyExit.USAGE).stderr
    assert "no module" in run_why("order-1", "--queue", "nowhere_at_all:orders", code=WhyExit.USAGE).stderr


def test_on_a_terminal_the_output_is_a_table(queue, monkeypatch, capsys):
    dispatch(queue)
    queue.settle([(fetch_one(queue), DeadLetter("refused", make_failure(error_message="[bold]x[/bold]\x1b[31m")))])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        app(["why", "order-1"])
    output = capsys.readouterr().out
    assert "┃" in output
    assert "[bold]x[/bold]\\x1b[31m" in "".join(output.split())


# -- cost ---------------------------------------------------------------------------------------------

#: Tables that grow with all past work, and the query of each.
GROWING_TABLES = {
    "dead_letter": (
        (
            "insert into ergon.dead_letter (queue, transaction_id, reason, deliveries, readable, headers, body) "
            "select q.id, 'x-' || n, 'r', 1, true, '{}', '' from ergon.queue q, generate_series(1, 20000) n"
        ),
        queues.SELECT_DEAD,
    ),
    "inbox": (
        (
            "insert into ergon.inbox (queue, transaction_id) "
            "select q.id, 'x-' || n from ergon.queue q, generate_series(1, 20000) n"
        ),
        queues.SELECT_MARKED,
    ),
    "job": (
        (
            "insert into ergon.job (id, queue, function_name, digest, retention) "
            "select 'x-' || n, q.id, 'f', '', 1 from ergon.queue q, generate_series(1, 20000) n"
        ),
        GET_JOB,
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
@pytest.mark.parametrize("table", GROWING_TABLES)
def test_growing_tables_are_read_by_their_indexes(dsn, queue, table):
    fill, statement = GROWING_TABLES[table]
    query(dsn, fill)
    query(dsn, f"analyze ergon.{table}")
    parameters = {"id": "x-77", "queue": None, "most": 100, "names": ["x-77"], "tenants": ["t"], "whose": ["t"]}
    time_range = {"first": datetime.now(UTC) - timedelta(hours=1), "last": datetime.now(UTC)}
    with psycopg.connect(dsn) as connection:
        plan_rows = connection.execute(f"explain (analyze, costs off) {statement}", parameters | time_range).fetchall()
    plan = [line for (line,) in plan_rows]
    assert any("Index" in line and table in line for line in plan), plan
    assert not [line for line in plan if "Seq Scan" in line and f"on {table}" in line], plan
