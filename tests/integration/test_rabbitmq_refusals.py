"""Who is let in: a server that says no is a mistake in the settings, one that dies while it is asked is not."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from ergon_framework import ConfigurationError, ConnectionLost
from ergon_framework.connectors.rabbitmq import RabbitMQQueue


@pytest.mark.parametrize(
    "wrong, why", [("guest:wrong@{}/", "Login was refused"), ("guest:guest@{}/nowhere", "vhost nowhere not found")]
)
def test_a_wrong_password_or_vhost_is_a_mistake_of_the_settings(rabbitmq, wrong, why):
    place = rabbitmq.partition("@")[2].rstrip("/")
    with pytest.raises(ConfigurationError, match=f"at {place} does not let this user in: .*{why}"):
        RabbitMQQueue("orders", url=f"amqp://{wrong.format(place)}").open()


@pytest.mark.parametrize(
    "place, why",
    [("127.0.0.1:1", "ConnectionRefusedError: .*refused"), ("no-such-host.invalid:5672", "gaierror: .*known")],
)
def test_a_server_that_is_not_there_is_told_by_its_address_and_why(place, why):
    with pytest.raises(ConnectionLost, match=f"RabbitMQ at {place} cannot be reached: {why}"):
        RabbitMQQueue("orders", url=f"amqp://guest:guest@{place}/").open()


@pytest.fixture
def dying():
    """The address of a server that begins to speak, and is gone when it is answered."""
    start = _frame(b"\0\x0a\0\x0a\0\x09" + b"\0\0\0\0" + b"\0\0\0\x05PLAIN" + b"\0\0\0\x05en_US")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with suppress(OSError):
                while True:
                    line, _ = server.accept()
                    with line:
                        line.recv(8)
                        line.sendall(start)
                        line.recv(4)

        threading.Thread(target=serve, daemon=True).start()
        yield f"amqp://guest:guest@127.0.0.1:{server.getsockname()[1]}/"


def _frame(method):
    return b"\x01\0\0" + len(method).to_bytes(4, "big") + method + b"\xce"


@pytest.mark.spec("CNN-07")
def test_a_server_that_dies_while_it_is_asked_is_a_lost_connection(dying):
    with pytest.raises(ConnectionLost):
        RabbitMQQueue("orders", url=dying).open()
