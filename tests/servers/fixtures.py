"""Servers as fixtures, one per test process; tests that stop or cut a server start one of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.postgres import PrivatePostgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """A running server that this test process shares among its tests; it does not sync, so crash tests need another."""
    # Not pytest's tmp_path: it is closed to the user postgres when root runs the tests.
    folder = Path(tempfile.mkdtemp(prefix="ergon-postgres-"))
    server = PrivatePostgres(folder, fsync=False)
    try:
        server.start()
        yield server
    finally:
        server.mend()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def new_postgres() -> Iterator[Callable[..., PrivatePostgres]]:
    """Makes running servers for one test, to be treated badly; the arguments are those of PrivatePostgres."""
    servers: list[PrivatePostgres] = []

    def make(**options: object) -> PrivatePostgres:
        server = PrivatePostgres(tempfile.mkdtemp(prefix="ergon-postgres-"), **options)
        servers.append(server)
        server.start()
        return server

    try:
        yield make
    finally:
        for server in servers:
            server.mend()
            server.kill()
            shutil.rmtree(server.folder, ignore_errors=True)
