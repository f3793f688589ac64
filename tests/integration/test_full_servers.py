"""A server that is there and cannot serve (a full disk, a memory limit, read-only) is waited out and named."""

from __future__ import annotations

import pwd
import signal
import time
import uuid
from functools import partial
from urllib.parse import quote

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Later, SettleResult
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.errors import ConnectionLost
from ergon_framework.runner.exits import Exit
from ergon_framework.schema.migrate import upgrade
from ergon_framework.transaction import Transaction
from tests.integration.running import Running
from tests.integration.test_run_probes import asked, port_of, until
from tests.servers.redis import PrivateRedis
from tests.servers.small_disk import SmallDisk

pytestmark = [pytest.mark.spec("SEC-15"), pytest.mark.invariant]

PATIENCE = 60.0
#: Longer than three attempts of a fetch with the default policy take.
OUTAGE = 4.0

WORKER = """
{imports}

@consumer(Queue("orders"))
def task(order, transaction: Transaction):
    with open("done", "a") as file:
        file.write(transaction.id + chr(10))
    time.sleep(0.002)
"""


class Ledger:
    """What was handled, in the folder of a run."""

    def __init__(self, folder):
        self._path = folder / "done"

    def __len__(self):
        return len(self.ids)

    @property
    def ids(self):
        return set(self._path.read_text().splitlines()) if self._path.exists() else set()

    def wait_for(self, count):
        end = time.monotonic() + PATIENCE
        while len(self) < count:
            assert time.monotonic() < end, f"{len(self)} of {count} were handled"
            time.sleep(0.05)


def running(folder, imports):
    """``ergon run`` with two processes, at its defaults."""
    options = ("--streaming", "--processes", "2", "--probe-port", "0")
    return Running(folder, WORKER.format(imports=imports), *options)


def wait_until_not_ready(port, words):
    """Return once every process says that it is not ready because of *words*; it stays live."""
    end = time.monotonic() + PATIENCE
    while True:
        status, told = asked(port, "/ready")
        if status == 503 and len(told["reasons"]) == 2 and all(words in reason for reason in told["reasons"]):
            assert asked(port, "/live")[0] == 200
            return told
        assert time.monotonic() < end, told
        time.sleep(0.05)


def stays_not_ready(port, words):
    end = time.monotonic() + OUTAGE
    while time.monotonic() < end:
        status, told = asked(port, "/ready")
        assert (status, told["live"]) == (503, True), told
        assert any(words in reason for reason in told["reasons"]), told
        time.sleep(0.2)


@pytest.fixture
def small_database(postgres):
    """The dsn of a database on a disk of its own, and that disk; the WAL of the server is elsewhere."""
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


def orders(count, *, prefix="order"):
    return [Transaction(f"{prefix}-{number}", {"text": "x" * 200}) for number in range(count)]


@pytest.mark.parametrize("begins", ["before", "during", "during, without an init file"])
def test_a_full_disk_of_the_database_is_waited_out_and_named(tmp_path, monkeypatch, small_database, begins):
    dsn, disk = small_database
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    count = 3000
    queue = PostgresQueue("orders", dsn=dsn)
    queue.dispatch(orders(count))
    queue.close()
    done = Ledger(tmp_path)
    if begins.endswith("init file"):
        # The server writes this cache of its catalog again when the next session connects.
        for file in disk.folder.rglob("pg_internal.init"):
            file.unlink()
    if begins != "before":
        disk.fill()
    with running(tmp_path, "from ergon_framework.connectors.postgres import PostgresQueue as Queue") as run:
        port = port_of(run)
        if begins == "before":
            done.wait_for(200)
            disk.fill()
        wait_until_not_ready(port, "the disk of the database is full")
        stays_not_ready(port, "the disk of the database is full")
        disk.empty()
        done.wait_for(count)
        until(port, "/ready", 200)
        run.send(signal.SIGTERM)
        assert run.ended()[0] == Exit.OK
    assert done.ids == {f"order-{number}" for number in range(count)}
    check_log(run, "the disk of the database is full")


def check_log(run, words):
    """Each process has logged an outage with its cause, and none has died."""
    lost = [line for line in run.said if 'event="connection lost"' in line]
    assert len(lost) >= 2
    assert all(words in line for line in lost)
    assert not [line for line in run.said if 'event="process died"' in line]


