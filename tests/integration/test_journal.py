"""The journal: ``ergon run`` writes each outcome without delaying work, and ``ergon why`` reads it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time

import psycopg
import pytest

from ergon_framework import Transaction
from ergon_framework.connectors.postgres import PostgresQueue, cleanup, journal
from ergon_framework.connectors.postgres.journal import (
    MAX_BATCH_ROWS,
    Journal,
    JournalEntry,
    insert_entries,
    lookup_journal,
)
from ergon_framework.database import migrate
from ergon_framework.database.pool import ConnectionPool
from tests.integration.metering import query, wait_until
from tests.integration.running import ERGON
from tests.log_events import get_event, list_events

pytestmark = pytest.mark.spec("RUN-06")

SECRET = "open-sesame"
APP = f"""
from ergon_framework import *
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.scope import current

policy = ConsumerPolicy.load({{"steps": {{"process": {{"retry": {{"max_attempts": 3, "backoff": 0.01}}}}}}}})

@consumer(PostgresQueue("orders"), policy=policy)
def task(order):
    if order["n"] == 1 and current().attempt == 0:
        raise ConnectionError("password={SECRET} \\\\ \\x00 hung up")
    if order["n"] == 2:
        raise BusinessError("card declined", code="declined")
"""
WORKER_LABELS = {"task": "charge", "queue": "orders", "worker": "here:1"}


def run_ergon(folder, dsn, *arguments, **environ):
    return subprocess.run(
        [*ERGON, *arguments],
        cwd=folder,
        env={**os.environ, "ERGON_POSTGRES__DSN": dsn, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


def make_entry(number=1, **fields):
    defaults = {
        "at": 1_700_000_000.0 + number,
        "transaction_id": f"order-{number}",
        "correlation": None,
        "tenant": None,
        "outcome": "succeeded",
        "category": None,
        "code": None,
        "reason": None,
        "error": None,
        "attempts": 1,
        "seconds": 0.5,
        "tries": None,
    }
    return JournalEntry(**defaults | fields)


@pytest.fixture
def pool(database):
    connection_pool = ConnectionPool(database)
    yield connection_pool
    connection_pool.close()


def list_outcomes(dsn):
    return query(dsn, "select transaction_id, outcome from ergon.journal order by at")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_outcome_of_each_transaction_is_written_and_shown(tmp_path, database, processes):
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch([Transaction({"n": n, "card": SECRET}, id=f"order-{n}", tenant="acme") for n in range(40)])
    queue.close()
    result = run_ergon(
        tmp_path, database, "run", "app:task", "--processes", processes, ERGON_RUN__JOURNAL__ENABLED="true"
    )
    assert result.returncode == 0, result.stderr
    outcomes = dict(list_outcomes(database))
    assert len(outcomes) == 40
    assert {name for name, outcome in outcomes.items() if outcome != "succeeded"} == {"order-2"}
    reports = {
        name: json.loads(run_ergon(tmp_path, database, "why", name, "--json").stdout) for name in ("order-1", "order-2")
    }
    (retried,) = reports["order-1"]["histories"]
    assert (retried["location"]["state"], retried["attributes"]["task"], retried["attributes"]["tenant"]) == (
        "succeeded",
        "task",
        "acme",
    )
    first, last = retried["events"]
    assert (first["event"], first["result"], first["values"]) == ("process 1", "SYSTEM", {"delay": 0.01})
    assert first["details"].endswith("hung up")
    assert (last["event"], retried["attributes"]["attempts"]) == ("succeeded", 2)
    # The queue reports the dead letter too, and only the queue knows its handle.
    failures = [history for history in reports["order-2"]["histories"] if history["location"]["state"] == "failed"]
    assert [event["event"] for event in failures[0]["events"]] == ["process 1", "failed"]
    assert SECRET not in json.dumps(reports)
    assert SECRET not in str(query(database, "select j::text from ergon.journal j"))


def test_the_journal_is_off_by_default(tmp_path, database):
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch([Transaction({"n": 0}, id="order-0")])
    queue.close()
    assert run_ergon(tmp_path, database, "run", "app:task").returncode == 0
    assert list_outcomes(database) == []


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_journal_without_a_database_is_an_error(tmp_path, processes):
    (tmp_path / "app.py").write_text("from ergon_framework import *\ntask = consumer(MemoryConnector('q'))(print)\n")
    result = run_ergon(tmp_path, "", "run", "app:task", "--processes", processes, ERGON_RUN__JOURNAL__ENABLED="true")
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert "run.journal.enabled needs a database" in result.stderr


@pytest.mark.spec("RUN-08")
def test_without_the_journal_table_work_is_done_and_no_source_has_an_error(tmp_path, postgres):
    dsn = postgres.create_database("journal_before")
    migrate.upgrade(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("drop table ergon.journal")
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    queue = PostgresQueue("orders", dsn=dsn)
    queue.dispatch([Transaction({"n": 0}, id="order-0")])
    queue.close()
    result = run_ergon(tmp_path, dsn, "run", "app:task", ERGON_RUN__JOURNAL__ENABLED="true")
    assert result.returncode == 0, result.stderr
    assert "journal rows dropped" in result.stderr
    report = json.loads(run_ergon(tmp_path, dsn, "why", "order-0", "--json").stdout)
    assert [source["error"] for source in report["sources"]] == [None] * 5


def test_while_the_database_is_unavailable_no_caller_waits_and_the_newest_rows_are_kept(new_postgres, caplog):
    caplog.set_level(logging.INFO)
    server = new_postgres()
    dsn = server.create_database("away")
    migrate.upgrade(dsn)
    writer = Journal(dsn, **WORKER_LABELS, retention_seconds=1e9, capacity=20).start()
    writer.record(make_entry(0))
    wait_until(lambda: list_outcomes(dsn))
    server.kill()
    began = time.monotonic()
    for number in range(1, 51):
        writer.record(make_entry(number))
    assert time.monotonic() - began < 0.1
    wait_until(lambda: "journal unavailable" in list_events(caplog.records))
    server.start()
    wait_until(lambda: "journal restored" in list_events(caplog.records))
    writer.stop(10.0)
    assert [name for name, _ in list_outcomes(dsn)] == ["order-0", *(f"order-{number}" for number in range(31, 51))]
    dropped = [record.rows for record in caplog.records if get_event(record) == "journal rows dropped"]
    assert sum(dropped) == 30


def test_a_rejected_row_loses_no_other_row(database, caplog):
    writer = Journal(database, **WORKER_LABELS, retention_seconds=1e9, capacity=5_000)
    for number in range(MAX_BATCH_ROWS + 100):
        # Larger than any integer of the table.
        writer.record(make_entry(number, attempts=2**40 if number == 77 else 1))
    writer.start()
    writer.stop(30.0)
    assert {name for name, _ in list_outcomes(database)} == {
        f"order-{n}" for n in range(MAX_BATCH_ROWS + 100) if n != 77
    }
    assert [record.rows for record in caplog.records if get_event(record) == "journal rows dropped"] == [1]


def test_rows_evicted_while_they_are_written_are_neither_lost_nor_written_twice(database, monkeypatch, caplog):
    writer, late_entries = (
        Journal(database, **WORKER_LABELS, retention_seconds=1e9, capacity=10),
        [make_entry(number) for number in range(10, 14)],
    )

    def fill_and_write(entries, **who):
        while late_entries:
            writer.record(late_entries.pop(0))
        yield from insert_entries(entries, **who)

    monkeypatch.setattr(journal, "insert_entries", fill_and_write)
    for number in range(10):
        writer.record(make_entry(number))
    writer.start()
    writer.stop(30.0)
    assert [name for name, _ in list_outcomes(database)] == [f"order-{number}" for number in range(14)]
    assert "journal rows dropped" not in list_events(caplog.records)


def test_any_text_is_written(database, pool):
    text = "a\\u0000 \x00 \\ \" ' é \U0001f600 {}"
    pool.run(insert_entries([make_entry(error=text, reason=text)], **WORKER_LABELS))
    ((error,),) = query(database, "select error from ergon.journal")
    assert error == text.replace("\x00", "\ufffd")


def test_a_batch_that_was_written_twice_is_shown_once(pool):
    for _ in range(2):
        pool.run(
            insert_entries(
                [make_entry(), make_entry(at=1_700_000_900.0, outcome="released", reason="stop")], **WORKER_LABELS
            )
        )
    (history,) = pool.run(lookup_journal("order-1"))
    assert [event.event for event in history.events] == ["succeeded", "released"]
    assert history.location.state == "queued"


@pytest.mark.spec("DX-20")
def test_old_rows_are_deleted_in_batches(database, pool, monkeypatch):
    monkeypatch.setattr(cleanup, "BATCH_ROWS", 3)
    pool.run(insert_entries([make_entry(number) for number in range(4)], **WORKER_LABELS))
    pool.run(insert_entries([make_entry(9, at=time.time())], **WORKER_LABELS))
    retention = cleanup.retain_journal(3600.0)
    assert [pool.run(cleanup.delete_batch(retention)) for _ in range(3)] == [3, 1, 0]
    assert [name for name, _ in list_outcomes(database)] == ["order-9"]


@pytest.mark.spec("DX-20")
def test_a_journal_deletes_old_rows_automatically(database, pool, monkeypatch):
    monkeypatch.setattr(cleanup, "INTERVAL_SECONDS", 0.05)
    pool.run(insert_entries([make_entry()], **WORKER_LABELS))
    writer = Journal(database, **WORKER_LABELS, retention_seconds=3600.0, capacity=10).start()
    wait_until(lambda: list_outcomes(database) == [])
    writer.stop(10.0)


def test_the_journal_is_read_through_an_index(database):
    with psycopg.connect(database) as connection:
        connection.execute("set enable_seqscan = off")
        plan = connection.execute("explain select * from ergon.journal where transaction_id = 'x'").fetchall()
    assert "journal_transaction" in str(plan)
