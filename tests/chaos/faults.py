"""Faults: what is done to workers, server and lines while the work goes on, each with its time and its victim."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import psycopg

from tests.chaos.fleet import Berth, Fleet, Life, send
from tests.servers.packets import PacketDrop

#: Past this a connection with an unanswered packet is given up by the queue.
GIVEN_UP = 12.0


class Server(Protocol):
    """What can be done to a server."""

    def kill(self) -> None: ...
    def start(self) -> None: ...
    def cut(self) -> None: ...
    def mend(self) -> None: ...


@dataclass(frozen=True)
class Fault:
    """Something that was done to *who*, or to everybody where that is None."""

    kind: str
    who: str | None
    began: float
    ended: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.who or 'all'} for {self.ended - self.began:.1f} s"


class Torment:
    """Carries out so many faults of each kind, at random moments of *seconds*."""

    #: Seconds after which a process is at work.
    ripe = 1.5

    def __init__(self, server: Server, fleet: Fleet, *, lease: float, sockets: str, dice: random.Random) -> None:
        self._server = server
        self._fleet = fleet
        self._lease = lease
        self._sockets = sockets
        self._dice = dice
        self._line = threading.Lock()
        self._note = threading.Lock()
        self.faults: list[Fault] = []
        self.errors: list[str] = []

    @property
    def counts(self) -> Counter[str]:
        return Counter(fault.kind for fault in self.faults)

    def run(self, seconds: float, wanted: dict[str, int]) -> None:
        """Return when all are done; a moment that found no victim is tried again."""
        acts, dice = self._acts(), self._dice
        plan = sorted((dice.uniform(0, seconds), kind) for kind, count in wanted.items() for _ in range(count))
        began, threads = time.monotonic(), []
        for due, kind in plan:
            time.sleep(max(0.0, began + due - time.monotonic()))
            # Drawn here, in order: threads would draw in an order of their own.
            thread = threading.Thread(target=self._act, args=(kind, acts[kind], dice.random()), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()

    def _acts(self) -> dict[str, Callable[[float], bool]]:
        """What each kind of fault is; False is that there was no victim."""
        return {"stop": self._stop, "kill": self._kill, "crash": self._crash, "cut": self._cut}

    def _act(self, kind: str, act: Callable[[float], bool], luck: float) -> None:
        try:
            while not act(luck):
                luck = (luck + 0.37) % 1.0
                time.sleep(0.05)
        except Exception as error:
            self.errors.append(f"{kind}: {type(error).__name__}: {error}")

    def _done(self, kind: str, who: str | None, began: float) -> None:
        with self._note:
            self.faults.append(Fault(kind, who, began, time.time()))

    def _victim(self, luck: float) -> Berth | None:
        """Somebody who lives and whom nobody else torments; its lock is held."""
        berths = self._fleet.berths
        first = int(luck * len(berths))
        for berth in berths[first:] + berths[:first]:
            if berth.lock.acquire(blocking=False):
                # One that has only just begun holds nothing and proves nothing.
                if berth.life.process.poll() is None and time.time() - berth.life.began > self.ripe:
                    return berth
                berth.lock.release()
        return None

    def _stop(self, luck: float) -> bool:
        """SIGSTOP past the lease."""
        berth = self._victim(luck)
        if berth is None:
            return False
        try:
            life, began = berth.life, time.time()
            if not send(life, signal.SIGSTOP):
                return False
            time.sleep(self._lease * (1.25 + 0.6 * luck))
            if not send(life, signal.SIGCONT):
                return False
            self._done("stop", life.who, began)
            return True
        finally:
            berth.lock.release()

    def _kill(self, luck: float) -> bool:
        """SIGKILL."""
        berth = self._victim(luck)
        if berth is None:
            return False
        try:
            life, began = berth.life, time.time()
            # Before it is done: whoever sees it end must know by whom.
            life.killed = True
            life.killed = send(life, signal.SIGKILL)
            if not life.killed:
                return False
            life.process.wait()
            life.ended = time.time()
            self._done("kill", life.who, began)
            return True
        finally:
            berth.lock.release()

    def _crash(self, luck: float) -> bool:
        """SIGKILL the server with all its children; start it again a little later."""
        with self._line:
            began = time.time()
            self._server.kill()
            time.sleep(2.0 * luck)
            self._server.start()
            self._done("crash", None, began)
        return True

    def _cut(self, luck: float) -> bool:
        """Packets vanish: for everybody, or for one worker while the others go on."""
        with self._line:
            if luck < 0.4:
                began = time.time()
                self._server.cut()
                try:
                    time.sleep(GIVEN_UP + 2.0 if luck < 0.1 else 0.5 + 8.0 * luck)
                finally:
                    self._server.mend()
                self._done("cut", None, began)
                return True
            berth = self._victim(luck)
            if berth is None:
                return False
            try:
                return self._cut_one(berth.life, GIVEN_UP + 2.0 if luck > 0.85 else self._lease * (1.0 + luck))
            finally:
                berth.lock.release()

    def _cut_one(self, life: Life, seconds: float) -> bool:
        lines, began = [PacketDrop(port) for port in self._ports(life)], time.time()
        if not lines:
            return False
        try:
            for line in lines:
                line.cut()
            time.sleep(seconds)
        finally:
            for line in lines:
                line.mend()
        self._done("cut", life.who, began)
        return True

    def _ports(self, life: Life) -> list[int]:
        """Where the connections of one worker to the server begin."""
        with psycopg.connect(self._sockets, autocommit=True) as connection:
            return [
                row[0]
                for row in connection.execute(
                    "select client_port from pg_stat_activity where application_name = %s and client_port > 0",
                    (life.who,),
                )
            ]
