"""The seams of the NATS client that we use: if a new release closes one, this is where it is seen."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from nats.aio.client import Client
from nats.protocol.parser import Parser

from ergon_framework.connectors.nats.fast_client import FastClient, RawMessage


@pytest.mark.parametrize("name", ["_process_msg", "_remove_sub", "_send_command", "_flush_pending"])
def test_overridden_private_methods_have_the_signatures_of_the_client(name):
    override, original = getattr(FastClient, name), getattr(Client, name)
    assert list(inspect.signature(override).parameters) == list(inspect.signature(original).parameters)


def test_the_client_still_has_the_private_write_buffer():
    client = Client()
    assert (client._pending, client._pending_data_size, client._transport) == ([], 0, None)
    assert type(client._ps) is Parser
    assert {"buf", "state", "needed"} <= vars(client._ps).keys()


def test_immediate_writes_do_not_overtake_buffered_writes(nats_server):
    """A subscription may wait there whose answers are asked for."""
    received = asyncio.Event()

    async def run():
        client = FastClient()
        await client.connect(nats_server.url)
        await client.subscribe_callback("seams.order", lambda _: received.set())
        assert client._pending, "or this proves nothing"
        await client.publish_all([("seams.order", "", b"one")])
        assert not client._pending
        await asyncio.wait_for(received.wait(), 10)
        await client.close()

    asyncio.run(run())


def test_a_subscriber_gets_all_messages_and_its_error_ends_nothing(nats_server):
    received: list[RawMessage] = []
    all_received = asyncio.Event()

    def record_message(message):
        received.append(message)
        if len(received) == 3:
            all_received.set()
        if message.data == b"bad":
            raise ValueError("odd")

    async def run():
        client = FastClient()
        await client.connect(nats_server.url)
        subscription = await client.subscribe_callback("seams.*", record_message)
        await client.publish("seams.a", b"bad", headers={"x": "ä: b"})
        await client.publish_all([("seams.b", "", b"one"), ("seams.c", "back", b"two")])
        await client.flush()
        # The answer to a flush may overtake what is on its way.
        await asyncio.wait_for(all_received.wait(), 10)
        assert [(each.subject, each.reply, each.data) for each in received] == [
            ("seams.a", "", b"bad"),
            ("seams.b", "", b"one"),
            ("seams.c", "back", b"two"),
        ]
        assert received[0].headers == {"x": "ä: b"}
        await subscription.unsubscribe()
        assert not client._callbacks
        await client.publish("seams.d", b"unheard")
        await client.flush()
        await client.close()
        assert len(received) == 3
        with pytest.raises(ConnectionError):
            await client.publish_all([("seams.b", "", b"one")])

    asyncio.run(run())
