"""Servers as fixtures, one per test process; tests that stop or cut a server start one of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.databases import Databases
from tests.servers.nats import PrivateNats
from tests.servers.postgres import PrivatePostgres
from tests.servers.rabbitmq import RUNNING, PrivateRabbitMQ, answers
from tests.servers.redis import PrivateRedis
from tests.servers.seaweed import ACCESS, PrivateSeaweed


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


@pytest.fixture(scope="session")
def running_seaweed() -> Iterator[PrivateSeaweed]:
    """A running server with an S3 gateway that this test process shares among its tests."""
    folder = Path(tempfile.mkdtemp(prefix="ergon-seaweed-"))
    server = PrivateSeaweed(folder)
    try:
        server.start()
        for bucket in ("exam", "artifacts"):
            server.make_bucket(bucket)
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def seaweed(running_seaweed: PrivateSeaweed, monkeypatch: pytest.MonkeyPatch) -> PrivateSeaweed:
    """That server, with credentials for it in the environment."""
    for name, value in ACCESS.items():
        monkeypatch.setenv(name, value)
    return running_seaweed


@pytest.fixture(scope="session")
def nats_server() -> Iterator[PrivateNats]:
    """A running NATS server that this test process shares among its tests; each has queues of its own names."""
    folder = Path(tempfile.mkdtemp(prefix="ergon-nats-"))
    server = PrivateNats(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def new_nats() -> Iterator[Callable[..., PrivateNats]]:
    """Makes running NATS servers for one test, to be treated badly; the arguments are those of PrivateNats."""
    servers: list[PrivateNats] = []

    def make(**options: object) -> PrivateNats:
        server = PrivateNats(tempfile.mkdtemp(prefix="ergon-nats-"), **options)
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
def new_redis() -> Iterator[Callable[[], PrivateRedis]]:
    """Makes running servers for one test, which may name its keys as it likes."""
    servers: list[PrivateRedis] = []

    def make() -> PrivateRedis:
        server = PrivateRedis(tempfile.mkdtemp(prefix="ergon-redis-"))
        servers.append(server)
        server.start()
        return server

    try:
        yield make
    finally:
        for server in servers:
            server.kill()
            shutil.rmtree(server.folder, ignore_errors=True)
