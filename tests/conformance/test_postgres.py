"""PostgreSQL takes the exam, on a server of its own that is stopped, killed and cut off."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from contextlib import contextmanager

import psycopg
import pytest

from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.schema import migrate
from ergon_framework.testing.conformance.connector import CHECKS, Candidate, exam
from tests.servers.pgbouncer import PrivatePgBouncer
from tests.servers.postgres import PrivatePostgres

#: A silent network is noticed sooner than by default, as anybody can have it.
SOON = "connect_timeout=2&tcp_user_timeout=4000"


class Outbox:
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


class PostgresCandidate(Candidate):
    receives = True
    durable = True
    patience = 30.0

    def __init__(self, server, dsn):
        self.server = server
        self._dsn = dsn
        migrate.upgrade(dsn)
        self._numbers = itertools.count()

    def client(self, queue, *, lease, inbox=False):
        # A name of its own makes each client a worker instance of its own, as another process would be.
        dsn = f"{self._dsn}?application_name=client-{next(self._numbers)}&{SOON}"
        return PostgresQueue(queue, dsn=dsn, lease=lease, inbox=inbox, priority=lambda sent: sent.type == "urgent")

    def receive(self, queue, body, headers):
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute("select ergon.send(%s, %s, %s)", (queue, body, json.dumps(dict(headers))))

    def dispatch_urgent(self, client, transaction):
        client.dispatch([transaction.replace(type="urgent")])
        return True

    def inbox(self, task):
        task.connector = self.client(task.connector.name, lease=task.connector.capabilities.lease, inbox=True)
        return task

    @contextmanager
    def outbox(self, queue):
        with psycopg.connect(self._dsn) as connection:
            yield Outbox(PostgresQueue(queue, dsn=self._dsn), connection)


@contextmanager
def running():
    folder = tempfile.mkdtemp(prefix="ergon-exam-")
    server = PrivatePostgres(folder)
    try:
        server.start()
        yield server
    finally:
        server.mend()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def candidate():
    with running() as server:
        yield PostgresCandidate(server, server.create_database("exam"))


@pytest.fixture(scope="module")
def behind_a_pooler():
    """The same through PgBouncer, which hands one session to many; there is nobody to stop, kill or cut there."""
    folder = tempfile.mkdtemp(prefix="ergon-pooler-")
    with running() as server:
        server.create_database("exam")
        pooler = PrivatePgBouncer(folder, server)
        try:
            pooler.start()
            yield PostgresCandidate(None, pooler.dsn("exam"))
        finally:
            pooler.stop()
            shutil.rmtree(folder, ignore_errors=True)


def spec(check):
    return [pytest.mark.spec(*check.ids)]


#: Notifications do not reach a session that is not one's own: there everybody polls.
POLLING = [check for check in CHECKS if check.name != "a_listener_is_woken_by_a_dispatch"]

test_postgres = exam("candidate", marks=spec)
test_postgres_behind_a_pooler = exam("behind_a_pooler", checks=POLLING, marks=spec)
