"""A process that serves in-memory boundary stores over mutual TLS, and manipulates them on a test's command.

`Host` starts it; it reads commands as pickles from stdin and answers on stdout, and exits when stdin ends.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.model import BoundarySide
from ergon_framework.facts.service.server import BoundaryServer, Limits
from ergon_framework.facts.service.tls import TlsFiles
from ergon_framework.facts.stores.memory import MemoryBoundary
from tests.servers.certificates import CertificateAuthority

ROOT = Path(__file__).parents[2]


class Host:
    """The process as its parent sees it."""

    def __init__(self, folder: Path, zones=()):
        self.authority = CertificateAuthority(folder)
        self.zones = tuple(zones)
        self.files = self.authority.issue("server")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.facts_host"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def pid(self):
        return self._process.pid

    def ask(self, *words, **options):
        """Run the command *words* in the process; return its result or raise its error."""
        with self._lock:
            pickle.dump((words, options), self._process.stdin)
            self._process.stdin.flush()
            has_succeeded, result = pickle.load(self._process.stdout)
        if not has_succeeded:
            raise result
        return result

    def serve(self, store, *, side="inner", max_facts=None, zones=None, limits=None, **more):
        """Serve *store* and return its address; *more* are fields of the BoundaryServer."""
        port = self.ask(
            "serve",
            store,
            self.files,
            zones or self.zones,
            side=side,
            max_facts=max_facts,
            limits=limits or Limits(),
            **more,
        )
        return f"127.0.0.1:{port}"

    def call(self, store, name, *args, **options):
        """Call the store directly."""
        return self.ask("call", store, name, *args, **options)

    def kill(self):
        self._process.kill()
        self.close()

    def close(self):
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


class _ControlledStore(MemoryBoundary):
    """Records who retired whom, and misbehaves on command."""

    def __init__(self, **options):
        super().__init__(**options)
        self.retired = []
        self.mood = None
        self.came = 0

    async def put_object_async(self, bucket, key, blob, **options):
        return await super().put_object_async(bucket, key, self._count_bytes(blob), **options)

    async def _count_bytes(self, blob):
        async for chunk in blob:
            yield chunk
            self.came += len(chunk)  # the next piece was requested, so this one has arrived

    def retire_reader(self, reader, pair, *, by=""):
        self.retired.append((reader, pair, by))
        return super().retire_reader(reader, pair, by=by)

    async def last_offset_async(self, pair):
        if self.mood == "hang":
            await asyncio.Event().wait()
        if self.mood == "lost":
            raise ConnectionLostError("the database is away")
        if self.mood:
            raise ValueError(self.mood)
        return await super().last_offset_async(pair)


class _StoreManager:
    def __init__(self):
        self.offset = 0.0
        self.stores = {}
        self.servers = {}
        self.backups = []

    async def serve(self, store, files: TlsFiles, zones, *, side, max_facts, **more):
        if store not in self.stores:
            self.stores[store] = _ControlledStore(side=BoundarySide(side), max_facts=max_facts)
        if store not in self.servers:
            server = BoundaryServer(store=self.stores[store], zones=zones, files=files, clock=self.clock, **more)
            await server.start()
            self.servers[store] = server
        return self.servers[store].port

    def clock(self):
        return time.time() + self.offset

    async def shift(self, seconds):
        """Move the clock of the services forward."""
        self.offset = seconds

    async def mood(self, store, mood):
        self.stores[store].mood = mood

    async def call(self, store, name, *args, **options):
        result = getattr(self.stores[store], name)(*args, **options)
        return list(result) if name == "get_object" else result

    async def value(self, store, name):
        return getattr(self.stores[store], name)

    async def stop(self, store, grace=5.0):
        await self.servers.pop(store).stop_gracefully(grace)

    async def drop(self, store):
        """Stop serving the store, if it is served, and delete it."""
        if store in self.servers:
            await self.stop(store, 0)
        del self.stores[store]

    async def backup(self, store):
        self.backups.append(self.stores[store].as_restored_backup())
        return len(self.backups) - 1

    async def restore(self, store, number):
        await self.stop(store)
        self.stores[store] = self.backups[number]

    async def lose(self, store, bucket, key):
        artifacts = self.stores[store]._artifacts
        del artifacts._contents[artifacts._names["", bucket, key][0].digest]

    async def damage(self, store, bucket, key):
        artifacts = self.stores[store]._artifacts
        digest = artifacts._names["", bucket, key][0].digest
        artifacts._contents[digest] = b"X" + artifacts._contents[digest][1:]


async def main():
    manager = _StoreManager()
    loop = asyncio.get_running_loop()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            (command, *words), options = await loop.run_in_executor(None, pickle.load, source)
        except EOFError:
            for store in list(manager.servers):
                await manager.stop(store, 0)
            return
        try:
            answer = True, await getattr(manager, command)(*words, **options)
        except Exception as error:
            answer = False, error
        pickle.dump(answer, sink)
        sink.flush()


if __name__ == "__main__":
    asyncio.run(main())
