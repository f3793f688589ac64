"""Rotated credentials of PostgreSQL: every new connection reads them again, and a rotation fails no transaction."""

from __future__ import annotations

import asyncio
import itertools
import threading

import psycopg
import pytest
from psycopg import sql

from ergon_framework import ConsumerPolicy, Transaction, consumer
from ergon_framework.connectors import Credentials, credentials_from_files
from ergon_framework.connectors import login as broker_login
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.database import login
from ergon_framework.database.migrate import check, upgrade
from ergon_framework.database.operation import Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.providers.postgres.connection import connect

TIMEOUT_SECONDS = 120.0
GRANTS = """
grant usage on schema ergon to app;
grant select, insert, update, delete on all tables in schema ergon to app;
grant usage on all sequences in schema ergon to app;
"""


class RotatingServer:
    """A server with the role ``app``, whose password is also in a file."""

    def __init__(self, server, folder):
        self.server = server
        self.password_file = folder / "password"
        self.user_file = folder / "user"
        upgrade(server.dsn())
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            admin.execute("create role app login")
            admin.execute(GRANTS)
        server.require_passwords()
        self.dsn = server.dsn().replace("postgres@", "app@")
        self._numbers = itertools.count(1)
        self.rotate()

    def rotate(self):
        """Change the password, first in the server and then in the file, and end all sessions of the role."""
        password = self.change_password()
        self.write_password(password)
        self.disconnect()
        return password

    def change_password(self):
        password = f"r0tated-{next(self._numbers)}-secret"
        with psycopg.connect(self.server.dsn(), autocommit=True) as admin:
            admin.execute(sql.SQL("alter role app password {}").format(password))
        return password

    def write_password(self, password):
        path = self.password_file.with_suffix(".new")
        path.write_text(password + "\n")
        path.replace(self.password_file)

    def disconnect(self):
        with psycopg.connect(self.server.dsn(), autocommit=True) as admin:
            admin.execute("select pg_terminate_backend(pid, 10000) from pg_stat_activity where usename like 'app%'")


@pytest.fixture
def rotating(new_postgres, tmp_path):
    return RotatingServer(new_postgres(fsync=False), tmp_path)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.setattr(login, "_is_configured", False)


def read_user(connection_pool):
    def read():
        ((user,),) = yield Query("select current_user::text")
        return user

    return connection_pool.run(read(), timeout_seconds=30.0)


def read_user_async(connection_pool):
    def read():
        ((user,),) = yield Query("select current_user::text")
        return user

    async def run():
        try:
            return await connection_pool.run_async(read(), timeout_seconds=30.0)
        finally:
            await connection_pool.close_async()

    return asyncio.run(run())


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("read", [read_user, read_user_async])
def test_a_new_connection_uses_the_credentials_of_that_moment(rotating, read):
    pool = ConnectionPool(rotating.dsn, credentials=credentials_from_files(rotating.password_file))
    assert read(pool) == "app"
    rotating.rotate()
    pool = ConnectionPool(rotating.dsn, credentials=credentials_from_files(rotating.password_file))
    assert read(pool) == "app"
    pool.close()


def test_a_connection_that_was_authenticated_before_a_rotation_stays_usable(rotating):
    pool = ConnectionPool(rotating.dsn, credentials=credentials_from_files(rotating.password_file))
    assert read_user(pool) == "app"
    rotating.change_password()
    assert read_user(pool) == "app"
    pool.close()


def test_the_user_can_change_too(rotating):
    rotating.user_file.write_text("app")
    source = credentials_from_files(rotating.password_file, rotating.user_file)
    pool = ConnectionPool(rotating.dsn.replace("app@", ""), credentials=source)
    assert read_user(pool) == "app"
    with psycopg.connect(rotating.server.dsn(), autocommit=True) as admin:
        admin.execute("create role app_2 login password 's3cond-secret'")
    rotating.user_file.write_text("app_2")
    rotating.password_file.write_text("s3cond-secret")
    rotating.disconnect()
    assert read_user(pool) == "app_2"
    pool.close()


