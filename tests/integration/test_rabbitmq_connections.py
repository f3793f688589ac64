"""Check connections to RabbitMQ as production has them: TLS, several hosts, credentials that change."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta

import pytest

from ergon_framework.connectors.base import Ack, ConnectorError
from ergon_framework.connectors.credentials import credentials_from_files
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.report import OutcomeKind
from tests.servers.certificates import CertificateAuthority
from tests.servers.postgres import free_port

TIMEOUT_SECONDS = 60.0
WORKER_COUNT = 8
ROTATIONS = 3
STREAMING = ConsumerPolicy.load(
    {"loop": {"streaming": True, "concurrency": {"value": 4}, "empty_queue": {"backoff": 0.05, "cap": 0.1}}}
)


def claim(queue, count=1):
    deliveries, deadline = [], time.monotonic() + TIMEOUT_SECONDS
    while len(deliveries) < count:
        assert time.monotonic() < deadline, f"{len(deliveries)} of {count} came"
        try:
            deliveries += queue.fetch_transactions(count - len(deliveries), wait=0.2)
        except ConnectionLostError:
            time.sleep(0.1)
    return deliveries


# -- TLS ----------------------------------------------------------------------------------------------


@pytest.fixture
def tls_server(new_rabbitmq, tmp_path):
    """Return a function that starts a server with a certificate of *authority*, and returns it."""

    def start(authority, **options):
        files = authority.issue("server", **options)
        server = new_rabbitmq()
        server.enable_tls(files.certificate, files.key)
        server.restart()
        return server

    return start


def connect(server, host, authority, **options):
    return RabbitMQQueue(
        "orders", url=f"amqps://guest:guest@{host}:{server.tls_port}//?cacertfile={authority.path}", **options
    )


@pytest.mark.spec("CNN-07")
def test_tls_verifies_the_authority_and_the_host_name(tls_server, tmp_path):
    (tmp_path / "other").mkdir()
    authority, other = CertificateAuthority(tmp_path), CertificateAuthority(tmp_path / "other")
    server = tls_server(authority)
    queue = connect(server, "localhost", authority)
    queue.dispatch([Transaction({}, id="order")])
    assert queue.settle([(claim(queue)[0], Ack())]) == ["settled"]
    assert queue.list_dead(DeadLetterQuery()) == []
    queue.close()
    for client in (
        connect(server, "localhost", other),
        connect(server, "127.0.0.2", authority),
        RabbitMQQueue("orders", url=f"amqps://guest:guest@localhost:{server.tls_port}//"),
    ):
        with pytest.raises(
            ConfigurationError, match=r"cannot connect to RabbitMQ at .*: the certificate of the server is refused"
        ):
            client.open()
        client.close()


@pytest.mark.spec("CNN-07")
def test_an_expired_certificate_is_refused(tls_server, tmp_path):
    authority = CertificateAuthority(tmp_path)
    server = tls_server(authority, since=timedelta(days=3), lasts=-timedelta(days=1))
    queue = connect(server, "localhost", authority)
    with pytest.raises(ConfigurationError, match="is refused: certificate has expired; renew it"):
        queue.open()
    queue.close()


def test_a_missing_file_of_the_address_is_named():
    queue = RabbitMQQueue("orders", url="amqps://guest:secret@localhost//?cacertfile=/no/such/file")
    with pytest.raises(ConfigurationError, match=r"cacertfile=/no/such/file.*FileNotFoundError") as caught:
        queue.open()
    assert "secret" not in str(caught.value)


# -- several hosts ------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
def test_the_next_host_is_used_when_one_is_lost(new_rabbitmq):
    first, second = new_rabbitmq(), new_rabbitmq()
    hosts = f"127.0.0.1:{free_port()},127.0.0.1:{first.port},127.0.0.1:{second.port}"
    queue = RabbitMQQueue("orders", url=f"amqp://guest:guest@{hosts}//", timeout=5.0)
    queue.dispatch([Transaction({}, id="first")])
    assert [delivery.transaction.id for delivery in claim(queue)] == ["first"]
    assert queue.server_host == f"127.0.0.1:{first.port}"
    first.kill()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            queue.dispatch([Transaction({}, id="second")])
            break
        except (ConnectionLostError, ConnectorError):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert [delivery.transaction.id for delivery in claim(queue)] == ["second"]
    assert queue.server_host == f"127.0.0.1:{second.port}"
    assert queue.list_dead(DeadLetterQuery()) == []
    queue.close()


@pytest.mark.spec("CNN-07")
def test_the_error_names_the_host_that_cannot_be_reached():
    ports = [free_port(), free_port()]
    queue = RabbitMQQueue("orders", url=f"amqp://guest:guest@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}//")
    with pytest.raises(ConnectionLostError, match=f"127.0.0.1:{ports[1]} cannot be reached"):
        queue.open()
    queue.close()


# -- credentials --------------------------------------------------------------------------------------


def start_worker(queue, handled, is_async):
    """Start one worker on a thread, and return it with its task."""
    base = AsyncConsumerMixin if is_async else ConsumerMixin

    class RecordingTask(base):
        connector = queue

        if is_async:

            async def process_transaction(self, transaction):
                handled.append(transaction.id)
        else:

            def process_transaction(self, transaction):
                handled.append(transaction.id)

    task, reports = RecordingTask(), []

    def run():
        result = task.consume_transactions(STREAMING)
        reports.append(asyncio.run(result) if is_async else result)

    thread = threading.Thread(target=run)
    thread.start()
    return task, thread, reports


@pytest.mark.spec("CNN-07", "CNN-12")
def test_credentials_change_while_eight_workers_run(new_rabbitmq, tmp_path):
    """The server knows the new password before the file has it, so that logins are rejected in between."""
    server = new_rabbitmq()
    server.run_rabbitmqctl("add_user", "worker", "password-0")
    server.run_rabbitmqctl("set_permissions", "worker", ".*", ".*", ".*")
    password_file = tmp_path / "password"
    password_file.write_text("password-0\n", encoding="utf-8")
    source = credentials_from_files(password_file)
    address = f"amqp://worker@127.0.0.1:{server.port}//"
    queues = [
        RabbitMQQueue("orders", url=f"{address}?client_properties={{'connection_name':'{n}'}}", credentials=source)
        for n in range(WORKER_COUNT)
    ]
    sender = RabbitMQQueue("orders", url=server.url)
    handled, sent = [], []
    workers = [start_worker(queue, handled, is_async=number % 2 == 1) for number, queue in enumerate(queues)]
    try:
        for rotation in range(ROTATIONS + 1):
            batch = [Transaction({}, id=f"order-{rotation}-{n}") for n in range(200)]
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while True:  # the sender is disconnected too
                try:
                    sender.dispatch(batch)
                    break
                except (ConnectionLostError, ConnectorError):
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            sent += [transaction.id for transaction in batch]
            while len(set(handled)) < len(sent):
                assert time.monotonic() < deadline, f"{len(set(handled))} of {len(sent)} after {rotation} rotations"
                time.sleep(0.05)
            if rotation < ROTATIONS:
                server.run_rabbitmqctl("change_password", "worker", f"password-{rotation + 1}")
                server.run_rabbitmqctl("close_all_connections", "the password has changed")
                password_file.write_text(f"password-{rotation + 1}\n", encoding="utf-8")
    finally:
        for task, _, _ in workers:
            task.stop()
        for _, thread, _ in workers:
            thread.join(TIMEOUT_SECONDS)
    assert set(handled) == set(sent)
    totals = [report for _, _, reports in workers for report in reports]
    assert len(totals) == WORKER_COUNT
    assert sum(report.counts[OutcomeKind.FAILED] for report in totals) == 0
    assert sender.list_dead(DeadLetterQuery()) == []
    for queue in [*queues, sender]:
        queue.close()


@pytest.mark.spec("CNN-07")
def test_wrong_credentials_at_the_start_are_an_error_of_configuration(new_rabbitmq, tmp_path):
    server = new_rabbitmq()
    password_file = tmp_path / "password"
    password_file.write_text("not-the-password", encoding="utf-8")
    address = f"amqp://guest@127.0.0.1:{server.port}//"
    queue = RabbitMQQueue("orders", url=address, credentials=credentials_from_files(password_file))
    with pytest.raises(ConfigurationError, match="rejected the user") as caught:
        queue.open()
    assert "not-the-password" not in str(caught.value)
    queue.close()
