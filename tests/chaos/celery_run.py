"""Chaos with Celery: workers killed, their children killed by a memory limit, both time limits, RabbitMQ restarted.

Every task must end in one result or in one dead letter with all thirteen fields: none lost, none with both, none
doubled. An Ergon consumer meets an open breaker meanwhile, and dead-letters nothing.

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
from collections import Counter
from pathlib import Path
from typing import Any

import amqp
import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework import ConsumerPolicy, MemoryConnector, Transaction, consumer
from ergon_framework.database.migrate import upgrade
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.dead_letter import DEAD_LETTER_QUEUE, MESSAGE_FIELDS
from ergon_framework.providers.error_mapping import error_for_status
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy
from tests.servers.postgres import PrivatePostgres, _list_children
from tests.servers.rabbitmq import PrivateRabbitMQ

ROOT = Path(__file__).parents[2]
#: The number of each kind among 100 tasks, which also decides the expected result.
KIND_SHARES = {
    "fine": 58,
    "flaky": 12,
    "down": 6,
    "refused": 6,
    "hang": 4,
    "soft": 4,
    "hard": 4,
    "greedy": 4,
    "poison": 2,
}
SUCCESSFUL_KINDS = {"fine", "flaky", "greedy"}
REASONS = {
    "down": "dependency_unavailable",
    "refused": "bad_request",
    "hang": "timeout",
    "soft": "timeout",
    "hard": "timeout",
    "poison": "internal_error",
}
#: Minimum numbers of faults.
MIN_FAULTS = {"worker killed": 5, "child killed": 6, "broker restarted": 1, "broker crashed": 1}
REST_TIMEOUT_SECONDS = 150.0
#: The limit of the memory cgroup; a greedy task allocates twice as much.
LIMIT = 32 * 1024 * 1024


class WorkerSlot:
    """A slot for one worker process after the other."""

    def __init__(self, env: dict[str, str], folder: Path, number: int) -> None:
        self._env = env
        self._log = folder / f"worker-{number}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "celery", "-A", "tests.chaos.celery_app", "worker", "-c", "2", "-l", "WARNING"]
        command += ["--without-gossip", "--without-mingle"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self._env, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, *, children: bool = True) -> None:
        """SIGKILL the parent; unless *children* is set, its children live on until their calls end."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if children:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()

    def kill_child(self, rng: random.Random) -> bool:
        child_pids = [] if self.process is None or self.process.poll() is not None else _list_children(self.process.pid)
        if not child_pids:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(child_pids), signal.SIGKILL)
        return True


