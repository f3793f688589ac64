from __future__ import annotations

import asyncio
import socket

import pytest

from ergon_framework import MemoryConnector, Transaction, consumer
from ergon_framework.testing.no_network import SocketOpenedError, forbid_sockets


def consume(handler):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction(id="order-1")])
    task = consumer(queue)(handler)
    report = task.run()
    return asyncio.run(report) if asyncio.iscoroutine(report) else report


def connect(order):
    socket.socket().close()


async def connect_async(order):
    socket.create_connection(("127.0.0.1", 9))


def connect_and_suppress_the_error(order):
    try:
        connect(order)
    except Exception:
        return


@pytest.mark.spec("CON-40")
@pytest.mark.parametrize("handler", [connect, connect_async, connect_and_suppress_the_error])
def test_a_handler_that_opens_a_socket_fails(handler):
    with pytest.raises(SocketOpenedError) as caught, forbid_sockets():
        consume(handler)
    assert "process step of transaction 'order-1'" in str(caught.value)


@pytest.mark.spec("CON-40")
def test_a_socket_error_of_the_handler_is_not_retried():
    reports = []
    with pytest.raises(SocketOpenedError), forbid_sockets():
        reports.append(consume(connect))
    (failure,) = reports[0].failures
    assert (failure.attempts, type(failure.error.__cause__)) == (1, SocketOpenedError)


def test_code_outside_handlers_may_open_sockets_and_a_handler_a_socket_pair():
    def open_socket_pair(order):
        for end in socket.socketpair():
            end.close()

    with forbid_sockets():
        socket.socket().close()
        assert consume(open_socket_pair).finished == 1
    assert socket.socket.__init__.__qualname__ == "socket.__init__"
