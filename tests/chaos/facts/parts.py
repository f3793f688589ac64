"""The processes of a zone: its service, its replicator and its producer. Each is killed at any moment, and comes back.

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
from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.model import Pair, Side
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.client_aio import AsyncBoundaryClient
from ergon_framework.facts.service.files import TlsFiles
from ergon_framework.facts.service.server import BoundaryServer
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.postgres import PostgresBoundary
from tests.chaos.facts.mix import Mix
from tests.chaos.facts.moody import Moody

BATCH = 100
POLICY = ReplicationPolicy(timeout=8.0, poll=0.5, survey=5.0, backoff=0.1, cap=2.0, drain=2.0)


def store_of(given: dict[str, Any]) -> PostgresBoundary:
    """The zone's own store."""
    return PostgresBoundary(
        given["dsn"],
        side=Side(given["side"]),
        contents=FileContents(given["contents"]),
        # Tests that cut no power run without fsync.
        accept_loss=given.get("accept_loss", False),
    )


def _address(given: dict[str, Any], host: str) -> Address:
    return Address(
        host=host,
        files=TlsFiles(*(Path(path) for path in given["tls"])),
        name="localhost",
        deadline=5.0,
        keepalive=10.0,
        keepalive_patience=5.0,
    )


def serve(given: dict[str, Any]) -> None:
    async def main() -> None:
        files = TlsFiles(*(Path(path) for path in given["server_tls"]))
        server = BoundaryServer(store=store_of(given), zones=[given["zone"]], files=files, listen=given["listen"])
        await server.start()
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        await over.wait()
        await server.drain(2.0)

    asyncio.run(main())


def follow(given: dict[str, Any]) -> None:
    """Pull the other zone's facts; the inner zone on threads, the outer one on asyncio."""
    pair, seed = Pair(given["peer"], given["zone"]), os.getpid()
    destination = Moody(store_of(given), seed=seed)
    if given["side"] == Side.INNER:
        source = Moody(BoundaryClient(_address(given, given["peer_address"])), seed=seed + 1)
        replicator = Replicator(source, destination, pair, policy=POLICY, on_change=_say)  # type: ignore[arg-type]
        signal.signal(signal.SIGTERM, lambda *_: replicator.stop())
        replicator.run()
        return

    async def main() -> None:
        source = Moody(AsyncBoundaryClient(_address(given, given["peer_address"])), seed=seed + 1)
        replicator = AsyncReplicator(source, destination, pair, policy=POLICY, on_change=_say)  # type: ignore[arg-type]
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, replicator.stop)
        await replicator.run()

    asyncio.run(main())


def _say(state: Any) -> None:
    why = "" if state.trouble is None else state.trouble.reason
    print(f"{time.time():.1f} {state.status} at {state.offset} {why}", flush=True)


def produce(given: dict[str, Any]) -> None:
    """Append all facts of the mix through the zone's service, and note what was confirmed, synced, before going on."""
    mix = Mix(Pair(given["zone"], given["peer"]), given["facts"], given["artifacts"], given["bytes"], given["seed"])
    client = Moody(BoundaryClient(_address(given, given["own_address"])), seed=os.getpid())
    journal = Path(given["journal"])
    done = _noted(journal)
    pause = given["seconds"] / max(1, mix.facts / BATCH)
    with journal.open("ab") as file:
        for first in range(done, mix.facts, BATCH):
            began = time.monotonic()
            numbers = range(first, min(first + BATCH, mix.facts))
            for number, offset in zip(numbers, _appended(client, mix, numbers), strict=True):
                file.write(f"{number} {offset}\n".encode())
            file.flush()
            os.fsync(file.fileno())
            time.sleep(max(0.0, pause - (time.monotonic() - began)))


def _noted(journal: Path) -> int:
    """How many are known to be confirmed: the last line may be half of one."""
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    with journal.open("wb") as file:
        file.write(b"".join(line + b"\n" for line in lines))
    return len(lines)


def _appended(client: Any, mix: Mix, numbers: range) -> list[int]:
    while True:
        try:
            facts = []
            for number in numbers:
                stored = mix.expected(number)
                if stored is not None:
                    place = mix.bucket, mix.key(number)
                    begin = client.received(*place, stored)
                    client.put_object(*place, mix.pieces(number, begin), expected=stored, begin=begin)
                facts.append((mix.envelope(number), mix.fact(number, stored)))
            return [confirmed(answer).offset for answer in client.append_facts(facts)]
        except ErgonError as error:
            print(f"{time.time():.1f} {numbers} {type(error).__name__}: {error}", flush=True)
            if error.final:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    {"serve": serve, "follow": follow, "produce": produce}[sys.argv[1]](json.loads(sys.argv[2]))
