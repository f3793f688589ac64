"""The PostgreSQL store passes the conformance suite, in both variants, against a real server."""

from __future__ import annotations

import subprocess

import pytest

from ergon_framework.facts.model import BoundarySide
from ergon_framework.facts.stores.memory_contents import MemoryContentStore
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from ergon_framework.testing.conformance.boundary.suite import CHECKS, BoundaryUnderTest, pytest_suite

_SERVERS = {}


@pytest.fixture(autouse=True)
def share_servers(postgres, databases):
    _SERVERS.update(postgres=postgres, databases=databases)


class PostgresBoundaryUnderTest(BoundaryUnderTest):
    """Each store is a separate database; its contents are in this process, so that they can be lost."""

    bounded = True
    #: The server of the tests does not sync.
    durable = False
    resumes = True

    def __init__(self):
        self._dsns, self._contents, self._clients = {}, {}, []

    def client(self, store, *, side=BoundarySide.INNER, max_facts=None):
        if store not in self._dsns:
            self._dsns[store] = _SERVERS["databases"].borrow()
            self._contents[store] = MemoryContentStore()
        client = PostgresBoundary(
            self._dsns[store], side=side, contents=self._contents[store], max_facts=max_facts, accept_loss=True
        )
        client.open()
        self._clients.append(client)
        return client

    def backup(self, store):
        binaries, dsn = _SERVERS["postgres"].binaries, self._dsns[store]
        dump = subprocess.run([binaries / "pg_dump", "--data-only", dsn], capture_output=True, check=True).stdout
        tables = "fact_object_uses, fact_objects, fact_contents, fact_readers, facts, fact_ids, fact_log, fact_usage, "
        truncated_tables = ", ".join(
            f"ergon.{name}" for name in (tables + "fact_store, fact_epochs, revision").split(", ")
        )

        def restore_dump():
            # Into the same database of the same server, with all tables as they are: this is the hardest to detect.
            script = f"truncate {truncated_tables};\n".encode() + dump
            psql = [binaries / "psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "-1", dsn]
            subprocess.run(psql, input=script, check=True, capture_output=True)

        return restore_dump

    def lose(self, store, bucket, key):
        self._contents[store].contents.clear()
        return True

    def damage(self, store, bucket, key):
        contents = self._contents[store].contents
        contents.update({digest: b"X" + content[1:] for digest, content in contents.items()})
        return True

    def close(self):
        for client in self._clients:
            client.close()
        for dsn in self._dsns.values():
            _SERVERS["databases"].release(dsn)


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_postgres_boundary = pytest_suite(PostgresBoundaryUnderTest, marks=get_spec_marks)


def test_the_suite_has_more_than_thirty_checks():
    assert len(CHECKS) > 30
