"""Attacks on `ergon facts serve`, and whether an honest caller is served while each of them runs.

    python bench/facts/attacks.py                 all of them, about two minutes
    python bench/facts/attacks.py streams idle    only these

The service runs in a process of its own with default limits and a store in memory. An honest zone appends facts and
describes, and a health check and a liveness probe are made, while an attack runs. It ends with one line of JSON, and
with exit code 1 where the p99 of the honest caller is above the target, one of its calls fails, or an attack succeeds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import grpc

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ergon_framework.facts.model import Envelope, Fact  # noqa: E402
from ergon_framework.facts.service import boundary_pb2 as wire  # noqa: E402
from ergon_framework.facts.service.address import Address  # noqa: E402
from ergon_framework.facts.service.client import BoundaryClient  # noqa: E402
from ergon_framework.facts.service.messages import write_appending  # noqa: E402
from tests.servers.certificates import Authority, fingerprint, with_other_signature  # noqa: E402

#: Milliseconds within which 99 of 100 calls of the honest caller are answered, on a busy machine with two processors.
P99_MS = 500.0
#: Seconds for which each attack runs.
SECONDS = 5.0
#: Idle connections that an attack wants to hold, the threads that open them, and seconds that they may take for it.
IDLE = 4_400
IDLE_THREADS = 8
IDLE_TIMEOUT_SECONDS = 120.0
BOUNDARY = "/ergon.facts.v1.Boundary/"
HEALTH = "/grpc.health.v1.Health/"
#: The usual soft limit of open files, with which the service is started.
FEW_FILES = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (1024, r.getrlimit(r.RLIMIT_NOFILE)[1]))"

ids = itertools.count()


class Service:
    """``ergon facts serve`` with default limits, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.revoked = folder / "revoked.txt"
        self.revoked.write_text("", encoding="utf-8")
        self.plant = self.authority.issue("plant", zones=["Plant A"])
        self.hq = self.authority.issue("hq", zones=["HQ"])
        self.unnamed = self.authority.issue("unnamed")
        server = self.authority.issue("server")
        words = [
            f"{FEW_FILES}; from ergon_framework.cli.main import main; main()",
            "facts",
            "serve",
            "--store",
            "memory",
        ]
        words += ["--accept-loss", "--zone", "Plant A", "--listen", "127.0.0.1:0", "--probe-port", "0"]
        words += ["--tls-cert", server.certificate, "--tls-key", server.key, "--tls-ca", self.authority.path]
        words += ["--revoked", self.revoked]
        self.log = folder / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", *map(str, words)],
                stdout=log,
                stderr=log,
            )
        self.where = self._wait(r"listening at (\S+)").replace("127.0.0.1", "localhost")
        self.probes = self._wait(r"probes on (\S+)")

    def _wait(self, pattern):
        until = time.monotonic() + 60
        while time.monotonic() < until and self.process.poll() is None:
            found = re.search(pattern, self.log.read_text(encoding="utf-8"))
            if found:
                return found[1]
            time.sleep(0.05)
        raise SystemExit(self.log.read_text(encoding="utf-8"))

    def channel(self, files, *options):
        pem = files.read()
        credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
        return grpc.secure_channel(self.where, credentials, options=[("grpc.use_local_subchannel_pool", 1), *options])

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def status(call, data=b"", **given):
    """The status with which *call* ends."""
    try:
        call(data, **given)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


# -- the honest caller ----------------------------------------------------------------------------------


