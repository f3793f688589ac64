"""Attack `ergon facts serve` over the network: facts_network.py --seconds 600 --seed 1; started by facts.py.

The service runs as users run it, with PostgreSQL and a folder for artifacts. Attackers connect without a certificate,
with certificates that are foreign, expired, revoked or without a name, and as a zone with few rights; they send
broken handshakes, HTTP/2 frames, gRPC messages, protobuf messages, health calls and uploads. The owner of the store
works meanwhile. The run fails if the service ends, logs an error, answers INTERNAL or UNKNOWN to a well-formed call,
grants a call to a caller without rights, leaves a call unanswered, keeps descriptors, or if the owner waits too long or
loses a fact.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2

from ergon_framework.errors import ErgonError
from ergon_framework.facts.model import Envelope, Fact, ZonePair
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.tls import TlsFiles
from tests.fuzz import http2
from tests.fuzz.facts_grammar import DIGEST, REQUESTS, make_seeds, mutate_message
from tests.integration.running import ERGON
from tests.servers.certificates import CertificateAuthority, compute_fingerprint
from tests.servers.databases import create_migrated_database
from tests.servers.postgres import PrivatePostgres

SERVICE = "/ergon.facts.v1.Boundary/"
MAX_BYTES = 200_000_000
#: Seconds within which each call must be answered, the owner's too.
CALL_TIMEOUT_SECONDS = 40.0
OWNER_TIMEOUT_SECONDS = 20.0
#: Maximum memory of the service in MiB.
MAX_RSS_MIB = 1_000
#: Permitted answers to a caller without rights.
REJECTED_STATUSES = {
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "INVALID_ARGUMENT",
    "CANCELLED",
}
#: Forbidden answers to a well-formed gRPC call: each stands for an exception in the service.
FORBIDDEN_STATUSES = {"INTERNAL", "UNKNOWN"}
ERROR_LOG_LINE = re.compile(r"Traceback|level=(?:error|critical)|never retrieved")
#: The parts in which equal log lines differ.
VARIABLE_LOG_PARTS = re.compile(r"time=\S+ |code=\w+ ")
#: A line of gRPC's own log, which is in C++ and does not use Python's logging.
GRPC_LOG_LINE = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\]")
ZONES = ("", "", "Plant A", "HQ", "x" * 300, "\0")
HEALTH_SERVICE = "/grpc.health.v1.Health/"


class AttackedService:
    """The process under attack, its database and the certificates of all callers."""

    def __init__(self, folder: Path, dsn: str) -> None:
        authority, foreign = CertificateAuthority(folder), CertificateAuthority(folder, "foreign")
        self.owner = authority.issue("owner", zones=["Plant A"])
        self.callers = {
            "plant": authority.issue("plant", zones=["Plant A"]),
            "peer": authority.issue("peer", zones=["HQ"]),
            "operator": authority.issue("operator", operator="ops"),
            "nameless": authority.issue("nameless"),
            "revoked": authority.issue("revoked", zones=["Plant A"]),
        }
        self.rejected_callers = {
            "expired": authority.issue("expired", zones=["Plant A"], lasts=timedelta(seconds=-60)),
            "foreign": self._with_authority(foreign.issue("foreigner", zones=["Plant A"]), authority),
            "none": None,
        }
        self.authorities = authority.path
        revoked = folder / "revoked"
        revoked.write_text(compute_fingerprint(self.callers["revoked"]) + "\n", encoding="utf-8")
        files = authority.issue("server")
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(*ERGON, "facts", "serve", "--accept-loss", "--zone", "Plant A", "--listen", "127.0.0.1:0"),
                    *("--artifact-dir", folder / "contents", "--max-bytes", str(MAX_BYTES), "--revoked", revoked),
                    *("--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", authority.path),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "ERGON_POSTGRES__DSN": dsn},
                cwd=folder,
            )
        first_line = self.process.stdout.readline().decode()
        match = re.search(r"127\.0\.0\.1:(\d+)", first_line)
        if match is None:
            raise SystemExit(f"the service did not start: {self.log.read_text(encoding='utf-8')[-2000:]}")
        self.port = int(match[1])
        self.process_stats = psutil.Process(self.process.pid)
        #: One connection for each caller: the service limits those of one address.
        self.channels = {name: self._open_channel(files) for name, files in self.callers.items()}

    @staticmethod
    def _with_authority(files: TlsFiles, authority: CertificateAuthority) -> TlsFiles:
        return TlsFiles(files.certificate, files.key, authority.path)

    def _open_channel(self, files: TlsFiles) -> grpc.Channel:
        pem = files.read()
        credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
        return grpc.secure_channel(
            f"localhost:{self.port}", credentials, options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def open_client(self, files: TlsFiles) -> BoundaryClient:
        return BoundaryClient(
            ServiceAddress(host=f"localhost:{self.port}", files=files, deadline=OWNER_TIMEOUT_SECONDS)
        )

    def connect(self, rng: random.Random, *, files: TlsFiles | None = None, tls: bool = True) -> socket.socket:
        """Open a connection from one of many addresses of this machine."""
        source = f"127.{rng.randrange(1, 250)}.{rng.randrange(250)}.{rng.randrange(1, 250)}"
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=5, source_address=(source, 0))
        if not tls:
            return plain
        context = ssl.create_default_context(cafile=str(self.authorities))
        context.set_alpn_protocols(["h2"])
        if files is not None:
            context.load_cert_chain(files.certificate, files.key)
        try:
            return context.wrap_socket(plain, server_hostname="localhost")
        except BaseException:
            plain.close()
            raise


class AttackRecord:
    """Counters of sent attacks and answers, and problems."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.logged: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.stopping = threading.Event()
        self._lock = threading.Lock()

    def record(self, kind: str, answer: str) -> None:
        with self._lock:
            self.sent[kind] += 1
            self.answers[answer] += 1

    def fail(self, problem: str) -> None:
        with self._lock:
            self.problems[VARIABLE_LOG_PARTS.sub("", problem)[:300]] += 1


