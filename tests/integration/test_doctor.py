"""``ergon doctor``: each finding once, against real servers, without changes and without leaking secrets."""

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

from ergon_framework.cli import doctor
from ergon_framework.cli.app import app
from ergon_framework.cli.doctor import DoctorExit
from ergon_framework.connectors.nats.streams import stream_names
from ergon_framework.database import migrate
from ergon_framework.diagnostics import Severity
from tests.integration.nats_queues import open_client
from tests.servers.databases import create_migrated_database
from tests.servers.postgres import PrivatePostgres, free_port

SECRET = "open-sesame"


@pytest.fixture(autouse=True)
def _isolate(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("ergon_framework.runner.queues._chosen", [])
    for name in ("POSTGRES__DSN", "RABBITMQ__URL", "NATS__URL", "REDIS__URL"):
        monkeypatch.delenv(f"ERGON_{name}", raising=False)


@pytest.fixture(scope="module")
def strict_server():
    """A PostgreSQL server with full durability."""
    folder = tempfile.mkdtemp(prefix="ergon-postgres-")
    server = PrivatePostgres(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def run_doctor(*args, code=None):
    result = CliRunner().invoke(app, ["doctor", *args, "--json"])
    assert code is None or result.exit_code == code, result.output
    assert SECRET not in result.output
    report = json.loads(result.stdout)
    assert report["exit_code"] == result.exit_code
    return report


def get_findings(report, name):
    """Return the findings of target *name* by check; the last finding of each."""
    [target] = [target_report for target_report in report["targets"] if target_report["name"] == name]
    return {finding["check"]: finding for finding in target["diagnostics"]}


def get_severities(report, name):
    return {what: each["severity"] for what, each in get_findings(report, name).items()}


def configure_queue(monkeypatch, url, name="orders", **options):
    monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__URL", url)
    for option, value in options.items():
        monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__OPTIONS__{option.upper()}", str(value))


# -- PostgreSQL ---------------------------------------------------------------------------------------


def test_a_healthy_database_and_its_queues_are_fine(strict_server, monkeypatch):
    dsn = create_migrated_database(strict_server)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    configure_queue(monkeypatch, dsn)
    configure_queue(monkeypatch, dsn, "invoices")
    report = run_doctor(code=DoctorExit.OK)
    assert (report["counts"]["error"], report["counts"]["warning"]) == (0, 0)
    assert set(get_findings(report, "database")) >= {
        "connection",
        "version",
        "clock",
        "durability",
        "schema",
        "permissions",
    }
    # Findings about the server are reported once.
    assert set(get_findings(report, "queue orders")) == set(get_findings(report, "queue invoices")) == {"queue"}
    assert "does not exist yet" in get_findings(report, "queue orders")["queue"]["observed"]
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select count(*) from ergon.queue").fetchone() == (0,)


def test_the_text_report_lists_broken_findings_first_with_their_remedy(postgres, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", postgres.create_database("doctor_people"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == DoctorExit.ERRORS
    lines = result.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("database ("))
    assert lines[begin + 1].split()[:2] == ["error", "schema"]
    assert lines[begin + 2].strip() == "fix: ergon db upgrade"
    assert lines[-1].endswith("1 error")


def test_a_new_process_checks_a_database_and_its_queues_concurrently(postgres, monkeypatch):
    # In a new process: only there is nothing imported yet, and each check imports what it needs.
    dsn = create_migrated_database(postgres)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    configure_queue(monkeypatch, dsn)
    configure_queue(monkeypatch, dsn, "invoices")
    command = [sys.executable, "-c", "from ergon_framework.cli.main import main; main()", "doctor", "--json"]
    report = json.loads(subprocess.run(command, check=False, capture_output=True, text=True).stdout)
    assert report["counts"]["error"] == 0
    assert set(get_findings(report, "queue orders")) == set(get_findings(report, "queue invoices")) == {"queue"}


def test_a_rejected_connection_names_the_setting_to_fix(postgres, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", postgres.dsn("no_such_database"))
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "database")["rejected"]
    assert '"no_such_database" does not exist' in finding["observed"]
    assert finding["remedy"].endswith("the permissions: see postgres.dsn of ergon.toml, or ERGON_POSTGRES__DSN")


def test_a_database_without_tables_is_broken_and_the_upgrade_is_named(postgres, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", postgres.create_database("doctor_empty"))
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "database")["schema"]
    assert (finding["severity"], finding["remedy"]) == ("error", "ergon db upgrade")
    assert "revision none" in finding["observed"]


def test_an_old_schema_is_a_warning_that_names_what_is_missing(strict_server, monkeypatch):
    dsn = strict_server.create_database("doctor_old")
    migrate.upgrade(dsn, "0001")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    finding = get_findings(run_doctor(code=DoctorExit.WARNINGS), "database")["schema"]
    assert (finding["severity"], finding["remedy"]) == ("warning", "ergon db upgrade")
    assert "revision 0001" in finding["observed"]
    assert "0002" in finding["observed"]


def test_a_database_with_synchronous_commit_off_is_a_warning(strict_server, monkeypatch):
    dsn = create_migrated_database(strict_server)
    name = dsn.rpartition("/")[2]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"alter database {name} set synchronous_commit = off")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    finding = get_findings(run_doctor(code=DoctorExit.WARNINGS), "database")["durability"]
    assert "synchronous_commit is off" in finding["observed"]
    assert "synchronous_commit" in finding["remedy"]


def test_missing_rights_are_named_with_the_grant_that_gives_them(strict_server, monkeypatch):
    dsn = create_migrated_database(strict_server)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("drop role if exists doctor_clerk")
        connection.execute("create role doctor_clerk login")
        connection.execute("grant usage on schema ergon to doctor_clerk")
        connection.execute("grant select on all tables in schema ergon to doctor_clerk")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn.replace("//postgres@", "//doctor_clerk@"))
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "database")["permissions"]
    assert "no delete, insert, update on ergon." in finding["observed"]
    assert 'to "doctor_clerk"' in finding["remedy"]
    with psycopg.connect(dsn, autocommit=True) as connection:
        for grant in finding["remedy"].removeprefix("as the owner: ").split("; "):
            connection.execute(grant)
    assert get_severities(run_doctor(code=DoctorExit.OK), "database")["permissions"] == "ok"


