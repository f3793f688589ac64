"""The store in PostgreSQL takes the exam, in both flavours, against a real server."""

from __future__ import annotations

import subprocess

import pytest

from ergon_framework.facts.model import Side
from ergon_framework.facts.stores.memory_contents import MemoryContents
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.testing.conformance.boundary import CHECKS, BoundaryCandidate, exam

_SERVER = {}


@pytest.fixture(autouse=True)
def server(postgres, databases):
    _SERVER.update(postgres=postgres, databases=databases)


class PostgresBoundaryCandidate(BoundaryCandidate):
    """Each store is a database of its own; its contents are in this process, so that they can be lost."""

    bounded = True
    #: The server of the tests does not sync.
    durable = False
    resumes = True

    def __init__(self):
        self._dsns, self._contents, self._clients = {}, {}, []

    def client(self, store, *, side=Side.INNER, room=None):
        if store not in self._dsns:
            self._dsns[store] = _SERVER["databases"].borrow()
            self._contents[store] = MemoryContents()
        client = PostgresBoundary(
            self._dsns[store], side=side, contents=self._contents[store], max_facts=room, accept_loss=True
        )
        client.open()
        self._clients.append(client)
        return client

    def backup(self, store):
        binaries, dsn = _SERVER["postgres"].binaries, self._dsns[store]
        dump = subprocess.run([binaries / "pg_dump", "--data-only", dsn], capture_output=True, check=True).stdout
        tables = "fact_object_uses, fact_objects, fact_contents, fact_readers, facts, fact_ids, fact_log, fact_room, "
        empty = ", ".join(f"ergon.{name}" for name in (tables + "fact_store, fact_epochs, revision").split(", "))

        def put_back():
            # Into the same database of the same server, with all tables as they are: the hardest to tell.
            script = f"truncate {empty};\n".encode() + dump
            psql = [binaries / "psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "-1", dsn]
            subprocess.run(psql, input=script, check=True, capture_output=True)

        return put_back

    def lose(self, store, bucket, key):
        self._contents[store].contents.clear()
        return True

    def damage(self, store, bucket, key):
        kept = self._contents[store].contents
        kept.update({digest: b"X" + content[1:] for digest, content in kept.items()})
        return True

    def close(self):
        for client in self._clients:
            client.close()
        for dsn in self._dsns.values():
            _SERVER["databases"].give_back(dsn)


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_postgres_boundary = exam(PostgresBoundaryCandidate, marks=spec)


def test_nothing_is_left_out():
    assert len(CHECKS) > 30
