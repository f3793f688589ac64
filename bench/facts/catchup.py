"""Catch-up: the rate at which a zone copies a backlog after a lost connection, and the memory that it takes.

python bench/facts/catchup.py                        1,000,000 facts
python bench/facts/catchup.py --facts 50000          to see that it runs

The same facts go from one store to another twice. "plain" is one process that fetches batches of one store and
forwards them to the other, with nothing in between. "replica" is the replicator, over mutual TLS and gRPC, from a
service in its own process. Stores are databases of one PostgreSQL with fsync. The targets: at least 0.5 of the plain
rate, and at most 20 MB of growth in the replicator's process, counted from the first hundredth of the facts. It ends
with one line of JSON, and with exit code 1 where a target is missed.
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

from ergon_framework.database.migrate import upgrade
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.model import BoundarySide, Cursor, Envelope, Fact, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.servers.postgres import PrivatePostgres

PAIR = ZonePair("plant", "headquarters")
BATCH_SIZE = 1_000
MIN_RATE_RATIO, MAX_GROWTH_MB = 0.5, 20.0


def fill(dsn, facts):
    with PostgresBoundary(dsn, side=BoundarySide.INNER) as store:
        for first in range(0, facts, BATCH_SIZE):
            batch = [
                (
                    Envelope(
                        message_id=f"m-{number}",
                        from_zone=PAIR.from_zone,
                        to_zone=PAIR.to_zone,
                        produced_at_unix_ms=number,
                    ),
                    Fact.create(f"order:{number}", "paid", {"charge": number, "text": "x" * 160}),
                )
                for number in range(first, min(first + BATCH_SIZE, facts))
            ]
            for result in store.append_facts(batch):
                raise_if_error(result)


def copy_plain(source, destination, facts):
    """Copy from one store to the other in one process; return facts per second."""
    with (
        PostgresBoundary(source) as source_store,
        PostgresBoundary(destination, side=BoundarySide.OUTER) as destination_store,
    ):
        began, cursor = time.monotonic(), Cursor("", 0)
        while cursor.offset < facts:
            batch = source_store.fetch_facts("plain", PAIR, BATCH_SIZE, after=cursor)
            for result in destination_store.forward_facts(batch):
                raise_if_error(result)
            cursor = batch[-1].cursor
        return {"rate": facts / (time.monotonic() - began)}


def serve(source, folder):
    from ergon_framework.facts.service.server import BoundaryServer  # noqa: PLC0415 - another process needs none

    async def main():
        server = BoundaryServer(
            store=PostgresBoundary(source), zones=[PAIR.from_zone], files=_build_tls_files(folder, "server")
        )
        print(await server.start(), flush=True)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()
        await server.stop_gracefully(1.0)

    asyncio.run(main())


def replicate(address, folder, destination, facts, variant):
    """Copy by the replicator; return facts per second, and megabytes of growth."""
    from ergon_framework.facts.service.channel import ServiceAddress  # noqa: PLC0415 - as above
    from ergon_framework.facts.service.client import BoundaryClient  # noqa: PLC0415 - as above
    from ergon_framework.facts.service.client_async import AsyncBoundaryClient  # noqa: PLC0415 - as above

    server_address = ServiceAddress(host=address, files=_build_tls_files(folder, PAIR.to_zone), name="localhost")
    policy = ReplicationPolicy(batch=BATCH_SIZE)
    if variant == "threads":
        source, destination_store = (
            BoundaryClient(server_address),
            PostgresBoundary(destination, side=BoundarySide.OUTER),
        )
        replicator = Replicator(source, destination_store, PAIR, policy=policy)
        return _run_and_watch(replicator, replicator.run, facts)

    def run():
        nonlocal replicator

        async def main():
            nonlocal replicator
            source_client = AsyncBoundaryClient(server_address)
            replicator = AsyncReplicator(
                source_client, PostgresBoundary(destination, side=BoundarySide.OUTER), PAIR, policy=policy
            )
            holder.append(replicator)
            await replicator.run()

        asyncio.run(main())

    replicator, holder = None, []
    return _run_and_watch(holder, run, facts)


def _run_and_watch(replicator, run, facts):
    began, process = time.monotonic(), psutil.Process(os.getpid())
    memory_samples = []
    result = {}

    def watch():
        while True:
            current = replicator[0] if isinstance(replicator, list) and replicator else replicator
            offset = 0 if not current else current.state().offset
            if offset >= facts / 100:
                memory_samples.append(process.memory_info().rss)
            if offset >= facts:
                result["seconds"] = time.monotonic() - began
                current.stop()
                return
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    run()
    return {
        "rate": facts / result["seconds"],
        "growth_mb": (max(memory_samples) - memory_samples[0]) / 1e6,
        "peak_mb": max(memory_samples) / 1e6,
    }


def _build_tls_files(folder, name):
    from ergon_framework.facts.service.tls import TlsFiles  # noqa: PLC0415 - as above

    folder = Path(folder)
    return TlsFiles(folder / f"{name}.crt", folder / f"{name}.key", folder / "authority.pem")


def _run_part(*arguments):
    """Run one part in its own process, and return its result."""
    completed = subprocess.run(
        [sys.executable, __file__, "--part", *map(str, arguments)], stdout=subprocess.PIPE, check=True
    )
    return json.loads(completed.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=int, default=1_000_000)
    parser.add_argument("--part", nargs="+", default=None)
    options = parser.parse_args()
    if options.part:
        name, *arguments = options.part
        if name == "serve":
            serve(*arguments)
        elif name == "plain":
            print(json.dumps(copy_plain(*arguments[:2], int(arguments[2]))))
        else:
            address, folder, destination, facts, variant = arguments
            print(json.dumps(replicate(address, folder, destination, int(facts), variant)))
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
    from tests.servers.certificates import CertificateAuthority  # noqa: PLC0415 - needs what the parts do not

    authority = CertificateAuthority(folder)
    authority.issue("server")
    authority.issue(PAIR.to_zone, zones=[PAIR.to_zone])
    names = ("source", "plain", "threads", "asyncio")
    dsns = {name: postgres.create_database(name) for name in names}
    for dsn in dsns.values():
        upgrade(dsn)
    began = time.monotonic()
    fill(dsns["source"], facts)
    say(f"{facts} facts are stored after {time.monotonic() - began:.0f} s")
    result = {"facts": facts}
    plain_result = _run_part("plain", dsns["source"], dsns["plain"], facts)
    result["plain_rate"] = round(plain_result["rate"])
    say(f"plain: {plain_result['rate']:.0f} facts/s")
    service = subprocess.Popen(
        [sys.executable, __file__, "--part", "serve", dsns["source"], str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        address = f"127.0.0.1:{service.stdout.readline().strip()}"
        for variant in ("threads", "asyncio"):
            replica_result = _run_part("replica", address, folder, dsns[variant], facts, variant)
            ratio = replica_result["rate"] / plain_result["rate"]
            result[variant] = {
                "rate": round(replica_result["rate"]),
                "ratio": round(ratio, 2),
                "growth_mb": round(replica_result["growth_mb"], 1),
                "met": ratio >= MIN_RATE_RATIO and replica_result["growth_mb"] <= MAX_GROWTH_MB,
            }
            say(
                f"{variant}: {replica_result['rate']:.0f} facts/s, {ratio:.2f} of plain, "
                f"{replica_result['growth_mb']:.1f} MB of growth"
            )
    finally:
        service.terminate()
        service.wait(20)
        service.stdout.close()
    result["met"] = all(result[variant]["met"] for variant in ("threads", "asyncio"))
    print(json.dumps(result))
    return 0 if result["met"] else 1


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