def test_a_wrong_password_is_reported_without_the_password(strict_server, monkeypatch):
    rules = strict_server.folder / "data" / "pg_hba.conf"
    before = rules.read_text(encoding="utf-8")
    rules.write_text(f"host all doctor_guarded 127.0.0.1/32 scram-sha-256\n{before}", encoding="utf-8")
    with psycopg.connect(strict_server.dsn(), autocommit=True) as connection:
        connection.execute("drop role if exists doctor_guarded")
        connection.execute("create role doctor_guarded login password 'another'")
        connection.execute("select pg_reload_conf()")
    dsn = strict_server.dsn().replace("//postgres@", f"//doctor_guarded:{SECRET}@")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    deadline = time.monotonic() + 20
    # The server reloads its rules a moment after the reload was requested.
    while "rejected" not in (findings := get_findings(run_doctor(code=DoctorExit.ERRORS), "database")):
        assert time.monotonic() < deadline, findings
    assert "password authentication failed" in findings["rejected"]["observed"]
    assert "postgres.dsn of ergon.toml, or ERGON_POSTGRES__DSN" in findings["rejected"]["remedy"]


@pytest.mark.parametrize("seconds, severity", [(-5.0, "warning"), (90.0, "error"), (0.2, "ok")])
def test_clock_skew_is_reported_with_its_size(strict_server, monkeypatch, seconds, severity):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", create_migrated_database(strict_server))
    reports = doctor.run_diagnostics([], config=None, timeout=15.0, wall=lambda: time.time() + seconds)
    [clock] = [each for report in reports for each in report.diagnostics if each.check == "clock"]
    assert clock.severity == Severity(severity)
    assert (severity == "ok") == (not clock.remedy)
    if severity == "error":
        assert "s behind that of this process" in clock.observed


# -- the other brokers ----------------------------------------------------------------------------------


def test_a_healthy_redis_is_fine_and_nothing_is_created_in_it(new_redis, monkeypatch):
    server = new_redis()
    configure_queue(monkeypatch, server.url)
    report = run_doctor(code=DoctorExit.OK)
    assert set(get_findings(report, "queue orders")) == {
        "connection",
        "version",
        "clock",
        "durability",
        "permissions",
        "queue",
    }
    with server.client() as client:
        assert client.keys("*") == []


