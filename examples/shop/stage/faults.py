"""Faults: applied to processes, servers and connections while orders arrive, each recorded with its time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from stage.parts import Part, describe_process, iter_processes, read_start_time
from stage.sites import Sites

#: Of ten faults, the number of each kind.
FAULT_WEIGHTS = {"kill": 4, "stop": 2, "crash": 2, "cut": 2}
#: Seconds that a process stands still or a connection is cut; the long ones outlast every lease.
SHORT_SECONDS, LONG_SECONDS = (0.5, 12.0), (32.0, 38.0)
#: One in this many stops is a long one.
LONG_STOP_ONE_IN = 6


@dataclass(frozen=True)
class Fault:
    """A fault of *who*, with its times."""

    kind: str
    target: str
    began: float
    ended: float


class NetworkLink(Protocol):
    def partition_network(self) -> None: ...
    def heal_network(self) -> None: ...


class Server(NetworkLink, Protocol):
    def kill(self) -> None: ...
    def start(self) -> None: ...


class Faults:
    """Applies a number of faults at random times, and stops on request."""

    def __init__(self, sites: Sites, *, seed: int, say: Callable[[str], None]) -> None:
        self._sites = sites
        self._rng = random.Random(seed)  # noqa: S311 - the same plan again for the same seed
        self._say = say
        self._path = sites.folder / "faults.jsonl"
        self._log_lock = threading.Lock()
        self._stopped = threading.Event()
        #: Targets take turns, so that a short run covers all of them.
        self._turns = {kind: itertools.count() for kind in ("part", "crash", "cut")}
        self.done: list[Fault] = []
        self.errors: list[str] = []
        servers: dict[str, Server] = {
            "shop-postgres": sites.shop,
            "headquarters-postgres": sites.headquarters,
            "rabbitmq": sites.rabbitmq,
        }
        # A starting server must be reachable, so cutting its connection waits for the start, and the other way round.
        self._servers = {name: (server, threading.Lock()) for name, server in servers.items()}
        self._links: dict[str, tuple[NetworkLink, threading.Lock]] = {
            **{name: (server, lock) for name, (server, lock) in self._servers.items()},
            "bank": (sites.bank_link, threading.Lock()),
            "serve": (sites.facts_link, threading.Lock()),
        }

    @property
    def counts(self) -> Counter[str]:
        return Counter(f"{fault.kind} {fault.target}" for fault in self.done)

    def run(self, seconds: float, count: int) -> None:
        """Return when all faults were applied and have ended."""
        kinds = [kind for kind, share in FAULT_WEIGHTS.items() for _ in range(share)]
        plan = [kinds[number % len(kinds)] for number in range(count)]
        self._rng.shuffle(plan)
        moments = sorted(self._rng.uniform(0.02 * seconds, 0.95 * seconds) for _ in plan)
        began, threads = time.monotonic(), []
        for moment, kind in zip(moments, plan, strict=True):
            if self._stopped.wait(max(0.0, began + moment - time.monotonic())):
                break
            # Each fault has its own random source: threads would draw from a shared one in varying order.
            act, rng = getattr(self, f"_{kind}"), random.Random(self._rng.random())  # noqa: S311
            threads.append(threading.Thread(target=self._apply, args=(kind, act, rng), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        self._stopped.set()

    def _apply(self, kind: str, act: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            act(rng)
        except Exception as error:  # noqa: BLE001 - a fault that cannot be made spoils the run, and is reported
            self.errors.append(f"{kind}: {type(error).__name__}: {error}")

    def _record(self, kind: str, target: str, began: float, **details: Any) -> None:
        timestamp = datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds")
        fault = {"at": timestamp, "fault": kind, "who": target, "seconds": round(time.time() - began, 2), **details}
        with self._log_lock:
            self.done.append(Fault(kind, target, began, time.time()))
            with self._path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(fault) + "\n")
        self._say(f"{timestamp[11:19]}  {kind} {target} {details.get('what', '')} for {fault['seconds']} s")

    def _next_target(self, kind: str, names: list[str]) -> str:
        return names[next(self._turns[kind]) % len(names)]

    def _pick_process(self, rng: random.Random) -> tuple[Part, int] | None:
        """Return a running part or a process below it; the part's lock is held."""
        parts, first = self._sites.parts.all, next(self._turns["part"])
        for part in parts[first % len(parts) :] + parts[: first % len(parts)]:
            if part.lock.acquire(blocking=False):
                if part.process is not None and part.is_running:
                    return part, rng.choice(list(iter_processes(part.process.pid)))
                part.lock.release()
        return None

    def _wait_for_process(self, rng: random.Random) -> tuple[Part, int]:
        while True:
            if (picked := self._pick_process(rng)) is not None:
                return picked
            time.sleep(0.2)

    def _kill(self, rng: random.Random) -> None:
        """SIGKILL one process of a part; it, or its ancestor, is restarted."""
        part, pid = self._wait_for_process(rng)
        try:
            began, process_name = time.time(), describe_process(pid)
            self._sites.parts.record_processes()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._record("kill", part.name, began, what=process_name, pid=pid)
        finally:
            part.lock.release()

    def _stop(self, rng: random.Random) -> None:
        """SIGSTOP one process, and SIGCONT it later."""
        part, pid = self._wait_for_process(rng)
        try:
            began, process_name, start_time = time.time(), describe_process(pid), read_start_time(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            self._stopped.wait(rng.uniform(*(LONG_SECONDS if rng.randrange(LONG_STOP_ONE_IN) == 0 else SHORT_SECONDS)))
            if read_start_time(pid) == start_time:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._record("stop", part.name, began, what=process_name, pid=pid)
        finally:
            part.lock.release()

    def _crash(self, rng: random.Random) -> None:
        """SIGKILL a server with all its children, and start it with the data that it kept."""
        name = self._next_target("crash", [*self._servers, "bank"])
        if name == "bank":
            bank = next(part for part in self._sites.parts.all if part.name == "bank")
            with bank.lock:
                began = time.time()
                if bank.process is not None:
                    bank.process.kill()
                    bank.process.wait()
                self._stopped.wait(rng.uniform(0.0, 3.0))
            self._record("crash", name, began)
            return
        server, lock = self._servers[name]
        with lock:
            began = time.time()
            server.kill()
            self._stopped.wait(rng.uniform(0.0, 3.0))
            server.start()
            self._record("crash", name, began)

    def _cut(self, rng: random.Random) -> None:
        """Drop every packet from and to a port for a while; connections stay open and receive nothing."""
        name = self._next_target("cut", list(self._links))
        link, lock = self._links[name]
        with lock:
            began = time.time()
            link.partition_network()
            try:
                self._stopped.wait(rng.uniform(*SHORT_SECONDS) + 3.0)
            finally:
                link.heal_network()
            self._record("cut", name, began)
