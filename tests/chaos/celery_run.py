"""Chaos with Celery: workers killed, their children eaten by a memory limit, both time limits, RabbitMQ restarted.

Every task must end in one result or in one dead letter with all thirteen fields: none lost, none with both, none
doubled. Beside it an Ergon consumer meets an open breaker, and buries nobody.

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
from collections import Counter
from pathlib import Path
from typing import Any

import amqp
import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework import ConsumerPolicy, MemoryConnector, Transaction, consumer
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.deadletter import FIELDS, QUEUE
from ergon_framework.providers.mapping import for_status
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.schema.migrate import upgrade
from tests.servers.postgres import PrivatePostgres, _children
from tests.servers.rabbitmq import PrivateRabbitMQ

ROOT = Path(__file__).parents[2]
#: How many of 100 tasks are of which kind, and how such a task must end.
KINDS = {"fine": 58, "flaky": 12, "down": 6, "refused": 6, "hang": 4, "soft": 4, "hard": 4, "greedy": 4, "poison": 2}
RESULT = {"fine", "flaky", "greedy"}
REASONS = {
    "down": "dependency_unavailable",
    "refused": "bad_request",
    "hang": "timeout",
    "soft": "timeout",
    "hard": "timeout",
    "poison": "internal_error",
}
#: Least numbers of faults.
BAR = {"worker killed": 5, "child killed": 6, "broker restarted": 1, "broker crashed": 1}
PATIENCE = 150.0
#: What a memory cgroup allows; a greedy task takes twice as much.
LIMIT = 32 * 1024 * 1024


class Worker:
    """A place for one worker process after the other."""

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
        """SIGKILL the parent; its children live on for as long as their calls take, unless they go too."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if children:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()

    def kill_child(self, dice: random.Random) -> bool:
        found = [] if self.process is None or self.process.poll() is not None else _children(self.process.pid)
        if not found:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(found), signal.SIGKILL)
        return True


