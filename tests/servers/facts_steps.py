"""A facts service over PostgreSQL and files that stands still at one step of its work, for whoever kills it there.

python -m tests.servers.facts_steps '{"dsn": ..., "contents": ..., "tls": [...], "listen": ..., "step": ...}'

It says ``listening``, and once it has come to the step, ``at STEP``; then it waits for a line on stdin, and goes on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from ergon_framework.facts.service.files import TlsFiles
from ergon_framework.facts.service.server import BoundaryServer
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.facts.stores.postgres_objects import Objects

#: In the order in which a call comes to them; what comes behind ``in`` is seen from the outside, by a lock.
STEPS = {
    "append": ("append-before", "append-in", "append-after"),
    "batch": ("batch-before", "batch-in", "batch-after"),
    "put": ("put-begin", "put-middle", "put-keep", "put-seal", "put-sealed", "put-after"),
    "fetch": ("fetch-before", "fetch-after"),
    "confirm": ("confirm-before", "confirm-in", "confirm-after"),
    "get": ("get-begin", "get-middle"),
}


class Gate:
    """Stands still the first time that somebody comes by the step that it is for."""

    def __init__(self, step: str | None) -> None:
        self._step = step
        self._lock = threading.Lock()

    def __call__(self, step: str) -> None:
        with self._lock:
            if step != self._step:
                return
            self._step = None
        print(f"at {step}", flush=True)
        sys.stdin.readline()


class _Contents(FileContents):
    """Says when bytes come, and when they are sealed."""

    def __init__(self, folder: str, gate: Gate) -> None:
        super().__init__(folder)
        self._gate = gate

    @contextmanager
    def receive(self, upload=None, *, begin=0):
        self._gate("put-begin")
        with super().receive(upload, begin=begin) as receiving:
            yield _Receiving(receiving, self._gate)


class _Receiving:
    def __init__(self, receiving, gate: Gate) -> None:
        self._receiving = receiving
        self._gate = gate
        self._pieces = 0

    @property
    def size(self):
        return self._receiving.size

    def add(self, piece: bytes) -> None:
        self._pieces += 1
        if self._pieces > 1:
            self._gate("put-middle")
        self._receiving.add(piece)

    def seal(self, expected=None):
        self._gate("put-seal")
        stored = self._receiving.seal(expected)
        self._gate("put-sealed")
        return stored


class _Objects(Objects):
    def __init__(self, objects: Objects, gate: Gate) -> None:
        self.__dict__.update(objects.__dict__)
        self._gate = gate

    def keep(self, upload):
        self._gate("put-keep")
        stored = super().keep(upload)
        self._gate("put-after")
        return stored


class _Store(PostgresBoundary):
    """The store, which has a step before and behind each call of it."""

    def __init__(self, dsn: str, contents: str, gate: Gate) -> None:
        super().__init__(dsn, contents=_Contents(contents, gate))
        self._gate = gate
        self._objects = _Objects(self._objects, gate)

    async def _between(self, name: str, call):
        # All of the service stands still, not this call alone.
        self._gate(f"{name}-before")
        found = await call
        self._gate(f"{name}-after")
        return found

    async def append_fact_async(self, envelope, fact):
        return await self._between("append", super().append_fact_async(envelope, fact))

    async def append_facts_async(self, facts):
        return await self._between("batch", super().append_facts_async(facts))

    async def fetch_facts_async(self, reader, pair, limit, *, after=None, **how):
        return await self._between("fetch", super().fetch_facts_async(reader, pair, limit, after=after, **how))

    async def confirm_receipt_async(self, reader, pair, cursor):
        return await self._between("confirm", super().confirm_receipt_async(reader, pair, cursor))

    async def get_object_async(self, bucket, key, *, begin=0, zone=""):
        self._gate("get-begin")
        async for piece in super().get_object_async(bucket, key, begin=begin, zone=zone):
            yield piece
            self._gate("get-middle")


async def main(given) -> None:
    store = _Store(given["dsn"], given["contents"], Gate(given["step"]))
    files = TlsFiles(*map(Path, given["tls"]))
    await store.open_async()
    server = BoundaryServer(store=store, zones=given["zones"], files=files, listen=given["listen"])
    await server.start()
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
