"""Attack both ends of the executor protocol through real pipes: executor_process.py --seconds 600.

A pool of executors runs jobs in programs that attack it, and a Python executor reads requests that attack it. The run
fails if a job has no outcome in time, or the outcome of another executor; if the loop of the pool stands still, memory
grows, anything is logged as an error, a process survives, or the executor stops answering good requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

from ergon_framework.errors import ErgonError
from ergon_framework.executor.lines import MAX_LINE
from ergon_framework.executor.pool import ExecutorPool, PoolPolicy
from ergon_framework.executor.process import Command
from ergon_framework.executor.protocol import ExecutionOutcome, read_outcome
from tests.fuzz.grammar import REQUEST, mutated, seeds
from tests.log_events import event_of

ROOT = Path(__file__).parents[2]
TIMEOUT = 1.0
#: Seconds beyond its timeout within which a job has its outcome. Reading a line of 5 MB takes 1 s of processor time.
LATE = 20.0
#: Seconds for which the loop may stand still, and MiB that a process may gain.
LAG = 3.0
GROWTH = 700
RUNTIME = (
    "import sys; from ergon_framework.cli.executor_work import run_handlers; "
    "sys.exit(run_handlers('noisy:registry', grace=1.0, log_level='info'))"
)


class Problems(logging.Handler):
    """What should not have happened; errors in the log among it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if event_of(record) in {"executor ended", "executor not started"}:
            return  # both are what the attack does to itself
        self.add(f"logged by {record.name}: {record.getMessage()[:200]}")

    def add(self, problem: str) -> None:
        self.found[problem] += 1


# -- a pool, and executors that attack it ---------------------------------------------------------------


class Attacked:
    def __init__(self, seed: int, problems: Problems) -> None:
        self._problems = problems
        self._numbers = iter(range(1000, 10**9))
        self.mark = f"hostile-{os.getpid()}"
        self.ends: Counter[str] = Counter()
        self.counts: dict[str, int] = {}
        self.lag = 0.0
        self._command = Command(
            words=(sys.executable, "-m", "tests.fuzz.hostile", str(seed), self.mark),
            environment={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            folder=str(ROOT),
        )

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with ExecutorPool(self._command, policy=PoolPolicy(size=3, grace=0.2)) as pool:
            pulse = asyncio.create_task(self._pulse())
            await asyncio.gather(*(self._jobs(pool, end) for _ in range(4)))
            pulse.cancel()
            counts = dict(pool.counts)
            closing = time.monotonic()
        if time.monotonic() - closing > LATE:
            self._problems.add("the pool took too long to close")
        self.counts = counts

    async def _pulse(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.02)
            self.lag = max(self.lag, time.perf_counter() - began - 0.02)

    async def _jobs(self, pool: ExecutorPool, end: float) -> None:
        while time.monotonic() < end:
            job = str(next(self._numbers))
            waits_for = "place"
            try:
                with await asyncio.wait_for(pool.reserve(), LATE * 2) as place:
                    waits_for, pid = "outcome", place.process.pid
                    running = pool.run("f", job_id=job, timeout=TIMEOUT, place=place)
                    outcome = await asyncio.wait_for(running, TIMEOUT + LATE)
            except TimeoutError:
                self._problems.add(f"a job has no {waits_for} in time")
                continue
            except ErgonError as error:
                self.ends[type(error).__name__] += 1
                if not error.later:
                    self._problems.add(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.05)
                continue
            self._check(job, pid, outcome)

    def _check(self, job: str, pid: int, outcome: ExecutionOutcome) -> None:
        self.ends[f"{outcome.status} {outcome.error_type or ''}".strip()] += 1
        if outcome.job_id != job:
            self._problems.add("a job has the outcome of another one")
        # An executor may say anything of its own job, also before it has read the request; of no other one.
        if isinstance(outcome.result, dict) and outcome.result.get("pid", pid) != pid:
            self._problems.add("a job has an outcome from an executor that did not have it")


def survivors(mark: str) -> list[int]:
    return [each.pid for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or [])]


# -- an executor, and requests that attack it -------------------------------------------------------------


