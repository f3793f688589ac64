"""A server that runs and cannot serve (a full disk, a memory limit, read-only) is waited for and named."""

from __future__ import annotations

import pwd
import signal
import time
import uuid
from functools import partial
from urllib.parse import quote

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, SettleResult
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.database.migrate import upgrade
from ergon_framework.errors import ConnectionLostError
from ergon_framework.runner.exit import RunExit
from ergon_framework.transaction import Transaction
from tests.integration.running import ErgonProcess
from tests.integration.test_run_probes import query_probe, wait_for_port, wait_for_status
from tests.servers.redis import PrivateRedis
from tests.servers.small_disk import SmallDisk

pytestmark = [pytest.mark.spec("SEC-15"), pytest.mark.invariant]

TIMEOUT_SECONDS = 60.0
#: Longer than three attempts of a fetch with the default policy take.
OUTAGE_SECONDS = 4.0

WORKER = """
{imports}

@consumer(Queue("orders"))
def task(order, transaction: Transaction):
    with open("done", "a") as file:
        file.write(transaction.id + chr(10))
    time.sleep(0.002)
"""


class HandledTransactions:
    """The handled transactions, in the folder of a run."""

    def __init__(self, folder):
        self._path = folder / "done"

    def __len__(self):
        return len(self.ids)

    @property
    def ids(self):
        return set(self._path.read_text().splitlines()) if self._path.exists() else set()

    def wait_for(self, count):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(self) < count:
            assert time.monotonic() < deadline, f"{len(self)} of {count} were handled"
            time.sleep(0.05)


def start_worker(folder, imports):
    """Run ``ergon run`` with two processes and default settings."""
    options = ("--streaming", "--processes", "2", "--probe-port", "0")
    return ErgonProcess(folder, WORKER.format(imports=imports), *options)


def wait_until_not_ready(port, words):
    """Return once every process reports that it is not ready because of *words*; it stays live."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        status, report = query_probe(port, "/ready")
        if status == 503 and len(report["reasons"]) == 2 and all(words in reason for reason in report["reasons"]):
            assert query_probe(port, "/live")[0] == 200
            return report
        assert time.monotonic() < deadline, report
        time.sleep(0.05)


def assert_stays_not_ready(port, words):
    deadline = time.monotonic() + OUTAGE_SECONDS
    while time.monotonic() < deadline:
        status, report = query_probe(port, "/ready")
        assert (status, report["live"]) == (503, True), report
        assert any(words in reason for reason in report["reasons"]), report
        time.sleep(0.2)


@pytest.fixture
def small_database(postgres):
    """The dsn of a database on its own small disk, and that disk; the WAL of the server is elsewhere."""
    name = f"small_{uuid.uuid4().hex[:8]}"
    with SmallDisk(48) as disk:
        folder = disk.make_folder("tables", pwd.getpwnam("postgres").pw_uid)
        with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
            admin.execute(f"create tablespace {name} location '{folder}'")
            admin.execute(f"create database {name} tablespace {name}")
        dsn = postgres.dsn(name)
        try:
            upgrade(dsn)
            yield dsn, disk
        finally:
            disk.empty()
            with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
                admin.execute(f"drop database {name} with (force)")
                admin.execute(f"drop tablespace {name}")


def make_orders(count, *, prefix="order"):
    return [Transaction({"text": "x" * 200}, id=f"{prefix}-{number}") for number in range(count)]


@pytest.mark.parametrize("disk_full_at", ["before", "during", "during, without an init file"])
def test_workers_wait_while_the_disk_of_the_database_is_full_and_report_it(
    tmp_path, monkeypatch, small_database, disk_full_at
):
    dsn, disk = small_database
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    count = 3000
    queue = PostgresQueue("orders", dsn=dsn)
    queue.dispatch(make_orders(count))
    queue.close()
    handled = HandledTransactions(tmp_path)
    if disk_full_at.endswith("init file"):
        # The server writes this catalog cache again when the next session connects.
        for file in disk.folder.rglob("pg_internal.init"):
            file.unlink()
    if disk_full_at != "before":
        disk.fill()
    with start_worker(tmp_path, "from ergon_framework.connectors.postgres import PostgresQueue as Queue") as run:
        port = wait_for_port(run)
        if disk_full_at == "before":
            handled.wait_for(200)
            disk.fill()
        wait_until_not_ready(port, "the disk of the database is full")
        assert_stays_not_ready(port, "the disk of the database is full")
        disk.empty()
        handled.wait_for(count)
        wait_for_status(port, "/ready", 200)
        run.send_signal(signal.SIGTERM)
        assert run.wait_for_exit()[0] == RunExit.OK
    assert handled.ids == {f"order-{number}" for number in range(count)}
    check_log(run, "the disk of the database is full")


def check_log(run, words):
    """Check that each process has logged an outage with its cause, and that none has exited."""
    lost = [line for line in run.output if 'event="connection lost"' in line]
    assert len(lost) >= 2
    assert all(words in line for line in lost)
    assert not [line for line in run.output if 'event="process exited unexpectedly"' in line]


def wait_for_cause(words, call):
    """Repeat *call* until it raises ConnectionLostError with *words*."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            call()
        except ConnectionLostError as error:
            if words in str(error):
                return
            raise
    raise AssertionError(f"never refused with {words!r}")


