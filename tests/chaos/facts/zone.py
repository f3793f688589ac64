"""A zone: a PostgreSQL, a folder of artifacts, and processes that are started again whenever they die."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ergon_framework.facts.model import Pair, Side
from ergon_framework.schema.migrate import upgrade
from tests.chaos.facts.parts import store_of
from tests.servers.postgres import PrivatePostgres

ROOT = Path(__file__).parents[3]
PORT = 7443
PARTS = ("serve", "follow", "produce")


class Part:
    """A place for one process after the other; whoever torments it holds the lock."""

    def __init__(self, zone: Zone, name: str) -> None:
        self.zone = zone
        self.name = name
        self.lock = threading.Lock()
        self.lives = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.began = 0.0
        #: A producer that has said all is not started again.
        self.over = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        zone = self.zone
        words = ["ip", "netns", "exec", zone.space, sys.executable, "-m", "tests.chaos.facts.parts", self.name]
        with (zone.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*words, json.dumps(zone.given)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.lives += 1
        self.began = time.monotonic()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Zone:
    """One side of the line. Its database is reached by a socket, which namespaces do not cut: it is the zone's own."""

    def __init__(self, name: str, side: Side, folder: Path, *, space: str, given: dict[str, Any]) -> None:
        self.name = name
        self.folder = folder
        self.space = space
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        self.server = PrivatePostgres(
            folder / "server", settings={"max_connections": 100, "log_min_messages": "fatal", "max_wal_size": "1GB"}
        )
        contents = folder / "contents"
        contents.mkdir()
        self.given = {
            **given,
            "zone": name,
            "side": side.value,
            "contents": str(contents),
            "journal": str(folder / "journal"),
        }
        self.parts = {part: Part(self, part) for part in PARTS}

    def prepare(self) -> None:
        self.server.start()
        upgrade(self.server.create_database("facts"))
        sockets = self.server.folder / "sockets"
        self.given["dsn"] = f"host={sockets} port={self.server.port} user=postgres dbname=facts"

    def store(self) -> Any:
        """Its store, for whoever looks on."""
        return store_of(self.given)

    @property
    def noted(self) -> int:
        journal = Path(self.given["journal"])
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    def confirmed(self) -> list[tuple[int, int]]:
        """Number and offset of every fact that its producer was told to be durable."""
        lines = Path(self.given["journal"]).read_text(encoding="ascii").splitlines()
        return [(int(number), int(offset)) for number, offset in map(str.split, lines)]

    def pair_to(self, other: Zone) -> Pair:
        return Pair(self.name, other.name)

    def end(self) -> None:
        for part in self.parts.values():
            part.kill()
        self.server.kill()

    def said(self) -> str:
        """The end of what its processes have written."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-600:]}" for log in logs)


class Keeper:
    """Starts again whatever has died."""

    def __init__(self, zones: list[Zone]) -> None:
        self._parts = [part for zone in zones for part in zone.parts.values()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        #: Parts that ended by themselves, and how; a database that is gone ends nobody.
        self.fallen: list[str] = []

    def start(self) -> None:
        for part in self._parts:
            part.start()
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._over.wait(0.05):
            for part in self._parts:
                if part.over or part.running or not part.lock.acquire(blocking=False):
                    continue
                try:
                    code = part.process.returncode if part.process is not None else None
                    if part.name == "produce" and code == 0:
                        part.over = True
                        continue
                    if code not in (None, -9):
                        self.fallen.append(f"{part.zone.name} {part.name}: {code}")
                        time.sleep(0.5)
                    part.start()
                finally:
                    part.lock.release()
