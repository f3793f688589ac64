"""Chaos with jobs: executors in several languages, two orchestrators and PostgreSQL killed, one of them stopped.

Jobs echo, fail, ask for a retry, hang, crash their executor, print, and some kill their orchestrator every time. There
are executors that end neither with their input nor by SIGTERM, and have children. Handlers write their start and end,
synced, outside the database; triggers see every end that is written. At the end all of it is held against each other.

The last line is JSON. The exit code is 1 if anything is wrong or too little was done to the system.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.schema.migrate import upgrade
from tests.chaos import job_verdict
from tests.chaos.faults import Torment
from tests.chaos.fleet import Berth, Fleet, Life
from tests.chaos.job_mix import Sender, drawn
from tests.chaos.job_verdict import Verdict, judge
from tests.servers.postgres import PrivatePostgres

ROOT = Path(__file__).parents[2]
OWN = Path(__file__).with_name("job_executors")
EXAMPLES = ROOT / "examples" / "executors"
LANGUAGES = ("python", "node", "go")
#: Of all kills, the executors' share; of the rest one in four is the server's.
EXECUTORS = 0.5
#: Seconds that those who are to be gone may take: the guard, and the system when it is busy.
GONE = 10.0
#: Stops among which at least one leaves an outcome that is told too late.
MANY = 20
SHOWN = 20


# -- executors --------------------------------------------------------------------------------------


def python(_: Path) -> list[str]:
    program = "import sys; sys.path.insert(0, sys.argv[1]); from ergon_framework.cli.main import main; "
    program += "sys.argv[1:] = ['executor', 'run', '--handlers', 'handlers:registry']; main()"
    return [sys.executable, "-c", program, str(OWN)]


def node(folder: Path) -> list[str]:
    program = found("node")
    script = folder / "executor.mjs"
    script.write_bytes((EXAMPLES / "node" / "executor.mjs").read_bytes() + (OWN / "chaos.mjs").read_bytes())
    return [program, str(script)]


def go(folder: Path) -> list[str]:
    program, source = found("go"), folder / "go"
    shutil.copytree(EXAMPLES / "go", source)
    shutil.copy(OWN / "chaos.go", source)
    cache = {"GOCACHE": str(folder / "cache"), "GOFLAGS": "-mod=mod", "GOPROXY": "off"}
    subprocess.run([program, "build", "-o", folder / "executor", "."], cwd=source, check=True, env=os.environ | cache)
    return [str(folder / "executor")]


def stubborn(_: Path) -> list[str]:
    return [sys.executable, "-S", str(OWN / "stubborn.py")]


def found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"{name} is missing; run tools/install-languages")
    return path


def commands(folder: Path, languages: Sequence[str]) -> dict[str, list[str]]:
    makers: dict[str, Callable[[Path], list[str]]] = {"python": python, "node": node, "go": go, "stubborn": stubborn}
    return {kind: makers[kind](folder) for kind in (*languages, "stubborn")}


# -- processes --------------------------------------------------------------------------------------


def marked(mark: str) -> dict[int, dict[str, str]]:
    """Every process with *mark* in its environment, and that environment."""
    every = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            given = dict(word.split("=", 1) for word in words if "=" in word)
            if given.get("CHAOS_MARK") == mark:
                every[int(path.parent.name)] = given
    return every


class Orchestrators(Fleet):
    """Two of them, started again whenever they die."""

    def __init__(self, folder: Path, *, dsn: str, lease: float, kinds: dict[str, list[str]]) -> None:
        super().__init__(folder, ["orchestrator"] * 2, dsn=dsn, options={})
        self.mark = uuid.uuid4().hex
        self._lease = lease
        self._kinds = json.dumps(kinds)
        (folder / "journals").mkdir()

    def executors(self) -> list[int]:
        """Those that run: the first of each group."""
        leaders = []
        for pid, given in marked(self.mark).items():
            with contextlib.suppress(ProcessLookupError):
                if "CHAOS_PARENT" in given and os.getpgid(pid) == pid:
                    leaders.append(pid)
        return sorted(leaders)

    def orphans(self) -> dict[int, str]:
        """Processes whose orchestrator has been gone for a while, and who that was."""
        gone = {life.who for life in self.lives if life.ended is not None and time.time() - life.ended > GONE}
        every = {pid: given["CHAOS_LIFE"] for pid, given in marked(self.mark).items()}
        return {pid: f"{who}: {_words(pid)}" for pid, who in every.items() if who in gone}

    def left_behind(self) -> dict[int, str]:
        """Whoever is still there once all orchestrators are gone."""
        until = time.monotonic() + GONE
        while (there := marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.1)
        return {pid: f"{given['CHAOS_LIFE']}: {_words(pid)}" for pid, given in there.items()}

    def stale(self) -> int:
        """How often an orchestrator was told that somebody else has its job by now."""
        return sum(
            (self.folder / f"{life.who}.err").read_text(errors="replace").count("job stale") for life in self.lives
        )

    def _launch(self, berth: Berth) -> None:
        who = f"{berth.flavour}-{berth.number}-{len(berth.lives)}"
        words = [sys.executable, "-m", "tests.chaos.job_orchestrator", "--dsn", f"{self._dsn}?application_name={who}"]
        words += ["--lease", str(self._lease), "--commands", self._kinds]
        environment = os.environ | {
            "CHAOS_MARK": self.mark,
            "CHAOS_LIFE": who,
            "CHAOS_JOURNALS": str(self.folder / "journals"),
        }
        with (self.folder / f"{who}.err").open("wb") as err:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=err, stderr=err, env=environment, cwd=ROOT
            )
        berth.lives.append(Life(who, process, time.time()))

    def _ended(self, life: Life) -> None:
        life.ended = life.ended or time.time()
        if life.how:
            return
        code = life.process.poll()
        if code == -signal.SIGKILL:
            life.how = "killed" if life.killed else "killed by a job"
        elif code == 1 and "ConnectionLost" in self.said(life).splitlines()[-1] and life.ended - life.began < 15.0:
            life.how = "no server at its start"
        else:
            life.how = "in good order" if code == 0 else f"by itself with {code}"


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return "?"


class Havoc(Torment):
    """Kills executors too, and stops one orchestrator at a time: the other one takes its jobs."""

    # Executors in four languages take a while to be there.
    ripe = 3.0

    def __init__(self, server: PrivatePostgres, fleet: Orchestrators, **rest: Any) -> None:
        super().__init__(server, fleet, **rest)
        self._orchestrators = fleet
        self._one = threading.Lock()

    def _acts(self) -> dict[str, Callable[[float], bool]]:
        return super()._acts() | {"executor": self._kill_executor}

    def _stop(self, luck: float) -> bool:
        with self._one:
            return super()._stop(luck)

    def _kill_executor(self, luck: float) -> bool:
        running = self._orchestrators.executors()
        if not running:
            return False
        began, victim = time.time(), running[int(luck * len(running))]
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self._done("executor", str(victim), began)
        return True


# -- the run ----------------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="ergon-chaos-"))
    # initdb runs as another user, who has to get there.
    folder.chmod(0o755)
    server = PrivatePostgres(folder / "server", settings={"log_min_messages": "fatal"})
    told: dict[str, Any] = {}
    try:
        server.start()
        told = run(server, folder, options)
    finally:
        server.kill()
        if told.get("ok") and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"journals, logs and database are kept in {folder}")
    print(json.dumps(told))
    return 0 if told["ok"] else 1


def run(server: PrivatePostgres, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    began, dice = time.monotonic(), random.Random(options.seed)
    dsn = server.create_database("chaos")
    upgrade(dsn)
    job_verdict.prepare(dsn)
    fleet = Orchestrators(folder, dsn=dsn, lease=options.lease, kinds=commands(folder, options.languages))
    sender = Sender(dsn, drawn(options.jobs, options.languages, dice, deadly=options.deadly))
    sockets = f"host={server.folder / 'sockets'} port={server.port} user=postgres dbname=chaos"
    havoc = Havoc(server, fleet, lease=options.lease, sockets=sockets, dice=dice)
    wanted = _wanted(options)
    fleet.start()
    try:
        sending = threading.Thread(target=sender.run, args=(options.seconds * 0.95,), daemon=True)
        tormenting = threading.Thread(target=havoc.run, args=(options.seconds, wanted), daemon=True)
        sending.start()
        tormenting.start()
        # Twice as long is too long: somebody waits for a victim or a server that never comes.
        while (sending.is_alive() or tormenting.is_alive()) and time.monotonic() - began < 2 * options.seconds + 60.0:
            _progress(began, dsn, sender, havoc, fleet)
            time.sleep(options.pause)
        ended = _emptied(began, dsn, sender, havoc, fleet, patience=options.patience)
        orphans = fleet.orphans()
        fleet.end()
        orphans |= fleet.left_behind()
    finally:
        fleet.kill()
        for pid in marked(fleet.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    verdict = judge(dsn, sender.orders, folder / "journals")
    for pid, whose in orphans.items():
        verdict.wrong("left behind", f"{pid} of {whose}")
    _judge_run(verdict, fleet, havoc, wanted, ended=ended, options=options)
    verdict.counts |= {"stale in the logs": fleet.stale(), "processes left behind": len(orphans)}
    return _told(verdict, fleet, havoc, sender, options, seconds=time.monotonic() - began)


def _wanted(options: argparse.Namespace) -> dict[str, int]:
    executors = round(options.kills * EXECUTORS)
    servers = max(1, (options.kills - executors) // 4)
    kills = {"executor": executors, "crash": servers, "kill": options.kills - executors - servers}
    return kills | {"stop": options.stops}


def _judge_run(
    verdict: Verdict,
    fleet: Orchestrators,
    havoc: Havoc,
    wanted: dict[str, int],
    *,
    ended: bool,
    options: argparse.Namespace,
) -> None:
    for kind, count in wanted.items():
        if havoc.counts[kind] < count:
            verdict.wrong("too little was done", f"{kind}: {havoc.counts[kind]}, not {count}")
    for error in havoc.errors:
        verdict.wrong("a fault could not be made", error)
    if options.stops >= MANY and not verdict.counts["stale outcomes refused"]:
        verdict.wrong("too little was done", "no stale outcome was ever told")
    if not ended:
        verdict.wrong("did not come to rest", f"within {options.patience} s after the last fault")
    for life in fleet.lives:
        if life.how.startswith("by itself") or life.how == "did not end":
            verdict.wrong("an orchestrator ended by itself", f"{life.who}: {life.how}: {fleet.said(life)[-300:]}")


def _emptied(began: float, dsn: str, *about: Any, patience: float) -> bool:
    """Wait until every job has its end and no message is left; False if that never happens."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if _progress(began, dsn, *about) == (0, 0):
            return True
        time.sleep(0.5)
    return False


