"""Faults of workers, servers and connections during the run; each is recorded with its time and its victim."""

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

from tests.chaos.fleet import Fleet, ProcessRecord, ProcessSlot, send_signal
from tests.servers.packets import PacketDrop

#: Seconds after which the queue gives up a connection with an unanswered packet.
CONNECTION_TIMEOUT_SECONDS = 12.0


class Server(Protocol):
    """A server that faults can hit."""

    def kill(self) -> None: ...
    def start(self) -> None: ...
    def partition_network(self) -> None: ...
    def heal_network(self) -> None: ...


@dataclass(frozen=True)
class Fault:
    """A fault of *who*, or of everything where that is None."""

    kind: str
    who: str | None
    started_at: float
    ended_at: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.who or 'all'} for {self.ended_at - self.started_at:.1f} s"


class FaultInjector:
    """Injects a number of faults of each kind at random moments of *seconds*."""

    #: Seconds after its start from which a process is at work.
    min_age_seconds = 1.5

    def __init__(self, server: Server, fleet: Fleet, *, lease: float, sockets: str, rng: random.Random) -> None:
        self._server = server
        self._fleet = fleet
        self._lease = lease
        self._sockets = sockets
        self._rng = rng
        self._server_lock = threading.Lock()
        self._faults_lock = threading.Lock()
        self.faults: list[Fault] = []
        self.errors: list[str] = []

    @property
    def counts(self) -> Counter[str]:
        return Counter(fault.kind for fault in self.faults)

    def run(self, seconds: float, fault_counts: dict[str, int]) -> None:
        """Return when all faults are injected; a moment without a victim is retried."""
        actions, rng = self._list_actions(), self._rng
        plan = sorted((rng.uniform(0, seconds), kind) for kind, count in fault_counts.items() for _ in range(count))
        started_at, threads = time.monotonic(), []
        for due, kind in plan:
            time.sleep(max(0.0, started_at + due - time.monotonic()))
            # Drawn here, in order: threads would draw in a nondeterministic order.
            thread = threading.Thread(target=self._inject, args=(kind, actions[kind], rng.random()), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()

    def _list_actions(self) -> dict[str, Callable[[float], bool]]:
        """Return the action of each kind of fault, which returns False if there was no victim."""
        return {"stop": self._stop, "kill": self._kill, "crash": self._crash, "cut": self._cut}

    def _inject(self, kind: str, action: Callable[[float], bool], draw: float) -> None:
        try:
            while not action(draw):
                draw = (draw + 0.37) % 1.0
                time.sleep(0.05)
        except Exception as error:
            self.errors.append(f"{kind}: {type(error).__name__}: {error}")

    def _record_fault(self, kind: str, who: str | None, started_at: float) -> None:
        with self._faults_lock:
            self.faults.append(Fault(kind, who, started_at, time.time()))

    def _lock_victim(self, draw: float) -> ProcessSlot | None:
        """Lock and return a slot with a live process that has no other fault."""
        slots = self._fleet.slots
        first = int(draw * len(slots))
        for slot in slots[first:] + slots[:first]:
            if slot.lock.acquire(blocking=False):
                # A process that has only just begun holds nothing and proves nothing.
                if slot.current.process.poll() is None and time.time() - slot.current.started_at > self.min_age_seconds:
                    return slot
                slot.lock.release()
        return None

    def _stop(self, draw: float) -> bool:
        """SIGSTOP past the lease."""
        slot = self._lock_victim(draw)
        if slot is None:
            return False
        try:
            record, started_at = slot.current, time.time()
            if not send_signal(record, signal.SIGSTOP):
                return False
            time.sleep(self._lease * (1.25 + 0.6 * draw))
            if not send_signal(record, signal.SIGCONT):
                return False
            self._record_fault("stop", record.who, started_at)
            return True
        finally:
            slot.lock.release()

    def _kill(self, draw: float) -> bool:
        """SIGKILL."""
        slot = self._lock_victim(draw)
        if slot is None:
            return False
        try:
            record, started_at = slot.current, time.time()
            # Set before the kill: a thread that sees the exit must know its cause.
            record.was_killed = True
            record.was_killed = send_signal(record, signal.SIGKILL)
            if not record.was_killed:
                return False
            record.process.wait()
            record.ended_at = time.time()
            self._record_fault("kill", record.who, started_at)
            return True
        finally:
            slot.lock.release()

    def _crash(self, draw: float) -> bool:
        """SIGKILL the server with all its children; restart it a little later."""
        with self._server_lock:
            started_at = time.time()
            self._server.kill()
            time.sleep(2.0 * draw)
            self._server.start()
            self._record_fault("crash", None, started_at)
        return True

    def _cut(self, draw: float) -> bool:
        """Drop packets: of all, or of one worker while the others continue."""
        with self._server_lock:
            if draw < 0.4:
                started_at = time.time()
                self._server.partition_network()
                try:
                    time.sleep(CONNECTION_TIMEOUT_SECONDS + 2.0 if draw < 0.1 else 0.5 + 8.0 * draw)
                finally:
                    self._server.heal_network()
                self._record_fault("cut", None, started_at)
                return True
            slot = self._lock_victim(draw)
            if slot is None:
                return False
            try:
                return self._cut_worker(
                    slot.current, CONNECTION_TIMEOUT_SECONDS + 2.0 if draw > 0.85 else self._lease * (1.0 + draw)
                )
            finally:
                slot.lock.release()

    def _cut_worker(self, record: ProcessRecord, seconds: float) -> bool:
        packet_drops, started_at = [PacketDrop(port) for port in self._list_ports(record)], time.time()
        if not packet_drops:
            return False
        try:
            for packet_drop in packet_drops:
                packet_drop.partition_network()
            time.sleep(seconds)
        finally:
            for packet_drop in packet_drops:
                packet_drop.heal_network()
        self._record_fault("cut", record.who, started_at)
        return True

    def _list_ports(self, record: ProcessRecord) -> list[int]:
        """Return the local ports of one worker's connections to the server."""
        with psycopg.connect(self._sockets, autocommit=True) as connection:
            return [
                row[0]
                for row in connection.execute(
                    "select client_port from pg_stat_activity where application_name = %s and client_port > 0",
                    (record.who,),
                )
            ]
