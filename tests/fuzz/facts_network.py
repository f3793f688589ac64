"""Attack `ergon facts serve` over the network: facts_network.py --seconds 600 --seed 1; started by facts.py.

The service runs as users run it, with PostgreSQL and a folder for artifacts. Attackers connect without a certificate,
with certificates that are foreign, expired, revoked or without a name, and as a zone that may do little; they send
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
from ergon_framework.facts.model import Envelope, Fact, Pair
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.files import TlsFiles
from tests.fuzz import http2
from tests.fuzz.facts_grammar import DIGEST, REQUESTS, mutated, seeds
from tests.integration.running import ERGON
from tests.servers.certificates import Authority, fingerprint
from tests.servers.databases import migrated
from tests.servers.postgres import PrivatePostgres

SERVICE = "/ergon.facts.v1.Boundary/"
MAX_BYTES = 200_000_000
#: Seconds within which each call has to be answered, and the owner's call too.
CALL_LIMIT = 40.0
OWNER_LIMIT = 20.0
#: MiB that the service may hold.
MAX_RSS = 1_000
#: What a caller without any right may get.
REFUSED = {"UNAUTHENTICATED", "PERMISSION_DENIED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "CANCELLED"}
#: What no answer to a well-formed gRPC call may be: it stands for an exception in the service.
BROKEN = {"INTERNAL", "UNKNOWN"}
LOGGED = re.compile(r"Traceback|level=(?:error|critical)|never retrieved")
#: What differs in two lines that say the same.
CHANGING = re.compile(r"time=\S+ |code=\w+ ")
#: A line of gRPC's own, which is in C++ and knows no logging of Python.
CORE = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\]")
ZONES = ("", "", "Plant A", "HQ", "x" * 300, "\0")
HEALTH = "/grpc.health.v1.Health/"


class Service:
    """The process under attack, its database and the certificates of everybody."""

    def __init__(self, folder: Path, dsn: str) -> None:
        authority, foreign = Authority(folder), Authority(folder, "foreign")
        self.owner = authority.issue("owner", zones=["Plant A"])
        self.callers = {
            "plant": authority.issue("plant", zones=["Plant A"]),
            "peer": authority.issue("peer", zones=["HQ"]),
            "operator": authority.issue("operator", operator="ops"),
            "nameless": authority.issue("nameless"),
            "revoked": authority.issue("revoked", zones=["Plant A"]),
        }
        self.strangers = {
            "expired": authority.issue("expired", zones=["Plant A"], lasts=timedelta(seconds=-60)),
            "foreign": self._trusting(foreign.issue("foreigner", zones=["Plant A"]), authority),
            "none": None,
        }
        self.authorities = authority.path
        revoked = folder / "revoked"
        revoked.write_text(fingerprint(self.callers["revoked"]) + "\n", encoding="utf-8")
        files = authority.issue("server")
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(*ERGON, "facts", "serve", "--accept-loss", "--zone", "Plant A", "--listen", "127.0.0.1:0"),
                    *("--contents", folder / "contents", "--max-bytes", str(MAX_BYTES), "--revoked", revoked),
                    *("--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", authority.path),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "ERGON_POSTGRES__DSN": dsn},
                cwd=folder,
            )
        line = self.process.stdout.readline().decode()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        if found is None:
            raise SystemExit(f"the service did not start: {self.log.read_text(encoding='utf-8')[-2000:]}")
        self.port = int(found[1])
        self.seen = psutil.Process(self.process.pid)
        #: One connection for each caller: the service limits those of one address.
        self.channels = {name: self._channel(files) for name, files in self.callers.items()}

    @staticmethod
    def _trusting(files: TlsFiles, authority: Authority) -> TlsFiles:
        return TlsFiles(files.certificate, files.key, authority.path)

    def _channel(self, files: TlsFiles) -> grpc.Channel:
        pem = files.read()
        credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
        return grpc.secure_channel(
            f"localhost:{self.port}", credentials, options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def client(self, files: TlsFiles) -> BoundaryClient:
        return BoundaryClient(Address(host=f"localhost:{self.port}", files=files, deadline=OWNER_LIMIT))

    def connect(self, dice: random.Random, *, files: TlsFiles | None = None, tls: bool = True) -> socket.socket:
        """A connection from one of many addresses of this machine."""
        source = f"127.{dice.randrange(1, 250)}.{dice.randrange(250)}.{dice.randrange(1, 250)}"
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


class Run:
    """What has been sent, what was answered, and what should not have happened."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.logged: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.over = threading.Event()
        self._lock = threading.Lock()

    def note(self, kind: str, answer: str) -> None:
        with self._lock:
            self.sent[kind] += 1
            self.answers[answer] += 1

    def fail(self, problem: str) -> None:
        with self._lock:
            self.problems[CHANGING.sub("", problem)[:300]] += 1


