"""Audit rows: every action of an operator leaves one, by command line and by API, on every broker."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid

import amqp
import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.audit import acting
from ergon_framework.cli.app import app
from ergon_framework.connectors import audit as sink
from ergon_framework.connectors.base import ConnectorError, DeadLetter
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.postgres import pauses
from ergon_framework.connectors.postgres.audit import list_rows
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.schemes import connect
from ergon_framework.errors import Category
from ergon_framework.executor.jobs.client import AsyncJobClient, JobClient
from ergon_framework.executor.jobs.cron import Cron
from ergon_framework.executor.verdict import Blame, Bury
from ergon_framework.providers.books import Account
from ergon_framework.providers.sql import operator
from ergon_framework.schema import migrate
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.migrations.versions import r0015_audit
from ergon_framework.transaction import Transaction
from tests.integration.jobs import Store

pytestmark = pytest.mark.spec("SEC-25")

SECRET = "card-4111"
BROKERS = ["postgres", "redis", "nats", "rabbitmq", "memory"]


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr("ergon_framework.runner.queues._chosen", [])
    monkeypatch.setattr(sink, "_database", [])
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    monkeypatch.delenv("ERGON_ACTOR", raising=False)
    return database


@pytest.fixture
def new_database(postgres):
    """An empty database."""
    return postgres.create_database(f"audit_{uuid.uuid4().hex[:8]}")


def run(*words, code=0):
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done


def rows(dsn, **filters):
    return list_rows(dsn, **filters)


def only(dsn):
    [row] = rows(dsn)
    assert row.outcome == "done"
    assert row.at == pytest.approx(time.time(), abs=120)
    assert SECRET not in str(row)
    return row


# -- dead letters, on every broker ------------------------------------------------------------------


def remove(url, name):
    line = amqp.Connection(url.partition("@")[2].rstrip("/"))
    line.connect()
    with line:
        for each in (name, topology.dead(name)):
            line.channel().queue_delete(each)


@pytest.fixture(params=BROKERS)
def queue(request, dsn, monkeypatch):
    """A queue with three dead letters; commands find it by its name."""
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
    made = as_sync(connect(name, url, {}))
    made.open()
    made.dispatch([Transaction(f"order-{number}", {"card": SECRET}) for number in (1, 2, 3)])
    taken = []
    while len(taken) < 3:
        taken += made.fetch_transactions(3 - len(taken), wait=20.0)
    made.settle([(delivery, DeadLetter("declined")) for delivery in taken])
    yield made
    made.close()
    if request.param == "rabbitmq":
        remove(url, name)


def dead(queue):
    return queue.list_dead(DeadLetterQuery())


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_a_command_on_dead_letters_leaves_a_row(queue, dsn, verb):
    sure = ["--yes"] if verb == "discard" else []
    why = ["--actor", "kim", "--audit-reason", "INC-7"]
    run("dlq", verb, queue.name, "--reason", "declined", *why, *sure)
    row = only(dsn)
    assert (row.action, row.name, row.actor, row.reason) == (f"dlq.{verb}", queue.name, "kim", "INC-7")
    assert (row.count, row.selection) == (3, {"reason": "declined"})
    assert sorted(row.targets) == ["order-1", "order-2", "order-3"]
    assert dead(queue) == []


def test_a_corrected_dead_letter_leaves_one_row(queue, dsn):
    run("dlq", "edit", queue.name, "order-2", "--set", "card=5", "--actor", "kim", "--reason", "INC-8")
    row = only(dsn)
    assert (row.action, row.name, row.actor, row.reason) == ("dlq.edit", queue.name, "kim", "INC-8")
    assert (row.targets, row.count) == (("order-2",), 1)


@pytest.mark.parametrize("method", ["replay_dead", "discard_dead"])
def test_a_program_that_moves_dead_letters_leaves_a_row(queue, dsn, method):
    first, second, _ = dead(queue)
    with acting("batch-job", reason="nightly"):
        getattr(queue, method)([first.place, second.place, "99999999"])
    row = only(dsn)
    assert (row.action, row.name) == (f"dlq.{method.partition('_')[0]}", queue.name)
    assert (row.actor, row.reason, row.count) == ("batch-job", "nightly", 2)
    assert row.targets[0] in (first.place, "order-1")


def test_an_async_program_that_moves_dead_letters_leaves_a_row(queue, dsn):
    first = dead(queue)[0]
    asyncio.run(move_async(queue, [first.place]))
    row = only(dsn)
    assert (row.action, row.name, row.count) == ("dlq.replay", queue.name, 1)
    assert row.actor, "the user of the process"


async def move_async(queue, places):
    await as_async(queue).replay_dead_async(places)


def test_a_dry_run_leaves_no_row(queue, dsn):
    run("dlq", "replay", queue.name, "--all", "--dry-run")
    run("dlq", "edit", queue.name, "order-1", "--set", "card=5", "--dry-run")
    assert rows(dsn) == []


@pytest.mark.invariant
def test_on_postgresql_the_row_and_the_action_are_one(dsn):
    queue = as_sync(connect("orders", dsn, {}))
    queue.open()
    queue.dispatch([Transaction("order-1", {})])
    queue.settle([(queue.fetch_transactions(1, wait=20.0)[0], DeadLetter("declined"))])
    with psycopg.connect(dsn) as line:
        line.execute("alter table ergon.audit add constraint nobody check (actor <> 'mallory')")
    [record] = dead(queue)
    for move in (queue.replay_dead, queue.discard_dead):
        with acting("mallory"), pytest.raises(ConnectorError):
            move([record.place])
    assert dead(queue) == [record]
    assert (queue.depth().ready, rows(dsn)) == (0, [])
    queue.close()
    with psycopg.connect(dsn) as line:
        line.execute("alter table ergon.audit drop constraint nobody")


# -- everything else that is in the database ----------------------------------------------------------


@pytest.fixture
def store(dsn):
    made = Store(dsn)
    yield made
    made.close()


def failed(store):
    blame = Blame(Category.SYSTEM, "executor_error", SECRET, "LookupError", "")
    delivery = store.fetched()[0]
    store.start(delivery)
    store.finish(delivery, Bury(blame))
    store.queue.settle([(delivery, DeadLetter("executor_error"))])


def submit(dsn, name="pay"):
    with JobClient(dsn) as client:
        return client.submit(name, {"card": SECRET}).id


async def steer(dsn, verb, job):
    async with AsyncJobClient(dsn) as client:
        with acting("kim", reason="INC-9"):
            await getattr(client, verb)(job)


@pytest.mark.parametrize("by", ["command", "program", "async program"])
@pytest.mark.parametrize("verb", ["cancel", "kill", "replay"])
def test_an_action_on_a_job_leaves_a_row(store, dsn, verb, by):
    job = submit(dsn)
    if verb == "replay":
        failed(store)
    if by == "command":
        run("job", verb, job, "--actor", "kim", "--reason", "INC-9")
    elif by == "program":
        with JobClient(dsn) as client, acting("kim", reason="INC-9"):
            getattr(client, verb)(job)
    else:
        asyncio.run(steer(dsn, verb, job))
    row = only(dsn)
    assert (row.action, row.targets, row.actor, row.reason) == (f"job.{verb}", (job,), "kim", "INC-9")
    assert row.name.endswith("python")


def test_an_action_that_changes_no_job_leaves_no_row(store, dsn):
    job = submit(dsn)
    run("job", "cancel", job)
    run("job", "cancel", job)
    run("job", "kill", job, code=1)
    run("job", "replay", job, code=1)
    assert [row.action for row in rows(dsn)] == ["job.cancel"]


@pytest.mark.parametrize("by", ["command", "program"])
@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_pausing_a_cron_entry_leaves_a_row(dsn, verb, by):
    with JobClient(dsn) as client:
        client.schedule(Cron("nightly", "0 3 * * *", "pay"))
        if by == "program":
            with acting("kim", reason="INC-9"):
                getattr(client, f"{verb}_schedule")("nightly")
        else:
            run("job", "cron", verb, "nightly", "--actor", "kim", "--reason", "INC-9")
    row = only(dsn)
    assert (row.action, row.name, row.actor, row.reason) == (f"cron.{verb}", "nightly", "kim", "INC-9")


def test_removing_a_cron_entry_leaves_a_row(dsn):
    with JobClient(dsn) as client:
        client.schedule(Cron("nightly", "0 3 * * *", "pay"))
        assert client.unschedule("nightly")
        assert not client.unschedule("nightly")
    row = only(dsn)
    assert (row.action, row.name) == ("cron.remove", "nightly")


@pytest.mark.parametrize("by", ["command", "program"])
def test_pause_and_resume_leave_a_row_each(dsn, by):
    if by == "command":
        run("pause", "charge", "--force", "--reason", "the bank doubles amounts", "--actor", "kim")
        run("resume", "charge", "--reason", "mended", "--actor", "lee")
        run("resume", "charge", code=1)
    else:
        lines = Lines(dsn, most=1)
        lines.run(pauses.pause("charge", by="kim", because="the bank doubles amounts"))
        lines.run(pauses.resume("charge", by="lee", because="mended"))
        lines.run(pauses.resume("charge", by="lee", because="mended"))
        lines.close()
    told = [(row.action, row.name, row.actor, row.reason, row.outcome) for row in rows(dsn)]
    assert told == [
        ("resume", "charge", "lee", "mended", "done"),
        ("pause", "charge", "kim", "the bank doubles amounts", "done"),
    ]


@pytest.mark.spec("PRV-32")
@pytest.mark.parametrize("action", ["force_open", "disable", "lift", "extend_quota"])
def test_an_override_of_a_provider_is_among_the_rows(dsn, action):
    more = {"lift": {}, "extend_quota": {"seconds": 60, "calls": 5}}.get(action, {"seconds": 60})
    account = Account("acme", "bank", "charging")
    getattr(operator, action)(dsn, account, actor="kim", reason="INC-7", **more)
    row = only(dsn)
    assert (row.action, row.name, row.targets) == (f"provider.{action}", "bank/charging", ("acme",))
    assert (row.actor, row.reason, row.count) == ("kim", "INC-7", 1)


def test_a_retired_reader_of_facts_is_among_the_rows(dsn):
    with psycopg.connect(dsn) as line:
        line.execute(
            "insert into ergon.fact_reader_audit (from_zone, to_zone, reader, fact_offset, last, by_whom) "
            "values ('plant', 'hq', 'billing', 1, 2, 'kim')"
        )
    row = only(dsn)
    assert (row.action, row.name, row.targets, row.actor) == ("facts.retire", "plant/hq", ("billing",), "kim")


# -- reading them -------------------------------------------------------------------------------------


def test_the_list_is_filtered_newest_first_and_obeys_no_terminal_codes(dsn):
    run("pause", "charge", "--force", "--reason", "a\x1b[31mb\nc", "--actor", "kim")
    run("pause", "ship", "--force", "--actor", "lee")
    shown = run("audit", "list").stdout
    assert [line.split()[3] for line in shown.splitlines()] == ["name", "ship", "charge"]
    assert r"a\x1b[31mb\nc" in shown
    by_json = [json.loads(line) for line in run("audit", "list", "--json").stdout.splitlines()]
    assert [(row["name"], row["actor"], row["outcome"]) for row in by_json] == [
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
        lines = run("audit", "list", "--json", *filters).stdout.splitlines()
        assert [json.loads(line)["name"] for line in lines] == names, filters
    assert run("audit", "list", "--name", "x").stdout == "no such action is recorded\n"


def test_without_a_database_the_list_says_so(dsn, monkeypatch):
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    assert "ERGON_POSTGRES__DSN" in run("audit", "list", code=2).stderr
    assert json.loads(run("audit", "list", "--json", code=2).stdout)["exit_code"] == 2


# -- when there is no row ------------------------------------------------------------------------------


def buried():
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("order-1", {"card": SECRET})])
    queue.settle([(queue.fetch_transactions(1)[0], DeadLetter("declined"))])
    return queue


def said(caplog):
    return [record for record in caplog.records if getattr(record, "event", None) == "audit"]


def test_without_a_database_the_log_is_the_record(dsn, monkeypatch, caplog):
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    with acting("kim", reason="INC-7"):
        buried().replay_dead(["1"])
    begun, done = said(caplog)
    assert (begun.outcome, done.outcome, done.count) == ("begun", "done", 1)
    assert (done.levelname, done.action, done.subject, done.actor) == ("WARNING", "dlq.replay", "orders", "kim")
    assert (done.reason, done.targets) == ("INC-7", "1")
    assert SECRET not in caplog.text


@pytest.mark.parametrize("state", ["out of reach", "of an earlier release"])
def test_an_action_elsewhere_goes_on_when_the_database_takes_no_row(dsn, new_database, monkeypatch, caplog, state):
    if state == "out of reach":
        monkeypatch.setenv("ERGON_POSTGRES__DSN", "postgresql://postgres@127.0.0.1:1/none?connect_timeout=1")
    else:
        monkeypatch.setenv("ERGON_POSTGRES__DSN", new_database)
        migrate.upgrade(new_database, r0015_audit.down_revision)
    queue = buried()
    queue.replay_dead(["1"])
    assert queue.depth().ready == 1
    assert all(record.not_in_database for record in said(caplog))
    assert [record.outcome for record in said(caplog)] == ["begun", "done"]


def test_a_queue_in_a_database_of_an_earlier_release_leaves_its_record_in_the_log(new_database, caplog):
    migrate.upgrade(new_database, r0015_audit.down_revision)
    queue = as_sync(connect("orders", new_database, {}))
    queue.open()
    queue.dispatch([Transaction("order-1", {})])
    queue.settle([(queue.fetch_transactions(1, wait=20.0)[0], DeadLetter("declined"))])
    queue.discard_dead([dead(queue)[0].place])
    [record] = said(caplog)
    assert (record.action, record.targets, record.count) == ("dlq.discard", "order-1", 1)
    assert "ergon db upgrade" in record.not_in_database
    queue.close()


def test_an_action_that_fails_leaves_a_row_that_says_so(dsn):
    class Broken(MemoryConnector):
        def replay_dead(self, places):
            raise ConnectorError("out of order")

    with pytest.raises(ConnectorError):
        Broken("orders").replay_dead(["1"])
    [row] = rows(dsn)
    assert (row.action, row.outcome, row.error, row.count) == ("dlq.replay", "failed", "ConnectorError", None)


def test_rows_are_added_and_never_changed(dsn):
    """Of one action elsewhere there are two rows, the intent and the outcome; a list shows one."""
    buried().replay_dead(["1"])
    with psycopg.connect(dsn) as line:
        found = line.execute("select outcome, intent is null from ergon.audit order by id").fetchall()
    assert found == [(None, True), ("done", False)]
    assert len(rows(dsn)) == 1


def test_an_action_whose_end_is_not_known_is_listed_as_such(dsn):
    with psycopg.connect(dsn) as line:
        line.execute("insert into ergon.audit (actor, action, name) values ('kim', 'dlq.replay', 'orders')")
    assert "not known" in run("audit", "list").stdout
