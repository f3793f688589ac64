"""PostgreSQL passes the conformance suite, on a separate server that is stopped, killed and cut off."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from contextlib import contextmanager

import psycopg
import pytest

from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.database import migrate
from ergon_framework.testing.conformance.connector.suite import CHECKS, ConnectorUnderTest, pytest_suite
from tests.servers.pgbouncer import PrivatePgBouncer
from tests.servers.postgres import PrivatePostgres

#: Detects a dead connection sooner than by default, with options that every user has.
FAST_FAILURE_OPTIONS = "connect_timeout=2&tcp_user_timeout=4000"


class CallerTransaction:
    """The caller's own transaction."""

    def __init__(self, queue, connection):
        self._queue = queue
        self._connection = connection

    def dispatch(self, transactions):
        self._queue.dispatch_on(self._connection, transactions)

    def commit(self):
        self._connection.commit()

    def rollback(self):
        self._connection.rollback()


class PostgresUnderTest(ConnectorUnderTest):
    receives = True
    durable = True
    call_timeout = 30.0

    def __init__(self, server, dsn):
        self.server = server
        self._dsn = dsn
        migrate.upgrade(dsn)
        self._numbers = itertools.count()

    def client(self, queue, *, lease, inbox=False):
        # A separate name makes each client a separate worker instance, as another process would be.
        dsn = f"{self._dsn}?application_name=client-{next(self._numbers)}&{FAST_FAILURE_OPTIONS}"
        return PostgresQueue(queue, dsn=dsn, lease=lease, inbox=inbox)

    def receive(self, queue, body, headers):
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute("select ergon.send(%s, %s, %s)", (queue, body, json.dumps(dict(headers))))

    def inbox(self, task):
        task.connector = self.client(task.connector.name, lease=task.connector.capabilities.lease, inbox=True)
        return task

    @contextmanager
    def outbox(self, queue):
        with psycopg.connect(self._dsn) as connection:
            yield CallerTransaction(PostgresQueue(queue, dsn=self._dsn), connection)


@contextmanager
def run_server():
    folder = tempfile.mkdtemp(prefix="ergon-postgres-")
    server = PrivatePostgres(folder)
    try:
        server.start()
        yield server
    finally:
        server.heal_network()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def system():
    with run_server() as server:
        yield PostgresUnderTest(server, server.create_database("conformance"))


@pytest.fixture(scope="module")
def pooled_system():
    """PgBouncer shares each session among many clients, and its server cannot be stopped, killed or cut off."""
    folder = tempfile.mkdtemp(prefix="ergon-pooler-")
    with run_server() as server:
        server.create_database("conformance")
        pooler = PrivatePgBouncer(folder, server)
        try:
            pooler.start()
            yield PostgresUnderTest(None, pooler.dsn("conformance"))
        finally:
            pooler.stop()
            shutil.rmtree(folder, ignore_errors=True)


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


#: Notifications do not reach a shared session, so every consumer polls there.
POLLING_CHECKS = [check for check in CHECKS if check.name != "a_listener_is_woken_by_a_dispatch"]

test_postgres = pytest_suite("system", marks=get_spec_marks)
test_postgres_behind_a_pooler = pytest_suite("pooled_system", checks=POLLING_CHECKS, marks=get_spec_marks)
