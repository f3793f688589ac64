"""Servers as fixtures, one per test process; tests that stop or cut a server start a separate one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.databases import DatabasePool
from tests.servers.nats import PrivateNats
from tests.servers.postgres import PrivatePostgres
from tests.servers.rabbitmq import DEFAULT_URL, PrivateRabbitMQ, is_answering
from tests.servers.redis import PrivateRedis, PrivateSentinels
from tests.servers.releases import find_root
from tests.servers.seaweed import CREDENTIALS, PrivateSeaweed


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """A running server that this test process shares among its tests; it does not sync, so crash tests need another."""
    # Not pytest's tmp_path: the user postgres cannot enter it when root runs the tests.
    folder = Path(tempfile.mkdtemp(prefix="ergon-postgres-"))
    server = PrivatePostgres(folder, fsync=False)
    try:
        server.start()
        yield server
    finally:
        server.heal_network()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def databases(postgres: PrivatePostgres) -> DatabasePool:
    return DatabasePool(postgres)


@pytest.fixture
def database(databases: DatabasePool) -> Iterator[str]:
    """The dsn of an empty database with our tables, for one test alone."""
    dsn = databases.borrow()
    yield dsn
    databases.release(dsn)


@pytest.fixture
def new_postgres() -> Iterator[Callable[..., PrivatePostgres]]:
    """Starts servers for one test that stops or cuts them; the arguments are those of PrivatePostgres."""
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
            server.heal_network()
            server.kill()
            shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture
def new_folder() -> Iterator[Callable[[str], Path]]:
    """Creates folders that other users than the tests' own may enter, unlike pytest's tmp_path."""
    folders: list[Path] = []

    def make(name: str) -> Path:
        folders.append(Path(tempfile.mkdtemp(prefix=f"ergon-{name}-")))
        return folders[-1]

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[str]:
    """The address of a RabbitMQ for tests that do not disturb others: the machine's own, or else a private one."""
    if find_root() is None and is_answering(DEFAULT_URL):
        yield DEFAULT_URL
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
    """Starts brokers for one test, which may use any queue names."""
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
def seaweed_server() -> Iterator[PrivateSeaweed]:
    """A running server with an S3 gateway that this test process shares among its tests."""
    folder = Path(tempfile.mkdtemp(prefix="ergon-seaweed-"))
    server = PrivateSeaweed(folder)
    try:
        server.start()
        for bucket in ("conformance", "artifacts"):
            server.create_bucket(bucket)
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def seaweed(seaweed_server: PrivateSeaweed, monkeypatch: pytest.MonkeyPatch) -> PrivateSeaweed:
    """That server, with its credentials in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return seaweed_server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[PrivateNats]:
    """A running NATS server that this test process shares among its tests; each uses its own queue names."""
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
    """Starts NATS servers for one test that stops or cuts them; the arguments are those of PrivateNats."""
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
            server.heal_network()
            server.kill()
            shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture
def new_redis() -> Iterator[Callable[..., PrivateRedis]]:
    """Starts servers for one test, which may use any keys; the arguments are those of PrivateRedis."""
    servers: list[PrivateRedis] = []

    def make(**options: object) -> PrivateRedis:
        server = PrivateRedis(tempfile.mkdtemp(prefix="ergon-redis-"), **options)
        servers.append(server)
        server.start()
        return server

    try:
        yield make
    finally:
        for server in servers:
            server.kill()
            shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture
def new_sentinels() -> Iterator[Callable[..., PrivateSentinels]]:
    """Starts a primary, a replica and sentinels for one test; the arguments are those of PrivateSentinels."""
    groups: list[tuple[Path, PrivateSentinels]] = []

    def make(**options: object) -> PrivateSentinels:
        folder = Path(tempfile.mkdtemp(prefix="ergon-sentinels-"))
        groups.append((folder, PrivateSentinels(folder, **options)))
        groups[-1][1].start()
        return groups[-1][1]

    try:
        yield make
    finally:
        for folder, group in groups:
            group.stop()
            shutil.rmtree(folder, ignore_errors=True)
