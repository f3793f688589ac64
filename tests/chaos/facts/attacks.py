"""A zone that attacks the facts service with readers, pairs and uploads, while an honest zone works.

``python tests/chaos/facts/attacks.py`` starts PostgreSQL and ``ergon facts serve`` with its default limits, except
``--max-bytes 10MB``. It prints one line of JSON, and exits with 1 if a target is missed: rows that the attack has left,
bytes on the disk, and the p99 of the honest zone's calls during each attack.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import psycopg

sys.path.insert(0, str(Path(__file__).parents[3]))

from ergon_framework.facts.model import Envelope, Fact, Pair
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.schema import migrate
from tests.integration.running import ERGON
from tests.servers.certificates import Authority
from tests.servers.postgres import PrivatePostgres

LIMIT = 10_000_000
PIECE = 1 << 20
#: Seconds that 99 of 100 calls of the honest zone may take at most, also on a machine that has much else to do.
P99 = 2.0


class Honest(threading.Thread):
    """Appends and reads as the plant and as another peer, one call after the other, and measures each."""

    def __init__(self, where: str, plant: Any, peer: Any) -> None:
        super().__init__(daemon=True)
        self._clients = tuple(BoundaryClient(Address(host=where, files=files)) for files in (plant, peer))
        self._over = threading.Event()
        self.seconds: list[float] = []
        self.failures: Counter[str] = Counter()
        self._number = 0
        self._called = threading.Condition()

    def wait_for_calls(self, count: int) -> None:
        """Return when so many calls have been measured."""
        with self._called:
            if not self._called.wait_for(lambda: len(self.seconds) >= count, 120):
                raise SystemExit(f"the honest zone has made {len(self.seconds)} of {count} calls in 120 s")

    def run(self) -> None:
        plant, peer = self._clients
        pair = Pair("Plant A", "Auditor")
        while not self._over.is_set():
            self._number += 1
            envelope = Envelope(
                message_id=f"m-{self._number}", from_zone="Plant A", to_zone="Auditor", produced_at_unix_ms=1
            )
            self._timed(lambda: plant.append_fact(envelope, Fact.of("order:7", "paid", 1)))  # noqa: B023 - called now
            self._timed(lambda: peer.fetch_facts("auditor", pair, 1))

    def _timed(self, call: Any) -> None:
        began = time.monotonic()
        try:
            call()
        except Exception as error:
            self.failures[type(error).__name__] += 1
        with self._called:
            self.seconds.append(time.monotonic() - began)
            self._called.notify_all()

    def figures(self) -> dict[str, Any]:
        """What was measured since this was last asked."""
        seconds, self.seconds = sorted(self.seconds), []
        failures, self.failures = self.failures, Counter()
        at = seconds[int(len(seconds) * 0.99)] if seconds else None
        return {"calls": len(seconds), "p99_ms": None if at is None else round(at * 1000, 1), "failures": failures}

    def stop(self) -> None:
        self._over.set()
        self.join(30)
        for client in self._clients:
            client.close()


def channel(where: str, files: Any) -> grpc.Channel:
    pem = files.read()
    credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
    return grpc.secure_channel(where, credentials)


def attack_readers(where: str, files: Any, count: int) -> Counter[str]:
    """Fetch under a new name each time, every second time for a pair that never was."""
    answers: Counter[str] = Counter()
    with channel(where, files) as line:
        fetch = line.unary_unary(SERVICE + "FetchFacts")
        for number in range(count):
            zone = "Plant A" if number % 2 else f"never {number}"
            pair = wire.Pair(from_zone=zone, to_zone="HQ")
            request = wire.FetchFactsRequest(reader=f"r{number}" + "x" * 200, pair=pair, limit=1)
            answers[_status(lambda: fetch(request.SerializeToString(), timeout=30))] += 1  # noqa: B023 - called now
    return answers


def attack_uploads(where: str, files: Any, folder: Path) -> tuple[Counter[str], int]:
    """Upload what is announced with 1 TiB, what ends never, and 24 at once; the most bytes that were on the disk."""
    answers: Counter[str] = Counter()
    most = 0

    def pieces(name: str, size: int | None, count: int) -> Any:
        nonlocal most
        header = wire.PutObjectHeader(bucket="b", key=name)
        if size is not None:
            header.expected.CopyFrom(wire.Stored(digest="sha256:" + "0" * 64, size=size))
        yield wire.PutObjectRequest(header=header).SerializeToString()
        for _ in range(count):
            yield wire.PutObjectRequest(piece=os.urandom(PIECE)).SerializeToString()
            most = max(most, on_disk(folder))

    def put(name: str, size: int | None, count: int) -> None:
        with channel(where, files) as line:
            call = line.stream_stream(SERVICE + "PutObject")(pieces(name, size, count), timeout=60)
            answers[_status(lambda: _last(call))] += 1

    put("announced", 1 << 40, 100)
    put("endless", None, 100)
    threads = [threading.Thread(target=put, args=(f"k{number}", 9_000_000, 9)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers, most


def _last(call: Any) -> None:
    for data in call:
        answer = wire.PutObjectAnswer.FromString(data)
        if answer.WhichOneof("result") == "fault":
            raise _RefusedError(answer.fault.kind)


class _RefusedError(Exception):
    """The service has said why."""


def _status(call: Any) -> str:
    try:
        call()
    except _RefusedError as error:
        return str(error)
    except grpc.RpcError as error:
        failed: Any = error
        return str(failed.code().name)
    return "OK"


def on_disk(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=3_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ergon-attacks-") as name:
        Path(name).chmod(0o755)
        return _attack(Path(name), options.readers)


def _attack(folder: Path, readers: int) -> int:
    postgres = PrivatePostgres(folder / "postgres", fsync=False)
    postgres.start()
    try:
        dsn = postgres.create_database("attacks")
        migrate.upgrade(dsn)
        authority = Authority(folder)
        server = authority.issue("server")
        plant, hq, auditor = (
            authority.issue(name, zones=[zone])
            for name, zone in (("plant", "Plant A"), ("hq", "HQ"), ("auditor", "Auditor"))
        )
        contents = folder / "contents"
        command = [
            *(*ERGON, "facts", "serve", "--accept-loss", "--zone", "Plant A"),
            *("--listen", "127.0.0.1:0", "--contents", str(contents), "--max-bytes", "10MB", "--keep-uploads", "10s"),
            *("--tls-cert", str(server.certificate), "--tls-key", str(server.key), "--tls-ca", str(authority.path)),
        ]
        environment = {**os.environ, "ERGON_POSTGRES__DSN": dsn}
        log = (folder / "serve.log").open("w", encoding="utf-8")
        served = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder, env=environment)
        try:
            assert served.stdout is not None
            found = re.match(r"listening at (\S+)", served.stdout.readline())
            assert found is not None
            return _judge(found[1], plant, hq, auditor, dsn=dsn, contents=contents, readers=readers)
        finally:
            served.terminate()
            served.wait(30)
            log.close()
    finally:
        postgres.stop()


def _judge(where: str, plant: Any, hq: Any, auditor: Any, *, dsn: str, contents: Path, readers: int) -> int:
    honest = Honest(where, plant, auditor)
    honest.start()
    honest.wait_for_calls(500)
    report: dict[str, Any] = {"quiet": honest.figures()}
    answers = attack_readers(where, hq, readers)
    with psycopg.connect(dsn) as connection:
        counts = [connection.execute(f"select count(*) from ergon.{table}").fetchone() for table in TABLES]
    report["readers"] = {"answers": answers, **dict(zip(TABLES, [row[0] for row in counts if row], strict=True))}
    report["readers"]["honest"] = honest.figures()
    before = on_disk(contents)
    answers, most = attack_uploads(where, plant, contents)
    report["uploads"] = {"answers": answers, "most_bytes": most, "honest": honest.figures()}
    end = time.monotonic() + 40
    while on_disk(contents) > before and time.monotonic() < end:
        # Another process removes them, and tells nothing of it.
        time.sleep(0.1)
    report["uploads"]["left_bytes"] = on_disk(contents) - before
    honest.stop()
    missed = _missed(report)
    print(json.dumps({"missed": missed, **report}))
    return 1 if missed else 0


TABLES = ("fact_readers", "fact_log")


def _missed(report: dict[str, Any]) -> list[str]:
    """The targets that were missed."""
    targets = {
        # Those of HQ, and the auditor's.
        "readers": report["readers"]["fact_readers"] <= 101,
        "pairs": report["readers"]["fact_log"] <= 2,
        "bytes": report["uploads"]["most_bytes"] <= LIMIT + PIECE,
        "left": report["uploads"]["left_bytes"] <= 0,
        "stored": "OK" not in report["uploads"]["answers"],
    }
    for attack in ("readers", "uploads"):
        honest = report[attack]["honest"]
        targets[f"{attack}: honest"] = not honest["failures"] and (honest["p99_ms"] or 1e9) <= P99 * 1000
    return [name for name, is_met in targets.items() if not is_met]


if __name__ == "__main__":
    sys.exit(main())