class CeleryRun:
    def __init__(self, postgres: PrivatePostgres, broker: PrivateRabbitMQ, folder: Path, options: Any) -> None:
        self.dsn = postgres.create_database("chaos")
        upgrade(self.dsn)
        self.broker, self.folder, self.options = broker, folder, options
        self.rng = random.Random(options.seed)
        self.faults: Counter[str] = Counter()
        (folder / "eaten").mkdir()
        self.cgroup = _create_cgroup(folder)
        self.env = {
            **os.environ,
            "CHAOS_DSN": self.dsn,
            "CHAOS_FOLDER": str(folder),
            "CHAOS_BROKER": broker.url,
            **({} if self.cgroup is None else {"CHAOS_CGROUP": str(self.cgroup)}),
        }
        os.environ.update(self.env)
        kinds = [kind for kind, share in KIND_SHARES.items() for _ in range(max(1, share * options.tasks // 100))]
        self.rng.shuffle(kinds)
        self.tasks = {f"{kind}-{number}": kind for number, kind in enumerate(kinds)}
        self.workers = [WorkerSlot(self.env, folder, number) for number in range(2)]
        self.sent: list[str] = []
        self.resent = 0

    # -- actions ------------------------------------------------------------------------------------

    def run(self) -> bool:
        for worker in self.workers:
            worker.start()
        send_thread = threading.Thread(target=self._send, daemon=True)
        send_thread.start()
        self._inject_faults()
        send_thread.join()
        deadline = time.monotonic() + REST_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            unfinished = self._count_unfinished()
            report(f"{unfinished} left, {dict(self.faults)}")
            if not unfinished:
                return True
            time.sleep(1.0)
        return False

    def _send(self) -> None:
        from tests.chaos import celery_app as tasks  # noqa: PLC0415 - it reads the environment

        pause_seconds = self.options.seconds * 0.9 / len(self.tasks)
        for name, kind in self.tasks.items():
            payload = {"kind": kind, "id": name, "takes": self.rng.random() * 0.4}
            task = {"poison": tasks.deadly, "soft": tasks.limited, "hard": tasks.limited}.get(kind, tasks.call)
            while True:
                try:
                    with tasks.app.connection_for_write() as connection:
                        task.apply_async(
                            (payload,),
                            task_id=name,
                            tenant_id="acme",
                            campaign_id="c",
                            retry=False,
                            connection=connection,
                        )
                    break
                except Exception:
                    # It is unknown whether the message arrived; sent again under its id it is the same task.
                    self.resent += 1
                    time.sleep(0.3)
            self.sent.append(name)
            time.sleep(pause_seconds)

    def _inject_faults(self) -> None:
        """Inject faults evenly over the seconds, in random order."""
        plan = [name for name, count in MIN_FAULTS.items() for _ in range(count)]
        self.rng.shuffle(plan)
        # Wait until a worker has started to work.
        while len(self._read_ends()) < 3:
            time.sleep(0.2)
        for name in plan:
            time.sleep(self.options.seconds / len(plan) * self.rng.uniform(0.6, 1.1))
            # A worker takes seconds to start, and killing it before it has done anything proves nothing.
            self._await_progress()
            worker = self.rng.choice(self.workers)
            if name == "worker killed":
                worker.kill(children=self.faults[name] % 2 == 0)
                worker.start()
            elif name == "child killed":
                while not self.rng.choice(self.workers).kill_child(self.rng):
                    time.sleep(0.2)
            else:
                self.broker.restart(crash=name == "broker crashed")
            self.faults[name] += 1
            report(f"{name}; {len(self._read_ends())} of {len(self.sent)} ended")

    def _await_progress(self) -> None:
        before, deadline = len(self._read_ends()), time.monotonic() + 20.0
        while len(self._read_ends()) < min(before + 4, len(self.tasks)) and time.monotonic() < deadline:
            time.sleep(0.1)

    # -- results --------------------------------------------------------------------------------------

    def _read_ends(self) -> list[list[Any]]:
        path = self.folder / "journal"
        return [json.loads(connection) for connection in path.read_bytes().splitlines()] if path.exists() else []

    def _count_unfinished(self) -> int:
        results, dead = self._read_outcomes()
        # Both reported and written.
        finished = {
            name for name, status in results.items() if status == "SUCCESS" or (status == "FAILURE" and name in dead)
        }
        return len(self.tasks) - len(finished)

    def _read_outcomes(self) -> tuple[dict[str, str], Counter[str]]:
        with psycopg.connect(self.dsn) as connection:
            try:
                results = dict(connection.execute("select task_id, status from celery_taskmeta").fetchall())
            except psycopg.errors.UndefinedTable:
                results = {}
                connection.rollback()
            dead = connection.execute("select task_id from ergon.provider_dead_letters").fetchall()
        return results, Counter(name for (name,) in dead)

    def evaluate(self, *, is_empty: bool) -> dict[str, Any]:
        findings: Counter[str] = Counter()

        def add_finding(problem: str, name: str) -> None:
            findings[problem] += 1
            report(f"WRONG {problem}: {name}")

        if not is_empty:
            add_finding("did not come to rest", f"{self._count_unfinished()} left")
        results, dead = self._read_outcomes()
        succeeded = {name for name, status in results.items() if status == "SUCCESS"}
        for name, kind in self.tasks.items():
            if name not in succeeded and not dead[name]:
                add_finding("lost", name)
            if name in succeeded and dead[name]:
                add_finding("both", name)
            if dead[name] > 1:
                add_finding("doubled", name)
            if (kind in SUCCESSFUL_KINDS) != (name in succeeded):
                add_finding("ended otherwise than it had to", f"{name}: {results.get(name)}")
        unknown = (set(dead) | set(results)) - set(self.tasks)
        for name in unknown:
            add_finding("without an order", name)
        reasons = self._check_dead_letters(add_finding)
        messages = self._check_messages(add_finding, set(dead))
        reports = Counter(name for name, outcome, *_ in self._read_ends() if outcome in {"success", "dead_letter"})
        for name, bar in MIN_FAULTS.items():
            if self.faults[name] < bar:
                add_finding("too little was done", name)
        return {
            "findings": dict(findings),
            "tasks": len(self.tasks),
            "results": len(succeeded),
            "dead letters": sum(dead.values()),
            "reasons": dict(reasons),
            "lost": findings["lost"],
            "with both": findings["both"],
            "doubled": findings["doubled"],
            "messages": messages,
            "told again": sum(count - 1 for count in reports.values() if count > 1),
            "sent again": self.resent,
            "faults": dict(self.faults),
            "children by memory": "cgroup" if self.cgroup is not None else "SIGKILL; no memory cgroup can be made here",
        }

    def _check_dead_letters(self, add_finding: Any) -> Counter[str]:
        """Check all thirteen fields and the expected reason of each dead letter."""
        reasons: Counter[str] = Counter()
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute(
                f"select task_id, published_at, {', '.join(MESSAGE_FIELDS)} from ergon.provider_dead_letters"
            ).fetchall()
        for name, published_at, *fields in rows:
            row = dict(zip(MESSAGE_FIELDS, fields, strict=True))
            reasons[row["reason_code"]] += 1
            if any(value is None or value == "" for value in row.values()):
                add_finding("a field is missing", f"{name}: {row}")
            if row["reason_code"] != REASONS.get(self.tasks.get(name, ""), row["reason_code"]):
                add_finding("died of something else", f"{name}: {row}")
            if published_at is None:
                add_finding("never published", name)
        return reasons

    def _check_messages(self, add_finding: Any, dead: set[str]) -> int:
        """Count the messages; every dead letter has at least one, with thirteen fields."""
        message_counts: Counter[str] = Counter()
        with amqp.Connection(f"127.0.0.1:{self.broker.port}") as connection, connection.channel() as channel:
            while (message := channel.basic_get(DEAD_LETTER_QUEUE, no_ack=True)) is not None:
                message_counts[message.properties["message_id"]] += 1
                if set(json.loads(message.body)) != set(MESSAGE_FIELDS):
                    add_finding("a field is missing", "in a message")
        for name in dead - set(message_counts):
            add_finding("no message", name)
        for name in set(message_counts) - dead:
            add_finding("a message without an order", name)
        return sum(message_counts.values())


def run_open_breaker() -> dict[str, Any]:
    """Run an Ergon consumer whose provider is down for a while; count deferred, paid and dead-lettered transactions."""
    started_at = time.monotonic()
    counts: Counter[str] = Counter()

    class Payments(ProviderBase):
        provider_name, capability = "payments", "charging"
        policy = ProviderPolicy(
            retry=RetryPolicy(max_attempts=2, base_delay_seconds=0.01),
            breaker=BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.3),
        )

        def _execute_impl(self, **_: Any) -> dict[str, Any]:
            if time.monotonic() - started_at < 2.0:
                raise error_for_status(503)
            return {"paid": True}

    payments, queue = Payments(state_store=MemoryProviderState()), MemoryConnector("orders")
    queue.dispatch([Transaction({}, id=f"order-{number}", tenant="acme") for number in range(50)])
    retry = {"max_attempts": 3, "backoff": 0.01}
    policy = ConsumerPolicy.load({"loop": {"max_deliveries": 2}, "steps": {"process": {"retry": retry}}})

    @consumer(queue, policy=policy)
    def charge(order: dict[str, Any]) -> None:
        payments.call("charge", order)

    while counts["succeeded"] < 50 and time.monotonic() - started_at < 30.0:
        counts.update(charge.consume_transactions().counts)
        time.sleep(0.05)
    return {
        "transactions": 50,
        "deferred": counts["deferred"],
        "succeeded": counts["succeeded"],
        "dead letters": len(queue.dead_letters),
    }


def _create_cgroup(folder: Path) -> Path | None:
    """Create a memory cgroup of version 1 or 2 whose members are killed at LIMIT; None if that is impossible."""
    version_1 = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    version_2 = Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"
    for parent, limit, swap in (version_1, version_2):
        cgroup = parent / folder.name
        try:
            cgroup.mkdir()
            (cgroup / limit).write_text(str(LIMIT), encoding="ascii")
            with contextlib.suppress(OSError):
                (cgroup / swap).write_text(str(LIMIT if "memsw" in swap else 0), encoding="ascii")
        except OSError:
            with contextlib.suppress(OSError):
                cgroup.rmdir()
        else:
            return cgroup
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=240)
    parser.add_argument("--seconds", type=float, default=60.0, help="in which faults are made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep logs and database")
    options = parser.parse_args()
    started_at = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="ergon-chaos-celery-"))
    folder.chmod(0o755)
    postgres, broker = PrivatePostgres(folder / "postgres"), PrivateRabbitMQ(folder / "rabbitmq")
    summary: dict[str, Any] = {}
    run: CeleryRun | None = None
    try:
        postgres.start()
        broker.start()
        report(f"servers run after {time.monotonic() - started_at:.0f} s")
        run = CeleryRun(postgres, broker, folder, options)
        is_empty = run.run()
        time.sleep(3.0)  # the last dead letters are being published
        summary = run.evaluate(is_empty=is_empty)
    finally:
        if run is not None:
            for worker in run.workers:
                worker.kill()
        broker.kill()
        postgres.kill()
        if run is not None and run.cgroup is not None:
            with contextlib.suppress(OSError):
                run.cgroup.rmdir()
    summary["open breaker in a consumer"] = consumer_result = run_open_breaker()
    checks = {
        "deferred": consumer_result["deferred"] > 0,
        "succeeded": consumer_result["succeeded"] == 50,
        "dead": not consumer_result["dead letters"],
    }
    summary["ok"] = not summary["findings"] and all(checks.values())
    if summary["ok"] and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        report(f"logs and database are kept in {folder}")
    print(
        json.dumps(
            {
                "ok": summary.pop("ok"),
                **summary,
                "seed": options.seed,
                "seconds": round(time.monotonic() - started_at, 1),
            }
        )
    )
    return 0 if not summary["findings"] and all(checks.values()) else 1


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