# -- attacks ------------------------------------------------------------------------------------------


class Attacker:
    """Attacks at random; one thread."""

    def __init__(self, service: AttackedService, run: AttackRecord, seed: int) -> None:
        self._service = service
        self._run = run
        self._rng = random.Random(seed)
        self._seeds = make_seeds("facts-requests")
        self._kinds = {
            "tcp": self._send_raw_bytes,
            "handshake": self._send_handshake,
            "stranger": self._call_as_stranger,
            "frames": self._send_frames,
            "framing": self._send_framing,
            "message": self._send_message,
            "bytes": self._send_bytes,
            "health": self._call_health,
            "upload": self._upload_object,
            "download": self._download_object,
        }
        self._weights = [1, 1, 1, 4, 4, 12, 4, 2, 4, 2]

    def attack(self) -> None:
        while not self._run.stopping.is_set():
            state = self._rng.getstate()
            (kind,) = self._rng.choices(list(self._kinds), self._weights)
            try:
                answer = self._kinds[kind]()
            except (OSError, ssl.SSLError) as error:
                answer = type(error).__name__
            except Exception as error:
                self._run.fail(f"{kind}: {type(error).__name__}: {error} (state {hash(state)})")
                answer = "failed"
            self._run.record(kind, answer)

    def _make_garbage(self, max_size: int) -> bytes:
        return self._rng.randbytes(self._rng.choice((0, 1, 5, 9, 100, max_size)))

    def _pick_caller(self) -> str:
        return self._rng.choice(list(self._service.callers))

    # -- below gRPC

    def _send_raw_bytes(self) -> str:
        """Send bytes that are not TLS, or nothing at all, or only hold the connection."""
        with self._service.connect(self._rng, tls=False) as connection:
            connection.sendall(
                self._rng.choice((b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", http2.PREFACE))
            )
            connection.sendall(self._make_garbage(4_000))
            if self._rng.random() < 0.3:
                self._run.stopping.wait(1)
        return "sent"

    def _send_handshake(self) -> str:
        """Send a handshake that is broken off, or has a byte changed."""
        outgoing, incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(self._service.authorities))
        context.set_alpn_protocols([self._rng.choice(("h2", "http/1.1", "x" * 200))])
        tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        hello = bytearray(outgoing.read())
        for _ in range(self._rng.randrange(4)):
            hello[self._rng.randrange(len(hello))] = self._rng.randrange(256)
        with self._service.connect(self._rng, tls=False) as connection:
            connection.sendall(bytes(hello[: self._rng.randrange(1, len(hello) + 1)]))
            connection.settimeout(0.2)
            return "answered" if connection.recv(100) else "closed"

    def _call_as_stranger(self) -> str:
        """Call without a certificate, or with a rejected one: no call is reached."""
        name = self._rng.choice(list(self._service.rejected_callers))
        with self._service.connect(self._rng, files=self._service.rejected_callers[name]) as connection:
            path = self._rng.choice((SERVICE + "Describe", HEALTH_SERVICE + "Check")).encode()
            connection.sendall(http2.PREFACE + http2.encode_frame(http2.SETTINGS))
            connection.sendall(
                http2.encode_frame(http2.HEADERS, http2.encode_request(path), flags=http2.END_HEADERS, stream=1)
            )
            connection.sendall(
                http2.encode_frame(http2.DATA, http2.encode_message(b""), flags=http2.END_STREAM, stream=1)
            )
            if self._has_headers(connection):
                self._run.fail(f"a caller with the certificate {name!r} was answered")
        return "refused"

    @staticmethod
    def _has_headers(connection: socket.socket) -> bool:
        """Tell whether HEADERS come back; otherwise the connection is closed, or an error is raised."""
        connection.settimeout(10)
        data = b""
        while piece := connection.recv(65_536):
            data += piece
            while len(data) >= 9:
                size = int.from_bytes(data[:3], "big")
                if data[3] == http2.HEADERS:
                    return True
                if len(data) < 9 + size:
                    break
                data = data[9 + size :]
        return False

    def _send_frames(self) -> str:
        """Send frames that HTTP/2 forbids, or too many of those that it allows."""
        with self._service.connect(self._rng, files=self._service.callers[self._pick_caller()]) as connection:
            connection.settimeout(2)
            connection.sendall(http2.PREFACE + http2.encode_frame(http2.SETTINGS))
            for _ in range(self._rng.randrange(1, 6)):
                connection.sendall(self._make_frames())
            connection.settimeout(self._rng.choice((0.01, 0.3)))
            return "answered" if connection.recv(65_536) else "closed"

    def _make_frames(self) -> bytes:  # noqa: PLR0911 - a table of attacks
        rng, stream = self._rng, self._rng.choice((0, 1, 2, 3, 101, 2**31 - 1, 2**31))
        block = http2.encode_request(
            rng.choice((SERVICE + "Describe", SERVICE + "Watch", HEALTH_SERVICE + "Watch", "/", "x")).encode()
        )
        head = http2.encode_frame(http2.HEADERS, block, flags=http2.END_HEADERS, stream=stream)
        kind = rng.randrange(11)
        if kind == 0:  # rapid reset
            ids = range(1, 2 * rng.choice((10, 300)), 2)
            return b"".join(
                http2.encode_frame(http2.HEADERS, block, flags=http2.END_HEADERS, stream=each)
                + http2.encode_frame(http2.RST_STREAM, b"\0\0\0\x08", stream=each)
                for each in ids
            )
        if kind == 1:  # a header block without an end
            rest = http2.encode_headers([(b"x-" + rng.randbytes(2).hex().encode(), b"y" * 1000)])
            return http2.encode_frame(http2.HEADERS, block, stream=stream) + b"".join(
                http2.encode_frame(http2.CONTINUATION, rest, stream=stream) for _ in range(rng.choice((1, 100)))
            )
        if kind == 2:
            return http2.encode_frame(rng.choice((http2.PING, http2.SETTINGS)), b"\0" * rng.choice((0, 6, 8))) * 500
        if kind == 3:
            return (
                http2.encode_frame(http2.WINDOW_UPDATE, rng.choice((b"\x7f\xff\xff\xff", b"\0\0\0\0")), stream=stream)
                * 3
            )
        if kind == 4:  # settings of zero, and as large as can be
            pairs = b"".join(
                number.to_bytes(2, "big") + rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1"))
                for number in (1, 2, 3, 4, 5, 6, 99)
            )
            return http2.encode_frame(http2.SETTINGS, pairs) + head
        if kind == 5:  # invalid HPACK
            return http2.encode_frame(http2.HEADERS, self._make_garbage(200), flags=http2.END_HEADERS, stream=stream)
        if kind == 6:  # a false length
            return http2.encode_frame(
                rng.randrange(12), self._make_garbage(100), stream=stream, length=rng.randrange(2**24)
            )
        if kind == 7:  # too many headers
            header_pairs = [(b"x-%d" % number, b"y" * rng.choice((1, 500))) for number in range(200)]
            return http2.encode_frame(
                http2.HEADERS, http2.encode_headers(header_pairs)[:16_000], flags=http2.END_HEADERS, stream=stream
            )
        if kind == 8:  # headers that are not text, or name an invalid encoding or timeout
            bad_headers = [
                (b"grpc-timeout", rng.choice((b"0n", b"99999999H", b"-1S", b"x"))),
                (b"grpc-encoding", rng.choice((b"gzip", b"deflate", b"zstd", b"\xff"))),
                (b"x-bin", rng.choice((b"***", b"AA==", b"\0"))),
            ]
            return http2.encode_frame(
                http2.HEADERS,
                http2.encode_request(SERVICE.encode() + b"Describe", more=bad_headers),
                flags=http2.END_HEADERS,
                stream=stream,
            ) + http2.encode_frame(http2.DATA, http2.encode_message(b""), flags=http2.END_STREAM, stream=stream)
        if kind == 9:
            return http2.encode_frame(http2.GOAWAY, b"\0" * 8) + head
        return http2.encode_frame(rng.randrange(256), self._make_garbage(1000), flags=rng.randrange(256), stream=stream)

    def _send_framing(self) -> str:
        """Send a call whose messages are cut, miscounted, compressed or missing, and whose stream may stay open."""
        rng = self._rng
        data = rng.choice(self._seeds)[1:]
        parts = [
            http2.encode_message(data),
            http2.encode_message(data, length=rng.choice((0, 1, len(data) + 5, 2**32 - 1, 5 * 2**20))),
            http2.encode_message(data, compressed=rng.choice((1, 255))),
            http2.encode_message(b"\x1f\x8b" + rng.randbytes(20), compressed=1),
            http2.encode_message(b"")[: rng.randrange(5)],
            b"",
        ]
        body = b"".join(rng.choice(parts) for _ in range(rng.randrange(1, 4)))
        method = rng.choice((*REQUESTS, "Watch", "Nothing"))
        with self._service.connect(rng, files=self._service.callers[self._pick_caller()]) as connection:
            more = [(b"grpc-encoding", b"gzip")] if rng.random() < 0.3 else []
            connection.settimeout(2)
            connection.sendall(http2.PREFACE + http2.encode_frame(http2.SETTINGS))
            block = http2.encode_request((SERVICE + method).encode(), more=more)
            connection.sendall(http2.encode_frame(http2.HEADERS, block, flags=http2.END_HEADERS, stream=1))
            end_flag = http2.END_STREAM if rng.random() < 0.7 else 0
            connection.sendall(http2.encode_frame(http2.DATA, body[:16_000], flags=end_flag, stream=1))
            connection.settimeout(rng.choice((0.01, 0.3)))
            return "answered" if connection.recv(65_536) else "closed"

    # -- calls

    def _get_channel(self, caller: str) -> grpc.Channel:
        return self._service.channels[caller]

    def _check_end(self, call_name: str, caller: str, call) -> str:
        """Return how *call* ends; it must end, and not with a status that stands for a defect."""
        try:
            for _ in call if hasattr(call, "__next__") else (call,):
                pass
            status = "OK"
        except grpc.RpcError as error:
            status, details = error.code().name, error.details() or ""
            if status == "DEADLINE_EXCEEDED" and "longer than the service allows" not in details:
                self._run.fail(f"{call_name} of {caller} was not answered within {CALL_TIMEOUT_SECONDS:.0f} s")
            # A connection that grpcio itself gives up is INTERNAL too, without details from the service.
            if status in FORBIDDEN_STATUSES and "RST_STREAM" not in details and "GOAWAY" not in details:
                self._run.fail(f"{call_name} of {caller} ended with {status}: {details}")
        if call_name == "PutObject" and status == "OK" and caller != "plant":
            self._run.fail(f"an upload of {caller} was granted")
        if caller in {"nameless", "revoked"} and status not in REJECTED_STATUSES and not call_name.startswith("health"):
            self._run.fail(f"{call_name} of {caller} ended with {status}")
        return status

    def _call_unary(self, method: str, caller: str, data: bytes):
        return self._get_channel(caller).unary_unary(SERVICE + method).with_call(data, timeout=CALL_TIMEOUT_SECONDS)

    def _call_stream(self, method: str, caller: str, data: bytes) -> str:
        call = self._get_channel(caller).unary_stream(SERVICE + method)(data, timeout=CALL_TIMEOUT_SECONDS)
        if method == "Watch":
            threading.Timer(self._rng.random() / 2, call.cancel).start()
        elif self._rng.random() < 0.2:
            call.cancel()
        return self._check_end(method, caller, call)

    def _send_message(self) -> str:
        """Send a message of the protocol with some of its fields changed."""
        number = self._rng.randrange(len(REQUESTS))
        method, message = list(REQUESTS.items())[number]
        data = bytes([number]) + message.SerializeToString()
        for _ in range(self._rng.randrange(1, 6)):
            data = mutate_message(data, "facts-requests", self._rng) or data
        return self._call(method, data[1:])

    def _send_bytes(self) -> str:
        """Send changed, cut or repeated bytes of a message, and messages of the maximum size or larger."""
        method = self._rng.choice((*REQUESTS, "Watch"))
        data = bytearray(self._rng.choice(self._seeds)[1:])
        for _ in range(self._rng.randrange(1, 10)):
            index = self._rng.randrange(len(data) + 1)
            data[index : index + self._rng.randrange(3)] = self._make_garbage(20)
        if self._rng.random() < 0.03:
            data += b"\x0a" + b"\xff\xff\xff\x01" + self._rng.randbytes(self._rng.choice((3, 5)) * 2**20)
        return self._call(method, bytes(data))

    def _call(self, method: str, data: bytes) -> str:
        caller = self._pick_caller()
        if method == "PutObject":
            return self._check_end(method, caller, self._open_upload(caller, [data]))
        if method in {"GetObject", "Watch"}:
            return self._call_stream(method, caller, data)
        try:
            answer, _ = self._call_unary(method, caller, data)
        except grpc.RpcError as error:
            return self._check_end(method, caller, _raise_lazily(error))
        appended = method == "AppendFact" or (
            method == "AppendFacts" and any(wire.AppendFactsAnswer.FromString(answer).offsets)
        )
        if appended and caller != "plant":
            self._run.fail(f"{method} of {caller} was granted")
        return self._check_end(method, caller, iter(()))

    def _call_health(self) -> str:
        caller, rng = self._pick_caller(), self._rng
        names = ("", "ergon.facts.v1.Boundary", "x" * 5000, "\0")
        data = health_pb2.HealthCheckRequest(service=rng.choice(names)).SerializeToString()
        data = rng.choice((data, b"", b"\x0a\x05x", self._make_garbage(100)))
        method = rng.choice(("Check", "Check", "Watch", "List"))
        if method == "Check":
            try:
                self._get_channel(caller).unary_unary(HEALTH_SERVICE + method)(data, timeout=CALL_TIMEOUT_SECONDS)
            except grpc.RpcError as error:
                # The health library itself decides how to answer an invalid message.
                if error.code().name == "DEADLINE_EXCEEDED":
                    self._run.fail(f"health of {caller} was not answered within {CALL_TIMEOUT_SECONDS:.0f} s")
                return error.code().name
            return "OK"
        call = self._get_channel(caller).unary_stream(HEALTH_SERVICE + method)(data, timeout=CALL_TIMEOUT_SECONDS)
        threading.Timer(rng.random() / 2, call.cancel).start()
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    def _open_upload(self, caller: str, parts):
        return self._get_channel(caller).stream_stream(SERVICE + "PutObject")(iter(parts), timeout=CALL_TIMEOUT_SECONDS)

    def _upload_object(self) -> str:
        """Send an upload with a false size or digest, parts in the wrong order, or without an end."""
        rng, caller = self._rng, self._pick_caller()
        stated_size = rng.choice((0, 1, 1000, MAX_BYTES * 2, 2**63 - 1, -1))
        digest = rng.choice((DIGEST, "sha256:" + rng.randbytes(32).hex(), "x"))
        expected = rng.choice((None, wire.Stored(digest=digest, size=stated_size)))
        key = rng.choice(("a/k", f"u/{rng.randrange(50)}", "../../x", "x" * 2000, "a\0b"))
        begin = rng.choice((0, 0, 0, 1, 1000, 2**62, -1))
        location = {"bucket": rng.choice(("b", "b", "..", "")), "key": key, "zone": rng.choice(ZONES)}
        header = wire.PutObjectRequest(header=wire.PutObjectHeader(**location, expected=expected, begin=begin))
        piece = wire.PutObjectRequest(piece=rng.randbytes(rng.choice((0, 1, 1000, 2**20))))
        end = wire.PutObjectRequest(end=wire.PutObjectEnd(size=rng.choice((0, 1, 1000, len(piece.piece), 2**62))))
        parts = [header, *(rng.choice((piece, piece, header, end)) for _ in range(rng.randrange(6)))]
        if rng.random() < 0.5:
            parts.append(wire.PutObjectRequest(end=wire.PutObjectEnd(size=len(piece.piece))))
        if rng.random() < 0.2:
            rng.shuffle(parts)
        call = self._open_upload(caller, [part.SerializeToString() for part in parts])
        if rng.random() < 0.2:
            threading.Timer(rng.random() / 20, call.cancel).start()
        return self._check_end("PutObject", caller, call)

    def _download_object(self) -> str:
        key = self._rng.choice(("a/k", f"u/{self._rng.randrange(50)}", "..", "owner"))
        begin = self._rng.choice((0, 1, 10**6, 2**62, -1))
        request = wire.GetObjectRequest(bucket="b", key=key, begin=begin, zone=self._rng.choice(ZONES))
        return self._call_stream("GetObject", self._pick_caller(), request.SerializeToString())


def _raise_lazily(error):
    raise error
    yield


# -- the owner ----------------------------------------------------------------------------------------


class Owner:
    """Appends facts and reads them again while the attack runs."""

    def __init__(self, service: AttackedService, run: AttackRecord) -> None:
        self._service = service
        self._run = run
        self.appended: list[str] = []
        self.slowest_seconds = 0.0

    def append_facts(self) -> None:
        client = self._service.open_client(self._service.owner)
        number = 0
        while not self._run.stopping.wait(0.25):
            started_at = time.monotonic()
            envelope = Envelope(
                message_id=f"owner-{number}", from_zone="Plant A", to_zone="Owner", produced_at_unix_ms=1
            )
            try:
                client.append_fact(envelope, Fact.create("order:7", "paid", {"number": number}))
            except ErgonError as error:
                self._run.fail(f"the owner's fact {number} was refused: {type(error).__name__}: {error}")
            else:
                self.appended.append(envelope.message_id)
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - started_at)
            number += 1
        if self.slowest_seconds > OWNER_TIMEOUT_SECONDS:
            self._run.fail(f"the owner waited {self.slowest_seconds:.1f} s for one append")
        client.close()

    def check_facts(self) -> None:
        """Check that every confirmed fact is there, once and in order."""
        files = self._service.owner
        client = self._service.open_client(files)
        ids, after = [], None
        while facts := client.fetch_facts("sender:check", ZonePair("Plant A", "Owner"), 1000, after=after):
            ids += [each.envelope.message_id for each in facts]
            after = facts[-1].cursor
        client.close()
        if [each for each in ids if each in set(self.appended)] != self.appended:
            self._run.fail(f"{len(self.appended)} facts were confirmed to the owner, and {len(ids)} are there")


