"""Check rejected connections: a refusal by the server is a configuration error, a server that dies is an outage."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from ergon_framework import ConfigurationError, ConnectionLostError
from ergon_framework.connectors.rabbitmq import RabbitMQQueue


@pytest.mark.parametrize(
    "address_format, reason",
    [("guest:wrong@{}/", "Login was refused"), ("guest:guest@{}/nowhere", "vhost nowhere not found")],
)
def test_a_wrong_password_or_vhost_is_a_configuration_error(rabbitmq, address_format, reason):
    address = rabbitmq.partition("@")[2].rstrip("/")
    with pytest.raises(ConfigurationError, match=f"at {address} rejected the user: .*{reason}"):
        RabbitMQQueue("orders", url=f"amqp://{address_format.format(address)}").open()


@pytest.mark.parametrize(
    "address, reason",
    [("127.0.0.1:1", "ConnectionRefusedError: .*refused"), ("no-such-host.invalid:5672", "gaierror: .*known")],
)
def test_an_unreachable_server_is_reported_with_its_address_and_reason(address, reason):
    with pytest.raises(ConnectionLostError, match=f"RabbitMQ at {address} cannot be reached: {reason}"):
        RabbitMQQueue("orders", url=f"amqp://guest:guest@{address}/").open()


@pytest.fixture
def dying_server_url():
    """Yield the address of a server that starts the handshake and closes the connection after the response."""
    start = _frame(b"\0\x0a\0\x0a\0\x09" + b"\0\0\0\0" + b"\0\0\0\x05PLAIN" + b"\0\0\0\x05en_US")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(8)
                        connection.sendall(start)
                        connection.recv(4)

        threading.Thread(target=serve, daemon=True).start()
        yield f"amqp://guest:guest@127.0.0.1:{server.getsockname()[1]}/"


def _frame(method):
    return b"\x01\0\0" + len(method).to_bytes(4, "big") + method + b"\xce"


@pytest.mark.spec("CNN-07")
def test_a_server_that_dies_during_the_handshake_is_a_lost_connection(dying_server_url):
    with pytest.raises(ConnectionLostError):
        RabbitMQQueue("orders", url=dying_server_url).open()
