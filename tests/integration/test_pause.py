"""Pause and resume: one word for the whole fleet, heard by real workers, kept by those who cannot hear."""

from __future__ import annotations

import json
import logging
import sys
import time
from types import SimpleNamespace

import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.pause_work import PauseExit
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres.pauses import PauseWatch
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.runner.pausing import PauseGate, pausable
from ergon_framework.schema import migrate
from ergon_framework.transaction import Transaction
from tests.integration.running import Running
from tests.servers.databases import migrated

PATIENCE = 60.0
LOUD = ("--streaming", "--log-level", "info")

#: Notes in the database when it begins, and waits there for leave if it is told to.
SHOP = """
import os, time
import psycopg
from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.postgres import PostgresQueue

two = ConsumerPolicy.load({"loop": {"concurrency": {"value": 2}, "drain_timeout": 5.0}})

@consumer(PostgresQueue("orders"), policy=two, name="charge")
def task(order):
    with psycopg.connect(os.environ["ERGON_POSTGRES__DSN"], autocommit=True) as line:
        line.execute("insert into effect values (%s)", [order["name"]])
        while order.get("waits") and not line.execute("select from effect where name = 'go'").rowcount:
            time.sleep(0.02)
"""
ELSEWHERE = """
from ergon_framework.connectors.redis import RedisQueue

@consumer(RedisQueue("orders"), policy=policy(), name="charge")
def task(order):
    say("handled " + order["name"])
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Workers begin slowly where others hold the processors.
    monkeypatch.setattr("tests.integration.running.PATIENCE", PATIENCE)


@pytest.fixture
def dsn(database, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


@pytest.fixture
def queue(dsn):
    made = PostgresQueue("orders", dsn=dsn)
    made.open()
    yield made
    made.close()


def ergon(*words, code=PauseExit.OK):
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def workers():
    return ergon("paused")["workers"]


def until(question):
    """What *question* answers once that is true."""
    end = time.monotonic() + PATIENCE
    while not (answer := question()):
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)
    return answer


def folder(tmp_path, name):
    (tmp_path / name).mkdir()
    return tmp_path / name


def begun(dsn):
    with psycopg.connect(dsn) as line:
        return sorted(name for (name,) in line.execute("select name from effect where name <> 'go'"))


def let_go(dsn):
    with psycopg.connect(dsn) as line:
        line.execute("insert into effect values ('go')")


def orders(*names, **fields):
    return [Transaction(name, {"name": name, **fields}) for name in names]


@pytest.mark.spec("CON-47")
def test_two_workers_stop_fetching_finish_what_they_have_and_go_on_when_resumed(queue, dsn, tmp_path):
    with (
        Running(folder(tmp_path, "a"), SHOP, *LOUD) as one,
        Running(folder(tmp_path, "b"), SHOP, *LOUD) as two,
    ):
        until(lambda: len(workers()) == 2)
        queue.dispatch(orders("slow", waits=True))
        until(lambda: begun(dsn) == ["slow"])
        told = ergon("pause", "charge", "--reason", "amounts are doubled", "--actor", "kim")
        assert told["name"] == "charge"
        assert {each["task"] for each in told["workers"]} == {"charge"}
        until(lambda: all(each["obeys"] == "charge" for each in workers()))
        until(lambda: sorted(each["in_hand"] for each in workers()) == [0, 1])
        queue.dispatch(orders("a", "b", "c"))
        # What was begun is finished, and nothing else is begun.
        let_go(dsn)
        until(lambda: [each["in_hand"] for each in workers()] == [0, 0])
        assert begun(dsn) == ["slow"]
        assert queue.depth().ready == 3
        shown = CliRunner().invoke(app, ["paused"]).stdout
        assert "kim" in shown
        assert "amounts are doubled" in shown
        assert shown.count("does not fetch, has nothing in hand") == 2
        assert ergon("resume", "charge")["resumed"] is True
        until(lambda: begun(dsn) == ["a", "b", "c", "slow"])
        until(lambda: [each["obeys"] for each in workers()] == [None, None])
        for worker in (one, two):
            worker.send()
            assert worker.ended()[0] == 0
            said = "\n".join(worker.said)
            assert "loop paused" in said
            assert "charge was paused by kim: amounts are doubled" in said
            assert "loop resumed" in said
    # Whoever ends in good order signs off.
    until(lambda: workers() == [])


def test_a_worker_that_starts_while_its_queue_is_paused_fetches_nothing(queue, dsn, tmp_path):
    ergon("pause", "orders", "--actor", "kim", "--force")
    queue.dispatch(orders("a"))
    with Running(tmp_path, SHOP, *LOUD) as worker:
        worker.wait_for("orders was paused by kim")
        until(lambda: [each["obeys"] for each in workers()] == ["orders"])
        assert begun(dsn) == []
        ergon("resume", "orders")
        until(lambda: begun(dsn) == ["a"])


def test_waiting_ends_when_all_have_finished_or_says_that_they_have_not(queue, dsn, tmp_path):
    with Running(tmp_path, SHOP, *LOUD):
        until(workers)
        queue.dispatch(orders("slow", waits=True))
        until(lambda: begun(dsn) == ["slow"])
        assert ergon("pause", "charge", "--wait", "0.5", code=PauseExit.WAITING)["finished"] is False
        let_go(dsn)
        assert ergon("pause", "charge", "--wait", "60")["finished"] is True


# -- a database that is out of reach ------------------------------------------------------------------------


@pytest.fixture
def elsewhere(new_postgres, new_redis, monkeypatch):
    """A database for pauses only, and a queue on another server."""
    server, redis = new_postgres(fsync=False), new_redis()
    monkeypatch.setenv("ERGON_POSTGRES__DSN", migrated(server))
    monkeypatch.setenv("ERGON_REDIS__URL", redis.url)
    queue = RedisQueue("orders", url=redis.url)
    queue.open()
    yield server, queue
    queue.close()


def test_a_paused_worker_stays_paused_while_the_database_is_gone_and_says_so(elsewhere, tmp_path):
    server, queue = elsewhere
    with Running(tmp_path, ELSEWHERE, *LOUD) as worker:
        until(workers)
        ergon("pause", "charge", "--actor", "kim")
        worker.wait_for("charge was paused by kim")
        server.stop("immediate")
        # The gate itself says it, when it is asked again: so it has kept what it knew.
        worker.wait_for("the database is out of reach, it may have been resumed")
        queue.dispatch(orders("a"))
        server.start()
        worker.wait_for("pause watch regained")
        assert not any("handled" in line for line in worker.said)
        ergon("resume", "charge")
        worker.wait_for("handled a")


def test_a_worker_goes_on_while_the_database_is_gone_and_says_so(elsewhere, tmp_path):
    server, queue = elsewhere
    with Running(tmp_path, ELSEWHERE, *LOUD) as worker:
        until(workers)
        server.stop("immediate")
        worker.wait_for("pause watch lost")
        queue.dispatch(orders("a"))
        worker.wait_for("handled a")
        server.start()
        worker.wait_for("pause watch regained")
        ergon("pause", "charge", "--actor", "kim")
        worker.wait_for("charge was paused by kim")


def test_a_worker_that_never_reached_the_database_begins_after_a_while(elsewhere, tmp_path):
    server, queue = elsewhere
    server.stop("immediate")
    queue.dispatch(orders("a"))
    with Running(tmp_path, ELSEWHERE, *LOUD) as worker:
        worker.wait_for("handled a")
        assert any("pause watch lost" in line for line in worker.said)


# -- the watch itself -----------------------------------------------------------------------------------------


@pytest.fixture
def watch():
    started = []

    def start(dsn):
        started.append(PauseWatch(dsn, task="charge", queue="orders", in_hand=lambda: 3).start())
        return started[-1]

    yield start
    for each in started:
        each.stop()


def test_a_schema_without_pauses_holds_nobody_back(postgres, watch):
    dsn = postgres.create_database("pause_old")
    migrate.upgrade(dsn, "0004")
    made = watch(dsn)
    until(lambda: made.known)
    assert PauseGate(made)() is None


@pytest.mark.spec("CON-47")
def test_a_start_that_nobody_paused_says_nothing_of_pauses(dsn, caplog):
    task = SimpleNamespace(name="charge", connector=SimpleNamespace(name="orders"))
    found = SimpleNamespace(postgres=SimpleNamespace(dsn=dsn), run=SimpleNamespace(pausable=True))
    with caplog.at_level(logging.INFO), pausable(task, found) as (gate,):
        assert gate() is None
    assert not caplog.records


def test_before_it_is_known_the_loop_waits_and_not_for_ever():
    unknown = PauseWatch("host=127.0.0.1", task="charge", queue="orders", in_hand=lambda: 0)
    assert "not known yet" in PauseGate(unknown, patience=60.0)().because
    assert PauseGate(unknown, patience=0.0)() is None


def test_a_pause_is_heard_at_once_and_by_name_only(dsn, watch):
    made = watch(dsn)
    until(lambda: made.known)
    gate = PauseGate(made)
    ergon("pause", "refund", "--actor", "kim", "--force")
    ergon("pause", "orders", "--actor", "lee")
    assert until(gate).because == "orders was paused by lee"
    [me] = until(lambda: [each for each in workers() if each["obeys"]])
    assert (me["task"], me["queue"], me["obeys"], me["in_hand"]) == ("charge", "orders", "orders", 3)
    ergon("resume", "orders")
    until(lambda: gate() is None)


# -- the command line -------------------------------------------------------------------------------------------


def test_what_is_not_paused_cannot_be_resumed(dsn):
    ergon("pause", "refund", "--force")
    done = CliRunner().invoke(app, ["resume", "charge"])
    assert done.exit_code == PauseExit.FAILED
    assert "'charge' is not paused; paused is: refund" in done.stderr


@pytest.mark.spec("DX-43")
def test_a_name_that_no_worker_has_is_refused_with_the_nearest_one(dsn, watch):
    made = watch(dsn)
    until(lambda: made.known and workers())
    done = CliRunner().invoke(app, ["pause", "chrage"])
    assert done.exit_code == PauseExit.USAGE
    assert "no running task or queue is called 'chrage': the nearest is 'charge'" in done.stderr
    assert "add --force" in done.stderr
    assert "the running ones are 'charge', 'orders'" in CliRunner().invoke(app, ["pause", "zzz"]).stderr
    assert ergon("paused")["paused"] == []
    assert ergon("pause", "chrage", "--force")["name"] == "chrage"
    # Said again, it is a name that is known.
    assert ergon("pause", "chrage", "--reason", "again")["name"] == "chrage"


PAYING = """
from ergon_framework import MemoryConnector, consumer

@consumer(MemoryConnector("orders"))
def pay(order): ...
"""


def test_a_task_may_be_named_by_its_module(dsn, tmp_path):
    (tmp_path / "pausedapp.py").write_text(PAYING, encoding="utf-8")
    try:
        assert ergon("pause", "pausedapp:pay")["name"] == "pay"
    finally:
        sys.modules.pop("pausedapp", None)


def test_nothing_is_paused_until_somebody_says_so(dsn):
    assert CliRunner().invoke(app, ["paused"]).stdout == "nothing is paused\n"
    assert ergon("paused") == {"paused": [], "workers": []}


def test_without_a_database_nobody_can_be_told(monkeypatch):
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    assert "no database is named" in ergon("pause", "charge", code=PauseExit.USAGE)["error"]


def test_a_database_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", "postgresql://nobody@127.0.0.1:1/none")
    assert "out of reach" in ergon("pause", "charge", code=PauseExit.FAILED)["error"]
