"""How a failed connection to PostgreSQL is classified, and when a refused login is tried again."""

from __future__ import annotations

import asyncio
import itertools

import psycopg
import pytest

from ergon_framework.connectors import Credentials
from ergon_framework.connectors import login as broker_login
from ergon_framework.connectors.login import BrokerLogin
from ergon_framework.database import login as login_module
from ergon_framework.database.address import connect_options, find_login, is_unverified
from ergon_framework.database.connection import open_connection, open_connection_async
from ergon_framework.errors import ConfigurationError, ConnectionLostError

PREFIX = 'connection failed: connection to server at "127.0.0.1", port 5432 failed: '
REFUSED = PREFIX + 'FATAL:  password authentication failed for user "app"'
UNREACHABLE = PREFIX + "Connection refused"
BAD_CERTIFICATE = PREFIX + "SSL error: certificate verify failed"
WRONG_NAME = PREFIX + 'server certificate for "localhost" does not match host name "db"'


def several(*failures):
    """Return the driver's message about several addresses, each a host, with a port or not, and its failure."""
    servers = [(*host.split(":"), "5432")[:2] for host, _ in failures]
    lines = [
        f"- host: {host!r}, port: {port!r}, hostaddr: '::1': {text}"
        for (host, port), (_, text) in zip(servers, failures, strict=True)
    ]
    return "\n".join([failures[-1][1], "Multiple connection attempts failed. All failures were:", *lines])


def open_sync(connect, login):
    return open_connection(connect, {"user": "app", "password": "own"}, login)


def open_async(connect, login):
    async def connect_async(**parameters):
        return connect(**parameters)

    return asyncio.run(open_connection_async(connect_async, {"user": "app", "password": "own"}, login))


def reject_with(message):
    def connect(**parameters):
        raise psycopg.OperationalError(message)

    return connect


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize(
    "message",
    [
        UNREACHABLE,
        several(("a", BAD_CERTIFICATE), ("b", UNREACHABLE)),
        several(("a:5432", REFUSED), ("a:5433", UNREACHABLE)),
    ],
)
@pytest.mark.parametrize("open_it", [open_sync, open_async])
def test_a_server_that_may_come_back_is_a_lost_connection(message, open_it):
    with pytest.raises(ConnectionLostError, match="unavailable") as raised:
        open_it(reject_with(message), BrokerLogin(None))
    assert isinstance(raised.value, psycopg.OperationalError)


@pytest.mark.parametrize(
    "message, remedy",
    [
        (REFUSED, "check the user and the password"),
        (BAD_CERTIFICATE, "renew it"),
        (WRONG_NAME, "use a name of the certificate"),
        (PREFIX + "server does not support SSL, but SSL was required", "set ssl"),
        (PREFIX + 'root certificate file "/root.crt" does not exist', "set sslrootcert"),
        (several(("a", BAD_CERTIFICATE), ("b", BAD_CERTIFICATE)), "renew it"),
        # One host name with two addresses, of which only one has a listener.
        (several(("localhost", REFUSED), ("localhost", UNREACHABLE)), "check the user and the password"),
    ],
)
@pytest.mark.parametrize("open_it", [open_sync, open_async])
def test_what_every_host_refuses_is_an_error_of_the_configuration(message, remedy, open_it):
    with pytest.raises(ConfigurationError, match=remedy) as raised:
        open_it(reject_with(message), BrokerLogin(None))
    assert isinstance(raised.value, psycopg.OperationalError)


def test_the_failure_of_each_host_is_named():
    error = several(("a", f"{UNREACHABLE}\n\tIs the server running?"), ("b", REFUSED))
    with pytest.raises(ConnectionLostError) as raised:
        open_sync(reject_with(error), BrokerLogin(None))
    assert str(raised.value) == f"the database is unavailable: {UNREACHABLE}, and {REFUSED}"


def test_an_authentication_server_that_fails_may_come_back():
    with pytest.raises(ConnectionLostError):
        open_sync(reject_with(PREFIX + 'FATAL:  LDAP authentication failed for user "app"'), BrokerLogin(None))