class Requests:
    """The pipes of a Python executor; what it answers is read all the time."""

    def __init__(self, folder: Path, seed: int, problems: Problems) -> None:
        self._dice = random.Random(seed)
        self._problems = problems
        self._seeds = seeds("requests")
        self.sent = 0
        self.answers: Counter[str] = Counter()
        self.log = folder / "executor.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUNTIME],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT / "tests" / "unit" / "executor",
            )
        self._arrived: dict[str, threading.Event] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            outcome = read_outcome(line.rstrip(b"\n"))
            if not isinstance(outcome, ExecutionOutcome):
                self._problems.add("the executor has answered with a line that is no outcome")
                continue
            self.answers[outcome.status.value] += 1
            if event := self._arrived.get(outcome.job_id):
                if outcome.result == outcome.job_id:
                    event.set()
                else:
                    self._problems.add("a good request has a wrong answer")

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end and self.process.poll() is None:
            number += 1
            job = f"good-{number}"
            good = REQUEST | {"job_id": job, "args": [job], "context": REQUEST["context"] | {"job_id": job}}
            self._arrived[job] = event = threading.Event()
            try:
                for _ in range(self._dice.randrange(30)):
                    self._send(self._attack())
                # A line feed first, because the attack may be half a line.
                self._send(b"\n" + json.dumps(good).encode() + b"\n")
            except BrokenPipeError:
                break
            if not event.wait(60):
                self._problems.add("the executor does not answer a good request any more")
                break
            del self._arrived[job]

    def _send(self, data: bytes) -> None:
        self.sent += 1
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def _attack(self) -> bytes:
        dice = self._dice
        kind = dice.randrange(100)
        if kind == 0:
            return b"x" * (MAX_LINE + dice.choice((-1, 0, 1, 5000))) + b"\n"
        if kind == 1:
            return b"\n" * 5_000
        if kind == 2:
            return b'{"args":' + b"[" * 1_000_000 + b"\n"
        if kind < 10:
            return dice.randbytes(dice.choice((1, 100, 70_000)))
        data = dice.choice(self._seeds)
        for _ in range(dice.randrange(1, 6)):
            data = mutated(data, dice=dice) or data
        return data + dice.choice((b"\n", b"\n", b"\r\n", b""))

    def finish(self) -> int:
        """End it; MiB that it held at the end."""
        if (code := self.process.poll()) is not None:
            self._problems.add(f"the executor has ended with {code}")
            return 0
        held = psutil.Process(self.process.pid).memory_info().rss >> 20
        self.process.stdin.close()
        try:
            if code := self.process.wait(30):
                self._problems.add(f"the executor ended with {code} after its input did")
        except subprocess.TimeoutExpired:
            self.process.kill()
            self._problems.add("the executor did not end with its input")
        self._reader.join(10)
        text = self.log.read_text(encoding="utf-8", errors="replace")
        for word in ("Traceback", "level=error", '"level": "error"', "never retrieved"):
            if word in text:
                self._problems.add(f"the executor has logged {word}")
        return held


# -- the run ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    problems = Problems()
    logging.getLogger().addHandler(problems)
    logging.getLogger("ergon_framework").setLevel(logging.ERROR)
    me = psutil.Process()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = Requests(folder, given.seed, problems)
        sender = threading.Thread(target=requests.run, args=(given.seconds,))
        before = me.memory_info().rss >> 20
        sender.start()
        attacked = Attacked(given.seed, problems)
        asyncio.run(attacked.run(given.seconds))
        sender.join(120)
        if sender.is_alive():
            problems.add("the executor takes no more requests")
        grown = (me.memory_info().rss >> 20) - before
        held = requests.finish()
        if requests.process.poll() is None:
            requests.process.kill()
    left = survivors(attacked.mark)
    if left:
        problems.add("executors have survived their pool")
    if attacked.lag > LAG:
        problems.add(f"the loop stood still for {attacked.lag:.1f} s")
    if max(grown, held) > GROWTH:
        problems.add(f"memory has grown: {grown} MiB in the pool, {held} MiB in the executor")
    told = {
        "seconds": given.seconds,
        "runs": attacked.ends.total() + requests.sent,
        "outcomes": dict(attacked.ends),
        "pool": attacked.counts,
        "requests": requests.sent,
        "answers": dict(requests.answers),
        "loop_lag_seconds": round(attacked.lag, 2),
        "grown_mib": grown,
        "executor_mib": held,
        "problems": dict(problems.found),
    }
    print(json.dumps(told))
    sys.exit(1 if problems.found or not requests.answers or not attacked.ends else 0)


if __name__ == "__main__":
    main()