def wait_for_cause(words, call):
    """Repeat *call* until it is ConnectionLost with *words*."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            call()
        except ConnectionLost as error:
            if words in str(error):
                return
            raise
    raise AssertionError(f"never refused with {words!r}")


def test_a_database_that_becomes_read_only_is_a_wait_and_not_an_end(database):
    name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch(orders(1))

    def switch(statement):
        """As a demoted primary does it: sessions end, and new ones write no more."""
        queue.close()
        with psycopg.connect(database, autocommit=True) as admin:
            admin.execute("set default_transaction_read_only = off")
            admin.execute(f"alter database {name} {statement}")

    switch("set default_transaction_read_only = on")
    try:
        with pytest.raises(ConnectionLost, match="the database is read-only"):
            queue.fetch_transactions(1)
    finally:
        switch("reset default_transaction_read_only")
    (delivery,) = queue.fetch_transactions(1)
    queue.settle([(delivery, Ack())])
    queue.close()


@pytest.mark.parametrize(
    "option, words",
    [("statement_timeout", "the database cancelled the statement"), ("lock_timeout", "did not grant a lock in time")],
)
def test_a_time_limit_of_the_role_is_a_wait_and_not_an_end(database, option, words):
    queue = PostgresQueue("orders", dsn=f"{database}?options={quote(f'-c {option}=100')}")
    queue.dispatch(orders(1))
    with psycopg.connect(database) as other:
        other.execute("lock table ergon.worker in access exclusive mode")
        with pytest.raises(ConnectionLost, match=words):
            queue.fetch_transactions(1)
    (delivery,) = queue.fetch_transactions(1)
    queue.settle([(delivery, Ack())])
    queue.close()


REDIS = "from ergon_framework.connectors.redis import RedisQueue as Queue"


def test_a_full_disk_of_redis_is_waited_out_and_named(tmp_path, monkeypatch):
    with SmallDisk(8) as disk:
        server = PrivateRedis(disk.folder / "redis", settings={"appendonly": "no", "save": "3600 1000000"})
        server.start()
        monkeypatch.setenv("ERGON_REDIS__URL", server.url)
        queue, done = RedisQueue("orders", url=server.url), Ledger(tmp_path)
        try:
            with server.client() as client, running(tmp_path, REDIS) as run:
                port = port_of(run)
                queue.dispatch(orders(100))
                done.wait_for(100)
                disk.fill()
                client.bgsave()
                wait_until_not_ready(port, "cannot write to its disk")
                stays_not_ready(port, "cannot write to its disk")
                wait_for_cause("cannot write to its disk", partial(queue.dispatch, orders(1)))
                disk.empty()
                client.bgsave()
                until(port, "/ready", 200)
                queue.dispatch(orders(100, prefix="more"))
                done.wait_for(200)
                run.send(signal.SIGTERM)
                assert run.ended()[0] == Exit.OK
        finally:
            queue.close()
            server.kill()
    check_log(run, "the server cannot write to its disk")


def test_a_redis_at_its_memory_limit_is_emptied_by_its_workers_which_name_it(tmp_path, monkeypatch, new_redis):
    server = new_redis()
    monkeypatch.setenv("ERGON_REDIS__URL", server.url)
    queue, done = RedisQueue("orders", url=server.url), Ledger(tmp_path)
    with server.client() as client:
        queue.dispatch(orders(500))
        with running(tmp_path, REDIS) as run:
            port = port_of(run)
            until(port, "/ready", 200)
            client.config_set("maxmemory", "1")
            wait_for_cause("memory is full", partial(queue.dispatch, orders(1)))
            # Workers read and ack on; what they would put off, dead-letter or dispatch is refused.
            wait_until_not_ready(port, "memory is full")
            done.wait_for(500)
            stays_not_ready(port, "memory is full")
            client.config_set("maxmemory", "0")
            until(port, "/ready", 200)
            queue.dispatch(orders(100, prefix="more"))
            done.wait_for(600)
            run.send(signal.SIGTERM)
            assert run.ended()[0] == Exit.OK
    queue.close()
    assert not [line for line in run.said if 'event="process died"' in line]


@pytest.mark.parametrize(
    "settlement", [DeadLetter("declined"), Later(0.0), Later(60.0)], ids=["dead", "ready", "later"]
)
def test_a_settlement_that_redis_has_no_memory_for_is_kept_and_named(new_redis, settlement):
    server = new_redis()
    queue = RedisQueue("orders", url=server.url)
    queue.dispatch(orders(1))
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


def test_a_start_at_the_memory_limit_of_redis_waits_and_names_it(tmp_path, monkeypatch, new_redis):
    server = new_redis()
    monkeypatch.setenv("ERGON_REDIS__URL", server.url)
    done = Ledger(tmp_path)
    with server.client() as client:
        client.config_set("maxmemory", "1")
        with running(tmp_path, REDIS) as run:
            port = port_of(run)
            wait_until_not_ready(port, "memory is full")
            stays_not_ready(port, "memory is full")
            client.config_set("maxmemory", "0")
            queue = RedisQueue("orders", url=server.url)
            queue.dispatch(orders(100))
            queue.close()
            done.wait_for(100)
            run.send(signal.SIGTERM)
            assert run.ended()[0] == Exit.OK
    check_log(run, "memory is full")


ACCOUNT = "accounts { A { jetstream { max_store: 1MB, max_mem: 1MB }, users: [{user: a, password: a}] } }"


def test_a_nats_account_at_its_limit_refuses_for_now_and_says_why(new_nats):
    server = new_nats(settings=ACCOUNT)
    queue = as_sync(NatsQueue("orders", url=server.url.replace("://", "://a:a@"), patience=1.0))
    queue.open()
    number = 0

    def send():
        nonlocal number
        number += 1
        queue.dispatch([Transaction(f"order-{number}-{part}", {"text": "x" * 20_000}) for part in range(10)])

    wait_for_cause("resource limits exceeded for account", send)
    while held := queue.fetch_transactions(100, wait=0.2):
        queue.settle([(delivery, Ack()) for delivery in held])
    send()
    queue.close()
