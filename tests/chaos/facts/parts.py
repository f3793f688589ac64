"""The processes of a zone: its service, its replicator and its producer; each is killed at any time and restarted.

python -m tests.chaos.facts.parts serve|follow|produce '{"zone": ..., ...}'
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ergon_framework.errors import ErgonError
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.model import BoundarySide, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.client_async import AsyncBoundaryClient
from ergon_framework.facts.service.server import BoundaryServer
from ergon_framework.facts.service.tls import TlsFiles
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.chaos.facts.mix import Mix
from tests.chaos.facts.moody import UnreliableBoundary

BATCH_SIZE = 100
POLICY = ReplicationPolicy(timeout=8.0, poll=0.5, survey=5.0, backoff=0.1, cap=2.0, drain=2.0)


def open_store(settings: dict[str, Any]) -> PostgresBoundary:
    """Open the zone's own store."""
    return PostgresBoundary(
        settings["dsn"],
        side=BoundarySide(settings["side"]),
        contents=FileContentStore(settings["contents"]),
        # Tests without power loss run without fsync.
        accept_loss=settings.get("accept_loss", False),
    )


def _make_address(settings: dict[str, Any], host: str) -> ServiceAddress:
    return ServiceAddress(
        host=host,
        files=TlsFiles(*(Path(path) for path in settings["tls"])),
        name="localhost",
        deadline=5.0,
        keepalive=10.0,
        keepalive_timeout=5.0,
    )


def serve(settings: dict[str, Any]) -> None:
    async def main() -> None:
        files = TlsFiles(*(Path(path) for path in settings["server_tls"]))
        server = BoundaryServer(
            store=open_store(settings), zones=[settings["zone"]], files=files, listen=settings["listen"]
        )
        await server.start()
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
        await stopping.wait()
        await server.stop_gracefully(2.0)

    asyncio.run(main())


def follow(settings: dict[str, Any]) -> None:
    """Pull the other zone's facts; the inner zone on threads, the outer one on asyncio."""
    pair, seed = ZonePair(settings["peer"], settings["zone"]), os.getpid()
    destination = UnreliableBoundary(open_store(settings), seed=seed)
    if settings["side"] == BoundarySide.INNER:
        source = UnreliableBoundary(BoundaryClient(_make_address(settings, settings["peer_address"])), seed=seed + 1)
        replicator = Replicator(source, destination, pair, policy=POLICY, on_change=_print_state)  # type: ignore[arg-type]
        signal.signal(signal.SIGTERM, lambda *_: replicator.stop())
        replicator.run()
        return

    async def main() -> None:
        source = UnreliableBoundary(
            AsyncBoundaryClient(_make_address(settings, settings["peer_address"])), seed=seed + 1
        )
        replicator = AsyncReplicator(source, destination, pair, policy=POLICY, on_change=_print_state)  # type: ignore[arg-type]
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, replicator.stop)
        await replicator.run()

    asyncio.run(main())


def _print_state(state: Any) -> None:
    reason = "" if state.problem is None else state.problem.reason
    print(f"{time.time():.1f} {state.status} at {state.offset} {reason}", flush=True)


def produce(settings: dict[str, Any]) -> None:
    """Append all facts of the mix through the zone's service; record each confirmation, synced, before the next."""
    mix = Mix(
        ZonePair(settings["zone"], settings["peer"]),
        settings["facts"],
        settings["artifacts"],
        settings["bytes"],
        settings["seed"],
    )
    client = UnreliableBoundary(BoundaryClient(_make_address(settings, settings["own_address"])), seed=os.getpid())
    journal = Path(settings["journal"])
    confirmed_count = _count_confirmed(journal)
    pause = settings["seconds"] / max(1, mix.facts / BATCH_SIZE)
    with journal.open("ab") as file:
        for first in range(confirmed_count, mix.facts, BATCH_SIZE):
            started_at = time.monotonic()
            numbers = range(first, min(first + BATCH_SIZE, mix.facts))
            for number, offset in zip(numbers, _append_batch(client, mix, numbers), strict=True):
                file.write(f"{number} {offset}\n".encode())
            file.flush()
            os.fsync(file.fileno())
            time.sleep(max(0.0, pause - (time.monotonic() - started_at)))


def _count_confirmed(journal: Path) -> int:
    """Count the facts that are known to be confirmed: the last line may be incomplete."""
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    with journal.open("wb") as file:
        file.write(b"".join(line + b"\n" for line in lines))
    return len(lines)


def _append_batch(client: Any, mix: Mix, numbers: range) -> list[int]:
    while True:
        try:
            facts = []
            for number in numbers:
                stored = mix.describe_artifact(number)
                if stored is not None:
                    location = mix.bucket, mix.key(number)
                    begin = client.uploaded_bytes(*location, stored)
                    client.put_object(*location, mix.iter_pieces(number, begin), expected=stored, begin=begin)
                facts.append((mix.make_envelope(number), mix.make_fact(number, stored)))
            return [raise_if_error(answer).offset for answer in client.append_facts(facts)]
        except ErgonError as error:
            print(f"{time.time():.1f} {numbers} {type(error).__name__}: {error}", flush=True)
            if error.final:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    {"serve": serve, "follow": follow, "produce": produce}[sys.argv[1]](json.loads(sys.argv[2]))