def test_a_redis_that_syncs_each_second_is_a_warning(new_redis, monkeypatch):
    server = new_redis()
    with server.client() as client:
        client.config_set("appendfsync", "everysec")
    configure_queue(monkeypatch, server.url)
    finding = get_findings(run_doctor(code=DoctorExit.WARNINGS), "queue orders")["durability"]
    assert "appendfsync is everysec" in finding["observed"]
    assert "appendfsync to always" in finding["remedy"]


def test_a_redis_that_evicts_keys_is_broken(new_redis, monkeypatch):
    server = new_redis()
    with server.client() as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    configure_queue(monkeypatch, server.url)
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "queue orders")["eviction"]
    assert "maxmemory-policy is allkeys-lru" in finding["observed"]
    assert "noeviction" in finding["remedy"]


def test_missing_redis_key_rights_are_reported_with_the_acl_command(new_redis, monkeypatch):
    server = new_redis()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "clerk", "on", f">{SECRET}", "~other*", "+@all")
    configure_queue(monkeypatch, server.url.replace("://", f"://clerk:{SECRET}@"))
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "queue orders")["permissions"]
    assert "'clerk' lacks a right that a queue needs" in finding["observed"]
    assert "ACL SETUSER clerk ~ergon:{orders}" in finding["remedy"]


def test_a_key_that_is_not_a_stream_is_broken(new_redis, monkeypatch):
    server = new_redis()
    with server.client() as client:
        client.set("ergon:{orders}", "mine")
    configure_queue(monkeypatch, server.url)
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "queue orders")["queue"]
    assert "holds a string, not a stream" in finding["observed"]


def test_a_nats_server_with_default_settings_is_a_warning(nats_server, monkeypatch):
    name = f"doctor{uuid.uuid4().hex[:8]}"
    configure_queue(monkeypatch, nats_server.url, name, monitor=nats_server.monitor)
    findings = get_findings(run_doctor(code=DoctorExit.WARNINGS), f"queue {name}")
    assert "sync_interval is not 'always'" in findings["durability"]["observed"]
    assert "sync_interval: always" in findings["durability"]["remedy"]
    assert "does not exist yet" in findings["topology"]["observed"]


def test_a_nats_stream_that_keeps_acked_work_is_broken(nats_server, monkeypatch):
    name = f"doctor{uuid.uuid4().hex[:8]}"
    topology = stream_names(name)

    async def make():
        async with open_client(nats_server) as (_, api):
            subjects = [topology.subject, f"{topology.subject}.>"]
            return await api(
                f"STREAM.CREATE.{topology.work}", name=topology.work, subjects=subjects, retention="limits"
            )

    assert "error" not in asyncio.run(make())
    configure_queue(monkeypatch, nats_server.url, name)
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), f"queue {name}")["topology"]
    assert "has retention 'limits'" in finding["observed"]
    assert finding["remedy"]


def test_a_strict_nats_server_is_fine(new_nats, monkeypatch):
    server = new_nats(sync=True)
    configure_queue(monkeypatch, server.url, monitor=server.monitor)
    assert set(get_severities(run_doctor(code=DoctorExit.OK), "queue orders").values()) == {"ok"}


@pytest.mark.spec("SEC-14")
def test_a_nats_server_with_max_payload_above_the_fetch_limit_is_a_warning(monkeypatch, new_nats):
    server = new_nats(sync=True, settings="max_payload: 67108864")
    configure_queue(monkeypatch, server.url, monitor=server.monitor)
    finding = get_findings(run_doctor(code=DoctorExit.WARNINGS), "queue orders")["payload"]
    assert finding["severity"] == "warning"
    assert (
        "max_payload of the server is 67108864 bytes: one message can be over the 33554432 bytes" in finding["observed"]
    )
    assert "lower max_payload" in finding["remedy"]


def test_a_nats_server_without_jetstream_is_broken(monkeypatch, new_nats):
    server = new_nats(settings="accounts { plain { users = [ { user: clerk, password: secret } ] } }")
    configure_queue(monkeypatch, server.url.replace("://", "://clerk:secret@"))
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "queue orders")["jetstream"]
    assert "-js" in finding["remedy"]


@pytest.fixture
def queue_name(rabbitmq):
    """A name for a queue that is deleted after the test."""
    queue_name = f"doctor-{uuid.uuid4().hex[:8]}"
    yield queue_name
    with _connect_amqp(rabbitmq) as connection:
        for each in (queue_name, f"{queue_name}.dead"):
            connection.channel().queue_delete(each)


def _connect_amqp(url):
    connection = amqp.Connection(url.removeprefix("amqp://guest:guest@").rstrip("/"))
    connection.connect()
    return connection


