"""Connections to Redis as production has them: TLS, and credentials that change."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ergon_framework.connectors import Credentials, as_async, as_sync, credentials_from_files
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.transaction import Transaction
from tests.servers.certificates import CertificateAuthority

TIMEOUTS = "socket_timeout=2&socket_connect_timeout=2"


class Caller:
    """One queue, through the calls of one variant."""

    def __init__(self, variant, *arguments, **options):
        self._queue = RedisQueue(*arguments, **options)
        self._runner = asyncio.Runner() if variant == "async" else None
        self._bridge = as_async(self._queue) if self._runner else as_sync(self._queue)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.call("close")
        if self._runner is not None:
            self._runner.close()

    def call(self, name, *arguments, **options):
        if self._runner is None:
            return getattr(self._bridge, name)(*arguments, **options)
        return self._runner.run(getattr(self._bridge, f"{name}_async")(*arguments, **options))

    def dispatch(self, number=1):
        return len(self.call("dispatch", [Transaction(number, id=f"order-{number}")]))

    @property
    def host(self):
        return self._queue.server_host

    @property
    def client(self):
        return self._queue._client

    @property
    def capabilities(self):
        return self._queue.capabilities


@pytest.fixture(params=["sync", "async"])
def connect(request):
    """Returns the calls of a queue of its own, in each variant."""
    return lambda url, **options: Caller(request.param, "orders", url=url, **options)


# -- TLS -----------------------------------------------------------------------------------------------


@pytest.fixture
def authority(new_folder):
    return CertificateAuthority(new_folder("certificates"))


def start_tls_server(new_redis, authority, **options):
    server = new_redis(tls=authority.issue("server", **options))
    return server, f"rediss://localhost:{server.port}/0?{TIMEOUTS}&ssl_ca_certs={authority.path}"


@pytest.mark.spec("CNN-07")
def test_a_server_with_a_trusted_certificate_is_used(new_redis, authority, connect):
    server, url = start_tls_server(new_redis, authority)
    for address in (url, url.replace("localhost", "127.0.0.1")):
        with connect(address) as queue:
            assert queue.dispatch() == 1
            assert queue.host.endswith(f":{server.port}")


def test_a_server_of_an_unknown_authority_is_refused(new_redis, authority, new_folder, connect):
    server, url = start_tls_server(new_redis, authority)
    other = CertificateAuthority(new_folder("certificates"), "other")
    for address in (url.replace(str(authority.path), str(other.path)), f"rediss://localhost:{server.port}?{TIMEOUTS}"):
        with (
            connect(address) as queue,
            pytest.raises(ConfigurationError, match=r"certificate of the server is refused.*set ssl_ca_certs in the"),
        ):
            queue.dispatch()


def test_an_expired_certificate_is_refused(new_redis, authority, connect):
    _, url = start_tls_server(new_redis, authority, since=timedelta(days=2), lasts=timedelta(days=-1))
    with connect(url) as queue, pytest.raises(ConfigurationError, match="certificate has expired; renew it"):
        queue.dispatch()


def test_a_certificate_for_another_host_is_refused(new_redis, authority, connect):
    _, url = start_tls_server(new_redis, authority, hosts=("redis.example.com",))
    with connect(url) as queue, pytest.raises(ConfigurationError, match=r"localhost.*use a name of the certificate"):
        queue.dispatch()


def test_a_missing_file_of_authorities_is_named(connect):
    with (
        connect("rediss://127.0.0.1:1?ssl_ca_certs=/missing/ca.pem") as queue,
        pytest.raises(ConfigurationError, match=r"/missing/ca\.pem.*set ssl_ca_certs"),
    ):
        queue.dispatch()


# -- credentials ---------------------------------------------------------------------------------------


def start_server(new_redis, password="f1rst-secret"):
    server = new_redis(settings={"requirepass": password})
    return server, f"redis://127.0.0.1:{server.port}/0?{TIMEOUTS}"


def rotate(server, password):
    """Change the password, and disconnect all clients."""
    with server.client() as client:
        client.config_set("requirepass", password)
        server.settings["requirepass"] = password
        client.execute_command("CLIENT", "KILL", "TYPE", "normal")


@pytest.mark.spec("CNN-07")
def test_a_rotated_password_is_read_at_the_next_connection(new_redis, connect, tmp_path):
    server, url = start_server(new_redis)
    password_file = tmp_path / "password"
    password_file.write_text("f1rst-secret\n")
    with connect(url, credentials=credentials_from_files(password_file)) as queue:
        assert queue.dispatch(1) == 1
        rotate(server, "s3cond-secret")
        with pytest.raises(ConnectionLostError):
            queue.dispatch(2)  # perhaps on the connection that the server has closed
        # The file still has the earlier password: a lost connection, which callers retry.
        with pytest.raises(ConnectionLostError, match=r"rejected the request.*tried again") as raised:
            queue.dispatch(2)
        assert "secret" not in str(raised.value)
        password_file.write_text("s3cond-secret\n")
        assert queue.dispatch(2) == 1
        assert len(queue.call("fetch_transactions", 5)) == 2


def test_a_first_login_that_is_refused_is_an_error_of_the_configuration(new_redis, connect):
    _, url = start_server(new_redis)
    for options in ({}, {"credentials": lambda: Credentials(None, "wr0ng-secret")}):
        with (
            connect(url, **options) as queue,
            pytest.raises(ConfigurationError, match="check the user, password and rights") as raised,
        ):
            queue.dispatch()
        assert "wr0ng" not in str(raised.value)


def test_the_files_of_the_environment_are_used_for_the_default_address(new_redis, connect, tmp_path, monkeypatch):
    server, url = start_server(new_redis)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">app-s3cret", "+@all", "~*")
    for name, text in (("user", "app"), ("password", "app-s3cret")):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"ERGON_REDIS__{name.upper()}_FILE", str(tmp_path / name))
    monkeypatch.setenv("ERGON_REDIS__URL", url)
    for address in (None, url):
        with connect(address) as queue:
            assert queue.dispatch() == 1
    with connect(url.replace("127.0.0.1", "localhost")) as queue, pytest.raises(ConfigurationError):
        queue.dispatch()
