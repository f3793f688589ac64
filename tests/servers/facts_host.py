"""A process that serves boundary stores in memory over mutual TLS, and does to them what a test tells it.

Started by `Host`, it is told commands as pickles on its stdin and answers on its stdout; when that ends, so does it.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.model import Side
from ergon_framework.facts.service.files import TlsFiles
from ergon_framework.facts.service.server import BoundaryServer, Limits
from ergon_framework.facts.stores.memory import MemoryBoundary
from tests.servers.certificates import Authority

ROOT = Path(__file__).parents[2]


class Host:
    """The process, from the outside."""

    def __init__(self, folder: Path, zones=()):
        self.authority = Authority(folder)
        self.zones = tuple(zones)
        self.files = self.authority.issue("server")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.facts_host"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def pid(self):
        return self._process.pid

    def ask(self, *words, **given):
        """Have the command *words* done in the process; what it returns or raises."""
        with self._lock:
            pickle.dump((words, given), self._process.stdin)
            self._process.stdin.flush()
            well, result = pickle.load(self._process.stdout)
        if not well:
            raise result
        return result

    def serve(self, store, *, side="inner", room=None, zones=None, limits=None, **more):
        """The address of *store*, which is served from now on; *more* are fields of the BoundaryServer."""
        port = self.ask(
            "serve",
            store,
            self.files,
            zones or self.zones,
            side=side,
            room=room,
            limits=limits or Limits(),
            **more,
        )
        return f"127.0.0.1:{port}"

    def call(self, store, name, *args, **given):
        """Call the store itself."""
        return self.ask("call", store, name, *args, **given)

    def kill(self):
        self._process.kill()
        self.close()

    def close(self):
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


class _Store(MemoryBoundary):
    """Remembers who retired whom, and misbehaves when it is told to."""

    def __init__(self, **given):
        super().__init__(**given)
        self.retired = []
        self.mood = None
        self.came = 0

    async def put_object_async(self, bucket, key, blob, **given):
        return await super().put_object_async(bucket, key, self._counted(blob), **given)

    async def _counted(self, blob):
        async for piece in blob:
            yield piece
            self.came += len(piece)  # asked for the next one: this one is here

    def retire_reader(self, reader, pair, *, by=""):
        self.retired.append((reader, pair, by))
        return super().retire_reader(reader, pair, by=by)

    async def end_of_async(self, pair):
        if self.mood == "hang":
            await asyncio.Event().wait()
        if self.mood == "lost":
            raise ConnectionLost("the database is away")
        if self.mood:
            raise ValueError(self.mood)
        return await super().end_of_async(pair)


class _Inside:
    def __init__(self):
        self.offset = 0.0
        self.stores = {}
        self.servers = {}
        self.kept = []

    async def serve(self, store, files: TlsFiles, zones, *, side, room, **more):
        if store not in self.stores:
            self.stores[store] = _Store(side=Side(side), max_facts=room)
        if store not in self.servers:
            server = BoundaryServer(store=self.stores[store], zones=zones, files=files, clock=self.clock, **more)
            await server.start()
            self.servers[store] = server
        return self.servers[store].port

    def clock(self):
        return time.time() + self.offset

    async def shift(self, seconds):
        """Have the services believe that it is later."""
        self.offset = seconds

    async def mood(self, store, mood):
        self.stores[store].mood = mood

    async def call(self, store, name, *args, **given):
        found = getattr(self.stores[store], name)(*args, **given)
        return list(found) if name == "get_object" else found

    async def value(self, store, name):
        return getattr(self.stores[store], name)

    async def stop(self, store, grace=5.0):
        await self.servers.pop(store).drain(grace)

    async def backup(self, store):
        self.kept.append(self.stores[store].restored())
        return len(self.kept) - 1

    async def restore(self, store, number):
        await self.stop(store)
        self.stores[store] = self.kept[number]

    async def lose(self, store, bucket, key):
        artifacts = self.stores[store]._artifacts
        del artifacts._contents[artifacts._names["", bucket, key][0].digest]

    async def damage(self, store, bucket, key):
        artifacts = self.stores[store]._artifacts
        digest = artifacts._names["", bucket, key][0].digest
        artifacts._contents[digest] = b"X" + artifacts._contents[digest][1:]


async def main():
    inside = _Inside()
    loop = asyncio.get_running_loop()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            (command, *words), given = await loop.run_in_executor(None, pickle.load, source)
        except EOFError:
            for store in list(inside.servers):
                await inside.stop(store, 0)
            return
        try:
            answer = True, await getattr(inside, command)(*words, **given)
        except Exception as error:
            answer = False, error
        pickle.dump(answer, sink)
        sink.flush()


if __name__ == "__main__":
    asyncio.run(main())
