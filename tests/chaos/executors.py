"""Chaos with jobs: executors in several languages, two orchestrators and PostgreSQL killed, one of them stopped.

Jobs echo, fail, ask for a retry, hang, crash their executor, print, and some kill their orchestrator every time. Some
executors ignore both the end of their input and SIGTERM, and have children. Handlers write their start and end,
synced, outside the database; triggers record every result that is written. At the end all records are compared.

The last line is JSON. The exit code is 1 if a check failed or too few faults were injected.
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

from ergon_framework.database.migrate import upgrade
from tests.chaos import job_verdict
from tests.chaos.faults import FaultInjector
from tests.chaos.fleet import Fleet, ProcessRecord, ProcessSlot
from tests.chaos.job_mix import JobSender, draw_jobs
from tests.chaos.job_verdict import JobVerdict, evaluate
from tests.servers.postgres import PrivatePostgres

ROOT = Path(__file__).parents[2]
EXECUTOR_FOLDER = Path(__file__).with_name("job_executors")
EXAMPLES = ROOT / "examples" / "executors"
LANGUAGES = ("python", "node", "go")
#: The executors' share of all kills; one in four of the others is the server's.
EXECUTOR_KILL_SHARE = 0.5
#: Seconds within which processes must be gone: the reaper's time, and the system's when it is busy.
EXIT_TIMEOUT_SECONDS = 10.0
#: Number of stops after which at least one outcome must have been reported too late.
MIN_STOPS_FOR_STALE_OUTCOME = 20
MAX_SHOWN_FINDINGS = 20


# -- executors --------------------------------------------------------------------------------------


def build_python_command(_: Path) -> list[str]:
    program = "import sys; sys.path.insert(0, sys.argv[1]); from ergon_framework.cli.main import main; "
    program += "sys.argv[1:] = ['executor', 'run', '--handlers', 'handlers:registry']; main()"
    return [sys.executable, "-c", program, str(EXECUTOR_FOLDER)]


def build_node_command(folder: Path) -> list[str]:
    program = find_program("node")
    script = folder / "executor.mjs"
    script.write_bytes((EXAMPLES / "node" / "executor.mjs").read_bytes() + (EXECUTOR_FOLDER / "chaos.mjs").read_bytes())
    return [program, str(script)]


def build_go_command(folder: Path) -> list[str]:
    program, source = find_program("go"), folder / "go"
    shutil.copytree(EXAMPLES / "go", source)
    shutil.copy(EXECUTOR_FOLDER / "chaos.go", source)
    cache = {"GOCACHE": str(folder / "cache"), "GOFLAGS": "-mod=mod", "GOPROXY": "off"}
    subprocess.run([program, "build", "-o", folder / "executor", "."], cwd=source, check=True, env=os.environ | cache)
    return [str(folder / "executor")]


def build_stubborn_command(_: Path) -> list[str]:
    return [sys.executable, "-S", str(EXECUTOR_FOLDER / "stubborn.py")]


def find_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"{name} is missing; run tools/install-languages")
    return path


def build_commands(folder: Path, languages: Sequence[str]) -> dict[str, list[str]]:
    builders: dict[str, Callable[[Path], list[str]]] = {
        "python": build_python_command,
        "node": build_node_command,
        "go": build_go_command,
        "stubborn": build_stubborn_command,
    }
    return {kind: builders[kind](folder) for kind in (*languages, "stubborn")}


# -- processes --------------------------------------------------------------------------------------


def list_marked_processes(mark: str) -> dict[int, dict[str, str]]:
    """Return every process with *mark* in its environment, and that environment."""
    environments = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            entries = path.read_bytes().decode(errors="replace").split("\0")
            environment = dict(word.split("=", 1) for word in entries if "=" in word)
            if environment.get("CHAOS_MARK") == mark:
                environments[int(path.parent.name)] = environment
    return environments


class Orchestrators(Fleet):
    """Two orchestrators that are restarted whenever they exit."""

    def __init__(self, folder: Path, *, dsn: str, lease: float, commands: dict[str, list[str]]) -> None:
        super().__init__(folder, ["orchestrator"] * 2, dsn=dsn, options={})
        self.mark = uuid.uuid4().hex
        self._lease = lease
        self._commands = json.dumps(commands)
        (folder / "journals").mkdir()

    def list_executors(self) -> list[int]:
        """Return the running executors: the first process of each group."""
        leaders = []
        for pid, environment in list_marked_processes(self.mark).items():
            with contextlib.suppress(ProcessLookupError):
                if "CHAOS_PARENT" in environment and os.getpgid(pid) == pid:
                    leaders.append(pid)
        return sorted(leaders)

    def find_orphans(self) -> dict[int, str]:
        """Return processes whose orchestrator has been gone for a while, with the orchestrator's name."""
        exited = {
            record.who
            for record in self.records
            if record.ended_at is not None and time.time() - record.ended_at > EXIT_TIMEOUT_SECONDS
        }
        owners = {pid: environment["CHAOS_LIFE"] for pid, environment in list_marked_processes(self.mark).items()}
        return {pid: f"{owner}: {_read_command_line(pid)}" for pid, owner in owners.items() if owner in exited}

    def list_leftovers(self) -> dict[int, str]:
        """Return the processes that remain once all orchestrators are gone."""
        deadline = time.monotonic() + EXIT_TIMEOUT_SECONDS
        while (processes := list_marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return {
            pid: f"{environment['CHAOS_LIFE']}: {_read_command_line(pid)}" for pid, environment in processes.items()
        }

    def count_stale(self) -> int:
        """Count how often an orchestrator learned that another one owns its job by now."""
        return sum(
            (self.folder / f"{record.who}.err").read_text(errors="replace").count("job stale")
            for record in self.records
        )

    def _launch(self, slot: ProcessSlot) -> None:
        who = f"{slot.flavour}-{slot.number}-{len(slot.records)}"
        command = [sys.executable, "-m", "tests.chaos.job_orchestrator", "--dsn", f"{self._dsn}?application_name={who}"]
        command += ["--lease", str(self._lease), "--commands", self._commands]
        environment = os.environ | {
            "CHAOS_MARK": self.mark,
            "CHAOS_LIFE": who,
            "CHAOS_JOURNALS": str(self.folder / "journals"),
        }
        with (self.folder / f"{who}.err").open("wb") as stderr_file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stderr_file, stderr=stderr_file, env=environment, cwd=ROOT
            )
        slot.records.append(ProcessRecord(who, process, time.time()))

    def _classify_exit(self, record: ProcessRecord) -> None:
        record.ended_at = record.ended_at or time.time()
        if record.ending:
            return
        exit_code = record.process.poll()
        if exit_code == -signal.SIGKILL:
            record.ending = "killed" if record.was_killed else "killed by a job"
        elif (
            exit_code == 1
            and "ConnectionLostError" in self.read_stderr(record).splitlines()[-1]
            and record.ended_at - record.started_at < 15.0
        ):
            record.ending = "no server at its start"
        else:
            record.ending = "in good order" if exit_code == 0 else f"by itself with {exit_code}"


