"""Attacks on `ergon facts serve`, and whether a legitimate caller is served while each of them runs.

    python bench/facts/attacks.py                 all of them, about two minutes
    python bench/facts/attacks.py streams idle    only these

The service runs in its own process with default limits and a store in memory. While an attack runs, a legitimate zone
appends facts and describes, and a health check and a liveness probe are made. It ends with one line of JSON, and with
exit code 1 where the p99 of the legitimate caller is above the target, one of its calls fails, or an attack succeeds.
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
from ergon_framework.facts.service.channel import ServiceAddress  # noqa: E402
from ergon_framework.facts.service.client import BoundaryClient  # noqa: E402
from ergon_framework.facts.service.wire import write_appending  # noqa: E402
from tests.servers.certificates import CertificateAuthority, compute_fingerprint, with_other_signature  # noqa: E402

#: Milliseconds within which 99 of 100 calls of the legitimate caller are answered, on a busy machine with 2 processors.
MAX_P99_MS = 500.0
#: Seconds that each attack runs.
ATTACK_SECONDS = 5.0
#: Idle connections that an attack tries to hold, the threads that open them, and the seconds for opening them.
IDLE_CONNECTION_COUNT = 4_400
IDLE_THREADS = 8
IDLE_TIMEOUT_SECONDS = 120.0
BOUNDARY = "/ergon.facts.v1.Boundary/"
HEALTH = "/grpc.health.v1.Health/"
#: The usual soft limit of open files, with which the service is started.
LIMIT_OPEN_FILES = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (1024, r.getrlimit(r.RLIMIT_NOFILE)[1]))"

ids = itertools.count()


class Service:
    """``ergon facts serve`` with default limits, in its own process."""

    def __init__(self, folder: Path) -> None:
        self.authority = CertificateAuthority(folder)
        self.revoked = folder / "revoked.txt"
        self.revoked.write_text("", encoding="utf-8")
        self.plant = self.authority.issue("plant", zones=["Plant A"])
        self.hq = self.authority.issue("hq", zones=["HQ"])
        self.unnamed = self.authority.issue("unnamed")
        server = self.authority.issue("server")
        command = [
            f"{LIMIT_OPEN_FILES}; from ergon_framework.cli.main import main; main()",
            "facts",
            "serve",
            "--store",
            "memory",
        ]
        command += ["--accept-loss", "--zone", "Plant A", "--listen", "127.0.0.1:0", "--probe-port", "0"]
        command += ["--tls-cert", server.certificate, "--tls-key", server.key, "--tls-ca", self.authority.path]
        command += ["--revoked", self.revoked]
        self.log = folder / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", *map(str, command)],
                stdout=log,
                stderr=log,
            )
        self.where = self._wait(r"listening at (\S+)").replace("127.0.0.1", "localhost")
        self.probes = self._wait(r"probes on (\S+)")

    def _wait(self, pattern):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            match = re.search(pattern, self.log.read_text(encoding="utf-8"))
            if match:
                return match[1]
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


def status(call, data=b"", **options):
    """Return the status with which *call* ends."""
    try:
        call(data, **options)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


# -- the legitimate caller ------------------------------------------------------------------------------


class LegitimateCaller:
    """A zone that appends and describes, then runs a health check and a liveness probe, in sequence."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.durations_ms: dict[str, list[float]] = {"append": [], "describe": [], "health": [], "live": []}
        self.failures: list[str] = []

    def call_for(self, seconds, *, reconnect=False):
        """Call for *seconds*; with *reconnect* each batch begins with a new connection."""
        deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as stack:
            channel = None
            while time.monotonic() < deadline:
                if channel is None or reconnect:
                    stack.close()
                    channel = stack.enter_context(self._service.channel(self._service.plant))
                self._run_batch(channel)

    def _run_batch(self, channel):
        envelope = Envelope(message_id=f"honest-{next(ids)}", from_zone="Plant A", to_zone="HQ", produced_at_unix_ms=1)
        fact = write_appending(envelope, Fact.create("order:1", "paid", {"total": 12.5})).SerializeToString()
        self._measure("append", lambda: channel.unary_unary(BOUNDARY + "AppendFact")(fact, timeout=10))
        self._measure("describe", lambda: channel.unary_unary(BOUNDARY + "Describe")(b"", timeout=10))
        self._measure("health", lambda: channel.unary_unary(HEALTH + "Check")(b"", timeout=10))
        self._measure("live", lambda: urllib.request.urlopen(self._service.probes + "/live", timeout=3).read())

    def _measure(self, name, call):
        began = time.perf_counter()
        try:
            call()
        except (grpc.RpcError, OSError) as error:
            self.failures.append(f"{name}: {error.code().name if isinstance(error, grpc.RpcError) else error}")
        self.durations_ms[name].append((time.perf_counter() - began) * 1000)

    def report(self):
        return {
            "p99_ms": {name: round(percentile(values), 1) for name, values in self.durations_ms.items() if values},
            "calls": sum(map(len, self.durations_ms.values())),
            "failed": len(self.failures),
            **({"failures": sorted(set(self.failures))[:5]} if self.failures else {}),
        }