def test_a_healthy_rabbitmq_is_fine_and_no_queue_is_created_in_it(rabbitmq, queue_name, monkeypatch):
    monkeypatch.setenv("ERGON_RABBITMQ__URL", rabbitmq)
    Path("app.py").write_text(RABBITMQ_APP.format(name=queue_name), encoding="utf-8")
    report = run_doctor("app:orders", code=DoctorExit.OK)
    sys.modules.pop("app")
    findings = get_findings(report, f"queue {queue_name}")
    assert set(findings) == {"connection", "version", "durability", "permissions", "topology", "deadline"}
    with _connect_amqp(rabbitmq) as connection, pytest.raises(amqp.exceptions.NotFound):
        connection.channel().queue_declare(queue_name, passive=True)


RABBITMQ_APP = """
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
orders = RabbitMQQueue("{name}")
"""


def test_a_classic_queue_in_place_of_a_quorum_queue_is_broken(rabbitmq, queue_name, monkeypatch):
    with _connect_amqp(rabbitmq) as connection:
        connection.channel().queue_declare(queue_name, durable=True, auto_delete=False)
    monkeypatch.setenv("ERGON_RABBITMQ__URL", rabbitmq)
    Path("app.py").write_text(RABBITMQ_APP.format(name=queue_name), encoding="utf-8")
    report = run_doctor("app:orders", code=DoctorExit.ERRORS)
    sys.modules.pop("app")
    [target] = [one for one in report["targets"] if one["name"] == f"queue {queue_name}"]
    broken = [each for each in target["diagnostics"] if each["severity"] == "error"]
    assert [each["check"] for each in broken] == ["topology"]
    assert f"queue {queue_name!r} exists with a different argument" in broken[0]["observed"]
    assert "delete the queue" in broken[0]["remedy"]


def test_a_server_without_a_queue_is_checked_on_its_own(rabbitmq, monkeypatch):
    monkeypatch.setenv("ERGON_RABBITMQ__URL", rabbitmq)
    assert set(get_findings(run_doctor(code=DoctorExit.OK), "rabbitmq")) == {"connection", "version", "durability"}


def test_a_wrong_rabbitmq_password_is_reported_without_the_password(rabbitmq, monkeypatch):
    monkeypatch.setenv("ERGON_RABBITMQ__URL", rabbitmq.replace("guest:guest@", f"guest:{SECRET}@"))
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "rabbitmq")["rejected"]
    assert "rejected the user" in finding["observed"]
    assert "check the name, the password and the vhost" in finding["remedy"]


# -- servers that are unreachable or hang -----------------------------------------------------------------


@pytest.mark.parametrize(
    "variable, address, name",
    [
        ("ERGON_POSTGRES__DSN", "postgresql://clerk:{secret}@127.0.0.1:{port}/shop", "database"),
        ("ERGON_RABBITMQ__URL", "amqp://clerk:{secret}@127.0.0.1:{port}/", "rabbitmq"),
        ("ERGON_NATS__URL", "nats://clerk:{secret}@127.0.0.1:{port}", "nats"),
        ("ERGON_REDIS__URL", "redis://clerk:{secret}@127.0.0.1:{port}/0", "redis"),
    ],
)
def test_an_unreachable_server_is_a_finding(monkeypatch, variable, address, name):
    port = free_port()
    monkeypatch.setenv(variable, address.format(secret=SECRET, port=port))
    report = run_doctor(code=DoctorExit.ERRORS)
    finding = get_findings(report, name)["connection"]
    assert finding["severity"] == "error"
    assert variable in finding["remedy"]
    [shown] = [one["address"] for one in report["targets"] if one["name"] == name]
    assert "[hidden]@" in shown
    assert str(port) in shown


def test_a_hanging_server_is_reported_within_the_timeout_and_delays_no_other_check(strict_server, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("ERGON_POSTGRES__DSN", create_migrated_database(strict_server))
        for name in ("orders", "invoices"):
            configure_queue(monkeypatch, f"redis://127.0.0.1:{port}/0?socket_timeout=600", name)
        began = time.monotonic()
        report = run_doctor("--timeout", "10s", code=DoctorExit.ERRORS)
        # Far less than the sum of all timeouts, and far more than a busy machine adds.
        assert time.monotonic() - began < 60
    assert set(get_severities(report, "database").values()) == {"ok"}
    for name in ("orders", "invoices"):
        finding = get_findings(report, f"queue {name}")["connection"]
        assert "no response within 10 s" in finding["observed"]
        assert f"queues.{name}.url" in finding["remedy"]


# -- settings, tasks, executors, facts ------------------------------------------------------------------


def test_a_mistake_in_the_settings_is_a_finding_that_names_the_key(monkeypatch):
    Path("ergon.toml").write_text("[run]\nproceses = 3\n", encoding="utf-8")
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "this program")["settings"]
    assert "unknown key 'run.proceses'; did you mean 'run.processes'?" in finding["observed"]


