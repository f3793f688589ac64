"""A zone: a PostgreSQL, a folder of artifacts, and processes that are restarted whenever they exit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ergon_framework.database.migrate import upgrade
from ergon_framework.facts.model import BoundarySide, ZonePair
from tests.chaos.facts.parts import open_store
from tests.servers.postgres import PrivatePostgres

ROOT = Path(__file__).parents[3]
PORT = 7443
PROCESS_NAMES = ("serve", "follow", "produce")


class ZoneProcessSlot:
    """A slot for one process after the other; the fault injector holds its lock during a fault."""

    def __init__(self, zone: Zone, name: str) -> None:
        self.zone = zone
        self.name = name
        self.lock = threading.Lock()
        self.start_count = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        #: A producer that has appended all facts is not restarted.
        self.is_finished = False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        zone = self.zone
        command = ["ip", "netns", "exec", zone.namespace, sys.executable, "-m", "tests.chaos.facts.parts", self.name]
        with (zone.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, json.dumps(zone.settings)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.start_count += 1
        self.started_at = time.monotonic()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Zone:
    """One side of the link. Its database is reached by a socket, which network namespaces do not cut."""

    def __init__(
        self, name: str, side: BoundarySide, folder: Path, *, namespace: str, settings: dict[str, Any]
    ) -> None:
        self.name = name
        self.folder = folder
        self.namespace = namespace
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        self.server = PrivatePostgres(
            folder / "server", settings={"max_connections": 100, "log_min_messages": "fatal", "max_wal_size": "1GB"}
        )
        contents = folder / "contents"
        contents.mkdir()
        self.settings = {
            **settings,
            "zone": name,
            "side": side.value,
            "contents": str(contents),
            "journal": str(folder / "journal"),
        }
        self.slots = {name: ZoneProcessSlot(self, name) for name in PROCESS_NAMES}

    def prepare(self) -> None:
        self.server.start()
        upgrade(self.server.create_database("facts"))
        sockets = self.server.folder / "sockets"
        self.settings["dsn"] = f"host={sockets} port={self.server.port} user=postgres dbname=facts"

    def open_store(self) -> Any:
        """Open its store for observers."""
        return open_store(self.settings)

    @property
    def confirmed_count(self) -> int:
        journal = Path(self.settings["journal"])
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    def read_confirmed(self) -> list[tuple[int, int]]:
        """Return number and offset of every fact that its producer saw confirmed."""
        lines = Path(self.settings["journal"]).read_text(encoding="ascii").splitlines()
        return [(int(number), int(offset)) for number, offset in map(str.split, lines)]

    def pair_to(self, other: Zone) -> ZonePair:
        return ZonePair(self.name, other.name)

    def end(self) -> None:
        for slot in self.slots.values():
            slot.kill()
        self.server.kill()

    def read_logs(self) -> str:
        """Return the end of the output of its processes."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-600:]}" for log in logs)


class ZoneSupervisor:
    """Restarts every process that has exited."""

    def __init__(self, zones: list[Zone]) -> None:
        self._slots = [slot for zone in zones for slot in zone.slots.values()]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._restart_exited, daemon=True)
        #: Processes that exited on their own, and how; losing the database must not end any of them.
        self.unexpected_exits: list[str] = []

    def start(self) -> None:
        for slot in self._slots:
            slot.start()
        self._thread.start()

    def end(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _restart_exited(self) -> None:
        while not self._stopping.wait(0.05):
            for slot in self._slots:
                if slot.is_finished or slot.is_running or not slot.lock.acquire(blocking=False):
                    continue
                try:
                    exit_code = slot.process.returncode if slot.process is not None else None
                    if slot.name == "produce" and exit_code == 0:
                        slot.is_finished = True
                        continue
                    if exit_code not in (None, -9):
                        self.unexpected_exits.append(f"{slot.zone.name} {slot.name}: {exit_code}")
                        time.sleep(0.5)
                    slot.start()
                finally:
                    slot.lock.release()