class Run:
    def __init__(self, postgres: PrivatePostgres, broker: PrivateRabbitMQ, folder: Path, options: Any) -> None:
        self.dsn = postgres.create_database("chaos")
        upgrade(self.dsn)
        self.broker, self.folder, self.options = broker, folder, options
        self.dice = random.Random(options.seed)
        self.faults: Counter[str] = Counter()
        (folder / "eaten").mkdir()
        self.cgroup = _cgroup(folder)
        self.env = {
            **os.environ,
            "CHAOS_DSN": self.dsn,
            "CHAOS_FOLDER": str(folder),
            "CHAOS_BROKER": broker.url,
            **({} if self.cgroup is None else {"CHAOS_CGROUP": str(self.cgroup)}),
        }
        os.environ.update(self.env)
        kinds = [kind for kind, share in KINDS.items() for _ in range(max(1, share * options.tasks // 100))]
        self.dice.shuffle(kinds)
        self.tasks = {f"{kind}-{number}": kind for number, kind in enumerate(kinds)}
        self.workers = [Worker(self.env, folder, number) for number in range(2)]
        self.sent: list[str] = []
        self.resent = 0

    # -- what is done -------------------------------------------------------------------------------

    def go(self) -> bool:
        for worker in self.workers:
            worker.start()
        sending = threading.Thread(target=self._send, daemon=True)
        sending.start()
        self._torment()
        sending.join()
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            left = self._left()
            say(f"{left} left, {dict(self.faults)}")
            if not left:
                return True
            time.sleep(1.0)
        return False

    def _send(self) -> None:
        from tests.chaos import celery_app as tasks  # noqa: PLC0415 - it reads the environment

        pace = self.options.seconds * 0.9 / len(self.tasks)
        for name, kind in self.tasks.items():
            payload = {"kind": kind, "id": name, "takes": self.dice.random() * 0.4}
            task = {"poison": tasks.deadly, "soft": tasks.limited, "hard": tasks.limited}.get(kind, tasks.call)
            while True:
                try:
                    with tasks.app.connection_for_write() as line:
                        task.apply_async(
                            (payload,), task_id=name, tenant_id="acme", campaign_id="c", retry=False, connection=line
                        )
                    break
                except Exception:
                    # Nobody knows whether it arrived; sent again under its id it is the same task.
                    self.resent += 1
                    time.sleep(0.3)
            self.sent.append(name)
            time.sleep(pace)

    def _torment(self) -> None:
        """Faults, evenly over the seconds, in an order of their own."""
        plan = [name for name, count in BAR.items() for _ in range(count)]
        self.dice.shuffle(plan)
        # Not before somebody is at work.
        while len(self._ends()) < 3:
            time.sleep(0.2)
        for name in plan:
            time.sleep(self.options.seconds / len(plan) * self.dice.uniform(0.6, 1.1))
            # A worker takes seconds to start: one that is killed before it has done anything proves nothing.
            self._await_progress()
            worker = self.dice.choice(self.workers)
            if name == "worker killed":
                worker.kill(children=self.faults[name] % 2 == 0)
                worker.start()
            elif name == "child killed":
                while not self.dice.choice(self.workers).kill_child(self.dice):
                    time.sleep(0.2)
            else:
                self.broker.restart(crash=name == "broker crashed")
            self.faults[name] += 1
            say(f"{name}; {len(self._ends())} of {len(self.sent)} ended")

    def _await_progress(self) -> None:
        before, until = len(self._ends()), time.monotonic() + 20.0
        while len(self._ends()) < min(before + 4, len(self.tasks)) and time.monotonic() < until:
            time.sleep(0.1)

    # -- what came of it ------------------------------------------------------------------------------

    def _ends(self) -> list[list[Any]]:
        path = self.folder / "journal"
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def _left(self) -> int:
        results, dead = self._found()
        # Reported as well as written down.
        over = {
            name for name, status in results.items() if status == "SUCCESS" or (status == "FAILURE" and name in dead)
        }
        return len(self.tasks) - len(over)

    def _found(self) -> tuple[dict[str, str], Counter[str]]:
        with psycopg.connect(self.dsn) as line:
            try:
                results = dict(line.execute("select task_id, status from celery_taskmeta").fetchall())
            except psycopg.errors.UndefinedTable:
                results = {}
                line.rollback()
            dead = line.execute("select task_id from ergon.provider_dead_letters").fetchall()
        return results, Counter(name for (name,) in dead)

    def judge(self, *, ended: bool) -> dict[str, Any]:
        findings: Counter[str] = Counter()

        def wrong(what: str, name: str) -> None:
            findings[what] += 1
            say(f"WRONG {what}: {name}")

        if not ended:
            wrong("did not come to rest", f"{self._left()} left")
        results, dead = self._found()
        succeeded = {name for name, status in results.items() if status == "SUCCESS"}
        for name, kind in self.tasks.items():
            if name not in succeeded and not dead[name]:
                wrong("lost", name)
            if name in succeeded and dead[name]:
                wrong("both", name)
            if dead[name] > 1:
                wrong("doubled", name)
            if (kind in RESULT) != (name in succeeded):
                wrong("ended otherwise than it had to", f"{name}: {results.get(name)}")
        unknown = (set(dead) | set(results)) - set(self.tasks)
        for name in unknown:
            wrong("of nobody", name)
        reasons = self._letters(wrong)
        messages = self._published(wrong, set(dead))
        told = Counter(name for name, outcome, *_ in self._ends() if outcome in {"success", "dead_letter"})
        for name, bar in BAR.items():
            if self.faults[name] < bar:
                wrong("too little was done", name)
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
            "told again": sum(count - 1 for count in told.values() if count > 1),
            "sent again": self.resent,
            "faults": dict(self.faults),
            "children by memory": "cgroup" if self.cgroup is not None else "SIGKILL; no memory cgroup can be made here",
        }

    def _letters(self, wrong: Any) -> Counter[str]:
        """All thirteen fields of each, and the reason that it had to die of."""
        reasons: Counter[str] = Counter()
        with psycopg.connect(self.dsn) as line:
            rows = line.execute(
                f"select task_id, published_at, {', '.join(FIELDS)} from ergon.provider_dead_letters"
            ).fetchall()
        for name, published, *fields in rows:
            row = dict(zip(FIELDS, fields, strict=True))
            reasons[row["reason_code"]] += 1
            if any(value is None or value == "" for value in row.values()):
                wrong("a field is missing", f"{name}: {row}")
            if row["reason_code"] != REASONS.get(self.tasks.get(name, ""), row["reason_code"]):
                wrong("died of something else", f"{name}: {row}")
            if published is None:
                wrong("never published", name)
        return reasons

    def _published(self, wrong: Any, dead: set[str]) -> int:
        """How many messages there are; every dead letter has at least one, with thirteen fields."""
        seen: Counter[str] = Counter()
        with amqp.Connection(f"127.0.0.1:{self.broker.port}") as line, line.channel() as channel:
            while (got := channel.basic_get(QUEUE, no_ack=True)) is not None:
                seen[got.properties["message_id"]] += 1
                if set(json.loads(got.body)) != set(FIELDS):
                    wrong("a field is missing", "in a message")
        for name in dead - set(seen):
            wrong("no message", name)
        for name in set(seen) - dead:
            wrong("a message of nobody", name)
        return sum(seen.values())


def open_breaker() -> dict[str, Any]:
    """An Ergon consumer whose provider is down for a while: how many were deferred, paid and buried."""
    began = time.monotonic()
    counts: Counter[str] = Counter()

    class Payments(ProviderBase):
        provider_name, capability = "payments", "charging"
        policy = ProviderPolicy(
            retry=RetryPolicy(max_attempts=2, base_delay_seconds=0.01),
            breaker=BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.3),
        )

        def _execute_impl(self, **_: Any) -> dict[str, Any]:
            if time.monotonic() - began < 2.0:
                raise for_status(503)
            return {"paid": True}

    payments, queue = Payments(books=MemoryBooks()), MemoryConnector("orders")
    queue.dispatch([Transaction(f"order-{number}", {}, tenant="acme") for number in range(50)])
    retry = {"max_attempts": 3, "backoff": 0.01}
    policy = ConsumerPolicy.load({"loop": {"max_deliveries": 2}, "steps": {"process": {"retry": retry}}})

    @consumer(queue, policy=policy)
    def charge(order: dict[str, Any]) -> None:
        payments.call("charge", order)

    while counts["succeeded"] < 50 and time.monotonic() - began < 30.0:
        counts.update(charge.consume_transactions().counts)
        time.sleep(0.05)
    return {
        "transactions": 50,
        "deferred": counts["deferred"],
        "succeeded": counts["succeeded"],
        "dead letters": len(queue.dead_letters),
    }


def _cgroup(folder: Path) -> Path | None:
    """A memory cgroup of version 1 or 2 whose members are killed at LIMIT; None where none can be made."""
    from_v1 = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    from_v2 = Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"
    for above, limit, swap in (from_v1, from_v2):
        place = above / folder.name
        try:
            place.mkdir()
            (place / limit).write_text(str(LIMIT), encoding="ascii")
            with contextlib.suppress(OSError):
                (place / swap).write_text(str(LIMIT if "memsw" in swap else 0), encoding="ascii")
        except OSError:
            with contextlib.suppress(OSError):
                place.rmdir()
        else:
            return place
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=240)
    parser.add_argument("--seconds", type=float, default=60.0, help="in which faults are made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep logs and database")
    options = parser.parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="ergon-chaos-celery-"))
    folder.chmod(0o755)
    postgres, broker = PrivatePostgres(folder / "postgres"), PrivateRabbitMQ(folder / "rabbitmq")
    told: dict[str, Any] = {}
    run: Run | None = None
    try:
        postgres.start()
        broker.start()
        say(f"servers run after {time.monotonic() - began:.0f} s")
        run = Run(postgres, broker, folder, options)
        ended = run.go()
        time.sleep(3.0)  # the last dead letters are published
        told = run.judge(ended=ended)
    finally:
        if run is not None:
            for worker in run.workers:
                worker.kill()
        broker.kill()
        postgres.kill()
        if run is not None and run.cgroup is not None:
            with contextlib.suppress(OSError):
                run.cgroup.rmdir()
    told["open breaker in a consumer"] = beside = open_breaker()
    whole = {
        "deferred": beside["deferred"] > 0,
        "succeeded": beside["succeeded"] == 50,
        "dead": not beside["dead letters"],
    }
    told["ok"] = not told["findings"] and all(whole.values())
    if told["ok"] and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(f"logs and database are kept in {folder}")
    print(
        json.dumps({"ok": told.pop("ok"), **told, "seed": options.seed, "seconds": round(time.monotonic() - began, 1)})
    )
    return 0 if not told["findings"] and all(whole.values()) else 1


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
