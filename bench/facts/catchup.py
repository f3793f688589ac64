"""Catch-up: how fast a zone copies a backlog after the line was cut, and what memory it takes.

python bench/facts/catchup.py                        1,000,000 facts
python bench/facts/catchup.py --facts 50000          to see that it runs

The same facts go from one store to another twice. "plain" is one process that fetches batches of one store and
forwards them to the other, with nothing in between. "replica" is the replicator, over mutual TLS and gRPC, from a
service in a process of its own. Stores are databases of one PostgreSQL with fsync. The bars: at least 0.5 of the plain
rate, and at most 20 MB of growth in the replicator's process, counted from when the first hundredth was copied. It
ends with one line of JSON, and with exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.model import Cursor, Envelope, Fact, Pair, Side
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.schema.migrate import upgrade
from tests.servers.postgres import PrivatePostgres

PAIR = Pair("plant", "headquarters")
BATCH = 1_000
RATE, GROWTH_MB = 0.5, 20.0


def fill(dsn, facts):
    with PostgresBoundary(dsn, side=Side.INNER) as store:
        for first in range(0, facts, BATCH):
            batch = [
                (
                    Envelope(
                        message_id=f"m-{number}",
                        from_zone=PAIR.from_zone,
                        to_zone=PAIR.to_zone,
                        produced_at_unix_ms=number,
                    ),
                    Fact.of(f"order:{number}", "paid", {"charge": number, "text": "x" * 160}),
                )
                for number in range(first, min(first + BATCH, facts))
            ]
            for answer in store.append_facts(batch):
                confirmed(answer)


def plain(source, destination, facts):
    """From one store to the other in one process; facts per second."""
    with PostgresBoundary(source) as there, PostgresBoundary(destination, side=Side.OUTER) as here:
        began, after = time.monotonic(), Cursor("", 0)
        while after.offset < facts:
            batch = there.fetch_facts("plain", PAIR, BATCH, after=after)
            for answer in here.forward_facts(batch):
                confirmed(answer)
            after = batch[-1].cursor
        return {"rate": facts / (time.monotonic() - began)}


def serve(source, folder):
    from ergon_framework.facts.service.server import BoundaryServer  # noqa: PLC0415 - another process needs none

    async def main():
        server = BoundaryServer(store=PostgresBoundary(source), zones=[PAIR.from_zone], files=_files(folder, "server"))
        print(await server.start(), flush=True)
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        await over.wait()
        await server.drain(1.0)

    asyncio.run(main())


def replica(address, folder, destination, facts, flavour):
    """By the replicator; facts per second, and megabytes of growth."""
    from ergon_framework.facts.service.address import Address  # noqa: PLC0415 - as above
    from ergon_framework.facts.service.client import BoundaryClient  # noqa: PLC0415 - as above
    from ergon_framework.facts.service.client_aio import AsyncBoundaryClient  # noqa: PLC0415 - as above

    where = Address(host=address, files=_files(folder, PAIR.to_zone), name="localhost")
    policy = ReplicationPolicy(batch=BATCH)
    if flavour == "threads":
        source, here = BoundaryClient(where), PostgresBoundary(destination, side=Side.OUTER)
        replicator = Replicator(source, here, PAIR, policy=policy)
        return _watched(replicator, replicator.run, facts)

    def run():
        nonlocal replicator

        async def main():
            nonlocal replicator
            there = AsyncBoundaryClient(where)
            replicator = AsyncReplicator(there, PostgresBoundary(destination, side=Side.OUTER), PAIR, policy=policy)
            holder.append(replicator)
            await replicator.run()

        asyncio.run(main())

    replicator, holder = None, []
    return _watched(holder, run, facts)


def _watched(replicator, run, facts):
    began, memory = time.monotonic(), psutil.Process(os.getpid())
    seen = []
    over = {}

    def watch():
        while True:
            found = replicator[0] if isinstance(replicator, list) and replicator else replicator
            offset = 0 if not found else found.state().offset
            if offset >= facts / 100:
                seen.append(memory.memory_info().rss)
            if offset >= facts:
                over["seconds"] = time.monotonic() - began
                found.stop()
                return
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    run()
    return {"rate": facts / over["seconds"], "growth_mb": (max(seen) - seen[0]) / 1e6, "peak_mb": max(seen) / 1e6}


def _files(folder, name):
    from ergon_framework.facts.service.files import TlsFiles  # noqa: PLC0415 - as above

    folder = Path(folder)
    return TlsFiles(folder / f"{name}.crt", folder / f"{name}.key", folder / "authority.pem")


def _part(*words):
    """One part in a process of its own: what it has told."""
    ran = subprocess.run([sys.executable, __file__, "--part", *map(str, words)], stdout=subprocess.PIPE, check=True)
    return json.loads(ran.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=int, default=1_000_000)
    parser.add_argument("--part", nargs="+", default=None)
    options = parser.parse_args()
    if options.part:
        name, *words = options.part
        if name == "serve":
            serve(*words)
        elif name == "plain":
            print(json.dumps(plain(*words[:2], int(words[2]))))
        else:
            address, folder, destination, facts, flavour = words
            print(json.dumps(replica(address, folder, destination, int(facts), flavour)))
        return 0
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        Path(folder).chmod(0o755)
        postgres = PrivatePostgres(
            Path(folder) / "data", settings={"shared_buffers": "512MB", "max_wal_size": "4GB", "max_connections": 100}
        )
        postgres.start()
        try:
            return measure(postgres, Path(folder), options.facts)
        finally:
            postgres.stop("fast")


def measure(postgres, folder, facts):
    from tests.servers.certificates import Authority  # noqa: PLC0415 - needs what the parts do not

    authority = Authority(folder)
    authority.issue("server")
    authority.issue(PAIR.to_zone, zones=[PAIR.to_zone])
    names = ("source", "plain", "threads", "asyncio")
    dsns = {name: postgres.create_database(name) for name in names}
    for dsn in dsns.values():
        upgrade(dsn)
    began = time.monotonic()
    fill(dsns["source"], facts)
    say(f"{facts} facts are stored after {time.monotonic() - began:.0f} s")
    told = {"facts": facts}
    measured = _part("plain", dsns["source"], dsns["plain"], facts)
    told["plain_rate"] = round(measured["rate"])
    say(f"plain: {measured['rate']:.0f} facts/s")
    service = subprocess.Popen(
        [sys.executable, __file__, "--part", "serve", dsns["source"], str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        address = f"127.0.0.1:{service.stdout.readline().strip()}"
        for flavour in ("threads", "asyncio"):
            found = _part("replica", address, folder, dsns[flavour], facts, flavour)
            ratio = found["rate"] / measured["rate"]
            told[flavour] = {
                "rate": round(found["rate"]),
                "ratio": round(ratio, 2),
                "growth_mb": round(found["growth_mb"], 1),
                "met": ratio >= RATE and found["growth_mb"] <= GROWTH_MB,
            }
            say(f"{flavour}: {found['rate']:.0f} facts/s, {ratio:.2f} of plain, {found['growth_mb']:.1f} MB of growth")
    finally:
        service.terminate()
        service.wait(20)
        service.stdout.close()
    told["met"] = all(told[flavour]["met"] for flavour in ("threads", "asyncio"))
    print(json.dumps(told))
    return 0 if told["met"] else 1


def say(line):
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