# -- attacks ------------------------------------------------------------------------------------------


class Attacker:
    """Attacks at random; one thread."""

    def __init__(self, service: Service, run: Run, seed: int) -> None:
        self._service = service
        self._run = run
        self._dice = random.Random(seed)
        self._seeds = seeds("facts-requests")
        self._kinds = {
            "tcp": self._tcp,
            "handshake": self._handshake,
            "stranger": self._stranger,
            "frames": self._frames,
            "framing": self._framing,
            "message": self._message,
            "bytes": self._bytes,
            "health": self._health,
            "upload": self._upload,
            "download": self._download,
        }
        self._weights = [1, 1, 1, 4, 4, 12, 4, 2, 4, 2]

    def attack(self) -> None:
        while not self._run.over.is_set():
            state = self._dice.getstate()
            (kind,) = self._dice.choices(list(self._kinds), self._weights)
            try:
                answer = self._kinds[kind]()
            except (OSError, ssl.SSLError) as error:
                answer = type(error).__name__
            except Exception as error:
                self._run.fail(f"{kind}: {type(error).__name__}: {error} (state {hash(state)})")
                answer = "failed"
            self._run.note(kind, answer)

    def _garbage(self, most: int) -> bytes:
        return self._dice.randbytes(self._dice.choice((0, 1, 5, 9, 100, most)))

    def _caller(self) -> str:
        return self._dice.choice(list(self._service.callers))

    # -- below gRPC

    def _tcp(self) -> str:
        """Bytes that are no TLS, or nothing at all, and sometimes a connection that is only held."""
        with self._service.connect(self._dice, tls=False) as line:
            line.sendall(
                self._dice.choice((b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", http2.PREFACE))
            )
            line.sendall(self._garbage(4_000))
            if self._dice.random() < 0.3:
                self._run.over.wait(1)
        return "sent"

    def _handshake(self) -> str:
        """A handshake that is broken off, or has a byte changed."""
        out, inner = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(self._service.authorities))
        context.set_alpn_protocols([self._dice.choice(("h2", "http/1.1", "x" * 200))])
        tls = context.wrap_bio(inner, out, server_hostname="localhost")
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        hello = bytearray(out.read())
        for _ in range(self._dice.randrange(4)):
            hello[self._dice.randrange(len(hello))] = self._dice.randrange(256)
        with self._service.connect(self._dice, tls=False) as line:
            line.sendall(bytes(hello[: self._dice.randrange(1, len(hello) + 1)]))
            line.settimeout(0.2)
            return "answered" if line.recv(100) else "closed"

    def _stranger(self) -> str:
        """A caller without a certificate, or with one that is not accepted, reaches no call."""
        name = self._dice.choice(list(self._service.strangers))
        with self._service.connect(self._dice, files=self._service.strangers[name]) as line:
            path = self._dice.choice((SERVICE + "Describe", HEALTH + "Check")).encode()
            line.sendall(http2.PREFACE + http2.frame(http2.SETTINGS))
            line.sendall(http2.frame(http2.HEADERS, http2.request(path), flags=http2.END_HEADERS, stream=1))
            line.sendall(http2.frame(http2.DATA, http2.message(b""), flags=http2.END_STREAM, stream=1))
            if self._answered(line):
                self._run.fail(f"a caller with the certificate {name!r} was answered")
        return "refused"

    @staticmethod
    def _answered(line: socket.socket) -> bool:
        """Whether HEADERS come back; the connection is closed otherwise, or an error is raised."""
        line.settimeout(10)
        data = b""
        while piece := line.recv(65_536):
            data += piece
            while len(data) >= 9:
                size = int.from_bytes(data[:3], "big")
                if data[3] == http2.HEADERS:
                    return True
                if len(data) < 9 + size:
                    break
                data = data[9 + size :]
        return False

    def _frames(self) -> str:
        """Frames that HTTP/2 forbids, or too many of those that it allows."""
        with self._service.connect(self._dice, files=self._service.callers[self._caller()]) as line:
            line.settimeout(2)
            line.sendall(http2.PREFACE + http2.frame(http2.SETTINGS))
            for _ in range(self._dice.randrange(1, 6)):
                line.sendall(self._some_frames())
            line.settimeout(self._dice.choice((0.01, 0.3)))
            return "answered" if line.recv(65_536) else "closed"

    def _some_frames(self) -> bytes:  # noqa: PLR0911 - a table of attacks
        dice, stream = self._dice, self._dice.choice((0, 1, 2, 3, 101, 2**31 - 1, 2**31))
        block = http2.request(
            dice.choice((SERVICE + "Describe", SERVICE + "Watch", HEALTH + "Watch", "/", "x")).encode()
        )
        head = http2.frame(http2.HEADERS, block, flags=http2.END_HEADERS, stream=stream)
        kind = dice.randrange(11)
        if kind == 0:  # rapid reset
            ids = range(1, 2 * dice.choice((10, 300)), 2)
            return b"".join(
                http2.frame(http2.HEADERS, block, flags=http2.END_HEADERS, stream=each)
                + http2.frame(http2.RST_STREAM, b"\0\0\0\x08", stream=each)
                for each in ids
            )
        if kind == 1:  # a header block without an end
            rest = http2.headers([(b"x-" + dice.randbytes(2).hex().encode(), b"y" * 1000)])
            return http2.frame(http2.HEADERS, block, stream=stream) + b"".join(
                http2.frame(http2.CONTINUATION, rest, stream=stream) for _ in range(dice.choice((1, 100)))
            )
        if kind == 2:
            return http2.frame(dice.choice((http2.PING, http2.SETTINGS)), b"\0" * dice.choice((0, 6, 8))) * 500
        if kind == 3:
            return http2.frame(http2.WINDOW_UPDATE, dice.choice((b"\x7f\xff\xff\xff", b"\0\0\0\0")), stream=stream) * 3
        if kind == 4:  # settings of zero, and as large as can be
            pairs = b"".join(
                number.to_bytes(2, "big") + dice.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1"))
                for number in (1, 2, 3, 4, 5, 6, 99)
            )
            return http2.frame(http2.SETTINGS, pairs) + head
        if kind == 5:  # HPACK that is none
            return http2.frame(http2.HEADERS, self._garbage(200), flags=http2.END_HEADERS, stream=stream)
        if kind == 6:  # a length that is not true
            return http2.frame(dice.randrange(12), self._garbage(100), stream=stream, length=dice.randrange(2**24))
        if kind == 7:  # too many headers
            many = [(b"x-%d" % number, b"y" * dice.choice((1, 500))) for number in range(200)]
            return http2.frame(http2.HEADERS, http2.headers(many)[:16_000], flags=http2.END_HEADERS, stream=stream)
        if kind == 8:  # headers that are not text, or say an encoding or a time that is none
            odd = [
                (b"grpc-timeout", dice.choice((b"0n", b"99999999H", b"-1S", b"x"))),
                (b"grpc-encoding", dice.choice((b"gzip", b"deflate", b"zstd", b"\xff"))),
                (b"x-bin", dice.choice((b"***", b"AA==", b"\0"))),
            ]
            return http2.frame(
                http2.HEADERS,
                http2.request(SERVICE.encode() + b"Describe", more=odd),
                flags=http2.END_HEADERS,
                stream=stream,
            ) + http2.frame(http2.DATA, http2.message(b""), flags=http2.END_STREAM, stream=stream)
        if kind == 9:
            return http2.frame(http2.GOAWAY, b"\0" * 8) + head
        return http2.frame(dice.randrange(256), self._garbage(1000), flags=dice.randrange(256), stream=stream)

    def _framing(self) -> str:
        """A call whose messages are cut, miscounted, compressed or missing, and whose stream may stay open."""
        dice = self._dice
        data = dice.choice(self._seeds)[1:]
        parts = [
            http2.message(data),
            http2.message(data, length=dice.choice((0, 1, len(data) + 5, 2**32 - 1, 5 * 2**20))),
            http2.message(data, compressed=dice.choice((1, 255))),
            http2.message(b"\x1f\x8b" + dice.randbytes(20), compressed=1),
            http2.message(b"")[: dice.randrange(5)],
            b"",
        ]
        body = b"".join(dice.choice(parts) for _ in range(dice.randrange(1, 4)))
        method = dice.choice((*REQUESTS, "Watch", "Nothing"))
        with self._service.connect(dice, files=self._service.callers[self._caller()]) as line:
            more = [(b"grpc-encoding", b"gzip")] if dice.random() < 0.3 else []
            line.settimeout(2)
            line.sendall(http2.PREFACE + http2.frame(http2.SETTINGS))
            block = http2.request((SERVICE + method).encode(), more=more)
            line.sendall(http2.frame(http2.HEADERS, block, flags=http2.END_HEADERS, stream=1))
            ends = http2.END_STREAM if dice.random() < 0.7 else 0
            line.sendall(http2.frame(http2.DATA, body[:16_000], flags=ends, stream=1))
            line.settimeout(dice.choice((0.01, 0.3)))
            return "answered" if line.recv(65_536) else "closed"

    # -- calls

    def _channel(self, who: str) -> grpc.Channel:
        return self._service.channels[who]

    def _end(self, what: str, who: str, call) -> str:
        """How *call* ends; it has to, and not with a status that stands for a defect."""
        try:
            for _ in call if hasattr(call, "__next__") else (call,):
                pass
            status = "OK"
        except grpc.RpcError as error:
            status, details = error.code().name, error.details() or ""
            if status == "DEADLINE_EXCEEDED" and "longer than the service allows" not in details:
                self._run.fail(f"{what} of {who} was not answered within {CALL_LIMIT:.0f} s")
            # A connection that grpcio itself gives up is INTERNAL too, and has no words of the service.
            if status in BROKEN and "RST_STREAM" not in details and "GOAWAY" not in details:
                self._run.fail(f"{what} of {who} ended with {status}: {details}")
        if what == "PutObject" and status == "OK" and who != "plant":
            self._run.fail(f"an upload of {who} was granted")
        if who in {"nameless", "revoked"} and status not in REFUSED and not what.startswith("health"):
            self._run.fail(f"{what} of {who} ended with {status}")
        return status

    def _unary(self, method: str, who: str, data: bytes):
        return self._channel(who).unary_unary(SERVICE + method).with_call(data, timeout=CALL_LIMIT)

    def _streamed(self, method: str, who: str, data: bytes) -> str:
        call = self._channel(who).unary_stream(SERVICE + method)(data, timeout=CALL_LIMIT)
        if method == "Watch":
            threading.Timer(self._dice.random() / 2, call.cancel).start()
        elif self._dice.random() < 0.2:
            call.cancel()
        return self._end(method, who, call)

    def _message(self) -> str:
        """A message of the protocol with some of its fields changed."""
        number = self._dice.randrange(len(REQUESTS))
        method, message = list(REQUESTS.items())[number]
        data = bytes([number]) + message.SerializeToString()
        for _ in range(self._dice.randrange(1, 6)):
            data = mutated(data, "facts-requests", self._dice) or data
        return self._called(method, data[1:])

    def _bytes(self) -> str:
        """Bytes of a message that were changed, cut or repeated; and messages as large as they may be, or larger."""
        method = self._dice.choice((*REQUESTS, "Watch"))
        data = bytearray(self._dice.choice(self._seeds)[1:])
        for _ in range(self._dice.randrange(1, 10)):
            place = self._dice.randrange(len(data) + 1)
            data[place : place + self._dice.randrange(3)] = self._garbage(20)
        if self._dice.random() < 0.03:
            data += b"\x0a" + b"\xff\xff\xff\x01" + self._dice.randbytes(self._dice.choice((3, 5)) * 2**20)
        return self._called(method, bytes(data))

    def _called(self, method: str, data: bytes) -> str:
        who = self._caller()
        if method == "PutObject":
            return self._end(method, who, self._put(who, [data]))
        if method in {"GetObject", "Watch"}:
            return self._streamed(method, who, data)
        try:
            answer, _ = self._unary(method, who, data)
        except grpc.RpcError as error:
            return self._end(method, who, _raising(error))
        appended = method == "AppendFact" or (
            method == "AppendFacts" and any(wire.AppendFactsAnswer.FromString(answer).offsets)
        )
        if appended and who != "plant":
            self._run.fail(f"{method} of {who} was granted")
        return self._end(method, who, iter(()))

    def _health(self) -> str:
        who, dice = self._caller(), self._dice
        names = ("", "ergon.facts.v1.Boundary", "x" * 5000, "\0")
        data = health_pb2.HealthCheckRequest(service=dice.choice(names)).SerializeToString()
        data = dice.choice((data, b"", b"\x0a\x05x", self._garbage(100)))
        method = dice.choice(("Check", "Check", "Watch", "List"))
        if method == "Check":
            try:
                self._channel(who).unary_unary(HEALTH + method)(data, timeout=CALL_LIMIT)
            except grpc.RpcError as error:
                # What the library of health does with a message that is none is its own word.
                if error.code().name == "DEADLINE_EXCEEDED":
                    self._run.fail(f"health of {who} was not answered within {CALL_LIMIT:.0f} s")
                return error.code().name
            return "OK"
        call = self._channel(who).unary_stream(HEALTH + method)(data, timeout=CALL_LIMIT)
        threading.Timer(dice.random() / 2, call.cancel).start()
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    def _put(self, who: str, parts):
        return self._channel(who).stream_stream(SERVICE + "PutObject")(iter(parts), timeout=CALL_LIMIT)

    def _upload(self) -> str:
        """An upload that lies about its size or digest, comes in the wrong order, or never ends."""
        dice, who = self._dice, self._caller()
        stated = dice.choice((0, 1, 1000, MAX_BYTES * 2, 2**63 - 1, -1))
        digest = dice.choice((DIGEST, "sha256:" + dice.randbytes(32).hex(), "x"))
        expected = dice.choice((None, wire.Stored(digest=digest, size=stated)))
        key = dice.choice(("a/k", f"u/{dice.randrange(50)}", "../../x", "x" * 2000, "a\0b"))
        begin = dice.choice((0, 0, 0, 1, 1000, 2**62, -1))
        place = {"bucket": dice.choice(("b", "b", "..", "")), "key": key, "zone": dice.choice(ZONES)}
        header = wire.PutObjectRequest(header=wire.PutObjectHeader(**place, expected=expected, begin=begin))
        piece = wire.PutObjectRequest(piece=dice.randbytes(dice.choice((0, 1, 1000, 2**20))))
        end = wire.PutObjectRequest(end=wire.PutObjectEnd(size=dice.choice((0, 1, 1000, len(piece.piece), 2**62))))
        parts = [header, *(dice.choice((piece, piece, header, end)) for _ in range(dice.randrange(6)))]
        if dice.random() < 0.5:
            parts.append(wire.PutObjectRequest(end=wire.PutObjectEnd(size=len(piece.piece))))
        if dice.random() < 0.2:
            dice.shuffle(parts)
        call = self._put(who, [part.SerializeToString() for part in parts])
        if dice.random() < 0.2:
            threading.Timer(dice.random() / 20, call.cancel).start()
        return self._end("PutObject", who, call)

    def _download(self) -> str:
        key = self._dice.choice(("a/k", f"u/{self._dice.randrange(50)}", "..", "owner"))
        begin = self._dice.choice((0, 1, 10**6, 2**62, -1))
        request = wire.GetObjectRequest(bucket="b", key=key, begin=begin, zone=self._dice.choice(ZONES))
        return self._streamed("GetObject", self._caller(), request.SerializeToString())


def _raising(error):
    raise error
    yield


# -- the owner ----------------------------------------------------------------------------------------


class Owner:
    """Appends facts and reads them again, as if nobody attacked."""

    def __init__(self, service: Service, run: Run) -> None:
        self._service = service
        self._run = run
        self.appended: list[str] = []
        self.slowest = 0.0

    def work(self) -> None:
        client = self._service.client(self._service.owner)
        number = 0
        while not self._run.over.wait(0.25):
            began = time.monotonic()
            envelope = Envelope(
                message_id=f"owner-{number}", from_zone="Plant A", to_zone="Owner", produced_at_unix_ms=1
            )
            try:
                client.append_fact(envelope, Fact.of("order:7", "paid", {"number": number}))
            except ErgonError as error:
                self._run.fail(f"the owner's fact {number} was refused: {type(error).__name__}: {error}")
            else:
                self.appended.append(envelope.message_id)
            self.slowest = max(self.slowest, time.monotonic() - began)
            number += 1
        if self.slowest > OWNER_LIMIT:
            self._run.fail(f"the owner waited {self.slowest:.1f} s for one append")
        client.close()

    def check(self) -> None:
        """Every fact that was confirmed is there, once and in order."""
        files = self._service.owner
        client = self._service.client(files)
        found, after = [], None
        while facts := client.fetch_facts("sender:check", Pair("Plant A", "Owner"), 1000, after=after):
            found += [each.envelope.message_id for each in facts]
            after = facts[-1].cursor
        client.close()
        if [each for each in found if each in set(self.appended)] != self.appended:
            self._run.fail(f"{len(self.appended)} facts were confirmed to the owner, and {len(found)} are there")


# -- the run ------------------------------------------------------------------------------------------


def watch(service: Service, run: Run, most: list[int]) -> None:
    while not run.over.wait(1):
        if service.process.poll() is not None:
            run.fail(f"the service has ended with {service.process.returncode}")
            run.over.set()
            return
        most[0] = max(most[0], service.seen.memory_info().rss >> 20)


def judge(service: Service, run: Run, idle: int, most: int) -> int:
    """What the end shows; descriptors that are still open."""
    if most > MAX_RSS:
        run.fail(f"the service held {most} MiB")
    end = time.monotonic() + 60
    while (left := service.seen.num_fds()) > idle + 20 and time.monotonic() < end:
        time.sleep(1)
    if left > idle + 20:
        run.fail(f"{left} descriptors are open a minute after the end, and {idle} were before")
    service.process.send_signal(signal.SIGTERM)
    try:
        if code := service.process.wait(60):
            run.fail(f"the service ended with {code}")
    except subprocess.TimeoutExpired:
        service.process.kill()
        run.fail("the service did not end within a minute of SIGTERM")
    for line in service.log.read_text(encoding="utf-8", errors="replace").splitlines():
        run.logged["grpc" if CORE.match(line) else "ergon"] += 1
        if LOGGED.search(line):
            run.fail(f"logged: {line}")
    return left


def attack(folder: Path, dsn: str, seconds: float, seed: int, attackers: int) -> tuple[dict, Run]:
    service, run, most = Service(folder, dsn), Run(), [0]
    try:
        owner = Owner(service, run)
        idle = service.seen.num_fds()
        threads = [threading.Thread(target=owner.work), threading.Thread(target=watch, args=(service, run, most))]
        threads += [
            threading.Thread(target=Attacker(service, run, seed * 1000 + number).attack) for number in range(attackers)
        ]
        for thread in threads:
            thread.start()
        run.over.wait(seconds)
        run.over.set()
        for thread in threads:
            thread.join(CALL_LIMIT * 2)
            if thread.is_alive():
                run.fail("an attack was never answered")
        for channel in service.channels.values():
            channel.close()
        if service.process.poll() is None:
            owner.check()
            left = judge(service, run, idle, most[0])
        else:
            left = 0
    finally:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()
    told = {
        "seconds": seconds,
        "runs": run.sent.total(),
        "attacks": dict(run.sent),
        "answers": dict(run.answers),
        "owner_facts": len(owner.appended),
        "owner_slowest_seconds": round(owner.slowest, 2),
        "rss_mib": most[0],
        "descriptors": [idle, left],
        "lines_logged": dict(run.logged),
        "problems": dict(run.problems.most_common(20)),
    }
    return told, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attackers", type=int, default=6)
    parser.add_argument("--keep-log", type=Path, help="where the log of the service is copied to")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        folder.chmod(0o755)
        server = PrivatePostgres(folder / "postgres", fsync=False)
        server.start()
        stack.callback(server.stop, "immediate")
        told, run = attack(folder, migrated(server), given.seconds, given.seed, given.attackers)
        if given.keep_log:
            given.keep_log.write_bytes((folder / "log").read_bytes())
    print(json.dumps(told))
    sys.exit(1 if run.problems or not run.sent else 0)


if __name__ == "__main__":
    main()
