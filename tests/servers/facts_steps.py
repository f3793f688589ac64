"""A facts service over PostgreSQL and files that stops at one step of its work, so that a test can kill it there.

python -m tests.servers.facts_steps '{"dsn": ..., "contents": ..., "tls": [...], "listen": ..., "step": ...}'

It prints ``listening``, and once it has reached the step, ``at STEP``; then it waits for a line on stdin and continues.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from ergon_framework.facts.service.server import BoundaryServer
from ergon_framework.facts.service.tls import TlsFiles
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.postgres.artifacts import PostgresArtifacts
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

#: In the order in which a call reaches them; steps after ``in`` are visible from outside, by a lock.
STEPS = {
    "append": ("append-before", "append-in", "append-after"),
    "batch": ("batch-before", "batch-in", "batch-after"),
    "put": ("put-begin", "put-middle", "put-keep", "put-seal", "put-sealed", "put-after"),
    "fetch": ("fetch-before", "fetch-after"),
    "confirm": ("confirm-before", "confirm-in", "confirm-after"),
    "get": ("get-begin", "get-middle"),
}


class Gate:
    """Blocks the first caller that reaches its step."""

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


class _GatedContents(FileContentStore):
    """Stops when bytes arrive, and when an upload is committed."""

    def __init__(self, folder: str, gate: Gate) -> None:
        super().__init__(folder)
        self._gate = gate

    @contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        self._gate("put-begin")
        with super().begin_upload(upload, begin=begin) as receiver:
            yield _GatedUpload(receiver, self._gate)


class _GatedUpload:
    def __init__(self, receiving, gate: Gate) -> None:
        self._upload = receiving
        self._gate = gate
        self._chunk_count = 0

    @property
    def size(self):
        return self._upload.size

    def add(self, piece: bytes) -> None:
        self._chunk_count += 1
        if self._chunk_count > 1:
            self._gate("put-middle")
        self._upload.add(piece)

    def commit(self, expected=None):
        self._gate("put-seal")
        stored = self._upload.commit(expected)
        self._gate("put-sealed")
        return stored


class _GatedObjects(PostgresArtifacts):
    def __init__(self, objects: PostgresArtifacts, gate: Gate) -> None:
        self.__dict__.update(objects.__dict__)
        self._gate = gate

    def store(self, upload):
        self._gate("put-keep")
        stored = super().store(upload)
        self._gate("put-after")
        return stored


class _GatedStore(PostgresBoundary):
    """The store with a step before and after each call."""

    def __init__(self, dsn: str, contents: str, gate: Gate) -> None:
        super().__init__(dsn, contents=_GatedContents(contents, gate))
        self._gate = gate
        self._artifacts = _GatedObjects(self._artifacts, gate)

    async def _call_between_steps(self, name: str, call):
        # The whole service stops, not this call alone.
        self._gate(f"{name}-before")
        result = await call
        self._gate(f"{name}-after")
        return result

    async def append_fact_async(self, envelope, fact):
        return await self._call_between_steps("append", super().append_fact_async(envelope, fact))

    async def append_facts_async(self, facts):
        return await self._call_between_steps("batch", super().append_facts_async(facts))

    async def fetch_facts_async(self, reader, pair, limit, *, after=None, **options):
        return await self._call_between_steps(
            "fetch", super().fetch_facts_async(reader, pair, limit, after=after, **options)
        )

    async def confirm_receipt_async(self, reader, pair, cursor):
        return await self._call_between_steps("confirm", super().confirm_receipt_async(reader, pair, cursor))

    async def get_object_async(self, bucket, key, *, begin=0, zone=""):
        self._gate("get-begin")
        async for chunk in super().get_object_async(bucket, key, begin=begin, zone=zone):
            yield chunk
            self._gate("get-middle")


async def main(options) -> None:
    store = _GatedStore(options["dsn"], options["contents"], Gate(options["step"]))
    files = TlsFiles(*map(Path, options["tls"]))
    await store.open_async()
    server = BoundaryServer(store=store, zones=options["zones"], files=files, listen=options["listen"])
    await server.start()
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
