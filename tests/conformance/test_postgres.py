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
from ergon_framework.testing.conformance.connector import Candidate, exam
from tests.servers.postgres import PrivatePostgres


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

    def __init__(self, server):
        self.server = server
        self._dsn = server.create_database("exam")
        migrate.upgrade(self._dsn)
        self._numbers = itertools.count()

    def client(self, queue, *, lease, inbox=False):
        # A name of its own makes each client a worker instance of its own, as another process would be.
        dsn = f"{self._dsn}?application_name=client-{next(self._numbers)}"
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


@pytest.fixture(scope="module")
def candidate():
    folder = tempfile.mkdtemp(prefix="ergon-exam-")
    server = PrivatePostgres(folder)
    try:
        server.start()
        yield PostgresCandidate(server)
    finally:
        server.mend()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


test_postgres = exam("candidate", marks=lambda check: [pytest.mark.spec(*check.ids)])
