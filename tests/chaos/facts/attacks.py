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

from ergon_framework.database import migrate
from ergon_framework.facts.model import Envelope, Fact, ZonePair
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from tests.integration.running import ERGON
from tests.servers.certificates import CertificateAuthority
from tests.servers.postgres import PrivatePostgres

MAX_BYTES = 10_000_000
PIECE_BYTES = 1 << 20
#: Maximum p99 in seconds of the honest zone's calls, also on a busy machine.
MAX_P99_SECONDS = 2.0


class HonestZone(threading.Thread):
    """Appends and reads as the plant and as another peer, one call after the other, and measures each."""

    def __init__(self, address: str, plant: Any, peer: Any) -> None:
        super().__init__(daemon=True)
        self._clients = tuple(BoundaryClient(ServiceAddress(host=address, files=files)) for files in (plant, peer))
        self._stopping = threading.Event()
        self.seconds: list[float] = []
        self.failures: Counter[str] = Counter()
        self._number = 0
        self._call_measured = threading.Condition()

    def wait_for_calls(self, count: int) -> None:
        """Return when *count* calls have been measured."""
        with self._call_measured:
            if not self._call_measured.wait_for(lambda: len(self.seconds) >= count, 120):
                raise SystemExit(f"the honest zone has made {len(self.seconds)} of {count} calls in 120 s")

    def run(self) -> None:
        plant, peer = self._clients
        pair = ZonePair("Plant A", "Auditor")
        while not self._stopping.is_set():
            self._number += 1
            envelope = Envelope(
                message_id=f"m-{self._number}", from_zone="Plant A", to_zone="Auditor", produced_at_unix_ms=1
            )
            self._measure(lambda: plant.append_fact(envelope, Fact.create("order:7", "paid", 1)))  # noqa: B023 - called now
            self._measure(lambda: peer.fetch_facts("auditor", pair, 1))

    def _measure(self, call: Any) -> None:
        started_at = time.monotonic()
        try:
            call()
        except Exception as error:
            self.failures[type(error).__name__] += 1
        with self._call_measured:
            self.seconds.append(time.monotonic() - started_at)
            self._call_measured.notify_all()

    def take_measurements(self) -> dict[str, Any]:
        """Return the measurements since the last call."""
        seconds, self.seconds = sorted(self.seconds), []
        failures, self.failures = self.failures, Counter()
        p99 = seconds[int(len(seconds) * 0.99)] if seconds else None
        return {"calls": len(seconds), "p99_ms": None if p99 is None else round(p99 * 1000, 1), "failures": failures}

    def stop(self) -> None:
        self._stopping.set()
        self.join(30)
        for client in self._clients:
            client.close()


def open_channel(address: str, files: Any) -> grpc.Channel:
    pem = files.read()
    credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
    return grpc.secure_channel(address, credentials)


def attack_readers(address: str, files: Any, count: int) -> Counter[str]:
    """Fetch under a new name each time, every second time for a pair that does not exist."""
    answers: Counter[str] = Counter()
    with open_channel(address, files) as channel:
        fetch = channel.unary_unary(SERVICE + "FetchFacts")
        for number in range(count):
            zone = "Plant A" if number % 2 else f"never {number}"
            pair = wire.Pair(from_zone=zone, to_zone="HQ")
            request = wire.FetchFactsRequest(reader=f"r{number}" + "x" * 200, pair=pair, limit=1)
            answers[_get_status(lambda: fetch(request.SerializeToString(), timeout=30))] += 1  # noqa: B023 - called now
    return answers