# -- the run ------------------------------------------------------------------------------------------


def watch_process(service: AttackedService, run: AttackRecord, peak_mib: list[int]) -> None:
    while not run.stopping.wait(1):
        if service.process.poll() is not None:
            run.fail(f"the service has ended with {service.process.returncode}")
            run.stopping.set()
            return
        peak_mib[0] = max(peak_mib[0], service.process_stats.memory_info().rss >> 20)


def check_end(service: AttackedService, run: AttackRecord, idle_descriptors: int, peak_mib: int) -> int:
    """Check the state at the end; return the number of open descriptors."""
    if peak_mib > MAX_RSS_MIB:
        run.fail(f"the service held {peak_mib} MiB")
    deadline = time.monotonic() + 60
    while (open_descriptors := service.process_stats.num_fds()) > idle_descriptors + 20 and time.monotonic() < deadline:
        time.sleep(1)
    if open_descriptors > idle_descriptors + 20:
        run.fail(f"{open_descriptors} descriptors are open a minute after the end, and {idle_descriptors} were before")
    service.process.send_signal(signal.SIGTERM)
    try:
        if exit_code := service.process.wait(60):
            run.fail(f"the service ended with {exit_code}")
    except subprocess.TimeoutExpired:
        service.process.kill()
        run.fail("the service did not end within a minute of SIGTERM")
    for log_line in service.log.read_text(encoding="utf-8", errors="replace").splitlines():
        run.logged["grpc" if GRPC_LOG_LINE.match(log_line) else "ergon"] += 1
        if ERROR_LOG_LINE.search(log_line):
            run.fail(f"logged: {log_line}")
    return open_descriptors


