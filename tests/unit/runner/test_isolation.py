from __future__ import annotations

import asyncio
import socket

import pytest

from ergon_framework import MemoryConnector, Transaction, consumer
from ergon_framework.testing.isolation import NotIsolatedError, isolated


def consume(handle):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("order-1")])
    task = consumer(queue)(handle)
    report = task.run()
    return asyncio.run(report) if asyncio.iscoroutine(report) else report


def connect(order):
    socket.socket().close()


async def connect_async(order):
    socket.create_connection(("127.0.0.1", 9))


def connect_and_hide_it(order):
    try:
        connect(order)
    except Exception:
        return


@pytest.mark.spec("CON-40")
@pytest.mark.parametrize("handle", [connect, connect_async, connect_and_hide_it])
def test_a_handler_that_opens_a_socket_fails(handle):
    with pytest.raises(NotIsolatedError) as caught, isolated():
        consume(handle)
    assert "process step of transaction 'order-1'" in str(caught.value)


@pytest.mark.spec("CON-40")
def test_the_handler_itself_fails_and_is_not_tried_again():
    reports = []
    with pytest.raises(NotIsolatedError), isolated():
        reports.append(consume(connect))
    (failure,) = reports[0].failures
    assert (failure.attempts, type(failure.error.__cause__)) == (1, NotIsolatedError)


def test_what_is_no_handler_may_open_sockets_and_a_pair_is_no_connection():
    def paired(order):
        for end in socket.socketpair():
            end.close()

    with isolated():
        socket.socket().close()
        assert consume(paired).finished == 1
    assert socket.socket.__init__.__qualname__ == "socket.__init__"
