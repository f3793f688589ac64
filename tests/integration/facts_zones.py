"""A plant's service in a process of its own, and those who call it with certificates of their own."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from contextlib import ExitStack

import grpc

from ergon_framework.facts.model import Envelope, Fact, Pair, Stored
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.client_aio import AsyncBoundaryClient
from tests.servers.facts_host import Host

OUT = Pair("Plant A", "Enterprise")
IN = Pair("Enterprise", "Plant A")


class Zones:
    """The plant is at home here, the enterprise reads, and a third zone has no business here."""

    def __init__(self, folder):
        self.host = Host(folder, zones=["Plant A"])
        self._stack = ExitStack()
        self._stack.callback(self.host.close)
        issue = self.host.authority.issue
        self.plant_files = issue("plant", zones=["Plant A"])
        self.peer_files = issue("peer", zones=["Enterprise"])
        self.stranger_files = issue("stranger", zones=["Plant B"])
        self.operator_files = issue("operator", operator="ops")

    def serve(self, store, **given):
        self.where = self.host.serve(store, **given)
        return self.where

    def client(self, files, *, kind=BoundaryClient, **given):
        given = {"deadline": 10.0} | given
        return self._stack.enter_context(kind(Address(host=self.where, files=files, **given)))

    def raw(self, files):
        """A channel without any of our manners."""
        pem = files.read()
        credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
        return self._stack.enter_context(grpc.secure_channel(self.where, credentials))

    def close(self):
        self._stack.close()


class OnALoop:
    """The client of asyncio on an event loop of its own, called like the one of threads."""

    def __init__(self, address):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = AsyncBoundaryClient(address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def __getattr__(self, name):
        return lambda *args, **given: self._wait(getattr(self._client, f"{name}_async")(*args, **given))

    def listen(self, wake):
        return self._client.listen(wake)

    def close(self):
        self._wait(self._client.close())

    def get_object(self, *args, **given):
        stream = self._client.get_object_async(*args, **given)
        while (piece := self._wait(anext(stream, None))) is not None:
            yield piece

    def _wait(self, awaitable):
        async def waited():
            return await awaitable

        return asyncio.run_coroutine_threadsafe(waited(), self._loop).result(60)


KINDS = {"threads": BoundaryClient, "asyncio": OnALoop}


def fact(number=1, *, pair=OUT, value=None):
    envelope = Envelope(
        message_id=f"m-{number}", from_zone=pair.from_zone, to_zone=pair.to_zone, produced_at_unix_ms=1_700_000_000_000
    )
    return envelope, Fact.of("order:7", "paid", {"number": number} if value is None else value)


def stored(content):
    return Stored(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))