@pytest.mark.parametrize("open_it", [open_sync, open_async])
def test_a_refusal_after_an_accepted_login_is_retried_until_the_rotation_must_be_over(open_it, monkeypatch):
    login = BrokerLogin(lambda: Credentials(None, "f1rst-secret"))
    for _ in range(2):
        assert open_it(dict, login) == {"user": "app", "password": "f1rst-secret"}
        for _ in range(2):
            with pytest.raises(ConnectionLostError, match="accepted before"):
                open_it(reject_with(REFUSED), login)
    monkeypatch.setattr(broker_login, "ROTATION_SECONDS", 0.0)
    with pytest.raises(ConfigurationError):
        open_it(reject_with(REFUSED), login)


def test_a_certificate_is_not_retried_after_an_accepted_login():
    login = BrokerLogin(lambda: Credentials(None, "f1rst-secret"))
    open_sync(dict, login)
    with pytest.raises(ConfigurationError):
        open_sync(reject_with(BAD_CERTIFICATE), login)


@pytest.mark.parametrize("open_it", [open_sync, open_async])
def test_a_refused_login_is_repeated_once_if_the_credentials_have_changed(open_it):
    attempts = []

    def connect(**parameters):
        attempts.append((parameters["user"], parameters["password"]))
        raise psycopg.OperationalError(REFUSED)

    numbers = itertools.count(1)
    changing = BrokerLogin(lambda: Credentials("app", f"s3cret-{next(numbers)}"))
    with pytest.raises(ConfigurationError):
        open_it(connect, changing)
    assert attempts == [("app", "s3cret-1"), ("app", "s3cret-2")]
    attempts.clear()
    with pytest.raises(ConfigurationError):
        open_it(connect, BrokerLogin(lambda: Credentials(None, "the-same-s3cret")))
    assert attempts == [("app", "the-same-s3cret")]


@pytest.mark.parametrize("open_it", [open_sync, open_async])
def test_credentials_that_cannot_be_read_are_an_error_of_the_driver_too(open_it):
    def fail():
        raise ConfigurationError("the file is missing")

    with pytest.raises(ConfigurationError, match="the file is missing") as raised:
        open_it(dict, BrokerLogin(fail))
    assert isinstance(raised.value, psycopg.OperationalError)


def test_pools_share_the_login_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(login_module, "_is_configured", False)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", "postgresql://app@db/shop")
    monkeypatch.setenv("ERGON_POSTGRES__PASSWORD_FILE", str(tmp_path / "password"))
    (tmp_path / "password").write_text("f1rst-secret")
    shared = find_login(connect_options("postgresql://app:0wn-secret@db/shop"))
    assert shared is find_login(connect_options("postgresql://app:0wn-secret@db/shop?application_name=other"))
    assert open_sync(dict, shared) == {"user": "app", "password": "f1rst-secret"}
    other = find_login(connect_options("postgresql://app@db/another"))
    assert open_sync(dict, other) == {"user": "app", "password": "own"}


def test_pools_of_one_account_share_the_login():
    options = connect_options("postgresql://app@db/shop")
    assert find_login(options) is find_login(connect_options("postgresql://app@db/shop?connect_timeout=3"))
    assert find_login(options) is not find_login(connect_options("postgresql://other@db/shop"))
    assert find_login(options) is not find_login(options, lambda: Credentials(None, "0ther-secret"))


@pytest.mark.parametrize(
    "parameters, expected",
    [
        ("", False),
        ("sslmode=prefer", False),
        ("sslmode=require", True),
        ("sslmode=require&sslrootcert=/ca.pem", False),
        ("sslmode=verify-ca", False),
        ("sslmode=verify-full", False),
    ],
)
def test_only_encryption_without_verification_is_unverified(parameters, expected, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PGSSLMODE", raising=False)
    monkeypatch.delenv("PGSSLROOTCERT", raising=False)
    assert is_unverified(connect_options(f"postgresql://app@db/shop?{parameters}")) is expected
    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql" / "root.crt").touch()
    assert not is_unverified(connect_options("postgresql://app@db/shop?sslmode=require"))
