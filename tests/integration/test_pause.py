"""Check pause and resume with real workers: one command reaches all, and an outage does not change their state."""

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
from ergon_framework.cli.pause import PauseExit
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres.pauses import PauseWatcher
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.database import migrate
from ergon_framework.runner.services import PauseGate, pause_gates
from ergon_framework.transaction import Transaction
from tests.integration.running import ErgonProcess
from tests.servers.databases import create_migrated_database

TIMEOUT_SECONDS = 60.0
LOG_ARGUMENTS = ("--streaming", "--log-level", "info")

#: The handler writes a row when it starts and waits there for a "go" row if its payload says so.
POSTGRES_APP = """
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
REDIS_APP = """
from ergon_framework.connectors.redis import RedisQueue

@consumer(RedisQueue("orders"), policy=policy(), name="charge")
def task(order):
    say("handled " + order["name"])
"""


@pytest.fixture(autouse=True)
def isolate_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Workers start slowly on a busy machine.
    monkeypatch.setattr("tests.integration.running.TIMEOUT_SECONDS", TIMEOUT_SECONDS)


@pytest.fixture
def dsn(database, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


@pytest.fixture
def queue(dsn):
    queue = PostgresQueue("orders", dsn=dsn)
    queue.open()
    yield queue
    queue.close()


def run_ergon(*arguments, code=PauseExit.OK):
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def list_workers():
    return run_ergon("paused")["workers"]


def wait_until(condition):
    """Wait until *condition* is true and return its result."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)
    return result


def make_folder(tmp_path, name):
    (tmp_path / name).mkdir()
    return tmp_path / name


def list_started(dsn):
    with psycopg.connect(dsn) as connection:
        return sorted(name for (name,) in connection.execute("select name from effect where name <> 'go'"))


def release_handlers(dsn):
    with psycopg.connect(dsn) as connection:
        connection.execute("insert into effect values ('go')")


def make_orders(*names, **fields):
    return [Transaction({"name": name, **fields}, id=name) for name in names]


@pytest.mark.spec("CON-47")
def test_two_workers_stop_fetching_finish_their_calls_and_continue_when_resumed(queue, dsn, tmp_path):
    with (
        ErgonProcess(make_folder(tmp_path, "a"), POSTGRES_APP, *LOG_ARGUMENTS) as first,
        ErgonProcess(make_folder(tmp_path, "b"), POSTGRES_APP, *LOG_ARGUMENTS) as second,
    ):
        wait_until(lambda: len(list_workers()) == 2)
        queue.dispatch(make_orders("slow", waits=True))
        wait_until(lambda: list_started(dsn) == ["slow"])
        result = run_ergon("pause", "charge", "--reason", "amounts are doubled", "--actor", "kim")
        assert result["name"] == "charge"
        assert {each["task"] for each in result["workers"]} == {"charge"}
        wait_until(lambda: all(each["applied"] == "charge" for each in list_workers()))
        wait_until(lambda: sorted(each["in_flight"] for each in list_workers()) == [0, 1])
        queue.dispatch(make_orders("a", "b", "c"))
        # Running calls finish, and no other call starts.
        release_handlers(dsn)
        wait_until(lambda: [each["in_flight"] for each in list_workers()] == [0, 0])
        assert list_started(dsn) == ["slow"]
        assert queue.depth().ready == 3
        table = CliRunner().invoke(app, ["paused"]).stdout
        assert "kim" in table
        assert "amounts are doubled" in table
        assert table.count("pause applied, 0 in flight") == 2
        assert run_ergon("resume", "charge")["resumed"] is True
        wait_until(lambda: list_started(dsn) == ["a", "b", "c", "slow"])
        wait_until(lambda: [each["applied"] for each in list_workers()] == [None, None])
        for worker in (first, second):
            worker.send_signal()
            assert worker.wait_for_exit()[0] == 0
            output = "\n".join(worker.output)
            assert "loop paused" in output
            assert "charge was paused by kim: amounts are doubled" in output
            assert "loop resumed" in output
    # Workers that exit cleanly remove their row.
    wait_until(lambda: list_workers() == [])