def percentile(values, share=0.99):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


@contextlib.contextmanager
def run_in_threads(work, *, threads):
    """Run *work* repeatedly in *threads* threads."""
    stopped = threading.Event()

    def run():
        while not stopped.is_set():
            work()

    workers = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for thread in workers:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in workers:
            thread.join(30)


# -- the attacks: each returns its observations, with "held" where it must have failed ----------------


def twin(service, caller):
    """Use a revoked certificate with the other signature of its authority."""
    resigned = with_other_signature(service.hq)
    request = wire.FetchFactsRequest(reader="x", pair=wire.Pair(from_zone="Plant A", to_zone="HQ"), limit=1)

    def fetch(files):
        with service.channel(files) as channel:
            return status(channel.unary_unary(BOUNDARY + "FetchFacts"), request.SerializeToString(), timeout=10)

    before = [fetch(service.hq), fetch(resigned)]
    service.revoked.write_text(compute_fingerprint(service.hq) + "\n", encoding="utf-8")
    caller.call_for(1)
    after = [fetch(service.hq), fetch(resigned)]
    service.revoked.write_text("", encoding="utf-8")
    return {"before": before, "after": after, "held": before == ["OK"] * 2 and after == ["PERMISSION_DENIED"] * 2}


def streams(service, caller):
    """Open 11 connections of 100 streams each as one caller: as itself, without a name, and revoked."""
    open_counts = {}
    for identity, path in (("zone", BOUNDARY + "Watch"), ("unnamed", HEALTH + "Watch"), ("revoked", HEALTH + "Watch")):
        if identity == "revoked":
            service.revoked.write_text(service.hq.certificate.read_text(encoding="utf-8"), encoding="utf-8")
        files = service.unnamed if identity == "unnamed" else service.hq
        with contextlib.ExitStack() as stack:
            calls = []
            for _ in range(11):
                channel = stack.enter_context(service.channel(files))
                calls += [channel.unary_stream(path)(b"") for _ in range(100)]
            caller.call_for(ATTACK_SECONDS / 2)
            open_counts[identity] = sum(1 for call in calls if call.is_active())
            for call in calls:
                call.cancel()
    service.revoked.write_text("", encoding="utf-8")
    return {
        "open": open_counts,
        "held": open_counts["zone"] <= 100 and open_counts["unnamed"] == open_counts["revoked"] == 0,
    }


def large_request():
    """Return about 3 MB of facts whose objects have many keys, which takes about a second to canonicalize."""
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


def large(service, caller):
    """Send large requests of a zone that may not append, eight at a time."""
    data, statuses = large_request(), []
    with service.channel(service.hq) as channel:
        call = channel.unary_unary(BOUNDARY + "AppendFacts")
        before = _read_cpu_seconds(service)
        statuses += [status(call, data, timeout=60) for _ in range(10)]
        cost = (_read_cpu_seconds(service) - before) / 10
        with run_in_threads(lambda: statuses.append(status(call, data, timeout=60)), threads=8):
            caller.call_for(ATTACK_SECONDS)
    return {
        "bytes": len(data),
        "refused": len(statuses),
        "cpu_ms_each": round(cost * 1000, 1),
        "held": set(statuses) == {"PERMISSION_DENIED"},
    }


