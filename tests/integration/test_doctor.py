"""``ergon doctor``: each finding once, against real servers, and nothing changed or given away by looking."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import amqp
import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.cli import doctor_work
from ergon_framework.cli.app import app
from ergon_framework.cli.doctor_work import DoctorExit
from ergon_framework.connectors.nats.naming import names
from ergon_framework.finding import Weight
from ergon_framework.schema import migrate
from tests.integration.nats_queues import bare
from tests.servers.databases import migrated
from tests.servers.postgres import PrivatePostgres, free_port

SECRET = "open-sesame"


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("ergon_framework.runner.queues._chosen", [])
    for name in ("POSTGRES__DSN", "RABBITMQ__URL", "NATS__URL", "REDIS__URL"):
        monkeypatch.delenv(f"ERGON_{name}", raising=False)


@pytest.fixture(scope="module")
def strict():
    """A PostgreSQL server that loses nothing."""
    folder = tempfile.mkdtemp(prefix="ergon-postgres-")
    server = PrivatePostgres(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def told(*words, code=None):
    done = CliRunner().invoke(app, ["doctor", *words, "--json"])
    assert code is None or done.exit_code == code, done.output
    assert SECRET not in done.output
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == done.exit_code
    return answer


def of(answer, name):
    """What was found of *name*, by what was looked at; the last of each."""
    [found] = [one for one in answer["examined"] if one["name"] == name]
    return {each["what"]: each for each in found["findings"]}


def weights(answer, name):
    return {what: each["weight"] for what, each in of(answer, name).items()}


def queue_at(monkeypatch, url, name="orders", **options):
    monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__URL", url)
    for option, value in options.items():
        monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__OPTIONS__{option.upper()}", str(value))


# -- PostgreSQL ---------------------------------------------------------------------------------------


def test_a_healthy_database_and_its_queues_are_fine(strict, monkeypatch):
    dsn = migrated(strict)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    queue_at(monkeypatch, dsn)
    queue_at(monkeypatch, dsn, "invoices")
    answer = told(code=DoctorExit.OK)
    assert (answer["broken"], answer["warning"]) == (0, 0)
    assert set(of(answer, "database")) >= {"connection", "version", "clock", "durability", "schema", "permissions"}
    # What is of the server is told once.
    assert set(of(answer, "queue orders")) == set(of(answer, "queue invoices")) == {"queue"}
    assert "is not there yet" in of(answer, "queue orders")["queue"]["seen"]
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select count(*) from ergon.queue").fetchone() == (0,)


def test_people_read_what_is_broken_first_with_what_to_do(postgres, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", postgres.create_database("doctor_people"))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == DoctorExit.BROKEN
    lines = done.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("database ("))
    assert lines[begin + 1].split()[:2] == ["broken", "schema"]
    assert lines[begin + 2].strip() == "do: run: ergon db upgrade"
    assert lines[-1].endswith("1 broken")


def test_a_fresh_program_looks_at_a_database_and_at_its_queues_at_once(postgres, monkeypatch):
    # In a process of its own: only there is nothing imported yet, and each look imports what it needs.
    dsn = migrated(postgres)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    queue_at(monkeypatch, dsn)
    queue_at(monkeypatch, dsn, "invoices")
    words = [sys.executable, "-c", "from ergon_framework.cli.main import main; main()", "doctor", "--json"]
    answer = json.loads(subprocess.run(words, check=False, capture_output=True, text=True).stdout)
    assert answer["broken"] == 0
    assert set(of(answer, "queue orders")) == set(of(answer, "queue invoices")) == {"queue"}


def test_what_is_refused_says_which_setting_to_mend_and_hides_no_word_of_that(postgres, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", postgres.dsn("no_such_database"))
    found = of(told(code=DoctorExit.BROKEN), "database")["refused"]
    assert '"no_such_database" does not exist' in found["seen"]
    assert found["do"].endswith("the rights: see postgres.dsn of ergon.toml, or ERGON_POSTGRES__DSN")


def test_a_database_without_tables_is_broken_and_says_how_to_make_them(postgres, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", postgres.create_database("doctor_empty"))
    found = of(told(code=DoctorExit.BROKEN), "database")["schema"]
    assert (found["weight"], found["do"]) == ("broken", "run: ergon db upgrade")
    assert "revision none" in found["seen"]


def test_an_old_schema_is_a_warning_that_names_what_is_missing(strict, monkeypatch):
    dsn = strict.create_database("doctor_old")
    migrate.upgrade(dsn, "0001")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    found = of(told(code=DoctorExit.WARNED), "database")["schema"]
    assert (found["weight"], found["do"]) == ("warning", "run: ergon db upgrade")
    assert "revision 0001" in found["seen"]
    assert "0002" in found["seen"]


def test_a_database_that_answers_before_it_has_written_is_a_warning(strict, monkeypatch):
    dsn = migrated(strict)
    name = dsn.rpartition("/")[2]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"alter database {name} set synchronous_commit = off")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    found = of(told(code=DoctorExit.WARNED), "database")["durability"]
    assert "synchronous_commit is off" in found["seen"]
    assert "synchronous_commit" in found["do"]


def test_missing_rights_are_named_with_the_grant_that_gives_them(strict, monkeypatch):
    dsn = migrated(strict)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("drop role if exists doctor_clerk")
        connection.execute("create role doctor_clerk login")
        connection.execute("grant usage on schema ergon to doctor_clerk")
        connection.execute("grant select on all tables in schema ergon to doctor_clerk")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn.replace("//postgres@", "//doctor_clerk@"))
    found = of(told(code=DoctorExit.BROKEN), "database")["permissions"]
    assert "no delete, insert, update on ergon." in found["seen"]
    assert 'to "doctor_clerk"' in found["do"]
    with psycopg.connect(dsn, autocommit=True) as connection:
        for grant in found["do"].removeprefix("as the owner: ").split("; "):
            connection.execute(grant)
    assert weights(told(code=DoctorExit.OK), "database")["permissions"] == "fine"


def test_a_wrong_password_is_told_without_the_password(strict, monkeypatch):
    rules = strict.folder / "data" / "pg_hba.conf"
    before = rules.read_text(encoding="utf-8")
    rules.write_text(f"host all doctor_guarded 127.0.0.1/32 scram-sha-256\n{before}", encoding="utf-8")
    with psycopg.connect(strict.dsn(), autocommit=True) as connection:
        connection.execute("drop role if exists doctor_guarded")
        connection.execute("create role doctor_guarded login password 'another'")
        connection.execute("select pg_reload_conf()")
    dsn = strict.dsn().replace("//postgres@", f"//doctor_guarded:{SECRET}@")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    deadline = time.monotonic() + 20
    # The server reads its rules again a moment after it was told to.
    while "refused" not in (found := of(told(code=DoctorExit.BROKEN), "database")):
        assert time.monotonic() < deadline, found
    assert "password authentication failed" in found["refused"]["seen"]
    assert "postgres.dsn of ergon.toml, or ERGON_POSTGRES__DSN" in found["refused"]["do"]


@pytest.mark.parametrize("seconds, weight", [(-5.0, "warning"), (90.0, "broken"), (0.2, "fine")])
def test_clocks_that_differ_are_told_by_how_much(strict, monkeypatch, seconds, weight):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", migrated(strict))
    reports = doctor_work.examined([], config=None, timeout=15.0, wall=lambda: time.time() + seconds)
    [clock] = [each for report in reports for each in report.findings if each.what == "clock"]
    assert clock.weight == Weight(weight)
    assert (weight == "fine") == (not clock.do)
    if weight == "broken":
        assert "s behind ours" in clock.seen


# -- the other brokers ----------------------------------------------------------------------------------


def test_a_healthy_redis_is_fine_and_nothing_is_made_in_it(new_redis, monkeypatch):
    server = new_redis()
    queue_at(monkeypatch, server.url)
    answer = told(code=DoctorExit.OK)
    assert set(of(answer, "queue orders")) == {"connection", "version", "clock", "durability", "permissions", "queue"}
    with server.client() as client:
        assert client.keys("*") == []


def test_a_redis_that_syncs_each_second_is_a_warning(new_redis, monkeypatch):
    server = new_redis()
    with server.client() as client:
        client.config_set("appendfsync", "everysec")
    queue_at(monkeypatch, server.url)
    found = of(told(code=DoctorExit.WARNED), "queue orders")["durability"]
    assert "appendfsync is everysec" in found["seen"]
    assert "appendfsync to always" in found["do"]


def test_a_redis_that_throws_keys_away_is_broken(new_redis, monkeypatch):
    server = new_redis()
    with server.client() as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    queue_at(monkeypatch, server.url)
    found = of(told(code=DoctorExit.BROKEN), "queue orders")["eviction"]
    assert "maxmemory-policy is allkeys-lru" in found["seen"]
    assert "noeviction" in found["do"]


def test_a_redis_user_without_the_queues_keys_is_told_how_to_get_them(new_redis, monkeypatch):
    server = new_redis()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "clerk", "on", f">{SECRET}", "~other*", "+@all")
    queue_at(monkeypatch, server.url.replace("://", f"://clerk:{SECRET}@"))
    found = of(told(code=DoctorExit.BROKEN), "queue orders")["permissions"]
    assert "'clerk' may not do all" in found["seen"]
    assert "ACL SETUSER clerk ~ergon:{orders}" in found["do"]


def test_a_key_that_is_no_stream_is_broken(new_redis, monkeypatch):
    server = new_redis()
    with server.client() as client:
        client.set("ergon:{orders}", "mine")
    queue_at(monkeypatch, server.url)
    found = of(told(code=DoctorExit.BROKEN), "queue orders")["queue"]
    assert "holds a string, not a stream" in found["seen"]


def test_a_nats_server_as_it_comes_is_a_warning(nats_server, monkeypatch):
    name = f"doctor{uuid.uuid4().hex[:8]}"
    queue_at(monkeypatch, nats_server.url, name, monitor=nats_server.monitor)
    found = of(told(code=DoctorExit.WARNED), f"queue {name}")
    assert "sync_interval is not always" in found["durability"]["seen"]
    assert "sync_interval: always" in found["durability"]["do"]
    assert "is not there yet" in found["topology"]["seen"]


def test_a_nats_stream_that_keeps_acked_work_is_broken(nats_server, monkeypatch):
    name = f"doctor{uuid.uuid4().hex[:8]}"
    its = names(name)

    async def make():
        async with bare(nats_server) as (_, api):
            subjects = [its.subject, f"{its.subject}.>"]
            return await api(f"STREAM.CREATE.{its.work}", name=its.work, subjects=subjects, retention="limits")

    assert "error" not in asyncio.run(make())
    queue_at(monkeypatch, nats_server.url, name)
    found = of(told(code=DoctorExit.BROKEN), f"queue {name}")["topology"]
    assert "has retention 'limits'" in found["seen"]
    assert found["do"]


def test_a_strict_nats_server_is_fine(new_nats, monkeypatch):
    server = new_nats(sync=True)
    queue_at(monkeypatch, server.url, monitor=server.monitor)
    assert set(weights(told(code=DoctorExit.OK), "queue orders").values()) == {"fine"}


@pytest.mark.spec("SEC-14")
def test_a_nats_server_that_takes_more_than_a_fetch_may_load_is_a_warning(monkeypatch, new_nats):
    server = new_nats(sync=True, settings="max_payload: 67108864")
    queue_at(monkeypatch, server.url, monitor=server.monitor)
    found = of(told(code=DoctorExit.WARNED), "queue orders")["payload"]
    assert found["weight"] == "warning"
    assert "max_payload of the server is 67108864 bytes: one message can be over the 33554432 bytes" in found["seen"]
    assert "lower max_payload" in found["do"]


def test_a_nats_server_without_jetstream_is_broken(monkeypatch, new_nats):
    server = new_nats(settings="accounts { plain { users = [ { user: clerk, password: secret } ] } }")
    queue_at(monkeypatch, server.url.replace("://", "://clerk:secret@"))
    found = of(told(code=DoctorExit.BROKEN), "queue orders")["jetstream"]
    assert "-js" in found["do"]


@pytest.fixture
def rabbit_name(rabbitmq):
    """A name for a queue; what the test has made of it is gone afterwards."""
    made = f"doctor-{uuid.uuid4().hex[:8]}"
    yield made
    with _amqp(rabbitmq) as line:
        for each in (made, f"{made}.dead"):
            line.channel().queue_delete(each)


def _amqp(url):
    line = amqp.Connection(url.removeprefix("amqp://guest:guest@").rstrip("/"))
    line.connect()
    return line


def test_a_healthy_rabbitmq_is_fine_and_no_queue_is_made_in_it(rabbitmq, rabbit_name, monkeypatch):
    monkeypatch.setenv("ERGON_RABBITMQ__URL", rabbitmq)
    Path("app.py").write_text(RABBIT.format(name=rabbit_name), encoding="utf-8")
    answer = told("app:orders", code=DoctorExit.OK)
    sys.modules.pop("app")
    found = of(answer, f"queue {rabbit_name}")
    assert set(found) == {"connection", "version", "durability", "permissions", "topology", "deadline"}
    with _amqp(rabbitmq) as line, pytest.raises(amqp.exceptions.NotFound):
        line.channel().queue_declare(rabbit_name, passive=True)


RABBIT = """
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
orders = RabbitMQQueue("{name}")
"""


def test_a_classic_queue_in_place_of_a_quorum_queue_is_broken(rabbitmq, rabbit_name, monkeypatch):
    with _amqp(rabbitmq) as line:
        line.channel().queue_declare(rabbit_name, durable=True, auto_delete=False)
    monkeypatch.setenv("ERGON_RABBITMQ__URL", rabbitmq)
    Path("app.py").write_text(RABBIT.format(name=rabbit_name), encoding="utf-8")
    answer = told("app:orders", code=DoctorExit.BROKEN)
    sys.modules.pop("app")
    [found] = [one for one in answer["examined"] if one["name"] == f"queue {rabbit_name}"]
    broken = [each for each in found["findings"] if each["weight"] == "broken"]
    assert [each["what"] for each in broken] == ["topology"]
    assert f"the queue {rabbit_name!r} is there with another argument" in broken[0]["seen"]
    assert "delete the queue" in broken[0]["do"]


def test_a_server_without_a_queue_is_looked_at_by_itself(rabbitmq, monkeypatch):
    monkeypatch.setenv("ERGON_RABBITMQ__URL", rabbitmq)
    assert set(of(told(code=DoctorExit.OK), "rabbitmq")) == {"connection", "version", "durability"}


def test_a_wrong_password_of_rabbitmq_is_told_without_the_password(rabbitmq, monkeypatch):
    monkeypatch.setenv("ERGON_RABBITMQ__URL", rabbitmq.replace("guest:guest@", f"guest:{SECRET}@"))
    found = of(told(code=DoctorExit.BROKEN), "rabbitmq")["refused"]
    assert "does not let this user in" in found["seen"]
    assert "check the name, the password and the vhost" in found["do"]


# -- who is not there, or hangs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variable, address, name",
    [
        ("ERGON_POSTGRES__DSN", "postgresql://clerk:{secret}@127.0.0.1:{port}/shop", "database"),
        ("ERGON_RABBITMQ__URL", "amqp://clerk:{secret}@127.0.0.1:{port}/", "rabbitmq"),
        ("ERGON_NATS__URL", "nats://clerk:{secret}@127.0.0.1:{port}", "nats"),
        ("ERGON_REDIS__URL", "redis://clerk:{secret}@127.0.0.1:{port}/0", "redis"),
    ],
)
def test_a_server_that_is_not_there_is_a_finding(monkeypatch, variable, address, name):
    port = free_port()
    monkeypatch.setenv(variable, address.format(secret=SECRET, port=port))
    answer = told(code=DoctorExit.BROKEN)
    found = of(answer, name)["connection"]
    assert found["weight"] == "broken"
    assert variable in found["do"]
    [shown] = [one["address"] for one in answer["examined"] if one["name"] == name]
    assert "[hidden]@" in shown
    assert str(port) in shown


def test_one_that_hangs_is_told_in_time_and_delays_nobody(strict, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("ERGON_POSTGRES__DSN", migrated(strict))
        for name in ("orders", "invoices"):
            queue_at(monkeypatch, f"redis://127.0.0.1:{port}/0?socket_timeout=600", name)
        began = time.monotonic()
        answer = told("--timeout", "10", code=DoctorExit.BROKEN)
        # Far below what waiting for each would take, and far above what a busy machine adds.
        assert time.monotonic() - began < 60
    assert set(weights(answer, "database").values()) == {"fine"}
    for name in ("orders", "invoices"):
        found = of(answer, f"queue {name}")["connection"]
        assert "no answer within 10 s" in found["seen"]
        assert f"queues.{name}.url" in found["do"]


# -- settings, tasks, executors, facts ------------------------------------------------------------------


def test_a_mistake_in_the_settings_is_a_finding_that_names_the_key(monkeypatch):
    Path("ergon.toml").write_text("[run]\nproceses = 3\n", encoding="utf-8")
    found = of(told(code=DoctorExit.BROKEN), "this program")["settings"]
    assert "unknown key 'run.proceses'; did you mean 'run.processes'?" in found["seen"]


def test_an_unknown_scheme_is_a_finding(monkeypatch):
    queue_at(monkeypatch, "kafa://nowhere")
    found = of(told(code=DoctorExit.BROKEN), "queue orders")["refused"]
    assert "begins with kafa://" in found["seen"]


def test_a_name_that_stands_for_nothing_is_a_mistake_of_the_command_line():
    assert "there is no module 'nowhere'" in told("nowhere:task", code=DoctorExit.USAGE)["error"]


APP = """
import os
import sys
from ergon_framework import ConsumerPolicy, MemoryConnector, consumer
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.executor.process import Command
from ergon_framework.executor.task import isolated
from ergon_framework.facts.stores.memory import MemoryBoundary