def _read_command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return "?"


class ExecutorFaultInjector(FaultInjector):
    """Kills executors too, and stops one orchestrator at a time: the other one takes over its jobs."""

    # Executors in four languages take a while to start.
    min_age_seconds = 3.0

    def __init__(self, server: PrivatePostgres, fleet: Orchestrators, **options: Any) -> None:
        super().__init__(server, fleet, **options)
        self._orchestrators = fleet
        self._stop_lock = threading.Lock()

    def _list_actions(self) -> dict[str, Callable[[float], bool]]:
        return super()._list_actions() | {"executor": self._kill_executor}

    def _stop(self, draw: float) -> bool:
        with self._stop_lock:
            return super()._stop(draw)

    def _kill_executor(self, draw: float) -> bool:
        running = self._orchestrators.list_executors()
        if not running:
            return False
        started_at, victim = time.time(), running[int(draw * len(running))]
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self._record_fault("executor", str(victim), started_at)
        return True


# -- the run ----------------------------------------------------------------------------------------


def main() -> int:
    options = _parse_options()
    folder = Path(tempfile.mkdtemp(prefix="ergon-chaos-"))
    # initdb runs as another user, which needs access.
    folder.chmod(0o755)
    server = PrivatePostgres(folder / "server", settings={"log_min_messages": "fatal"})
    summary: dict[str, Any] = {}
    try:
        server.start()
        summary = run(server, folder, options)
    finally:
        server.kill()
        if summary.get("ok") and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            report(f"journals, logs and database are kept in {folder}")
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def run(server: PrivatePostgres, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    started_at, rng = time.monotonic(), random.Random(options.seed)
    dsn = server.create_database("chaos")
    upgrade(dsn)
    job_verdict.create_ledger(dsn)
    fleet = Orchestrators(folder, dsn=dsn, lease=options.lease, commands=build_commands(folder, options.languages))
    sender = JobSender(dsn, draw_jobs(options.jobs, options.languages, rng, deadly=options.deadly))
    sockets = f"host={server.folder / 'sockets'} port={server.port} user=postgres dbname=chaos"
    injector = ExecutorFaultInjector(server, fleet, lease=options.lease, sockets=sockets, rng=rng)
    fault_counts = _plan_faults(options)
    fleet.start()
    try:
        send_thread = threading.Thread(target=sender.run, args=(options.seconds * 0.95,), daemon=True)
        fault_thread = threading.Thread(target=injector.run, args=(options.seconds, fault_counts), daemon=True)
        send_thread.start()
        fault_thread.start()
        # Twice the time is too long: a fault still waits for a victim or a server that never appears.
        while (
            send_thread.is_alive() or fault_thread.is_alive()
        ) and time.monotonic() - started_at < 2 * options.seconds + 60.0:
            _print_progress(started_at, dsn, sender, injector, fleet)
            time.sleep(options.pause)
        is_empty = _wait_until_empty(started_at, dsn, sender, injector, fleet, timeout=options.patience)
        leftovers = fleet.find_orphans()
        fleet.end()
        leftovers |= fleet.list_leftovers()
    finally:
        fleet.kill()
        for pid in list_marked_processes(fleet.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    verdict = evaluate(dsn, sender.orders, folder / "journals")
    for pid, owner in leftovers.items():
        verdict.add_finding("left behind", f"{pid} of {owner}")
    _check_run(verdict, fleet, injector, fault_counts, is_empty=is_empty, options=options)
    verdict.counts |= {"stale in the logs": fleet.count_stale(), "processes left behind": len(leftovers)}
    return _summarize(verdict, fleet, injector, sender, options, seconds=time.monotonic() - started_at)


def _plan_faults(options: argparse.Namespace) -> dict[str, int]:
    executors = round(options.kills * EXECUTOR_KILL_SHARE)
    servers = max(1, (options.kills - executors) // 4)
    kills = {"executor": executors, "crash": servers, "kill": options.kills - executors - servers}
    return kills | {"stop": options.stops}


def _check_run(
    verdict: JobVerdict,
    fleet: Orchestrators,
    injector: ExecutorFaultInjector,
    fault_counts: dict[str, int],
    *,
    is_empty: bool,
    options: argparse.Namespace,
) -> None:
    for kind, count in fault_counts.items():
        if injector.counts[kind] < count:
            verdict.add_finding("too little was done", f"{kind}: {injector.counts[kind]}, not {count}")
    for error in injector.errors:
        verdict.add_finding("a fault could not be made", error)
    if options.stops >= MIN_STOPS_FOR_STALE_OUTCOME and not verdict.counts["stale outcomes refused"]:
        verdict.add_finding("too little was done", "no stale outcome was ever told")
    if not is_empty:
        verdict.add_finding("did not come to rest", f"within {options.patience} s after the last fault")
    for record in fleet.records:
        if record.ending.startswith("by itself") or record.ending == "did not end":
            verdict.add_finding(
                "an orchestrator ended by itself", f"{record.who}: {record.ending}: {fleet.read_stderr(record)[-300:]}"
            )


def _wait_until_empty(started_at: float, dsn: str, *context: Any, timeout: float) -> bool:
    """Wait until every job has ended and no message is left; False on timeout."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if _print_progress(started_at, dsn, *context) == (0, 0):
            return True
        time.sleep(0.5)
    return False


def _print_progress(
    started_at: float, dsn: str, sender: JobSender, injector: ExecutorFaultInjector, fleet: Orchestrators
) -> tuple[int, int] | None:
    """Print the progress; return how many jobs and messages are left, None if the server is unavailable."""
    try:
        jobs, messages = job_verdict.count_unfinished(dsn)
    except psycopg.Error as error:
        report(f"{time.monotonic() - started_at:5.0f} s: {type(error).__name__}")
        return None
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(injector.counts.items()))
    report(
        f"{time.monotonic() - started_at:5.0f} s: {sender.sent} sent, {sender.sent - jobs} ended, {messages} messages, "
        f"{len(fleet.records)} orchestrators; {faults}"
    )
    return jobs, messages


def _summarize(
    verdict: JobVerdict,
    fleet: Orchestrators,
    injector: ExecutorFaultInjector,
    sender: JobSender,
    options: argparse.Namespace,
    *,
    seconds: float,
) -> dict[str, Any]:
    for kind, all_details in verdict.findings.items():
        for details in all_details[:MAX_SHOWN_FINDINGS]:
            report(f"WRONG {kind}: {details}")
    exits: dict[str, int] = {}
    for record in fleet.records:
        exits[record.ending] = exits.get(record.ending, 0) + 1
    return {
        "ok": not verdict.findings,
        "findings": {kind: len(details) for kind, details in sorted(verdict.findings.items())},
        "jobs": len(sender.orders),
        **verdict.counts,
        "faults": dict(sorted(injector.counts.items())),
        "orchestrators": exits,
        "submitted twice": sender.submitted_twice,
        "seed": options.seed,
        "seconds": round(seconds, 1),
    }


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
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
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