@pytest.mark.spec("SEC-03")
def test_a_first_login_that_is_refused_is_a_configuration_error(rotating):
    rotating.write_password("wr0ng-secret")
    pool = ConnectionPool(rotating.dsn, credentials=credentials_from_files(rotating.password_file))
    with pytest.raises(ConfigurationError, match=r"refused the login .*: .*password authentication failed") as raised:
        read_user(pool)
    assert "wr0ng-secret" not in str(raised.value)
    rotating.password_file.unlink()
    with pytest.raises(ConfigurationError, match=r"password file .* cannot be read"):
        read_user(pool)
    pool.close()


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("refuse", ["the server was first", "the file is missing"])
def test_a_refusal_after_an_accepted_login_is_retried_for_a_limited_time(rotating, monkeypatch, refuse):
    pool = ConnectionPool(rotating.dsn, credentials=credentials_from_files(rotating.password_file))
    assert read_user(pool) == "app"
    password = rotating.change_password()
    if refuse == "the file is missing":
        rotating.password_file.unlink()
    rotating.disconnect()
    with pytest.raises(ConnectionLostError, match="accepted before"):
        read_user(pool)
    rotating.write_password(password)
    assert read_user(pool) == "app"
    rotating.change_password()
    rotating.disconnect()
    with pytest.raises(ConnectionLostError):
        read_user(pool)
    monkeypatch.setattr(broker_login, "ROTATION_SECONDS", 0.0)
    with pytest.raises(ConfigurationError, match="password authentication failed"):
        read_user(pool)
    pool.close()


def test_a_password_that_changes_between_the_read_and_the_login_is_read_again(rotating):
    old, new = "0ld-secret", rotating.change_password()
    passwords = iter([old, new])
    pool = ConnectionPool(rotating.dsn, credentials=lambda: Credentials(None, next(passwords)))
    assert read_user(pool) == "app"
    pool.close()


@pytest.mark.spec("SEC-03")
@pytest.mark.parametrize("result", ["a text", OSError("s3cret in a text")])
def test_an_invalid_source_is_a_configuration_error_without_its_text(rotating, result):
    def read():
        if isinstance(result, Exception):
            raise result
        return result

    pool = ConnectionPool(rotating.dsn, credentials=read)
    with pytest.raises(ConfigurationError) as raised:
        read_user(pool)
    assert "s3cret" not in str(raised.value)
    pool.close()


def test_the_settings_apply_to_all_connections_to_their_database(rotating, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", rotating.dsn)
    monkeypatch.setenv("ERGON_POSTGRES__PASSWORD_FILE", str(rotating.password_file))
    queue = PostgresQueue("orders")
    queue.open()
    queue.close()
    assert check(rotating.dsn).is_compatible
    connect(rotating.dsn, answer_timeout=30.0).close()
    same_database = ConnectionPool(rotating.dsn + "?application_name=other")
    assert read_user(same_database) == "app"
    same_database.close()
    other_user = ConnectionPool(rotating.dsn.replace("app@", "app_2@"))
    with pytest.raises(ConfigurationError, match="no password supplied"):
        read_user(other_user)
    with_password = ConnectionPool(rotating.dsn.replace("app@", "app:0utdated-secret@"))
    assert read_user(with_password) == "app"
    with_password.close()


@pytest.mark.invariant
@pytest.mark.spec("CNN-07")
def test_a_rotation_while_eight_workers_run_fails_no_transaction(rotating):
    # A source and a lease each, so that each worker has its own client, as in its own process.
    sources = [credentials_from_files(rotating.password_file) for _ in range(8)]
    queues = [
        PostgresQueue("orders", dsn=rotating.dsn, lease=5.0 + n, credentials=source) for n, source in enumerate(sources)
    ]
    handled, changed = [], threading.Condition()
    policy = ConsumerPolicy.load({"loop": {"streaming": True, "concurrency": {"value": 4}}})

    def make_task(queue):
        @consumer(queue, policy=policy)
        def handle(order, transaction: Transaction):
            threading.Event().wait(0.005)
            with changed:
                handled.append(transaction.id)
                changed.notify_all()

        return handle

    tasks = [make_task(queue) for queue in queues]
    ended = []
    threads = [threading.Thread(target=lambda task=task: ended.append(task.run()), daemon=True) for task in tasks]
    sender = PostgresQueue("orders", dsn=rotating.server.dsn())
    for thread in threads:
        thread.start()
    names = [f"order-{number}" for number in range(1_500)]
    for step, start in enumerate(range(0, len(names), 300)):
        sender.dispatch([Transaction({}, id=name) for name in names[start : start + 300]])
        with changed:
            assert changed.wait_for(lambda start=start: len(set(handled)) >= start + 100, TIMEOUT_SECONDS)
        if step % 2 == 0:
            rotating.rotate()
        else:
            # The file is late: the workers are refused until it is written.
            password = rotating.change_password()
            rotating.disconnect()
            threading.Event().wait(1.0)
            rotating.write_password(password)
    with changed:
        assert changed.wait_for(lambda: set(handled) >= set(names), TIMEOUT_SECONDS)
    for task in tasks:
        task.stop()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    failures = [str(failure) for report in ended for failure in report.failures]
    assert (len(ended), failures) == (len(tasks), [])
    depth = sender.depth()
    assert (depth.ready, depth.delayed, depth.dead) == (0, 0, 0)
    sender.close()