long = ConsumerPolicy.load({"loop": {"transaction_timeout": 7200}, "steps": {"process": {"retry": {"timeout": 7200}}}})

@consumer(RabbitMQQueue("orders", url="amqp://127.0.0.1:%(port)d/", timeout=1.0), policy=long)
def slow(order): ...

@consumer(MemoryConnector("orders"))
def plain(order): ...

gone = isolated(plain, Command(words=("/nowhere/executor",)))
mute = isolated(plain, Command(words=("sleep", "60"), environment={"PATH": os.environ["PATH"]}))
main = "from ergon_framework.cli.main import main; main()"
runner = (sys.executable, "-P", "-c", main, "executor", "run", "--handlers", "handlers:registry")
there = isolated(plain, Command(words=runner, folder=".", environment=%(environment)r))
boundary = MemoryBoundary()
"""
HANDLERS = """
from ergon_framework.executor.registry import Registry
registry = Registry()

@registry.handler("plain")
def plain(order): ...
"""


@pytest.fixture
def written():
    """A module with tasks of every kind, which is forgotten afterwards."""
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    Path("doctored.py").write_text(APP % {"port": free_port(), "environment": environment}, encoding="utf-8")
    Path("handlers.py").write_text(HANDLERS, encoding="utf-8")
    yield
    sys.modules.pop("doctored", None)


@pytest.mark.usefixtures("written")
def test_a_policy_that_the_broker_does_not_wait_for_is_broken():
    answer = told("doctored:slow", code=DoctorExit.BROKEN)
    found = of(answer, "task slow")["policy"]
    assert found["weight"] == "broken"
    assert found["do"]
    # The same task's server is not there, which is a finding of its own.
    assert of(answer, "queue orders")["connection"]["weight"] == "broken"


@pytest.mark.usefixtures("written")
def test_executors_are_started_and_asked():
    gone = of(told("doctored:gone", "--timeout", "2", code=DoctorExit.BROKEN), "executor plain")["start"]
    assert "'/nowhere/executor' ended before its first answer, with exit code 127: it wrote " in gone["seen"]
    assert "the program is there" in gone["do"]
    mute = of(told("doctored:mute", "--timeout", "2", code=DoctorExit.BROKEN), "executor plain")["start"]
    assert "'sleep 60' did not announce itself within 1.6 s and was killed" in mute["seen"]
    assert "ergon executor check -- sleep 60" in mute["do"]
    there = of(told("doctored:there", "--timeout", "60"), "executor plain")["start"]
    assert there["weight"] == "fine"


@pytest.mark.usefixtures("written")
def test_a_boundary_of_facts_says_its_epoch_and_what_it_is_worth():
    found = of(told("doctored:boundary", code=DoctorExit.WARNED), "facts doctored:boundary")
    assert "in epoch" in found["connection"]["seen"]
    assert found["durability"]["weight"] == "warning"
