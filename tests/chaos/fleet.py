"""Fleet: worker processes that are started again whenever they die, with a note of when and how each ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.journal import read
from tests.chaos.worker import POISONED

SCRIPT = Path(__file__).with_name("worker.py")
PATIENCE = 40.0


@dataclass
class Life:
    """One process, from start to end."""

    who: str
    process: subprocess.Popen[bytes]
    began: float
    ended: float | None = None
    #: killed, poisoned, no server at its start, in good order, or the exit code of one that ended by itself.
    how: str = ""
    killed: bool = False


class Berth:
    """A place for one process after the other; whoever torments it holds the lock."""

    def __init__(self, number: int, flavour: str) -> None:
        self.number = number
        self.flavour = flavour
        self.lock = threading.Lock()
        self.lives: list[Life] = []

    @property
    def life(self) -> Life:
        return self.lives[-1]


class Fleet:
    """As many workers as *flavours*; every other word goes to the worker as an option."""

    def __init__(
        self, folder: Path, flavours: list[str], *, dsn: str, options: dict[str, str], script: Path = SCRIPT
    ) -> None:
        self.folder = folder
        self._script = script
        self.berths = [Berth(number, flavour) for number, flavour in enumerate(flavours)]
        self._dsn = dsn
        self._options = options
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="fleet", daemon=True)

    @property
    def lives(self) -> list[Life]:
        return [life for berth in self.berths for life in berth.lives]

    def start(self) -> None:
        for berth in self.berths:
            self._launch(berth)
        self._keeper.start()

    def end(self) -> None:
        """Ask all to end in good order, and see that they do."""
        self._over.set()
        self._keeper.join()
        for berth in self.berths:
            if berth.life.process.poll() is None:
                berth.life.process.terminate()
        until = time.monotonic() + PATIENCE
        for berth in self.berths:
            try:
                berth.life.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                berth.life.how = "did not end"
            self._ended(berth.life)

    def kill(self) -> None:
        """Leave nobody behind."""
        self._over.set()
        for life in self.lives:
            if life.process.poll() is None:
                life.process.kill()
                life.process.wait()

    def journal(self, life: Life) -> Path:
        return self.folder / f"{life.who}.journal"

    def said(self, life: Life) -> str:
        """The end of what the process wrote on stderr."""
        return (self.folder / f"{life.who}.err").read_text(errors="replace")[-1500:]

    def _begun(self, life: Life) -> bool:
        path = self.journal(life)
        return path.exists() and bool(read(path))

    def _launch(self, berth: Berth) -> None:
        who = f"{berth.flavour}-{berth.number}-{len(berth.lives)}"
        words = [sys.executable, str(self._script), berth.flavour, "--who", who]
        words += ["--dsn", f"{self._dsn}?application_name={who}", "--journal", str(self.folder / f"{who}.journal")]
        words += [word for option, value in self._options.items() for word in (f"--{option}", value)]
        with (self.folder / f"{who}.err").open("wb") as err:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=err, stderr=err)
        berth.lives.append(Life(who, process, time.time()))

    def _keep(self) -> None:
        while not self._over.wait(0.02):
            for berth in self.berths:
                if berth.life.process.poll() is None:
                    continue
                # Noted at once, also while its tormentor does not know yet that it has nobody left to torment.
                self._ended(berth.life)
                if berth.lock.acquire(blocking=False):
                    try:
                        if not self._over.is_set():
                            self._launch(berth)
                    finally:
                        berth.lock.release()

    def _ended(self, life: Life) -> None:
        life.ended = life.ended or time.time()
        if life.how:
            return
        code = life.process.poll()
        if life.killed and code == -signal.SIGKILL:
            life.how = "killed"
        elif code == POISONED:
            life.how = "poisoned"
        elif code == -signal.SIGTERM and not self._begun(life):
            # Told to end before it could listen: it held nothing.
            life.how = "in good order"
        elif code == 1 and len(read(self.journal(life))) == 1 and "ConnectionLost" in self.said(life).splitlines()[-1]:
            # It had not begun: whoever cannot reach the server at its start says so and is started again.
            life.how = "no server at its start"
        else:
            life.how = "in good order" if code == 0 else f"by itself with {code}"


def send(life: Life, number: signal.Signals) -> bool:
    """Signal a process that is still there; False if it is not."""
    if life.process.poll() is not None:
        return False
    os.kill(life.process.pid, number)
    return True