class Honest:
    """A zone that appends and describes, beside a check of the health and a liveness probe, one after the other."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.taken: dict[str, list[float]] = {"append": [], "describe": [], "health": [], "live": []}
        self.failures: list[str] = []

    def call_for(self, seconds, *, reconnect=False):
        """Call for so long; with *reconnect* each round begins with a new connection."""
        until = time.monotonic() + seconds
        with contextlib.ExitStack() as stack:
            channel = None
            while time.monotonic() < until:
                if channel is None or reconnect:
                    stack.close()
                    channel = stack.enter_context(self._service.channel(self._service.plant))
                self._round(channel)

    def _round(self, channel):
        envelope = Envelope(message_id=f"honest-{next(ids)}", from_zone="Plant A", to_zone="HQ", produced_at_unix_ms=1)
        fact = write_appending(envelope, Fact.of("order:1", "paid", {"total": 12.5})).SerializeToString()
        self._timed("append", lambda: channel.unary_unary(BOUNDARY + "AppendFact")(fact, timeout=10))
        self._timed("describe", lambda: channel.unary_unary(BOUNDARY + "Describe")(b"", timeout=10))
        self._timed("health", lambda: channel.unary_unary(HEALTH + "Check")(b"", timeout=10))
        self._timed("live", lambda: urllib.request.urlopen(self._service.probes + "/live", timeout=3).read())

    def _timed(self, name, call):
        began = time.perf_counter()
        try:
            call()
        except (grpc.RpcError, OSError) as error:
            self.failures.append(f"{name}: {error.code().name if isinstance(error, grpc.RpcError) else error}")
        self.taken[name].append((time.perf_counter() - began) * 1000)

    def report(self):
        return {
            "p99_ms": {name: round(percentile(taken), 1) for name, taken in self.taken.items() if taken},
            "calls": sum(map(len, self.taken.values())),
            "failed": len(self.failures),
            **({"failures": sorted(set(self.failures))[:5]} if self.failures else {}),
        }


def percentile(taken, part=0.99):
    return sorted(taken)[min(len(taken) - 1, int(len(taken) * part))]


@contextlib.contextmanager
def hostile(work, *, threads):
    """*work* again and again in so many threads."""
    over = threading.Event()

    def run():
        while not over.is_set():
            work()

    started = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in started:
            thread.join(30)


# -- the attacks: each returns what it saw, with "held" where it has to have failed -------------------


def twin(service, honest):
    """A revoked certificate comes back with the other signature of its authority."""
    other = with_other_signature(service.hq)
    request = wire.FetchFactsRequest(reader="x", pair=wire.Pair(from_zone="Plant A", to_zone="HQ"), limit=1)

    def fetch(files):
        with service.channel(files) as channel:
            return status(channel.unary_unary(BOUNDARY + "FetchFacts"), request.SerializeToString(), timeout=10)

    before = [fetch(service.hq), fetch(other)]
    service.revoked.write_text(fingerprint(service.hq) + "\n", encoding="utf-8")
    honest.call_for(1)
    after = [fetch(service.hq), fetch(other)]
    service.revoked.write_text("", encoding="utf-8")
    return {"before": before, "after": after, "held": before == ["OK"] * 2 and after == ["PERMISSION_DENIED"] * 2}


def streams(service, honest):
    """One caller opens 11 connections of 100 streams each: as itself, without a name, and revoked."""
    seen = {}
    for who, path in (("zone", BOUNDARY + "Watch"), ("unnamed", HEALTH + "Watch"), ("revoked", HEALTH + "Watch")):
        if who == "revoked":
            service.revoked.write_text(service.hq.certificate.read_text(encoding="utf-8"), encoding="utf-8")
        files = service.unnamed if who == "unnamed" else service.hq
        with contextlib.ExitStack() as stack:
            opened = []
            for _ in range(11):
                channel = stack.enter_context(service.channel(files))
                opened += [channel.unary_stream(path)(b"") for _ in range(100)]
            honest.call_for(SECONDS / 2)
            seen[who] = sum(1 for each in opened if each.is_active())
            for each in opened:
                each.cancel()
    service.revoked.write_text("", encoding="utf-8")
    return {"open": seen, "held": seen["zone"] <= 100 and seen["unnamed"] == seen["revoked"] == 0}


def large_request():
    """About 3 MB of facts whose objects have many keys, which takes about a second to bring into canonical form."""
    keys = json.dumps({f"{(number * 7919) % 100_003:x}": 0 for number in range(75_000)}, separators=(",", ":"))
    request = wire.AppendFactsRequest()
    request.facts.message_ids.extend("1234")
    request.facts.from_zones.append("Plant A")
    request.facts.to_zones.append("HQ")
    request.facts.produced_at_unix_ms.extend([1] * 4)
    request.facts.subjects.extend(["s"] * 4)
    request.facts.predicates.extend(["p"] * 4)
    request.facts.objects_json.extend([keys] * 4)
    return request.SerializeToString()


def large(service, honest):
    """Eight at a time, large requests of a zone that may not append."""
    data, seen = large_request(), []
    with service.channel(service.hq) as channel:
        call = channel.unary_unary(BOUNDARY + "AppendFacts")
        before = _cpu(service)
        seen += [status(call, data, timeout=60) for _ in range(10)]
        cost = (_cpu(service) - before) / 10
        with hostile(lambda: seen.append(status(call, data, timeout=60)), threads=8):
            honest.call_for(SECONDS)
    return {
        "bytes": len(data),
        "refused": len(seen),
        "cpu_ms_each": round(cost * 1000, 1),
        "held": set(seen) == {"PERMISSION_DENIED"},
    }


def own(service, honest):
    """The same requests of the zone that may append them; the honest caller is another program of that zone."""
    data, seen = large_request(), []
    with service.channel(service.plant) as channel:
        call = channel.unary_unary(BOUNDARY + "AppendFacts")
        with hostile(lambda: seen.append(status(call, data, timeout=60)), threads=4):
            honest.call_for(SECONDS)
    return {"answers": dict(Counter(seen)), "held": set(seen) <= {"OK", "RESOURCE_EXHAUSTED"}}


def idle(service, honest):
    """1,500 connections that never begin a handshake, at a service that may open 1,024 files."""
    host, _, port = service.where.partition(":")
    held = []
    try:
        held += (socket.create_connection((host, int(port)), timeout=10) for _ in range(1_500))
        honest.call_for(SECONDS, reconnect=True)
        closed = 0
        until = time.monotonic() + 15
        for each in held:
            each.settimeout(max(0.01, until - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                try:
                    closed += each.recv(1) == b""
                except ConnectionError:
                    closed += 1
    finally:
        for each in held:
            each.close()
    return {"connections": len(held), "closed_by_timeout": closed, "held": closed == len(held)}


class IdleConnections:
    """4,400 connections from *address* with a complete handshake and no call; each that is closed is opened again."""

    def __init__(self, service, files, address):
        host, _, port = service.where.partition(":")
        self._target, self._address = (host, int(port)), address
        self._context = ssl.create_default_context(cafile=str(files.authorities))
        self._context.load_cert_chain(files.certificate, files.key)
        self._context.set_alpn_protocols(["h2"])
        self._lines = [[] for _ in range(IDLE_THREADS)]
        self._threads = [threading.Thread(target=self._run, args=(lines,), daemon=True) for lines in self._lines]
        self._over = threading.Event()
        #: Set once as many connections were opened as the service has places, also if it has closed some of them.
        self._all_opened = threading.Event()
        self.counts = Counter()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        if not self._all_opened.wait(IDLE_TIMEOUT_SECONDS):
            self.__exit__()
            raise SystemExit(f"{self.counts['opened']} of {IDLE} connections in {IDLE_TIMEOUT_SECONDS:g} s: no attack")
        return self.counts

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(30)
        for line in itertools.chain.from_iterable(self._lines):
            line.close()

    def _run(self, lines):
        while not self._over.wait(0.01):
            for line in [line for line in lines if self._is_closed(line)]:
                lines.remove(line)
                line.close()
                self.counts["closed"] += 1
            for _ in range(min(20, IDLE // IDLE_THREADS - len(lines))):
                with contextlib.suppress(OSError):
                    lines.append(self._open())
                    self.counts["opened"] += 1
            self.counts["most"] = max(self.counts["most"], sum(map(len, self._lines)))
            if self.counts["opened"] >= IDLE:
                self._all_opened.set()

    def _open(self):
        line = socket.create_connection(self._target, timeout=5, source_address=(self._address, 0))
        line = self._context.wrap_socket(line, server_hostname="localhost")
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        line.settimeout(0)
        return line

    @staticmethod
    def _is_closed(line):
        try:
            return line.recv(1000) == b""
        except (ssl.SSLWantReadError, BlockingIOError):
            return False
        except OSError:
            return True


def idle_unnamed(service, honest):
    """Idle connections of a certificate without a name, from another address than the honest caller's."""
    with IdleConnections(service, service.unnamed, "127.0.0.5") as counts:
        honest.call_for(2 * SECONDS, reconnect=True)
    return {**counts, "held": counts["most"] < IDLE / 2}


