"""The overhead of the facts service over its store: one writer, and calls of 100 facts, over mutual TLS on loopback.

The store itself and the service take turns, so that other load on the machine affects both. It ends with one line of
JSON, and with exit code 1 where a target is missed. The store is in its own PostgreSQL, which is started for the
benchmark with its defaults. With --store memory there are no targets: the figures are those of the processor only.
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

from ergon_framework.database.migrate import upgrade  # noqa: E402
from ergon_framework.facts.boundary import raise_if_error  # noqa: E402
from ergon_framework.facts.model import BoundarySide, Envelope, Fact  # noqa: E402
from ergon_framework.facts.service.channel import ServiceAddress  # noqa: E402
from ergon_framework.facts.service.client import BoundaryClient  # noqa: E402
from ergon_framework.facts.stores.files import FileContentStore  # noqa: E402
from ergon_framework.facts.stores.memory import MemoryBoundary  # noqa: E402
from ergon_framework.facts.stores.postgres.store import PostgresBoundary  # noqa: E402
from tests.servers.certificates import CertificateAuthority  # noqa: E402
from tests.servers.postgres import PrivatePostgres  # noqa: E402

#: Milliseconds that the service may add to an append of one writer; and its minimum share of the store's rate.
MAX_ADDED_MS = 2.5
MIN_RATE_RATIO = 0.5
ROUNDS = 12
APPENDS_PER_ROUND = 100
BATCHES_PER_ROUND = 10
BATCH_SIZE = 100

numbers = itertools.count()


def create_fact(zone):
    number = next(numbers)
    envelope = Envelope(
        message_id=f"{uuid.uuid4().hex}-{number}", from_zone=zone, to_zone="HQ", produced_at_unix_ms=1_700_000_000_000
    )
    return envelope, Fact.create(f"order:{number}", "paid", {"total": 12.5, "lines": [1, 2, 3], "currency": "EUR"})


def measure_appends(store, zone, count):
    """Return the milliseconds of each append."""
    durations_ms = []
    for arguments in [create_fact(zone) for _ in range(count)]:
        began = time.perf_counter()
        store.append_fact(*arguments)
        durations_ms.append((time.perf_counter() - began) * 1000)
    return durations_ms


def measure_batches(store, zone, count):
    """Return facts per second."""
    fact_batches = [[create_fact(zone) for _ in range(BATCH_SIZE)] for _ in range(count)]
    began = time.perf_counter()
    for batch in fact_batches:
        for result in store.append_facts(batch):
            raise_if_error(result)
    return count * BATCH_SIZE / (time.perf_counter() - began)


class ServiceProcess:
    """``ergon facts serve`` in its own process."""

    def __init__(self, folder, kind):
        authority = CertificateAuthority(folder)
        files = authority.issue("server")
        self.client_files = authority.issue("plant", zones=["Served"])
        command = ["from ergon_framework.cli.main import main; main()", "facts", "serve", "--store", kind]
        command += ["--zone", "Served", "--listen", "127.0.0.1:0", "--tls-cert", files.certificate]
        command += ["--tls-key", files.key, "--tls-ca", authority.path]
        command += ["--artifact-dir", folder / "contents"] if kind == "postgres" else ["--accept-loss"]
        self._process = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True)
        self.address = self._process.stdout.readline().split()[2]

    def close(self):
        self._process.terminate()
        self._process.wait(30)


def open_bare_store(kind, folder):
    if kind == "memory":
        return MemoryBoundary()
    return PostgresBoundary(side=BoundarySide.INNER, contents=FileContentStore(folder / "bare"))


def measure(kind, rounds):
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as name:
        folder = Path(name)
        service = ServiceProcess(folder, kind)
        try:
            store = open_bare_store(kind, folder)
            with (
                store if kind == "postgres" else contextlib.nullcontext(),
                BoundaryClient(ServiceAddress(host=service.address, files=service.client_files)) as client,
            ):
                targets = ((store, "Bare"), (client, "Served"))
                for target, zone in targets:
                    measure_appends(target, zone, APPENDS_PER_ROUND)
                    measure_batches(target, zone, 2)
                samples = [
                    [
                        (
                            measure_appends(target, zone, APPENDS_PER_ROUND),
                            measure_batches(target, zone, BATCHES_PER_ROUND),
                        )
                        for target, zone in targets
                    ]
                    for _ in range(rounds)
                ]
        finally:
            service.close()
    return samples


@contextlib.contextmanager
def server():
    """Start a PostgreSQL with its defaults, and set its address in the environment."""
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
    options = parser.parse_args()
    with server() if options.store == "postgres" else contextlib.nullcontext():
        samples = measure(options.store, ROUNDS // 4 if options.quick else ROUNDS)
    medians = [[statistics.median(durations_ms) for durations_ms, _ in pair] for pair in samples]
    added_ms = [served - bare for bare, served in medians]
    ratios = [served / bare for (_, bare), (_, served) in samples]
    has_targets = options.store == "postgres"
    met = not has_targets or (
        statistics.median(added_ms) <= MAX_ADDED_MS and statistics.median(ratios) >= MIN_RATE_RATIO
    )
    for name, values in (("added ms", added_ms), ("rate ratio", ratios)):
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    print(
        json.dumps(
            {
                "store": options.store,
                "store_p50_ms": round(statistics.median(bare for bare, _ in medians), 3),
                "service_p50_ms": round(statistics.median(served for _, served in medians), 3),
                "added_ms": round(statistics.median(added_ms), 3),
                "added_bar_ms": MAX_ADDED_MS if has_targets else None,
                "store_rate": round(statistics.median(pair[0][1] for pair in samples)),
                "service_rate": round(statistics.median(pair[1][1] for pair in samples)),
                "rate_ratio": round(statistics.median(ratios), 3),
                "rate_bar": MIN_RATE_RATIO if has_targets else None,
                "met": met,
            }
        )
    )
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
