"""The seams of the NATS client that we use: if a new release closes one, this is where it is seen."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from nats.aio.client import Client
from nats.protocol.parser import Parser

from ergon_framework.connectors.nats.client import DirectClient
from ergon_framework.connectors.nats.frames import Heard


@pytest.mark.parametrize("name", ["_process_msg", "_remove_sub", "_send_command", "_flush_pending"])
def test_the_seam_is_still_there(name):
    ours, theirs = getattr(DirectClient, name), getattr(Client, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_what_we_write_past_the_client_is_still_its_own():
    client = Client()
    assert (client._pending, client._pending_data_size, client._transport) == ([], 0, None)
    assert type(client._ps) is Parser
    assert {"buf", "state", "needed"} <= vars(client._ps).keys()


def test_what_is_written_at_once_does_not_overtake_what_waits_to_be_flushed(nats_server):
    """A subscription may wait there whose answers are asked for."""
    heard = asyncio.Event()

    async def run():
        client = DirectClient()
        await client.connect(nats_server.url)
        await client.hear("seams.order", lambda _: heard.set())
        assert client._pending, "or this proves nothing"
        await client.publish_all([("seams.order", "", b"one")])
        assert not client._pending
        await asyncio.wait_for(heard.wait(), 10)
        await client.close()

    asyncio.run(run())


def test_an_ear_hears_everything_at_once_and_a_bad_one_ends_nothing(nats_server):
    heard: list[Heard] = []
    three = asyncio.Event()

    def ear(message):
        heard.append(message)
        if len(heard) == 3:
            three.set()
        if message.data == b"bad":
            raise ValueError("odd")

    async def run():
        client = DirectClient()
        await client.connect(nats_server.url)
        subscription = await client.hear("seams.*", ear)
        await client.publish("seams.a", b"bad", headers={"x": "ä: b"})
        await client.publish_all([("seams.b", "", b"one"), ("seams.c", "back", b"two")])
        await client.flush()
        # The answer to a flush may overtake what is on its way.
        await asyncio.wait_for(three.wait(), 10)
        assert [(each.subject, each.reply, each.data) for each in heard] == [
            ("seams.a", "", b"bad"),
            ("seams.b", "", b"one"),
            ("seams.c", "back", b"two"),
        ]
        assert heard[0].headers == {"x": "ä: b"}
        await subscription.unsubscribe()
        assert not client._ears
        await client.publish("seams.d", b"unheard")
        await client.flush()
        await client.close()
        assert len(heard) == 3
        with pytest.raises(ConnectionError):
            await client.publish_all([("seams.b", "", b"one")])

    asyncio.run(run())