def idle_unnamed_same_address(service, honest):
    """The same from the address of the honest caller, as behind a proxy."""
    with IdleConnections(service, service.unnamed, "127.0.0.1") as counts:
        honest.call_for(2 * SECONDS, reconnect=True)
    return {**counts, "held": counts["most"] < IDLE / 2}


def foreign_artifact(service, honest):
    """A zone asks for an artifact of another, for which there is no fact, in four threads."""
    address = Address(host=service.where, files=service.plant)
    with BoundaryClient(address) as client:
        client.put_object("payroll", "2026", [b"private"])
    request = wire.GetObjectRequest(bucket="payroll", key="2026", zone="Plant A").SerializeToString()
    seen = []
    with service.channel(service.hq) as channel:
        call = channel.unary_stream(BOUNDARY + "GetObject")
        with hostile(lambda: seen.append(status(lambda data, **_: list(call(data, timeout=10)), request)), threads=4):
            honest.call_for(SECONDS / 2)
    return {"statuses": dict(Counter(seen)), "held": set(seen) == {"NOT_FOUND"}}


def compressed(service, honest):
    """Compressed requests that are a thousand times larger than they look."""
    seen = []
    with service.channel(service.unnamed, ("grpc.max_send_message_length", -1)) as channel:
        call = channel.unary_unary(BOUNDARY + "AppendFact")
        data = b"\0" * (100 << 20)
        before = _memory(service)
        with hostile(lambda: seen.append(status(call, data, timeout=60, compression=grpc.Compression.Gzip)), threads=1):
            honest.call_for(SECONDS / 2)
        grown = _memory(service) - before
    return {"statuses": sorted(set(seen)), "grown_mib": grown, "held": "OK" not in seen and grown < 50}