def test_an_unknown_scheme_is_a_finding(monkeypatch):
    configure_queue(monkeypatch, "kafa://nowhere")
    finding = get_findings(run_doctor(code=DoctorExit.ERRORS), "queue orders")["rejected"]
    assert "begins with kafa://" in finding["observed"]


def test_an_unknown_module_is_a_usage_error():
    assert "there is no module 'nowhere'" in run_doctor("nowhere:task", code=DoctorExit.USAGE)["error"]


APP = """
import os
import sys
from ergon_framework import ConsumerPolicy, MemoryConnector, consumer
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.executors.isolation import run_in_executor
from ergon_framework.facts.stores.memory import MemoryBoundary

long = ConsumerPolicy.load({"loop": {"transaction_timeout": 7200}, "steps": {"process": {"retry": {"timeout": 7200}}}})

@consumer(RabbitMQQueue("orders", url="amqp://127.0.0.1:%(port)d/", timeout=1.0), policy=long)
def slow(order): ...

@consumer(MemoryConnector("orders"))
def plain(order): ...

gone = run_in_executor(plain, ExecutorCommand(words=("/nowhere/executor",)))
mute = run_in_executor(plain, ExecutorCommand(words=("sleep", "60"), environment={"PATH": os.environ["PATH"]}))
main = "from ergon_framework.cli.main import main; main()"
runner = (sys.executable, "-P", "-c", main, "executor", "run", "--handlers", "handlers:registry")
there = run_in_executor(plain, ExecutorCommand(words=runner, folder=".", environment=%(environment)r))
boundary = MemoryBoundary()
"""
HANDLERS = """
from ergon_framework.executors.registry import HandlerRegistry
registry = HandlerRegistry()

@registry.handler("plain")
def plain(order): ...
"""


@pytest.fixture
def task_module():
    """A module with tasks of every kind, which is unloaded afterwards."""
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    Path("doctored.py").write_text(APP % {"port": free_port(), "environment": environment}, encoding="utf-8")
    Path("handlers.py").write_text(HANDLERS, encoding="utf-8")
    yield
    sys.modules.pop("doctored", None)


@pytest.mark.usefixtures("task_module")
def test_a_policy_that_exceeds_the_broker_timeout_is_broken():
    report = run_doctor("doctored:slow", code=DoctorExit.ERRORS)
    finding = get_findings(report, "task slow")["policy"]
    assert finding["severity"] == "error"
    assert finding["remedy"]
    # The server of the same task is unreachable, which is a separate finding.
    assert get_findings(report, "queue orders")["connection"]["severity"] == "error"


@pytest.mark.usefixtures("task_module")
def test_executors_are_started_and_checked():
    gone = get_findings(run_doctor("doctored:gone", "--timeout", "2s", code=DoctorExit.ERRORS), "executor plain")[
        "start"
    ]
    assert "'/nowhere/executor' exited before its first answer, with exit code 127: it wrote " in gone["observed"]
    assert "check that the program exists" in gone["remedy"]
    mute = get_findings(run_doctor("doctored:mute", "--timeout", "2s", code=DoctorExit.ERRORS), "executor plain")[
        "start"
    ]
    assert "'sleep 60' did not answer within 1.6 s and was killed" in mute["observed"]
    assert "ergon executor check -- sleep 60" in mute["remedy"]
    there = get_findings(run_doctor("doctored:there", "--timeout", "60s"), "executor plain")["start"]
    assert there["severity"] == "ok"


@pytest.mark.usefixtures("task_module")
def test_a_fact_boundary_reports_its_epoch_and_durability():
    finding = get_findings(run_doctor("doctored:boundary", code=DoctorExit.WARNINGS), "facts doctored:boundary")
    assert "in epoch" in finding["connection"]["observed"]
    assert finding["durability"]["severity"] == "warning"
