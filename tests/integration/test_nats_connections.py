"""Connections to NATS as production has them: TLS, several servers in one address, and credentials that change."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import deque
from datetime import timedelta

import pytest

from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors import Credentials, credentials_from_files
from ergon_framework.connectors.login import BrokerLogin
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.nats.client import ConnectSettings, connect
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.transaction import Transaction
from tests.integration.nats_queues import new_queue_name, open_queue
from tests.log_events import get_event
from tests.servers.certificates import CertificateAuthority


async def dispatch(url, **options):
    """Dispatch one transaction through a new queue."""
    queue = NatsQueue(new_queue_name(), url=url, timeout=2.0, patience=0.5, **options)
    try:
        return len(await queue.dispatch_async([Transaction(1, id="order-1")]))
    finally:
        await queue.close_async()


# -- TLS -----------------------------------------------------------------------------------------------


def make_tls_settings(files):
    return f"""
tls {{
  cert_file: "{files.certificate}"
  key_file: "{files.key}"
}}
"""


@pytest.fixture
def authority(new_folder):
    return CertificateAuthority(new_folder("certificates"))


def start_tls_server(new_nats, authority, **options):
    server = new_nats(settings=make_tls_settings(authority.issue("server", **options)))
    return server, f"tls://localhost:{server.port}"


@pytest.mark.spec("CNN-07")
def test_a_server_with_a_trusted_certificate_is_used(new_nats, authority):
    server, url = start_tls_server(new_nats, authority)
    assert asyncio.run(dispatch(url, ca_file=str(authority.path))) == 1
    assert asyncio.run(dispatch(f"tls://127.0.0.1:{server.port}", ca_file=str(authority.path))) == 1


def test_a_server_of_an_unknown_authority_is_refused(new_nats, authority, new_folder):
    _, url = start_tls_server(new_nats, authority)
    other = CertificateAuthority(new_folder("certificates"), "other")
    for options in ({}, {"ca_file": str(other.path)}):
        with pytest.raises(ConfigurationError, match=r"certificate of the server is refused.*set ca_file of the queue"):
            asyncio.run(dispatch(url, **options))
    # The client of nats:// encrypts where the server asks for it, and verifies the certificate too.
    with pytest.raises(ConfigurationError, match="certificate of the server is refused"):
        asyncio.run(dispatch(url.replace("tls:", "nats:")))


def test_an_expired_certificate_is_refused(new_nats, authority):
    _, url = start_tls_server(new_nats, authority, since=timedelta(days=2), lasts=timedelta(days=-1))
    with pytest.raises(ConfigurationError, match="certificate has expired; renew it"):
        asyncio.run(dispatch(url, ca_file=str(authority.path)))


def test_a_certificate_for_another_host_is_refused(new_nats, authority):
    _, url = start_tls_server(new_nats, authority, hosts=("nats.example.com",))
    with pytest.raises(ConfigurationError, match=r"localhost.*use a name of the certificate"):
        asyncio.run(dispatch(url, ca_file=str(authority.path)))


def test_a_server_without_tls_gets_no_password_from_an_address_that_requires_it(new_nats):
    async def run():
        received = asyncio.get_running_loop().create_future()

        async def serve(reader, writer):
            writer.write(b'INFO {"server_id":"a","version":"2.10.0","max_payload":1048576,"auth_required":true}\r\n')
            try:
                received.set_result(await reader.read(1))
            except ConnectionError:
                received.set_result(b"")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            with pytest.raises(ConfigurationError, match="does not offer TLS"):
                await dispatch(f"tls://app:s3cretword@127.0.0.1:{port}")
            assert await received == b""
        finally:
            server.close()

    asyncio.run(run())


def test_a_missing_file_of_authorities_is_named():
    with pytest.raises(ConfigurationError, match=r"/missing/ca.pem.*No such file.*set ca_file"):
        asyncio.run(dispatch("tls://127.0.0.1:1", ca_file="/missing/ca.pem"))


# -- several servers -----------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
def test_another_server_of_the_address_is_used_when_one_is_down(new_nats):
    one, other = new_nats(), new_nats()
    url = f"nats://127.0.0.1:{one.port},127.0.0.1:{other.port}"

    async def run():
        queue = NatsQueue(new_queue_name(), url=url, timeout=2.0, patience=10.0)
        await queue.dispatch_async([Transaction(1, id="order-1")])
        by_host = {f"127.0.0.1:{server.port}": server for server in (one, other)}
        first = queue.server_host
        by_host.pop(first).kill()
        # The other server has its own streams: it does not copy the first.
        await queue.dispatch_async([Transaction(2, id="order-2")])
        assert queue.server_host in by_host
        (delivery,) = await queue.fetch_transactions_async(5, wait=5.0)
        assert delivery.transaction.id == "order-2"
        await queue.close_async()

    asyncio.run(run())


@pytest.mark.spec("CNN-07", "DX-12")
def test_the_log_names_the_server_that_was_lost_and_the_one_in_use(new_nats, caplog):
    servers = {f"127.0.0.1:{server.port}": server for server in (new_nats(), new_nats())}
    queue = NatsQueue(new_queue_name(), url=f"nats://{','.join(servers)}", timeout=2.0, patience=3.0)
    policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.05, "cap": 0.1}}})

    handled = []

    @consumer(queue)
    async def charge(order):
        handled.append(order)

    def list_hosts(event):
        return [record.host for record in caplog.records if get_event(record) == event]

    async def wait_until(condition):
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - the condition belongs to a server
                await asyncio.sleep(0.02)

    async def run():
        running = asyncio.ensure_future(charge.run(policy))
        await queue.dispatch_async([Transaction(1, id="order-1")])
        await wait_until(lambda: handled)
        lost = queue.server_host
        servers.pop(lost).kill()
        (other,) = servers.values()
        # With the other one up, the next fetch would use it, and nothing would be lost.
        other.kill()
        await wait_until(lambda: list_hosts("connection lost"))
        other.start()
        await wait_until(lambda: list_hosts("connection restored"))
        charge.stop()
        await running
        assert list_hosts("connection lost") == [lost]
        assert list_hosts("connection restored") == list(servers)

    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        asyncio.run(run())


@pytest.mark.spec("CNN-07")
def test_a_server_that_hangs_does_not_take_the_time_of_every_attempt(new_nats):
    hanging, other = new_nats(), new_nats()
    addresses = deque([hanging.url, other.url])

    async def run():
        settings = ConnectSettings(1.0, BrokerLogin(None))
        with pytest.raises(ConnectionLostError, match="no NATS server answers"):
            await connect(addresses, settings)
        connection = await connect(addresses, settings)
        assert connection.host == f"127.0.0.1:{other.port}"
        await connection.close()

    hanging._process.send_signal(signal.SIGSTOP)
    try:
        asyncio.run(run())
    finally:
        hanging._process.send_signal(signal.SIGCONT)


# -- credentials ---------------------------------------------------------------------------------------


def make_login_settings(password):
    return f'authorization {{ user: app, password: "{password}" }}'


def rotate(server, old, new):
    """Change the password in the configuration of *server*, which then disconnects its clients."""
    path = server.folder / "server.conf"
    path.write_text(path.read_text().replace(old, new))
    server._process.send_signal(signal.SIGHUP)


@pytest.mark.spec("CNN-07")
def test_a_rotated_password_is_read_at_the_next_connection(new_nats, tmp_path):
    server = new_nats(settings=make_login_settings("f1rst-secret"))
    password_file = tmp_path / "password"
    password_file.write_text("f1rst-secret\n")
    source = credentials_from_files(password_file)

    async def run():
        url = server.url.replace("//", "//app@")
        async with open_queue(server, url=url, credentials=source) as queue:
            session = await queue._get_session()
            rotate(server, "f1rst-secret", "s3cond-secret")
            lost = asyncio.Event()
            session.connection.on_lost(lost.set)
            if not session.connection.is_lost:
                await asyncio.wait_for(lost.wait(), 20)
            # The file still has the earlier password: a lost connection, which callers retry.
            with pytest.raises(ConnectionLostError, match=r"refused the login.*tried again") as raised:
                await queue.fetch_transactions_async(1)
            assert "secret" not in str(raised.value)
            password_file.write_text("s3cond-secret\n")
            await queue.dispatch_async([Transaction(1, id="order-1")])
            assert len(await queue.fetch_transactions_async(1, wait=5.0)) == 1

    asyncio.run(run())


def test_a_first_login_that_is_refused_is_an_error_of_the_configuration(new_nats):
    server = new_nats(settings=make_login_settings("f1rst-secret"))
    for options in ({}, {"credentials": lambda: Credentials("app", "wr0ng-secret")}):
        with pytest.raises(ConfigurationError, match="refused the login; check the user and the password") as raised:
            asyncio.run(dispatch(server.url, **options))
        assert "wr0ng" not in str(raised.value)


def test_a_password_without_a_user_is_a_token(new_nats):
    server = new_nats(settings='authorization { token: "t0ken-of-app" }')
    assert asyncio.run(dispatch(server.url, credentials=lambda: Credentials(None, "t0ken-of-app"))) == 1


def test_the_files_of_the_environment_are_used_for_the_default_address(new_nats, tmp_path, monkeypatch):
    server = new_nats(settings=make_login_settings("f1rst-secret"))
    for name, text in (("user", "app"), ("password", "f1rst-secret")):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"ERGON_NATS__{name.upper()}_FILE", str(tmp_path / name))
    monkeypatch.setenv("ERGON_NATS__URL", server.url)
    assert asyncio.run(dispatch(None)) == 1
    assert asyncio.run(dispatch(server.url)) == 1
    with pytest.raises(ConfigurationError, match="refused the login"):
        asyncio.run(dispatch(server.url.replace("127.0.0.1", "localhost")))
