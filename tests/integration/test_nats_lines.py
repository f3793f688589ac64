"""Check that connections to NATS that cannot be closed cleanly leave no socket behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings

import pytest

from ergon_framework.connectors.nats import NatsQueue
from tests.integration.nats_queues import new_queue_name, open_queue

#: More than the buffers of both ends hold.
LARGE_WRITE = bytes(32 * 1024 * 1024)


def get_writer(queue):
    return queue._session.connection.client._transport._io_writer


def get_socket(queue):
    return get_writer(queue).transport.get_extra_info("socket")


def test_data_that_a_hanging_server_does_not_read_keeps_no_socket_open(new_nats):
    server = new_nats()

    async def run():
        async with open_queue(server) as queue:
            nats_socket = get_socket(queue)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                get_writer(queue).write(LARGE_WRITE)
                await queue.close_async()
                # Closed in the next iteration of the event loop.
                await asyncio.sleep(0)
                return nats_socket.fileno()
            finally:
                os.kill(server.pid, signal.SIGCONT)

    assert asyncio.run(run()) == -1


async def open_and_close(server):
    async with open_queue(server):
        pass


@pytest.mark.parametrize("trigger", ["another is opened", "it is closed elsewhere"])
def test_a_connection_that_a_closed_loop_left_open_is_closed(nats_server, trigger):
    queue = NatsQueue(new_queue_name(), url=nats_server.url)

    async def open_and_leave():
        await queue.open_async()
        return get_socket(queue)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        nats_socket = asyncio.run(open_and_leave())
        assert nats_socket.fileno() != -1
        asyncio.run(open_and_close(nats_server) if trigger == "another is opened" else queue.close_async())
        assert nats_socket.fileno() == -1
        gc.collect()