def test_a_worker_that_starts_while_its_queue_is_paused_fetches_nothing(queue, dsn, tmp_path):
    run_ergon("pause", "orders", "--actor", "kim", "--force")
    queue.dispatch(make_orders("a"))
    with ErgonProcess(tmp_path, POSTGRES_APP, *LOG_ARGUMENTS) as worker:
        worker.wait_for("orders was paused by kim")
        wait_until(lambda: [each["applied"] for each in list_workers()] == ["orders"])
        assert list_started(dsn) == []
        run_ergon("resume", "orders")
        wait_until(lambda: list_started(dsn) == ["a"])


def test_wait_ends_when_all_calls_have_finished_or_reports_those_still_running(queue, dsn, tmp_path):
    with ErgonProcess(tmp_path, POSTGRES_APP, *LOG_ARGUMENTS):
        wait_until(list_workers)
        queue.dispatch(make_orders("slow", waits=True))
        wait_until(lambda: list_started(dsn) == ["slow"])
        assert run_ergon("pause", "charge", "--wait", "0.5s", code=PauseExit.WAITING)["finished"] is False
        release_handlers(dsn)
        assert run_ergon("pause", "charge", "--wait", "60s")["finished"] is True


# -- an unavailable database --------------------------------------------------------------------------------


@pytest.fixture
def database_and_queue(new_postgres, new_redis, monkeypatch):
    """Yield a database that serves pauses only, and a queue on another server."""
    server, redis = new_postgres(fsync=False), new_redis()
    monkeypatch.setenv("ERGON_POSTGRES__DSN", create_migrated_database(server))
    monkeypatch.setenv("ERGON_REDIS__URL", redis.url)
    queue = RedisQueue("orders", url=redis.url)
    queue.open()
    yield server, queue
    queue.close()


def test_a_paused_worker_stays_paused_and_logs_it_while_the_database_is_unavailable(database_and_queue, tmp_path):
    server, queue = database_and_queue
    with ErgonProcess(tmp_path, REDIS_APP, *LOG_ARGUMENTS) as worker:
        wait_until(list_workers)
        run_ergon("pause", "charge", "--actor", "kim")
        worker.wait_for("charge was paused by kim")
        server.stop("immediate")
        # The gate, called again, still reports the pause: it has kept the last known state.
        worker.wait_for("the database is unavailable, and the pause may have ended")
        queue.dispatch(make_orders("a"))
        server.start()
        worker.wait_for("pause channel restored")
        assert not any("handled" in line for line in worker.output)
        run_ergon("resume", "charge")
        worker.wait_for("handled a")


def test_a_worker_continues_and_logs_it_while_the_database_is_unavailable(database_and_queue, tmp_path):
    server, queue = database_and_queue
    with ErgonProcess(tmp_path, REDIS_APP, *LOG_ARGUMENTS) as worker:
        wait_until(list_workers)
        server.stop("immediate")
        worker.wait_for("pause channel unavailable")
        queue.dispatch(make_orders("a"))
        worker.wait_for("handled a")
        server.start()
        worker.wait_for("pause channel restored")
        run_ergon("pause", "charge", "--actor", "kim")
        worker.wait_for("charge was paused by kim")


def test_a_worker_that_never_reached_the_database_starts_after_a_timeout(database_and_queue, tmp_path):
    server, queue = database_and_queue
    server.stop("immediate")
    queue.dispatch(make_orders("a"))
    with ErgonProcess(tmp_path, REDIS_APP, *LOG_ARGUMENTS) as worker:
        worker.wait_for("handled a")
        assert any("pause channel unavailable" in line for line in worker.output)


# -- the pause watch ------------------------------------------------------------------------------------------


@pytest.fixture
def start_watch():
    started = []

    def start(dsn):
        started.append(PauseWatcher(dsn, task="charge", queue="orders", in_flight=lambda: 3).start())
        return started[-1]

    yield start
    for watch in started:
        watch.stop()


