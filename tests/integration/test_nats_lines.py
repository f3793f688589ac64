"""Lines to NATS that cannot be closed in good order: none leaves its socket behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings

import pytest

from ergon_framework.connectors.nats import NatsQueue
from tests.integration.nats_queues import name, opened

#: More than the buffers of both ends take.
MUCH = bytes(32 * 1024 * 1024)


def writer_of(queue):
    return queue._session.line.client._transport._io_writer


def socket_of(queue):
    return writer_of(queue).transport.get_extra_info("socket")


def test_what_a_hanging_server_did_not_take_keeps_no_line_open(new_nats):
    server = new_nats()

    async def run():
        async with opened(server) as queue:
            kept = socket_of(queue)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                writer_of(queue).write(MUCH)
                await queue.close_async()
                # Closed in the loop's next round.
                await asyncio.sleep(0)
                return kept.fileno()
            finally:
                os.kill(server.pid, signal.SIGCONT)

    assert asyncio.run(run()) == -1


async def opening(server):
    async with opened(server):
        pass


@pytest.mark.parametrize("how", ["another is opened", "it is closed elsewhere"])
def test_what_a_closed_loop_has_left_open_is_let_go(nats_server, how):
    queue = NatsQueue(name(), url=nats_server.url)

    async def forgetting():
        await queue.open_async()
        return socket_of(queue)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        kept = asyncio.run(forgetting())
        assert kept.fileno() != -1
        asyncio.run(opening(nats_server) if how == "another is opened" else queue.close_async())
        assert kept.fileno() == -1
        gc.collect()