def test_a_database_that_becomes_read_only_is_a_lost_connection_and_recovers(database):
    name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch(make_orders(1))

    def switch_read_only(statement):
        """Switch the database as a demoted primary does: sessions end, and new sessions are read-only."""
        queue.close()
        with psycopg.connect(database, autocommit=True) as admin:
            admin.execute("set default_transaction_read_only = off")
            admin.execute(f"alter database {name} {statement}")

    switch_read_only("set default_transaction_read_only = on")
    try:
        with pytest.raises(ConnectionLostError, match="the database is read-only"):
            queue.fetch_transactions(1)
    finally:
        switch_read_only("reset default_transaction_read_only")
    (delivery,) = queue.fetch_transactions(1)
    queue.settle([(delivery, Ack())])
    queue.close()


@pytest.mark.parametrize(
    "option, words",
    [("statement_timeout", "the database cancelled the statement"), ("lock_timeout", "did not grant a lock in time")],
)
def test_a_timeout_of_the_database_role_is_a_lost_connection_and_recovers(database, option, words):
    queue = PostgresQueue("orders", dsn=f"{database}?options={quote(f'-c {option}=100')}")
    queue.dispatch(make_orders(1))
    with psycopg.connect(database) as other:
        other.execute("lock table ergon.worker in access exclusive mode")
        with pytest.raises(ConnectionLostError, match=words):
            queue.fetch_transactions(1)
    (delivery,) = queue.fetch_transactions(1)
    queue.settle([(delivery, Ack())])
    queue.close()


REDIS_IMPORT = "from ergon_framework.connectors.redis import RedisQueue as Queue"


def test_workers_wait_while_the_disk_of_redis_is_full_and_report_it(tmp_path, monkeypatch):
    with SmallDisk(8) as disk:
        server = PrivateRedis(disk.folder / "redis", settings={"appendonly": "no", "save": "3600 1000000"})
        server.start()
        monkeypatch.setenv("ERGON_REDIS__URL", server.url)
        queue, handled = RedisQueue("orders", url=server.url), HandledTransactions(tmp_path)
        try:
            with server.client() as client, start_worker(tmp_path, REDIS_IMPORT) as run:
                port = wait_for_port(run)
                queue.dispatch(make_orders(100))
                handled.wait_for(100)
                disk.fill()
                client.bgsave()
                wait_until_not_ready(port, "cannot write to its disk")
                assert_stays_not_ready(port, "cannot write to its disk")
                wait_for_cause("cannot write to its disk", partial(queue.dispatch, make_orders(1)))
                disk.empty()
                client.bgsave()
                wait_for_status(port, "/ready", 200)
                queue.dispatch(make_orders(100, prefix="more"))
                handled.wait_for(200)
                run.send_signal(signal.SIGTERM)
                assert run.wait_for_exit()[0] == RunExit.OK
        finally:
            queue.close()
            server.kill()
    check_log(run, "the server cannot write to its disk")