def run_attack(folder: Path, dsn: str, seconds: float, seed: int, attackers: int) -> tuple[dict, AttackRecord]:
    service, run, peak_mib = AttackedService(folder, dsn), AttackRecord(), [0]
    try:
        owner = Owner(service, run)
        idle_descriptors = service.process_stats.num_fds()
        threads = [
            threading.Thread(target=owner.append_facts),
            threading.Thread(target=watch_process, args=(service, run, peak_mib)),
        ]
        threads += [
            threading.Thread(target=Attacker(service, run, seed * 1000 + number).attack) for number in range(attackers)
        ]
        for thread in threads:
            thread.start()
        run.stopping.wait(seconds)
        run.stopping.set()
        for thread in threads:
            thread.join(CALL_TIMEOUT_SECONDS * 2)
            if thread.is_alive():
                run.fail("an attack was never answered")
        for channel in service.channels.values():
            channel.close()
        if service.process.poll() is None:
            owner.check_facts()
            open_descriptors = check_end(service, run, idle_descriptors, peak_mib[0])
        else:
            open_descriptors = 0
    finally:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()
    summary = {
        "seconds": seconds,
        "runs": run.sent.total(),
        "attacks": dict(run.sent),
        "answers": dict(run.answers),
        "owner_facts": len(owner.appended),
        "owner_slowest_seconds": round(owner.slowest_seconds, 2),
        "rss_mib": peak_mib[0],
        "descriptors": [idle_descriptors, open_descriptors],
        "lines_logged": dict(run.logged),
        "problems": dict(run.problems.most_common(20)),
    }
    return summary, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attackers", type=int, default=6)
    parser.add_argument("--keep-log", type=Path, help="where the log of the service is copied to")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        folder.chmod(0o755)
        server = PrivatePostgres(folder / "postgres", fsync=False)
        server.start()
        stack.callback(server.stop, "immediate")
        summary, run = run_attack(
            folder, create_migrated_database(server), options.seconds, options.seed, options.attackers
        )
        if options.keep_log:
            options.keep_log.write_bytes((folder / "log").read_bytes())
    print(json.dumps(summary))
    sys.exit(1 if run.problems or not run.sent else 0)


if __name__ == "__main__":
    main()
