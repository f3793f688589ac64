"""Servers as fixtures, one per test process; tests that stop or cut a server start one of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.databases import Databases
from tests.servers.postgres import PrivatePostgres
from tests.servers.rabbitmq import RUNNING, PrivateRabbitMQ, answers


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


@pytest.fixture(scope="session")
def databases(postgres: PrivatePostgres) -> Databases:
    return Databases(postgres)


@pytest.fixture
def database(databases: Databases) -> Iterator[str]:
    """The dsn of a database with our tables, empty, for one test alone."""
    dsn = databases.borrow()
    yield dsn
    databases.give_back(dsn)


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


@pytest.fixture
def new_folder() -> Iterator[Callable[[str], Path]]:
    """Makes folders that other users than the tests' own may enter, which pytest's tmp_path is not."""
    folders: list[Path] = []

    def make(name: str) -> Path:
        folders.append(Path(tempfile.mkdtemp(prefix=f"ergon-{name}-")))
        return folders[-1]

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[str]:
    """The address of a RabbitMQ for tests that leave others alone: the machine's own, or else a private one."""
    if answers(RUNNING):
        yield RUNNING
        return
    folder = Path(tempfile.mkdtemp(prefix="ergon-rabbitmq-"))
    server = PrivateRabbitMQ(folder)
    try:
        server.start()
        yield server.url
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def new_rabbitmq() -> Iterator[Callable[[], PrivateRabbitMQ]]:
    """Makes running brokers for one test, which may name its queues as it likes."""
    servers: list[PrivateRabbitMQ] = []

    def make() -> PrivateRabbitMQ:
        server = PrivateRabbitMQ(tempfile.mkdtemp(prefix="ergon-rabbitmq-"))
        servers.append(server)
        server.start()
        return server

    try:
        yield make
    finally:
        for server in servers:
            server.kill()
            shutil.rmtree(server.folder, ignore_errors=True)