def refusals(service, honest):
    """Refused calls, each of which used to be a line of the log."""
    request = wire.GetFactRequest(from_zone="Plant A", message_id="x").SerializeToString()
    before, seen = service.log.read_text(encoding="utf-8").count("\n"), []
    with service.channel(service.hq) as channel:
        call = channel.unary_unary(BOUNDARY + "GetFact")
        with hostile(lambda: seen.append(status(call, request, timeout=10)), threads=4):
            honest.call_for(SECONDS / 2)
    lines = service.log.read_text(encoding="utf-8").count("\n") - before
    return {"refused": len(seen), "lines": lines, "held": lines <= 10 and set(seen) == {"PERMISSION_DENIED"}}


def slow_probes(service, honest, callers=500):
    """500 callers of the probes that never finish their request."""
    host, _, port = service.probes.rpartition("/")[2].partition(":")

    def hold():
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as slow:
            slow.sendall(b"GET /live HT")
            slow.recv(10)

    with hostile(hold, threads=callers):
        honest.call_for(SECONDS)
    return {"callers": callers, "held": True}


def slow_probes_64(service, honest):
    """The same with 64 callers."""
    return slow_probes(service, honest, 64)


def _cpu(service):
    fields = Path(f"/proc/{service.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _memory(service):
    status_text = Path(f"/proc/{service.process.pid}/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+)", status_text)[1]) // 1024


ATTACKS = {
    attack.__name__: attack
    for attack in (
        twin,
        streams,
        large,
        own,
        idle,
        idle_unnamed,
        idle_unnamed_same_address,
        foreign_artifact,
        compressed,
        refusals,
        slow_probes_64,
        slow_probes,
    )
}


def run(names):
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    results, met = {}, True
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ergon-attack-") as folder:
            service = Service(Path(folder))
            try:
                quiet, honest = Honest(service), Honest(service)
                quiet.call_for(1)
                seen = ATTACKS[name](service, honest)
            finally:
                service.close()
        report = honest.report()
        well = seen["held"] and not honest.failures and max(report["p99_ms"].values()) <= P99_MS
        met = met and well
        results[name] = {
            **seen,
            "quiet_p99_ms": quiet.report()["p99_ms"],
            **report,
            "target_p99_ms": P99_MS,
            "met": well,
        }
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    return {"attacks": results, "met": met}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", help=f"of {', '.join(ATTACKS)}; all without a name")
    names = parser.parse_args().attacks or list(ATTACKS)
    unknown = sorted(set(names) - ATTACKS.keys())
    if unknown:
        parser.error(f"there is no attack {', '.join(unknown)}")
    result = run(names)
    print(json.dumps(result))
    sys.exit(0 if result["met"] else 1)


if __name__ == "__main__":
    main()