def _progress(began: float, dsn: str, sender: Sender, havoc: Havoc, fleet: Orchestrators) -> tuple[int, int] | None:
    """Say how it stands; how many jobs and messages are left, None if the server cannot say."""
    try:
        jobs, messages = job_verdict.left(dsn)
    except psycopg.Error as error:
        say(f"{time.monotonic() - began:5.0f} s: {type(error).__name__}")
        return None
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(havoc.counts.items()))
    say(
        f"{time.monotonic() - began:5.0f} s: {sender.sent} sent, {sender.sent - jobs} ended, {messages} messages, "
        f"{len(fleet.lives)} orchestrators; {faults}"
    )
    return jobs, messages


def _told(
    verdict: Verdict, fleet: Orchestrators, havoc: Havoc, sender: Sender, options: argparse.Namespace, *, seconds: float
) -> dict[str, Any]:
    for what, every in verdict.findings.items():
        for words in every[:SHOWN]:
            say(f"WRONG {what}: {words}")
    lives: dict[str, int] = {}
    for life in fleet.lives:
        lives[life.how] = lives.get(life.how, 0) + 1
    return {
        "ok": not verdict.findings,
        "findings": {what: len(words) for what, words in sorted(verdict.findings.items())},
        "jobs": len(sender.orders),
        **verdict.counts,
        "faults": dict(sorted(havoc.counts.items())),
        "orchestrators": lives,
        "submitted twice": sender.unconfirmed,
        "seed": options.seed,
        "seconds": round(seconds, 1),
    }


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=34, help="of executors, orchestrators and the server")
    parser.add_argument("--stops", type=int, default=50, help="of an orchestrator, past its lease")
    parser.add_argument("--seconds", type=float, default=300.0, help="in which faults are made and jobs come in")
    parser.add_argument("--deadly", type=int, default=3, help="attempts of a job that kills its orchestrator")
    parser.add_argument("--lease", type=float, default=2.0, help="seconds")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds until all must have ended")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between two words of progress")
    parser.add_argument("--languages", nargs="+", default=LANGUAGES, choices=LANGUAGES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep journals, logs and database")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
