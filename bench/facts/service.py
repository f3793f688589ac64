"""What the facts service adds to its store: one writer, and calls of a hundred facts, over mutual TLS on loopback.

The store itself and the service take turns, so that a busy machine is busy for both. It ends with one line of JSON, and
with exit code 1 where a bar is missed. The store is in a PostgreSQL of its own, which is started for the bench with its
defaults. With --store memory nothing is judged: there is nothing to wait for, and the figures are the processor's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ergon_framework.facts.boundary import confirmed  # noqa: E402
from ergon_framework.facts.model import Envelope, Fact, Side  # noqa: E402
from ergon_framework.facts.service.address import Address  # noqa: E402
from ergon_framework.facts.service.client import BoundaryClient  # noqa: E402
from ergon_framework.facts.stores.files import FileContents  # noqa: E402
from ergon_framework.facts.stores.memory import MemoryBoundary  # noqa: E402
from ergon_framework.facts.stores.postgres import PostgresBoundary  # noqa: E402
from ergon_framework.schema.migrate import upgrade  # noqa: E402
from tests.servers.certificates import Authority  # noqa: E402
from tests.servers.postgres import PrivatePostgres  # noqa: E402

#: What the service may add to an append of one writer, in milliseconds; and its least part of the store's rate.
ADDED_MS = 2.5
RATE = 0.5
ROUNDS = 12
SINGLES = 100
BATCHES = 10
BATCH = 100

numbers = itertools.count()


def fact(zone):
    number = next(numbers)
    envelope = Envelope(
        message_id=f"{uuid.uuid4().hex}-{number}", from_zone=zone, to_zone="HQ", produced_at_unix_ms=1_700_000_000_000
    )
    return envelope, Fact.of(f"order:{number}", "paid", {"total": 12.5, "lines": [1, 2, 3], "currency": "EUR"})


def singles(store, zone, count):
    """Milliseconds of each append."""
    taken = []
    for stated in [fact(zone) for _ in range(count)]:
        began = time.perf_counter()
        store.append_fact(*stated)
        taken.append((time.perf_counter() - began) * 1000)
    return taken


def batches(store, zone, count):
    """Facts a second."""
    given = [[fact(zone) for _ in range(BATCH)] for _ in range(count)]
    began = time.perf_counter()
    for batch in given:
        for result in store.append_facts(batch):
            confirmed(result)
    return count * BATCH / (time.perf_counter() - began)


class Served:
    """``ergon facts serve`` in a process of its own."""

    def __init__(self, folder, kind):
        authority = Authority(folder)
        files = authority.issue("server")
        self.client_files = authority.issue("plant", zones=["Served"])
        words = ["from ergon_framework.cli.main import main; main()", "facts", "serve", "--store", kind]
        words += ["--zone", "Served", "--listen", "127.0.0.1:0", "--tls-cert", files.certificate]
        words += ["--tls-key", files.key, "--tls-ca", authority.path]
        words += ["--contents", folder / "contents"] if kind == "postgres" else ["--accept-loss"]
        self._process = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True)
        self.where = self._process.stdout.readline().split()[2]

    def close(self):
        self._process.terminate()
        self._process.wait(30)


def bare(kind, folder):
    if kind == "memory":
        return MemoryBoundary()
    return PostgresBoundary(side=Side.INNER, contents=FileContents(folder / "bare"))


def measured(kind, rounds):
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as name:
        folder = Path(name)
        served = Served(folder, kind)
        try:
            store = bare(kind, folder)
            with (
                store if kind == "postgres" else contextlib.nullcontext(),
                BoundaryClient(Address(host=served.where, files=served.client_files)) as client,
            ):
                sides = ((store, "Bare"), (client, "Served"))
                for side, zone in sides:
                    singles(side, zone, SINGLES)
                    batches(side, zone, 2)
                found = [
                    [(singles(side, zone, SINGLES), batches(side, zone, BATCHES)) for side, zone in sides]
                    for _ in range(rounds)
                ]
        finally:
            served.close()
    return found


@contextlib.contextmanager
def server():
    """A PostgreSQL with its defaults, at the address in the environment."""
    folder = Path(tempfile.mkdtemp(prefix="ergon-bench-"))
    folder.chmod(0o755)
    postgres = PrivatePostgres(folder / "server")
    try:
        postgres.start()
        os.environ["ERGON_POSTGRES__DSN"] = postgres.create_database("bench")
        upgrade(os.environ["ERGON_POSTGRES__DSN"])
        yield
    finally:
        postgres.kill()
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("memory", "postgres"), default="postgres")
    parser.add_argument("--quick", action="store_true", help="a quarter of the work")
    given = parser.parse_args()
    with server() if given.store == "postgres" else contextlib.nullcontext():
        found = measured(given.store, ROUNDS // 4 if given.quick else ROUNDS)
    each = [[statistics.median(taken) for taken, _ in pair] for pair in found]
    added = [served - bare for bare, served in each]
    ratios = [served / bare for (_, bare), (_, served) in found]
    judged = given.store == "postgres"
    met = not judged or (statistics.median(added) <= ADDED_MS and statistics.median(ratios) >= RATE)
    for name, values in (("added ms", added), ("rate ratio", ratios)):
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    print(
        json.dumps(
            {
                "store": given.store,
                "store_p50_ms": round(statistics.median(bare for bare, _ in each), 3),
                "service_p50_ms": round(statistics.median(served for _, served in each), 3),
                "added_ms": round(statistics.median(added), 3),
                "added_bar_ms": ADDED_MS if judged else None,
                "store_rate": round(statistics.median(pair[0][1] for pair in found)),
                "service_rate": round(statistics.median(pair[1][1] for pair in found)),
                "rate_ratio": round(statistics.median(ratios), 3),
                "rate_bar": RATE if judged else None,
                "met": met,
            }
        )
    )
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
