"""A plant's service in its own process, and clients that call it with their own certificates."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from contextlib import ExitStack

import grpc

from ergon_framework.facts.model import Envelope, Fact, StoredArtifact, ZonePair
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.client_async import AsyncBoundaryClient
from tests.servers.facts_host import Host

OUTBOUND = ZonePair("Plant A", "Enterprise")
INBOUND = ZonePair("Enterprise", "Plant A")


class ServiceZones:
    """The plant owns this service, the enterprise reads, and a third zone has no rights."""

    def __init__(self, folder):
        self.host = Host(folder, zones=["Plant A"])
        self._stack = ExitStack()
        self._stack.callback(self.host.close)
        issue = self.host.authority.issue
        self.plant_files = issue("plant", zones=["Plant A"])
        self.peer_files = issue("peer", zones=["Enterprise"])
        self.stranger_files = issue("stranger", zones=["Plant B"])
        self.operator_files = issue("operator", operator="ops")

    def serve(self, store, **options):
        self.address = self.host.serve(store, **options)
        return self.address

    def connect(self, files, *, client_type=BoundaryClient, **options):
        options = {"deadline": 10.0} | options
        return self._stack.enter_context(client_type(ServiceAddress(host=self.address, files=files, **options)))

    def open_channel(self, files):
        """Open a channel without the framework's client settings."""
        pem = files.read()
        credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
        return self._stack.enter_context(grpc.secure_channel(self.address, credentials))

    def close(self):
        self._stack.close()


class BlockingAsyncClient:
    """The asyncio client on its own event loop, called like the threaded client."""

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

    def get_object(self, *args, **options):
        stream = self._client.get_object_async(*args, **options)
        while (chunk := self._wait(anext(stream, None))) is not None:
            yield chunk

    def _wait(self, awaitable):
        async def await_result():
            return await awaitable

        return asyncio.run_coroutine_threadsafe(await_result(), self._loop).result(60)


CLIENT_TYPES = {"threads": BoundaryClient, "asyncio": BlockingAsyncClient}


def make_fact(number=1, *, pair=OUTBOUND, value=None):
    envelope = Envelope(
        message_id=f"m-{number}", from_zone=pair.from_zone, to_zone=pair.to_zone, produced_at_unix_ms=1_700_000_000_000
    )
    return envelope, Fact.create("order:7", "paid", {"number": number} if value is None else value)


def to_stored(content):
    return StoredArtifact(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))
