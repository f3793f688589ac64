"""Attack both ends of the executor protocol through real pipes: executor_process.py --seconds 600.

A pool of executors runs jobs in programs that attack it, and a Python executor reads requests that attack it. The run
fails if a job has no outcome in time, or the outcome of another executor; if the pool's event loop stalls, memory
grows, anything is logged as an error, a process survives, or the executor stops answering valid requests.
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
from ergon_framework.executors.json_lines import MAX_LINE_BYTES
from ergon_framework.executors.pool import ExecutorPool, PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.executors.protocol import ExecutionOutcome, read_outcome
from tests.fuzz.grammar import REQUEST, make_seeds, mutate_line
from tests.log_events import get_event

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_SECONDS = 1.0
#: Seconds after its timeout within which a job has its outcome. Reading a line of 5 MB takes 1 s of processor time.
OUTCOME_SLACK_SECONDS = 20.0
#: Seconds for which the loop may stall, and MiB by which a process may grow.
MAX_LAG_SECONDS = 3.0
MAX_GROWTH_MIB = 700
RUNTIME_PROGRAM = (
    "import sys; from ergon_framework.cli.executor import run_handlers; "
    "sys.exit(run_handlers('noisy:registry', grace=1.0, log_level='info'))"
)


class ProblemLog(logging.Handler):
    """Records unexpected events, errors in the log among them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if get_event(record) in {"executor exited unexpectedly", "executor not started"}:
            return  # both are effects of the attack on itself
        self.add(f"logged by {record.name}: {record.getMessage()[:200]}")

    def add(self, problem: str) -> None:
        self.counts[problem] += 1


# -- a pool, and executors that attack it ---------------------------------------------------------------


class AttackedPool:
    def __init__(self, seed: int, problems: ProblemLog) -> None:
        self._problems = problems
        self._numbers = iter(range(1000, 10**9))
        self.mark = f"hostile-{os.getpid()}"
        self.ends: Counter[str] = Counter()
        self.counts: dict[str, int] = {}
        self.max_lag = 0.0
        self._command = ExecutorCommand(
            words=(sys.executable, "-m", "tests.fuzz.hostile", str(seed), self.mark),
            environment={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            folder=str(ROOT),
        )

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with ExecutorPool(self._command, policy=PoolPolicy(size=3, grace=0.2)) as pool:
            lag_task = asyncio.create_task(self._measure_lag())
            await asyncio.gather(*(self._run_jobs(pool, end) for _ in range(4)))
            lag_task.cancel()
            counts = dict(pool.counts)
            closing_at = time.monotonic()
        if time.monotonic() - closing_at > OUTCOME_SLACK_SECONDS:
            self._problems.add("the pool took too long to close")
        self.counts = counts

    async def _measure_lag(self) -> None:
        while True:
            started_at = time.perf_counter()
            await asyncio.sleep(0.02)
            self.max_lag = max(self.max_lag, time.perf_counter() - started_at - 0.02)

    async def _run_jobs(self, pool: ExecutorPool, end: float) -> None:
        while time.monotonic() < end:
            job = str(next(self._numbers))
            waits_for = "place"
            try:
                with await asyncio.wait_for(pool.reserve(), OUTCOME_SLACK_SECONDS * 2) as reservation:
                    waits_for, pid = "outcome", reservation.process.pid
                    running = pool.run("f", job_id=job, timeout=JOB_TIMEOUT_SECONDS, reservation=reservation)
                    outcome = await asyncio.wait_for(running, JOB_TIMEOUT_SECONDS + OUTCOME_SLACK_SECONDS)
            except TimeoutError:
                self._problems.add(f"a job has no {waits_for} in time")
                continue
            except ErgonError as error:
                self.ends[type(error).__name__] += 1
                if not error.not_attempted:
                    self._problems.add(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.05)
                continue
            self._check(job, pid, outcome)

    def _check(self, job: str, pid: int, outcome: ExecutionOutcome) -> None:
        self.ends[f"{outcome.status} {outcome.error_type or ''}".strip()] += 1
        if outcome.job_id != job:
            self._problems.add("a job has the outcome of another one")
        # An executor may report anything about its own job, even before it has read the request, but of no other one.
        if isinstance(outcome.result, dict) and outcome.result.get("pid", pid) != pid:
            self._problems.add("a job has an outcome from an executor that did not have it")


def list_survivors(mark: str) -> list[int]:
    return [each.pid for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or [])]


# -- an executor, and requests that attack it -------------------------------------------------------------


