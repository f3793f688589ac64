"""Audit rows: every action of an operator writes one, by command line and by API, on every broker."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import uuid

import amqp
import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.audit import act_as
from ergon_framework.cli.app import app
from ergon_framework.connectors import audit as sink
from ergon_framework.connectors.base import ConnectorError, DeadLetter
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.postgres import pauses
from ergon_framework.connectors.postgres.audit import list_rows
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.registry import create_connector
from ergon_framework.database import migrate
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import Category
from ergon_framework.executors.decision import Fail, FailureCause
from ergon_framework.jobs.client import AsyncJobClient, JobClient
from ergon_framework.jobs.cron import Cron
from ergon_framework.providers.postgres import admin
from ergon_framework.providers.state import ProviderScope
from ergon_framework.transaction import Transaction
from tests.integration.jobs import ManualWorker

pytestmark = pytest.mark.spec("SEC-25")

SECRET = "card-4111"
BROKERS = ["postgres", "redis", "nats", "rabbitmq", "memory"]


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr("ergon_framework.runner.queues._chosen", [])
    monkeypatch.setattr(sink, "_database_dsn", [])
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    monkeypatch.delenv("ERGON_ACTOR", raising=False)
    return database


@pytest.fixture
def new_database(postgres):
    """An empty database."""
    return postgres.create_database(f"audit_{uuid.uuid4().hex[:8]}")


def run_command(*args, code=0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output
    return result


def list_audit_rows(dsn, **filters):
    return list_rows(dsn, **filters)


def get_only_row(dsn):
    [row] = list_audit_rows(dsn)
    assert row.outcome == "done"
    assert row.at == pytest.approx(time.time(), abs=120)
    assert SECRET not in str(row)
    return row


# -- dead letters, on every broker ------------------------------------------------------------------


def delete_queues(url, name):
    connection = amqp.Connection(url.partition("@")[2].rstrip("/"))
    connection.connect()
    with connection:
        for queue_name in (name, topology.dead_letter_queue(name)):
            connection.channel().queue_delete(queue_name)


@pytest.fixture(params=BROKERS)
def queue(request, dsn, monkeypatch):
    """A queue with three dead letters, which commands find by its name."""
    name = f"audited{uuid.uuid4().hex[:8]}"
    addresses = {
        "postgres": lambda: dsn,
        "redis": lambda: request.getfixturevalue("new_redis")().url,
        "nats": lambda: request.getfixturevalue("nats_server").url,
        "rabbitmq": lambda: request.getfixturevalue("rabbitmq"),
        "memory": lambda: "memory://audit",
    }
    url = addresses[request.param]()
    monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__URL", url)
    queue = as_sync(create_connector(name, url, {}))
    queue.open()
    queue.dispatch([Transaction({"card": SECRET}, id=f"order-{number}") for number in (1, 2, 3)])
    deliveries = []
    while len(deliveries) < 3:
        deliveries += queue.fetch_transactions(3 - len(deliveries), wait=20.0)
    queue.settle([(delivery, DeadLetter("declined")) for delivery in deliveries])
    yield queue
    queue.close()
    if request.param == "rabbitmq":
        delete_queues(url, name)


def list_dead_letters(queue):
    return queue.list_dead(DeadLetterQuery())


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_a_command_on_dead_letters_leaves_a_row(queue, dsn, verb):
    confirmation = ["--yes"] if verb == "discard" else []
    reason_options = ["--actor", "kim", "--reason", "INC-7"]
    run_command("dlq", verb, queue.name, "--dead-letter-reason", "declined", *reason_options, *confirmation)
    row = get_only_row(dsn)
    assert (row.action, row.name, row.actor, row.reason) == (f"dlq.{verb}", queue.name, "kim", "INC-7")
    assert (row.count, row.selection) == (3, {"reason": "declined"})
    assert sorted(row.targets) == ["order-1", "order-2", "order-3"]
    assert list_dead_letters(queue) == []


def test_a_corrected_dead_letter_leaves_one_row(queue, dsn):
    run_command("dlq", "edit", queue.name, "order-2", "--set", "card=5", "--actor", "kim", "--reason", "INC-8")
    row = get_only_row(dsn)
    assert (row.action, row.name, row.actor, row.reason) == ("dlq.edit", queue.name, "kim", "INC-8")
    assert (row.targets, row.count) == (("order-2",), 1)


@pytest.mark.parametrize("method", ["replay_dead", "discard_dead"])
def test_a_program_that_moves_dead_letters_leaves_a_row(queue, dsn, method):
    first, second, _ = list_dead_letters(queue)
    with act_as("batch-job", reason="nightly"):
        getattr(queue, method)([first.handle, second.handle, "99999999"])
    row = get_only_row(dsn)
    assert (row.action, row.name) == (f"dlq.{method.partition('_')[0]}", queue.name)
    assert (row.actor, row.reason, row.count) == ("batch-job", "nightly", 2)
    assert row.targets[0] in (first.handle, "order-1")


def test_an_async_program_that_moves_dead_letters_leaves_a_row(queue, dsn):
    first = list_dead_letters(queue)[0]
    asyncio.run(move_async(queue, [first.handle]))
    row = get_only_row(dsn)
    assert (row.action, row.name, row.count) == ("dlq.replay", queue.name, 1)
    assert row.actor, "the user of the process"


async def move_async(queue, places):
    await as_async(queue).replay_dead_async(places)


def test_a_dry_run_leaves_no_row(queue, dsn):
    run_command("dlq", "replay", queue.name, "--all", "--dry-run")
    run_command("dlq", "edit", queue.name, "order-1", "--set", "card=5", "--dry-run")
    assert list_audit_rows(dsn) == []


@pytest.mark.invariant
def test_on_postgresql_the_row_and_the_action_commit_together(dsn):
    queue = as_sync(create_connector("orders", dsn, {}))
    queue.open()
    queue.dispatch([Transaction({}, id="order-1")])
    queue.settle([(queue.fetch_transactions(1, wait=20.0)[0], DeadLetter("declined"))])
    with psycopg.connect(dsn) as connection:
        connection.execute("alter table ergon.audit add constraint no_mallory check (actor <> 'mallory')")
    [record] = list_dead_letters(queue)
    for move in (queue.replay_dead, queue.discard_dead):
        with act_as("mallory"), pytest.raises(ConnectorError):
            move([record.handle])
    assert list_dead_letters(queue) == [record]
    assert (queue.depth().ready, list_audit_rows(dsn)) == (0, [])
    queue.close()
    with psycopg.connect(dsn) as connection:
        connection.execute("alter table ergon.audit drop constraint no_mallory")


# -- everything else that is in the database ----------------------------------------------------------


@pytest.fixture
def worker(dsn):
    worker = ManualWorker(dsn)
    yield worker
    worker.close()


def fail_job(worker):
    blame = FailureCause(Category.SYSTEM, "executor_error", SECRET, "LookupError", "")
    delivery = worker.fetch()[0]
    worker.start(delivery)
    worker.finish(delivery, Fail(blame))
    worker.queue.settle([(delivery, DeadLetter("executor_error"))])


def submit(dsn, name="pay"):
    with JobClient(dsn) as client:
        return client.submit(name, {"card": SECRET}).id


async def control_job(dsn, verb, job):
    async with AsyncJobClient(dsn) as client:
        with act_as("kim", reason="INC-9"):
            await getattr(client, verb)(job)


@pytest.mark.parametrize("by", ["command", "program", "async program"])
@pytest.mark.parametrize("verb", ["cancel", "kill", "replay"])
def test_an_action_on_a_job_leaves_a_row(worker, dsn, verb, by):
    job = submit(dsn)
    if verb == "replay":
        fail_job(worker)
    if by == "command":
        run_command("job", verb, job, "--actor", "kim", "--reason", "INC-9")
    elif by == "program":
        with JobClient(dsn) as client, act_as("kim", reason="INC-9"):
            getattr(client, verb)(job)
    else:
        asyncio.run(control_job(dsn, verb, job))
    row = get_only_row(dsn)
    assert (row.action, row.targets, row.actor, row.reason) == (f"job.{verb}", (job,), "kim", "INC-9")
    assert row.name.endswith("python")


def test_an_action_that_changes_no_job_leaves_no_row(worker, dsn):
    job = submit(dsn)
    run_command("job", "cancel", job)
    run_command("job", "cancel", job)
    run_command("job", "kill", job, code=1)
    run_command("job", "replay", job, code=1)
    assert [row.action for row in list_audit_rows(dsn)] == ["job.cancel"]


@pytest.mark.parametrize("by", ["command", "program"])
@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_pausing_a_cron_entry_leaves_a_row(dsn, verb, by):
    with JobClient(dsn) as client:
        client.schedule(Cron("nightly", "0 3 * * *", "pay"))
        if by == "program":
            with act_as("kim", reason="INC-9"):
                getattr(client, f"{verb}_schedule")("nightly")
        else:
            run_command("job", "cron", verb, "nightly", "--actor", "kim", "--reason", "INC-9")
    row = get_only_row(dsn)
    assert (row.action, row.name, row.actor, row.reason) == (f"cron.{verb}", "nightly", "kim", "INC-9")


def test_removing_a_cron_entry_leaves_a_row(dsn):
    with JobClient(dsn) as client:
        client.schedule(Cron("nightly", "0 3 * * *", "pay"))
        assert client.unschedule("nightly")
        assert not client.unschedule("nightly")
    row = get_only_row(dsn)
    assert (row.action, row.name) == ("cron.remove", "nightly")


@pytest.mark.parametrize("by", ["command", "program"])
def test_pause_and_resume_leave_a_row_each(dsn, by):
    if by == "command":
        run_command("pause", "charge", "--force", "--reason", "INC-7: duplicate charges", "--actor", "kim")
        run_command("resume", "charge", "--reason", "mended", "--actor", "lee")
        run_command("resume", "charge", code=1)
    else:
        pool = ConnectionPool(dsn, max_size=1)
        pool.run(pauses.pause("charge", actor="kim", reason="INC-7: duplicate charges"))
        pool.run(pauses.resume("charge", actor="lee", reason="mended"))
        pool.run(pauses.resume("charge", actor="lee", reason="mended"))
        pool.close()
    summary = [(row.action, row.name, row.actor, row.reason, row.outcome) for row in list_audit_rows(dsn)]
    assert summary == [
        ("resume", "charge", "lee", "mended", "done"),
        ("pause", "charge", "kim", "INC-7: duplicate charges", "done"),
    ]


@pytest.mark.spec("PRV-32")
@pytest.mark.parametrize("action", ["force_open", "disable", "lift", "extend_quota"])
def test_a_provider_override_leaves_a_row(dsn, action):
    options = {"lift": {}, "extend_quota": {"seconds": 60, "calls": 5}}.get(action, {"seconds": 60})
    scope = ProviderScope("acme", "bank", "charging")
    function = getattr(admin, {"lift": "clear_override"}.get(action, action))
    function(dsn, scope, actor="kim", reason="INC-7", **options)
    row = get_only_row(dsn)
    assert (row.action, row.name, row.targets) == (f"provider.{action}", "bank/charging", ("acme",))
    assert (row.actor, row.reason, row.count) == ("kim", "INC-7", 1)


def test_retiring_a_fact_reader_leaves_a_row(dsn):
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "insert into ergon.fact_reader_audit (from_zone, to_zone, reader, fact_offset, last, actor) "
            "values ('plant', 'hq', 'billing', 1, 2, 'kim')"
        )
    row = get_only_row(dsn)
    assert (row.action, row.name, row.targets, row.actor) == ("facts.retire", "plant/hq", ("billing",), "kim")


# -- reading them -------------------------------------------------------------------------------------


def test_the_list_is_filtered_newest_first_and_escapes_terminal_codes(dsn):
    run_command("pause", "charge", "--force", "--reason", "a\x1b[31mb\nc", "--actor", "kim")
    run_command("pause", "ship", "--force", "--actor", "lee")
    output = run_command("audit", "list").stdout
    assert [line.split()[3] for line in output.splitlines()] == ["name", "ship", "charge"]
    assert r"a\x1b[31mb\nc" in output
    json_rows = [json.loads(line) for line in run_command("audit", "list", "--json").stdout.splitlines()]
    assert [(row["name"], row["actor"], row["outcome"]) for row in json_rows] == [
        ("ship", "lee", "done"),
        ("charge", "kim", "done"),
    ]
    for filters, names in (
        (["--actor", "kim"], ["charge"]),
        (["--name", "ship"], ["ship"]),
        (["--action", "resume"], []),
        (["--since", "1h"], ["ship", "charge"]),
        (["--since", "2100-01-01"], []),
        (["--limit", "1"], ["ship"]),
    ):
        lines = run_command("audit", "list", "--json", *filters).stdout.splitlines()
        assert [json.loads(line)["name"] for line in lines] == names, filters
    assert run_command("audit", "list", "--name", "x").stdout == "no matching action is recorded\n"


def test_without_a_database_the_list_reports_the_missing_setting(dsn, monkeypatch):
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    assert "ERGON_POSTGRES__DSN" in run_command("audit", "list", code=2).stderr
    assert json.loads(run_command("audit", "list", "--json", code=2).stdout)["exit_code"] == 2


# -- when there is no row ------------------------------------------------------------------------------


def make_queue_with_dead_letter():
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction({"card": SECRET}, id="order-1")])
    queue.settle([(queue.fetch_transactions(1)[0], DeadLetter("declined"))])
    return queue


def list_audit_records(caplog):
    return [record for record in caplog.records if getattr(record, "event", None) == "audit"]


def test_without_a_database_the_log_is_the_record(dsn, monkeypatch, caplog):
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    with act_as("kim", reason="INC-7"):
        make_queue_with_dead_letter().replay_dead(["1"])
    begun, done = list_audit_records(caplog)
    assert (begun.outcome, done.outcome, done.count) == ("begun", "done", 1)
    assert (done.levelname, done.action, done.subject, done.actor) == ("WARNING", "dlq.replay", "orders", "kim")
    assert (done.reason, done.targets) == ("INC-7", "1")
    assert SECRET not in caplog.text


@pytest.mark.parametrize("state", ["out of reach", "without tables"])
def test_an_action_outside_the_database_succeeds_when_no_row_can_be_written(
    dsn, new_database, monkeypatch, caplog, state
):
    if state == "out of reach":
        monkeypatch.setenv("ERGON_POSTGRES__DSN", "postgresql://postgres@127.0.0.1:1/none?connect_timeout=1")
    else:
        monkeypatch.setenv("ERGON_POSTGRES__DSN", new_database)
    queue = make_queue_with_dead_letter()
    queue.replay_dead(["1"])
    assert queue.depth().ready == 1
    assert all(record.database_error for record in list_audit_records(caplog))
    assert [record.outcome for record in list_audit_records(caplog)] == ["begun", "done"]


def test_a_queue_without_the_audit_table_leaves_its_record_in_the_log(new_database, caplog):
    migrate.upgrade(new_database)
    with psycopg.connect(new_database) as connection:
        connection.execute("drop table ergon.audit")
    queue = as_sync(create_connector("orders", new_database, {}))
    queue.open()
    queue.dispatch([Transaction({}, id="order-1")])
    queue.settle([(queue.fetch_transactions(1, wait=20.0)[0], DeadLetter("declined"))])
    queue.discard_dead([list_dead_letters(queue)[0].handle])
    [record] = list_audit_records(caplog)
    assert (record.action, record.targets, record.count) == ("dlq.discard", "order-1", 1)
    assert "ergon db upgrade" in record.database_error
    queue.close()


def test_a_failed_action_leaves_a_row_with_its_error(dsn):
    class FailingConnector(MemoryConnector):
        def replay_dead(self, handles):
            raise ConnectorError("out of order")

    with pytest.raises(ConnectorError):
        FailingConnector("orders").replay_dead(["1"])
    [row] = list_audit_rows(dsn)
    assert (row.action, row.outcome, row.error, row.count) == ("dlq.replay", "failed", "ConnectorError", None)


def test_rows_are_added_and_never_changed(dsn):
    """An action outside the database writes two rows, the intent and the outcome; a list shows one."""
    make_queue_with_dead_letter().replay_dead(["1"])
    with psycopg.connect(dsn) as connection:
        outcomes = connection.execute("select outcome, intent is null from ergon.audit order by id").fetchall()
    assert outcomes == [(None, True), ("done", False)]
    assert len(list_audit_rows(dsn)) == 1


def test_an_action_with_an_unknown_outcome_is_listed_as_such(dsn):
    with psycopg.connect(dsn) as connection:
        connection.execute("insert into ergon.audit (actor, action, name) values ('kim', 'dlq.replay', 'orders')")
    assert re.search(r"kim +dlq\.replay +orders +unknown$", run_command("audit", "list").stdout, re.MULTILINE)