def attack_uploads(address: str, files: Any, folder: Path) -> tuple[Counter[str], int]:
    """Upload objects announced with 1 TiB, endless ones, and 24 at once; return the peak of bytes on disk."""
    answers: Counter[str] = Counter()
    peak_bytes = 0

    def iter_requests(name: str, size: int | None, count: int) -> Any:
        nonlocal peak_bytes
        header = wire.PutObjectHeader(bucket="b", key=name)
        if size is not None:
            header.expected.CopyFrom(wire.Stored(digest="sha256:" + "0" * 64, size=size))
        yield wire.PutObjectRequest(header=header).SerializeToString()
        for _ in range(count):
            yield wire.PutObjectRequest(piece=os.urandom(PIECE_BYTES)).SerializeToString()
            peak_bytes = max(peak_bytes, count_bytes(folder))

    def upload(name: str, size: int | None, count: int) -> None:
        with open_channel(address, files) as channel:
            call = channel.stream_stream(SERVICE + "PutObject")(iter_requests(name, size, count), timeout=60)
            answers[_get_status(lambda: _raise_fault(call))] += 1

    upload("announced", 1 << 40, 100)
    upload("endless", None, 100)
    threads = [threading.Thread(target=upload, args=(f"k{number}", 9_000_000, 9)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers, peak_bytes


def _raise_fault(call: Any) -> None:
    for data in call:
        answer = wire.PutObjectAnswer.FromString(data)
        if answer.WhichOneof("result") == "fault":
            raise _RejectedError(answer.fault.kind)


class _RejectedError(Exception):
    """The service has rejected the call with a reason."""


def _get_status(call: Any) -> str:
    try:
        call()
    except _RejectedError as error:
        return str(error)
    except grpc.RpcError as error:
        rpc_error: Any = error
        return str(rpc_error.code().name)
    return "OK"


def count_bytes(folder: Path) -> int:
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
        return _run_attacks(Path(name), options.readers)


def _run_attacks(folder: Path, readers: int) -> int:
    postgres = PrivatePostgres(folder / "postgres", fsync=False)
    postgres.start()
    try:
        dsn = postgres.create_database("attacks")
        migrate.upgrade(dsn)
        authority = CertificateAuthority(folder)
        server = authority.issue("server")
        plant, hq, auditor = (
            authority.issue(name, zones=[zone])
            for name, zone in (("plant", "Plant A"), ("hq", "HQ"), ("auditor", "Auditor"))
        )
        contents = folder / "contents"
        command = [
            *(*ERGON, "facts", "serve", "--accept-loss", "--zone", "Plant A"),
            *(
                "--listen",
                "127.0.0.1:0",
                "--artifact-dir",
                str(contents),
                "--max-bytes",
                "10MB",
                "--keep-uploads",
                "10s",
            ),
            *("--tls-cert", str(server.certificate), "--tls-key", str(server.key), "--tls-ca", str(authority.path)),
        ]
        environment = {**os.environ, "ERGON_POSTGRES__DSN": dsn}
        log = (folder / "serve.log").open("w", encoding="utf-8")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder, env=environment)
        try:
            assert process.stdout is not None
            match = re.match(r"listening at (\S+)", process.stdout.readline())
            assert match is not None
            return _measure_attacks(match[1], plant, hq, auditor, dsn=dsn, contents=contents, readers=readers)
        finally:
            process.terminate()
            process.wait(30)
            log.close()
    finally:
        postgres.stop()


def _measure_attacks(address: str, plant: Any, hq: Any, auditor: Any, *, dsn: str, contents: Path, readers: int) -> int:
    honest = HonestZone(address, plant, auditor)
    honest.start()
    honest.wait_for_calls(500)
    report: dict[str, Any] = {"quiet": honest.take_measurements()}
    answers = attack_readers(address, hq, readers)
    with psycopg.connect(dsn) as connection:
        counts = [connection.execute(f"select count(*) from ergon.{table}").fetchone() for table in TABLES]
    report["readers"] = {"answers": answers, **dict(zip(TABLES, [row[0] for row in counts if row], strict=True))}
    report["readers"]["honest"] = honest.take_measurements()
    bytes_before = count_bytes(contents)
    answers, peak_bytes = attack_uploads(address, plant, contents)
    report["uploads"] = {"answers": answers, "most_bytes": peak_bytes, "honest": honest.take_measurements()}
    deadline = time.monotonic() + 40
    while count_bytes(contents) > bytes_before and time.monotonic() < deadline:
        # Another process removes them without a notification.
        time.sleep(0.1)
    report["uploads"]["left_bytes"] = count_bytes(contents) - bytes_before
    honest.stop()
    missed = _find_missed_targets(report)
    print(json.dumps({"missed": missed, **report}))
    return 1 if missed else 0


TABLES = ("fact_readers", "fact_log")


def _find_missed_targets(report: dict[str, Any]) -> list[str]:
    """Return the targets that were missed."""
    targets = {
        # Those of HQ and of the auditor.
        "readers": report["readers"]["fact_readers"] <= 101,
        "pairs": report["readers"]["fact_log"] <= 2,
        "bytes": report["uploads"]["most_bytes"] <= MAX_BYTES + PIECE_BYTES,
        "left": report["uploads"]["left_bytes"] <= 0,
        "stored": "OK" not in report["uploads"]["answers"],
    }
    for attack in ("readers", "uploads"):
        honest = report[attack]["honest"]
        targets[f"{attack}: honest"] = not honest["failures"] and (honest["p99_ms"] or 1e9) <= MAX_P99_SECONDS * 1000
    return [name for name, is_met in targets.items() if not is_met]


if __name__ == "__main__":
    sys.exit(main())