def test_a_schema_without_pauses_blocks_no_worker(postgres, start_watch):
    dsn = postgres.create_database("pause_old")
    migrate.upgrade(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("drop table ergon.pause")
    watch = start_watch(dsn)
    wait_until(lambda: watch.initialized)
    assert PauseGate(watch)() is None


@pytest.mark.spec("CON-47")
def test_a_start_without_a_pause_logs_nothing(dsn, caplog):
    task = SimpleNamespace(name="charge", connector=SimpleNamespace(name="orders"))
    settings = SimpleNamespace(postgres=SimpleNamespace(dsn=dsn), run=SimpleNamespace(pausable=True))
    with caplog.at_level(logging.INFO), pause_gates([task], settings) as ((gate,),):
        assert gate() is None
    assert not caplog.records


def test_the_loop_waits_a_limited_time_for_the_first_pause_state():
    watch = PauseWatcher("host=127.0.0.1", task="charge", queue="orders", in_flight=lambda: 0)
    assert "not known yet" in PauseGate(watch, timeout=60.0)().reason
    assert PauseGate(watch, timeout=0.0)() is None


def test_a_pause_takes_effect_immediately_and_only_for_its_name(dsn, start_watch):
    watch = start_watch(dsn)
    wait_until(lambda: watch.initialized)
    gate = PauseGate(watch)
    run_ergon("pause", "refund", "--actor", "kim", "--force")
    run_ergon("pause", "orders", "--actor", "lee")
    assert wait_until(gate).reason == "orders was paused by lee"
    [worker] = wait_until(lambda: [each for each in list_workers() if each["applied"]])
    assert (worker["task"], worker["queue"], worker["applied"], worker["in_flight"]) == (
        "charge",
        "orders",
        "orders",
        3,
    )
    run_ergon("resume", "orders")
    wait_until(lambda: gate() is None)


# -- the command line -------------------------------------------------------------------------------------------


def test_resuming_a_name_that_is_not_paused_fails(dsn):
    run_ergon("pause", "refund", "--force")
    result = CliRunner().invoke(app, ["resume", "charge"])
    assert result.exit_code == PauseExit.FAILED
    assert "'charge' is not paused (paused: refund)" in result.stderr


@pytest.mark.spec("DX-43")
def test_an_unknown_name_is_rejected_with_the_nearest_known_one(dsn, start_watch):
    watch = start_watch(dsn)
    wait_until(lambda: watch.initialized and list_workers())
    result = CliRunner().invoke(app, ["pause", "chrage"])
    assert result.exit_code == PauseExit.USAGE
    assert "no running worker matches 'chrage' (nearest: 'charge')" in result.stderr
    assert "pass --force" in result.stderr
    assert (
        "no running worker matches 'zzz' (running: 'charge', 'orders')"
        in CliRunner().invoke(app, ["pause", "zzz"]).stderr
    )
    assert run_ergon("paused")["paused"] == []
    assert run_ergon("pause", "chrage", "--force")["name"] == "chrage"
    # The second time, the name is known.
    assert run_ergon("pause", "chrage", "--reason", "again")["name"] == "chrage"


PAY_APP = """
from ergon_framework import MemoryConnector, consumer

@consumer(MemoryConnector("orders"))
def pay(order): ...
"""


def test_a_task_may_be_named_by_its_module(dsn, tmp_path):
    (tmp_path / "pausedapp.py").write_text(PAY_APP, encoding="utf-8")
    try:
        assert run_ergon("pause", "pausedapp:pay")["name"] == "pay"
    finally:
        sys.modules.pop("pausedapp", None)


def test_nothing_is_paused_by_default(dsn):
    assert CliRunner().invoke(app, ["paused"]).stdout == "nothing is paused\n"
    assert run_ergon("paused") == {"paused": [], "workers": []}


def test_pausing_without_a_database_is_a_usage_error(monkeypatch):
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    assert "no database is configured" in run_ergon("pause", "charge", code=PauseExit.USAGE)["error"]


def test_an_unavailable_database_is_reported(monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", "postgresql://unknown@127.0.0.1:1/none")
    assert "is unavailable" in run_ergon("pause", "charge", code=PauseExit.FAILED)["error"]