def own(service, caller):
    """Send them from the zone that may append them; the legitimate caller is another program of that zone."""
    data, statuses = large_request(), []
    with service.channel(service.plant) as channel:
        call = channel.unary_unary(BOUNDARY + "AppendFacts")
        with run_in_threads(lambda: statuses.append(status(call, data, timeout=60)), threads=4):
            caller.call_for(ATTACK_SECONDS)
    return {"answers": dict(Counter(statuses)), "held": set(statuses) <= {"OK", "RESOURCE_EXHAUSTED"}}


def idle(service, caller):
    """Open 1,500 connections that never begin a handshake, at a service that may open 1,024 files."""
    host, _, port = service.where.partition(":")
    connections = []
    try:
        connections += (socket.create_connection((host, int(port)), timeout=10) for _ in range(1_500))
        caller.call_for(ATTACK_SECONDS, reconnect=True)
        closed = 0
        deadline = time.monotonic() + 15
        for connection in connections:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                try:
                    closed += connection.recv(1) == b""
                except ConnectionError:
                    closed += 1
    finally:
        for connection in connections:
            connection.close()
    return {"connections": len(connections), "closed_by_timeout": closed, "held": closed == len(connections)}


class IdleConnections:
    """4,400 connections from *address* with a complete handshake and no call; each that is closed is opened again."""

    def __init__(self, service, files, address):
        host, _, port = service.where.partition(":")
        self._target, self._address = (host, int(port)), address
        self._context = ssl.create_default_context(cafile=str(files.authorities))
        self._context.load_cert_chain(files.certificate, files.key)
        self._context.set_alpn_protocols(["h2"])
        self._connections = [[] for _ in range(IDLE_THREADS)]
        self._threads = [
            threading.Thread(target=self._run, args=(connections,), daemon=True) for connections in self._connections
        ]
        self._stopped = threading.Event()
        #: Set when as many connections were opened as the service has slots, even if it has closed some of them.
        self._all_opened = threading.Event()
        self.counts = Counter()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        if not self._all_opened.wait(IDLE_TIMEOUT_SECONDS):
            self.__exit__()
            raise SystemExit(
                f"{self.counts['opened']} of {IDLE_CONNECTION_COUNT} connections in "
                f"{IDLE_TIMEOUT_SECONDS:g} s: no attack"
            )
        return self.counts

    def __exit__(self, *_):
        self._stopped.set()
        for thread in self._threads:
            thread.join(30)
        for connection in itertools.chain.from_iterable(self._connections):
            connection.close()

    def _run(self, connections):
        while not self._stopped.wait(0.01):
            for connection in [connection for connection in connections if self._is_closed(connection)]:
                connections.remove(connection)
                connection.close()
                self.counts["closed"] += 1
            for _ in range(min(20, IDLE_CONNECTION_COUNT // IDLE_THREADS - len(connections))):
                with contextlib.suppress(OSError):
                    connections.append(self._open())
                    self.counts["opened"] += 1
            self.counts["most"] = max(self.counts["most"], sum(map(len, self._connections)))
            if self.counts["opened"] >= IDLE_CONNECTION_COUNT:
                self._all_opened.set()

    def _open(self):
        connection = socket.create_connection(self._target, timeout=5, source_address=(self._address, 0))
        connection = self._context.wrap_socket(connection, server_hostname="localhost")
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        connection.settimeout(0)
        return connection

    @staticmethod
    def _is_closed(connection):
        try:
            return connection.recv(1000) == b""
        except (ssl.SSLWantReadError, BlockingIOError):
            return False
        except OSError:
            return True


def idle_unnamed(service, caller):
    """Hold idle connections of a certificate without a name, from another address than the legitimate caller's."""
    with IdleConnections(service, service.unnamed, "127.0.0.5") as counts:
        caller.call_for(2 * ATTACK_SECONDS, reconnect=True)
    return {**counts, "held": counts["most"] < IDLE_CONNECTION_COUNT / 2}


def idle_unnamed_same_address(service, caller):
    """Hold them from the address of the legitimate caller, as behind a proxy."""
    with IdleConnections(service, service.unnamed, "127.0.0.1") as counts:
        caller.call_for(2 * ATTACK_SECONDS, reconnect=True)
    return {**counts, "held": counts["most"] < IDLE_CONNECTION_COUNT / 2}


def foreign_artifact(service, caller):
    """Request an artifact of another zone, for which there is no fact, in four threads."""
    address = ServiceAddress(host=service.where, files=service.plant)
    with BoundaryClient(address) as client:
        client.put_object("payroll", "2026", [b"private"])
    request = wire.GetObjectRequest(bucket="payroll", key="2026", zone="Plant A").SerializeToString()
    statuses = []
    with service.channel(service.hq) as channel:
        call = channel.unary_stream(BOUNDARY + "GetObject")
        with run_in_threads(
            lambda: statuses.append(status(lambda data, **_: list(call(data, timeout=10)), request)), threads=4
        ):
            caller.call_for(ATTACK_SECONDS / 2)
    return {"statuses": dict(Counter(statuses)), "held": set(statuses) == {"NOT_FOUND"}}


def compressed(service, caller):
    """Send compressed requests that expand a thousandfold."""
    statuses = []
    with service.channel(service.unnamed, ("grpc.max_send_message_length", -1)) as channel:
        call = channel.unary_unary(BOUNDARY + "AppendFact")
        data = b"\0" * (100 << 20)
        before = _read_memory_mib(service)
        with run_in_threads(
            lambda: statuses.append(status(call, data, timeout=60, compression=grpc.Compression.Gzip)), threads=1
        ):
            caller.call_for(ATTACK_SECONDS / 2)
        grown = _read_memory_mib(service) - before
    return {"statuses": sorted(set(statuses)), "grown_mib": grown, "held": "OK" not in statuses and grown < 50}


def refusals(service, caller):
    """Make rejected calls, each of which used to write a line of the log."""
    request = wire.GetFactRequest(from_zone="Plant A", message_id="x").SerializeToString()
    before, statuses = service.log.read_text(encoding="utf-8").count("\n"), []
    with service.channel(service.hq) as channel:
        call = channel.unary_unary(BOUNDARY + "GetFact")
        with run_in_threads(lambda: statuses.append(status(call, request, timeout=10)), threads=4):
            caller.call_for(ATTACK_SECONDS / 2)
    lines = service.log.read_text(encoding="utf-8").count("\n") - before
    return {"refused": len(statuses), "lines": lines, "held": lines <= 10 and set(statuses) == {"PERMISSION_DENIED"}}


def slow_probes(service, caller, callers=500):
    """Open 500 requests to the probes that are never completed."""
    host, _, port = service.probes.rpartition("/")[2].partition(":")

    def hold():
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as slow:
            slow.sendall(b"GET /live HT")
            slow.recv(10)

    with run_in_threads(hold, threads=callers):
        caller.call_for(ATTACK_SECONDS)
    return {"callers": callers, "held": True}


def slow_probes_64(service, caller):
    """Open 64 such requests."""
    return slow_probes(service, caller, 64)


def _read_cpu_seconds(service):
    fields = Path(f"/proc/{service.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _read_memory_mib(service):
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
    results, all_met = {}, True
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ergon-attack-") as folder:
            service = Service(Path(folder))
            try:
                baseline, caller = LegitimateCaller(service), LegitimateCaller(service)
                baseline.call_for(1)
                observed = ATTACKS[name](service, caller)
            finally:
                service.close()
        report = caller.report()
        is_met = observed["held"] and not caller.failures and max(report["p99_ms"].values()) <= MAX_P99_MS
        all_met = all_met and is_met
        results[name] = {
            **observed,
            "quiet_p99_ms": baseline.report()["p99_ms"],
            **report,
            "target_p99_ms": MAX_P99_MS,
            "met": is_met,
        }
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    return {"attacks": results, "met": all_met}


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
