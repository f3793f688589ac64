"""The journal: what ``ergon run`` writes of each outcome without holding anything up, and ``ergon why`` reads."""

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
from ergon_framework.connectors.postgres.journal import GROUP, Entry, Journal, trace, write
from ergon_framework.schema import migrate
from ergon_framework.schema.lines import Lines
from tests.integration.metering import ask, until
from tests.integration.running import ERGON
from tests.log_events import event_of, events_of

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
WHO = {"task": "charge", "queue": "orders", "worker": "here:1"}


def ergon(folder, dsn, *words, **environ):
    return subprocess.run(
        [*ERGON, *words],
        cwd=folder,
        env={**os.environ, "ERGON_POSTGRES__DSN": dsn, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


def entry(number=1, **told):
    plain = {
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
    return Entry(**plain | told)


@pytest.fixture
def lines(database):
    made = Lines(database)
    yield made
    made.close()


def rows(dsn):
    return ask(dsn, "select transaction_id, outcome from ergon.journal order by at")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_what_became_of_each_transaction_is_written_and_told(tmp_path, database, processes):
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch([Transaction(f"order-{n}", {"n": n, "card": SECRET}, tenant="acme") for n in range(40)])
    queue.close()
    done = ergon(tmp_path, database, "run", "app:task", "--processes", processes, ERGON_RUN__JOURNAL__ON="true")
    assert done.returncode == 0, done.stderr
    found = dict(rows(database))
    assert len(found) == 40
    assert {name for name, outcome in found.items() if outcome != "succeeded"} == {"order-2"}
    told = {
        name: json.loads(ergon(tmp_path, database, "why", name, "--json").stdout) for name in ("order-1", "order-2")
    }
    (lucky,) = told["order-1"]["histories"]
    assert (lucky["place"]["state"], lucky["about"]["task"], lucky["about"]["tenant"]) == ("succeeded", "task", "acme")
    first, last = lucky["events"]
    assert (first["what"], first["verdict"], first["values"]) == ("process 1", "SYSTEM", {"delay": 0.01})
    assert first["words"].endswith("hung up")
    assert (last["what"], lucky["about"]["attempts"]) == ("succeeded", 2)
    # The dead letter is told by its queue too, and only that says where it is.
    buried = [one for one in told["order-2"]["histories"] if one["place"]["state"] == "failed"]
    assert [event["what"] for event in buried[0]["events"]] == ["process 1", "failed"]
    assert SECRET not in json.dumps(told)
    assert SECRET not in str(ask(database, "select j::text from ergon.journal j"))


def test_it_is_off_unless_it_is_switched_on(tmp_path, database):
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch([Transaction("order-0", {"n": 0})])
    queue.close()
    assert ergon(tmp_path, database, "run", "app:task").returncode == 0
    assert rows(database) == []


@pytest.mark.parametrize("processes", ["1", "2"])
def test_whoever_names_no_database_for_it_is_told_so(tmp_path, processes):
    (tmp_path / "app.py").write_text("from ergon_framework import *\ntask = consumer(MemoryConnector('q'))(print)\n")
    done = ergon(tmp_path, "", "run", "app:task", "--processes", processes, ERGON_RUN__JOURNAL__ON="true")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "run.journal.on needs a database" in done.stderr


@pytest.mark.spec("RUN-08")
def test_on_the_schema_before_it_work_is_done_and_nobody_is_said_not_to_answer(tmp_path, postgres):
    dsn = postgres.create_database("journal_before")
    migrate.upgrade(dsn, "0006")
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    queue = PostgresQueue("orders", dsn=dsn)
    queue.dispatch([Transaction("order-0", {"n": 0})])
    queue.close()
    done = ergon(tmp_path, dsn, "run", "app:task", ERGON_RUN__JOURNAL__ON="true")
    assert done.returncode == 0, done.stderr
    assert "journal rows dropped" in done.stderr
    why = json.loads(ergon(tmp_path, dsn, "why", "order-0", "--json").stdout)
    assert [one["error"] for one in why["asked"]] == [None] * 5


def test_while_the_database_is_away_nobody_waits_and_the_newest_are_kept(new_postgres, caplog):
    caplog.set_level(logging.INFO)
    server = new_postgres()
    dsn = server.create_database("away")
    migrate.upgrade(dsn)
    kept = Journal(dsn, **WHO, keep=1e9, room=20).start()
    kept.note(entry(0))
    until(lambda: rows(dsn))
    server.kill()
    began = time.monotonic()
    for number in range(1, 51):
        kept.note(entry(number))
    assert time.monotonic() - began < 0.1
    until(lambda: "journal lost" in events_of(caplog.records))
    server.start()
    until(lambda: "journal regained" in events_of(caplog.records))
    kept.stop(10.0)
    assert [name for name, _ in rows(dsn)] == ["order-0", *(f"order-{number}" for number in range(31, 51))]
    dropped = [record.rows for record in caplog.records if event_of(record) == "journal rows dropped"]
    assert sum(dropped) == 30


def test_one_that_is_refused_costs_no_other(database, caplog):
    kept = Journal(database, **WHO, keep=1e9, room=5_000)
    for number in range(GROUP + 100):
        # Larger than any integer of the table.
        kept.note(entry(number, attempts=2**40 if number == 77 else 1))
    kept.start()
    kept.stop(30.0)
    assert {name for name, _ in rows(database)} == {f"order-{n}" for n in range(GROUP + 100) if n != 77}
    assert [record.rows for record in caplog.records if event_of(record) == "journal rows dropped"] == [1]


def test_what_makes_room_while_it_is_written_is_neither_lost_nor_written_twice(database, monkeypatch, caplog):
    kept, late = Journal(database, **WHO, keep=1e9, room=10), [entry(number) for number in range(10, 14)]

    def spilling(entries, **who):
        while late:
            kept.note(late.pop(0))
        yield from write(entries, **who)

    monkeypatch.setattr(journal, "write", spilling)
    for number in range(10):
        kept.note(entry(number))
    kept.start()
    kept.stop(30.0)
    assert [name for name, _ in rows(database)] == [f"order-{number}" for number in range(14)]
    assert "journal rows dropped" not in events_of(caplog.records)


def test_any_text_is_written(database, lines):
    odd = "a\\u0000 \x00 \\ \" ' é \U0001f600 {}"
    lines.run(write([entry(error=odd, reason=odd)], **WHO))
    ((found,),) = ask(database, "select error from ergon.journal")
    assert found == odd.replace("\x00", "\ufffd")


def test_a_group_that_was_written_twice_is_told_once(lines):
    for _ in range(2):
        lines.run(write([entry(), entry(at=1_700_000_900.0, outcome="released", reason="stop")], **WHO))
    (history,) = lines.run(trace("order-1"))
    assert [event.what for event in history.events] == ["succeeded", "released"]
    assert history.place.state == "queued"


@pytest.mark.spec("DX-20")
def test_what_is_old_is_thrown_away_a_part_at_a_time(database, lines, monkeypatch):
    monkeypatch.setattr(cleanup, "BATCH_ROWS", 3)
    lines.run(write([entry(number) for number in range(4)], **WHO))
    lines.run(write([entry(9, at=time.time())], **WHO))
    old = cleanup.retain_journal(3600.0)
    assert [lines.run(cleanup.delete_batch(old)) for _ in range(3)] == [3, 1, 0]
    assert [name for name, _ in rows(database)] == ["order-9"]


@pytest.mark.spec("DX-20")
def test_a_journal_sweeps_by_itself(database, lines, monkeypatch):
    monkeypatch.setattr(cleanup, "INTERVAL_SECONDS", 0.05)
    lines.run(write([entry()], **WHO))
    kept = Journal(database, **WHO, keep=3600.0, room=10).start()
    until(lambda: rows(database) == [])
    kept.stop(10.0)


def test_it_is_read_by_an_index(database):
    with psycopg.connect(database) as connection:
        connection.execute("set enable_seqscan = off")
        plan = connection.execute("explain select * from ergon.journal where transaction_id = 'x'").fetchall()
    assert "journal_transaction" in str(plan)