class AttackedExecutor:
    """The pipes of a Python executor; its output is read continuously."""

    def __init__(self, folder: Path, seed: int, problems: ProblemLog) -> None:
        self._rng = random.Random(seed)
        self._problems = problems
        self._seeds = make_seeds("requests")
        self.sent = 0
        self.answers: Counter[str] = Counter()
        self.log = folder / "executor.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUNTIME_PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT / "tests" / "unit" / "executors",
            )
        self._answer_events: dict[str, threading.Event] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            outcome = read_outcome(line.rstrip(b"\n"))
            if not isinstance(outcome, ExecutionOutcome):
                self._problems.add("the executor answered with a line that is not an outcome")
                continue
            self.answers[outcome.status.value] += 1
            if event := self._answer_events.get(outcome.job_id):
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
            request = REQUEST | {"job_id": job, "args": [job], "context": REQUEST["context"] | {"job_id": job}}
            self._answer_events[job] = event = threading.Event()
            try:
                for _ in range(self._rng.randrange(30)):
                    self._send(self._make_attack())
                # A line feed first, because the attack may be half a line.
                self._send(b"\n" + json.dumps(request).encode() + b"\n")
            except BrokenPipeError:
                break
            if not event.wait(60):
                self._problems.add("the executor does not answer a good request any more")
                break
            del self._answer_events[job]

    def _send(self, data: bytes) -> None:
        self.sent += 1
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def _make_attack(self) -> bytes:
        rng = self._rng
        kind = rng.randrange(100)
        if kind == 0:
            return b"x" * (MAX_LINE_BYTES + rng.choice((-1, 0, 1, 5000))) + b"\n"
        if kind == 1:
            return b"\n" * 5_000
        if kind == 2:
            return b'{"args":' + b"[" * 1_000_000 + b"\n"
        if kind < 10:
            return rng.randbytes(rng.choice((1, 100, 70_000)))
        data = rng.choice(self._seeds)
        for _ in range(rng.randrange(1, 6)):
            data = mutate_line(data, rng=rng) or data
        return data + rng.choice((b"\n", b"\n", b"\r\n", b""))

    def finish(self) -> int:
        """End it; return the MiB that it used at the end."""
        if (exit_code := self.process.poll()) is not None:
            self._problems.add(f"the executor has ended with {exit_code}")
            return 0
        memory_mib = psutil.Process(self.process.pid).memory_info().rss >> 20
        self.process.stdin.close()
        try:
            if exit_code := self.process.wait(30):
                self._problems.add(f"the executor ended with {exit_code} after its input did")
        except subprocess.TimeoutExpired:
            self.process.kill()
            self._problems.add("the executor did not end with its input")
        self._reader.join(10)
        text = self.log.read_text(encoding="utf-8", errors="replace")
        for marker in ("Traceback", "level=error", '"level": "error"', "never retrieved"):
            if marker in text:
                self._problems.add(f"the executor has logged {marker}")
        return memory_mib


# -- the run ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    problems = ProblemLog()
    logging.getLogger().addHandler(problems)
    logging.getLogger("ergon_framework").setLevel(logging.ERROR)
    own_process = psutil.Process()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = AttackedExecutor(folder, options.seed, problems)
        sender = threading.Thread(target=requests.run, args=(options.seconds,))
        memory_before = own_process.memory_info().rss >> 20
        sender.start()
        attacked_pool = AttackedPool(options.seed, problems)
        asyncio.run(attacked_pool.run(options.seconds))
        sender.join(120)
        if sender.is_alive():
            problems.add("the executor takes no more requests")
        growth_mib = (own_process.memory_info().rss >> 20) - memory_before
        executor_mib = requests.finish()
        if requests.process.poll() is None:
            requests.process.kill()
    survivors = list_survivors(attacked_pool.mark)
    if survivors:
        problems.add("executors have survived their pool")
    if attacked_pool.max_lag > MAX_LAG_SECONDS:
        problems.add(f"the loop stood still for {attacked_pool.max_lag:.1f} s")
    if max(growth_mib, executor_mib) > MAX_GROWTH_MIB:
        problems.add(f"memory has grown: {growth_mib} MiB in the pool, {executor_mib} MiB in the executor")
    summary = {
        "seconds": options.seconds,
        "runs": attacked_pool.ends.total() + requests.sent,
        "outcomes": dict(attacked_pool.ends),
        "pool": attacked_pool.counts,
        "requests": requests.sent,
        "answers": dict(requests.answers),
        "loop_lag_seconds": round(attacked_pool.max_lag, 2),
        "grown_mib": growth_mib,
        "executor_mib": executor_mib,
        "problems": dict(problems.counts),
    }
    print(json.dumps(summary))
    sys.exit(1 if problems.counts or not requests.answers or not attacked_pool.ends else 0)


if __name__ == "__main__":
    main()