def test_workers_drain_a_redis_at_its_memory_limit_and_report_it(tmp_path, monkeypatch, new_redis):
    server = new_redis()
    monkeypatch.setenv("ERGON_REDIS__URL", server.url)
    queue, handled = RedisQueue("orders", url=server.url), HandledTransactions(tmp_path)
    with server.client() as client:
        queue.dispatch(make_orders(500))
        with start_worker(tmp_path, REDIS_IMPORT) as run:
            port = wait_for_port(run)
            wait_for_status(port, "/ready", 200)
            client.config_set("maxmemory", "1")
            wait_for_cause("memory is full", partial(queue.dispatch, make_orders(1)))
            # Workers still read and ack; Redis rejects their deferrals, dead letters and dispatches.
            wait_until_not_ready(port, "memory is full")
            handled.wait_for(500)
            assert_stays_not_ready(port, "memory is full")
            client.config_set("maxmemory", "0")
            wait_for_status(port, "/ready", 200)
            queue.dispatch(make_orders(100, prefix="more"))
            handled.wait_for(600)
            run.send_signal(signal.SIGTERM)
            assert run.wait_for_exit()[0] == RunExit.OK
    queue.close()
    assert not [line for line in run.output if 'event="process exited unexpectedly"' in line]


@pytest.mark.parametrize(
    "settlement", [DeadLetter("declined"), Defer(0.0), Defer(60.0)], ids=["dead", "ready", "later"]
)
def test_a_settlement_that_redis_has_no_memory_for_can_be_repeated_and_names_the_cause(new_redis, settlement):
    server = new_redis()
    queue = RedisQueue("orders", url=server.url)
    queue.dispatch(make_orders(1))
    (delivery,) = queue.fetch_transactions(1)
    assert queue.write_refusal is None
    with server.client() as client:
        client.config_set("maxmemory", "1")
        assert queue.settle([(delivery, settlement)]) == [SettleResult.FAILED]
        assert "raise maxmemory" in queue.write_refusal
        client.config_set("maxmemory", "0")
    assert queue.settle([(delivery, settlement)]) == [SettleResult.SETTLED]
    queue.fetch_transactions(2)
    assert queue.write_refusal is None
    queue.close()


def test_workers_started_at_the_memory_limit_of_redis_wait_and_report_it(tmp_path, monkeypatch, new_redis):
    server = new_redis()
    monkeypatch.setenv("ERGON_REDIS__URL", server.url)
    handled = HandledTransactions(tmp_path)
    with server.client() as client:
        client.config_set("maxmemory", "1")
        with start_worker(tmp_path, REDIS_IMPORT) as run:
            port = wait_for_port(run)
            wait_until_not_ready(port, "memory is full")
            assert_stays_not_ready(port, "memory is full")
            client.config_set("maxmemory", "0")
            queue = RedisQueue("orders", url=server.url)
            queue.dispatch(make_orders(100))
            queue.close()
            handled.wait_for(100)
            run.send_signal(signal.SIGTERM)
            assert run.wait_for_exit()[0] == RunExit.OK
    check_log(run, "memory is full")


ACCOUNT_SETTINGS = "accounts { A { jetstream { max_store: 1MB, max_mem: 1MB }, users: [{user: a, password: a}] } }"


def test_a_nats_account_at_its_limit_rejects_dispatches_temporarily_with_the_reason(new_nats):
    server = new_nats(settings=ACCOUNT_SETTINGS)
    queue = as_sync(NatsQueue("orders", url=server.url.replace("://", "://a:a@"), patience=1.0))
    queue.open()
    number = 0

    def send():
        nonlocal number
        number += 1
        queue.dispatch([Transaction({"text": "x" * 20_000}, id=f"order-{number}-{part}") for part in range(10)])

    wait_for_cause("resource limits exceeded for account", send)
    while deliveries := queue.fetch_transactions(100, wait=0.2):
        queue.settle([(delivery, Ack()) for delivery in deliveries])
    send()
    queue.close()
