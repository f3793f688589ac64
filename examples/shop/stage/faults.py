"""Faults: what is done to processes, servers and lines while orders come in, each written down with its time."""

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

from stage.parts import Part, family, named, started
from stage.sites import Sites

#: Of ten faults so many are of each kind.
SHARES = {"kill": 4, "stop": 2, "crash": 2, "cut": 2}
#: Seconds that a process stands still or a line is cut; the long ones outlast every lease.
SHORT, LONG = (0.5, 12.0), (32.0, 38.0)
#: One of so many stops is a long one.
RARE = 6


@dataclass(frozen=True)
class Fault:
    """Something that was done to *who*, with its times."""

    kind: str
    who: str
    began: float
    ended: float


class Line(Protocol):
    def cut(self) -> None: ...
    def mend(self) -> None: ...


class Server(Line, Protocol):
    def kill(self) -> None: ...
    def start(self) -> None: ...


class Faults:
    """Carries out so many faults, at moments that are drawn, and stops when it is told to."""

    def __init__(self, sites: Sites, *, seed: int, say: Callable[[str], None]) -> None:
        self._sites = sites
        self._dice = random.Random(seed)  # noqa: S311 - the same plan again for the same seed
        self._say = say
        self._path = sites.folder / "faults.jsonl"
        self._note = threading.Lock()
        self._over = threading.Event()
        #: Everybody has his turn, so that a short run leaves nobody out.
        self._turns = {kind: itertools.count() for kind in ("part", "crash", "cut")}
        self.done: list[Fault] = []
        self.errors: list[str] = []
        servers: dict[str, Server] = {
            "shop-postgres": sites.shop,
            "headquarters-postgres": sites.headquarters,
            "rabbitmq": sites.rabbitmq,
        }
        # A server that starts must be heard, so whoever cuts its line waits, and the other way round.
        self._servers = {name: (server, threading.Lock()) for name, server in servers.items()}
        self._lines: dict[str, tuple[Line, threading.Lock]] = {
            **{name: (server, lock) for name, (server, lock) in self._servers.items()},
            "bank": (sites.bank_line, threading.Lock()),
            "serve": (sites.facts_line, threading.Lock()),
        }

    @property
    def counts(self) -> Counter[str]:
        return Counter(f"{fault.kind} {fault.who}" for fault in self.done)

    def run(self, seconds: float, count: int) -> None:
        """Return when all were done and are over."""
        kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
        plan = [kinds[number % len(kinds)] for number in range(count)]
        self._dice.shuffle(plan)
        moments = sorted(self._dice.uniform(0.02 * seconds, 0.95 * seconds) for _ in plan)
        began, threads = time.monotonic(), []
        for moment, kind in zip(moments, plan, strict=True):
            if self._over.wait(max(0.0, began + moment - time.monotonic())):
                break
            # Each has dice of its own: threads would draw from one in an order of their own.
            act, dice = getattr(self, f"_{kind}"), random.Random(self._dice.random())  # noqa: S311
            threads.append(threading.Thread(target=self._act, args=(kind, act, dice), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        self._over.set()

    def _act(self, kind: str, act: Callable[[random.Random], None], dice: random.Random) -> None:
        try:
            act(dice)
        except Exception as error:  # noqa: BLE001 - a fault that cannot be made spoils the run, and is told at its end
            self.errors.append(f"{kind}: {type(error).__name__}: {error}")

    def _done(self, kind: str, who: str, began: float, **told: Any) -> None:
        at = datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds")
        fault = {"at": at, "fault": kind, "who": who, "seconds": round(time.time() - began, 2), **told}
        with self._note:
            self.done.append(Fault(kind, who, began, time.time()))
            with self._path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(fault) + "\n")
        self._say(f"{at[11:19]}  {kind} {who} {told.get('what', '')} for {fault['seconds']} s")

    def _next(self, kind: str, names: list[str]) -> str:
        return names[next(self._turns[kind]) % len(names)]

    def _victim(self, dice: random.Random) -> tuple[Part, int] | None:
        """Somebody who lives: a part, or a process below it; the part's lock is held."""
        parts, first = self._sites.parts.all, next(self._turns["part"])
        for part in parts[first % len(parts) :] + parts[: first % len(parts)]:
            if part.lock.acquire(blocking=False):
                if part.process is not None and part.running:
                    return part, dice.choice(list(family(part.process.pid)))
                part.lock.release()
        return None

    def _found(self, dice: random.Random) -> tuple[Part, int]:
        while True:
            if (found := self._victim(dice)) is not None:
                return found
            time.sleep(0.2)

    def _kill(self, dice: random.Random) -> None:
        """SIGKILL of one process of a part; it, or what is above it, is started again."""
        part, pid = self._found(dice)
        try:
            began, what = time.time(), named(pid)
            self._sites.parts.look()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._done("kill", part.name, began, what=what, pid=pid)
        finally:
            part.lock.release()

    def _stop(self, dice: random.Random) -> None:
        """SIGSTOP, and SIGCONT later."""
        part, pid = self._found(dice)
        try:
            began, what, when = time.time(), named(pid), started(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            self._over.wait(dice.uniform(*(LONG if dice.randrange(RARE) == 0 else SHORT)))
            if started(pid) == when:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._done("stop", part.name, began, what=what, pid=pid)
        finally:
            part.lock.release()

    def _crash(self, dice: random.Random) -> None:
        """SIGKILL of a server with all its children, and a start with what it has kept."""
        name = self._next("crash", [*self._servers, "bank"])
        if name == "bank":
            bank = next(part for part in self._sites.parts.all if part.name == "bank")
            with bank.lock:
                began = time.time()
                if bank.process is not None:
                    bank.process.kill()
                    bank.process.wait()
                self._over.wait(dice.uniform(0.0, 3.0))
            self._done("crash", name, began)
            return
        server, lock = self._servers[name]
        with lock:
            began = time.time()
            server.kill()
            self._over.wait(dice.uniform(0.0, 3.0))
            server.start()
            self._done("crash", name, began)

    def _cut(self, dice: random.Random) -> None:
        """Every packet from and to a port vanishes for a while; connections stay open and hear nothing."""
        name = self._next("cut", list(self._lines))
        line, lock = self._lines[name]
        with lock:
            began = time.time()
            line.cut()
            try:
                self._over.wait(dice.uniform(*SHORT) + 3.0)
            finally:
                line.mend()
            self._done("cut", name, began)
