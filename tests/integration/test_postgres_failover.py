"""The primary is killed and its synchronous standby promoted: workers go on, and no confirmed work is lost."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import ExitStack

import psycopg
import pytest

from ergon_framework import ConnectionLostError, ConsumerPolicy, Transaction, consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres.notify import NotificationListener
from ergon_framework.database.migrate import upgrade
from ergon_framework.database.operation import Query
from ergon_framework.database.pool import ConnectionPool
from tests.integration.running import ERGON
from tests.integration.test_connection_log import connection_log  # noqa: F401 - a fixture
from tests.servers.failover import PostgresCluster

TIMEOUT_SECONDS = 120.0
POLICY = ConsumerPolicy.load(
    {
        "loop": {"streaming": True, "concurrency": {"value": 4}, "empty_queue": {"backoff": 0.05, "cap": 0.3}},
        "steps": {
            "fetch": {"retry": {"backoff": 0.1, "cap": 0.5}},
            "process": {"retry": {"max_attempts": 100, "backoff": 0.1, "cap": 0.5}},
        },
    }
)


@pytest.fixture
def cluster(new_folder):
    folder = new_folder("cluster")
    folder.chmod(0o755)
    cluster = PostgresCluster(folder)
    cluster.start()
    yield cluster
    cluster.kill()


def dispatch(queue, names):
    """Dispatch until it is confirmed; an unconfirmed one may have arrived, and the inbox rejects its repetition."""
    while True:
        try:
            queue.dispatch([Transaction({}, id=name) for name in names])
        except ConnectionLostError:
            threading.Event().wait(0.05)
        else:
            return


@pytest.mark.invariant
@pytest.mark.spec("CNN-07", "DX-12")
def test_workers_go_on_at_the_promoted_standby_and_nothing_is_lost_or_doubled(cluster, connection_log):  # noqa: F811
    upgrade(cluster.dsn())
    with psycopg.connect(cluster.dsn()) as connection:
        connection.execute("create table effect (id text not null)")
    queues = [PostgresQueue("orders", dsn=cluster.dsn(), inbox=True, lease=4.0 + number) for number in range(2)]

    def make_task(queue):
        @consumer(queue, policy=POLICY)
        def handle(order, transaction: Transaction):
            with psycopg.connect(cluster.dsn(), connect_timeout=5) as connection:
                if queue.record_processed_on(connection, transaction):
                    connection.execute("insert into effect values (%s)", [transaction.id])

        return handle

    tasks = [make_task(queue) for queue in queues]
    threads = [threading.Thread(target=task.run, daemon=True) for task in tasks]
    sender = PostgresQueue("orders", dsn=cluster.dsn())
    names = [f"order-{number}" for number in range(400)]
    with ExitStack() as stack:
        stack.callback(sender.close)
        for thread in threads:
            thread.start()
        dispatch(sender, names[:200])
        cluster.fail_over()
        dispatch(sender, names[200:300])
        cluster.rebuild_standby()
        assert wait_for_effects(cluster.dsn(), 300) == sorted(names[:300])
        # Now without work: a worker whose handlers wait for the database does not fetch, and loses no connection.
        connection_log.clear()
        old = cluster.primary
        old.kill()
        connection_log.wait("connection lost")
        cluster.promote_standby()
        connection_log.wait("connection restored")
        dispatch(sender, names[300:])
        assert wait_for_effects(cluster.dsn(), len(names)) == sorted(names)
        assert diagnose_connection(cluster.dsn()) == "ok"
        for task in tasks:
            task.stop()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    first = {record.event: record for record in reversed(connection_log.records)}
    assert first["connection lost"].host == f"127.0.0.1:{old.port}"
    assert first["connection restored"].host == f"127.0.0.1:{cluster.primary.port}"


def diagnose_connection(dsn):
    """Return the severity of the doctor's finding about the connection."""
    env, command = {**os.environ, "ERGON_POSTGRES__DSN": dsn}, [*ERGON, "doctor", "--json"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    (database,) = [each for each in json.loads(result.stdout)["targets"] if each["name"] == "database"]
    return {each["check"]: each["severity"] for each in database["diagnostics"]}["connection"]


def wait_for_effects(dsn, count):
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(round(TIMEOUT_SECONDS / 0.1)):
            names = [row[0] for row in connection.execute("select id from effect order by id")]
            if len(names) >= count:
                return names
            threading.Event().wait(0.1)
    return names


@pytest.mark.spec("CNN-07")
def test_connections_to_a_server_that_became_read_only_are_replaced(cluster):
    """A server that is demoted keeps its sessions where a proxy or a setting makes it read-only."""
    upgrade(cluster.dsn())
    queue = PostgresQueue("orders", dsn=cluster.dsn())
    queue.dispatch([Transaction({}, id="order-1")])
    queue.close()
    pool = ConnectionPool(cluster.dsn())
    listener, notified = NotificationListener(pool), threading.Event()
    old, new = cluster.primary, cluster.standby
    unsubscribe = listener.subscribe(1, notified.set)
    assert notified.wait(TIMEOUT_SECONDS)  # at its registration
    assert pool.run(write(), timeout_seconds=30.0) == old.port
    with psycopg.connect(old.dsn(), autocommit=True) as admin:
        admin.execute("alter system set default_transaction_read_only = on")
    old.reload()
    new.promote()
    with pytest.raises(ConnectionLostError, match="read-only"):
        pool.run(write(), timeout_seconds=30.0)
    assert pool.run(write(), timeout_seconds=30.0) == new.port
    assert pool.host == f"127.0.0.1:{new.port}"
    notified.clear()
    with psycopg.connect(new.dsn(), autocommit=True) as admin:
        for _ in range(round(TIMEOUT_SECONDS / 0.1)):
            admin.execute("select pg_notify('ergon', '1')")
            if notified.wait(0.1):
                break
    assert notified.is_set(), "the listener still waits for notifications of the old server"
    unsubscribe()
    pool.close()


def write():
    yield Query("insert into ergon.listener (queue, id, until) values (1, 1, now()) on conflict do nothing")
    ((port,),) = yield Query("select inet_server_port()")
    return port
