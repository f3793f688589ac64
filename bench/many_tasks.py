"""Forty tasks in one process: memory beside forty processes, and one busy task beside running it alone.

    python bench/many_tasks.py              one line of JSON at the end, exit 1 where a target is missed
    python bench/many_tasks.py --quick      a tenth of the messages and of the processes: to see that it runs

Every task has its own queue on one Redis server; half of the tasks are sync, half async. Both runs of the busy task
take turns, because other work on the machine changes the throughput more than the other tasks do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.transaction import Transaction

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.servers.redis import PrivateRedis

TASK_COUNT = 40
#: Messages of the busy task that are timed, after as many as a fifth of them to warm up.
MESSAGE_COUNT = 20_000
ROUNDS = 5
#: Throughput of the busy task among forty, in proportion to running it alone.
MIN_THROUGHPUT_RATIO = 0.9
#: Memory of forty tasks in one process, in proportion to forty processes.
MAX_MEMORY_RATIO = 0.1
TIMEOUT_SECONDS = 300.0

APP = """
import asyncio, json, os, time
from pathlib import Path
from ergon_framework import ConsumerPolicy, consumer, queue
from ergon_framework.gates import Pause

POLICY = ConsumerPolicy.load({{
    "loop": {{"streaming": True, "concurrency": {{"value": 50}}, "batch": {{"size": 100}}}},
}})
FIRST, LAST = {first}, {last}
began, count = 0.0, 0

def hold():
    # All tasks run before the first message does: a start takes processor time of its own.
    return None if Path("go").exists() else Pause("held back", 0.05)

def note():
    global began, count
    count += 1
    if count == FIRST:
        began = time.perf_counter(), time.process_time()
    if count == LAST:
        seconds = [time.perf_counter() - began[0], time.process_time() - began[1]]
        Path("seconds.part").write_text(json.dumps(seconds))
        Path("seconds.part").rename("seconds")
"""
TASK = """
@consumer(queue("queue_{name}"), policy=POLICY, name="{name}", gates={gates})
{prefix}def {name}(order):
    {body}
"""
#: The interpreter, without the compiled scripts of an installation.
ERGON = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()"]


class Bench:
    """A folder with the module of all tasks, and the server of their queues."""

    def __init__(self, folder: Path, url: str, *, messages: int) -> None:
        self.folder, self.url, self.messages = folder, url, messages
        self.names = [f"task_{number}" for number in range(TASK_COUNT)]
        self.environment = {f"ERGON_QUEUES__QUEUE_{name.upper()}__URL": url for name in self.names}

    def write_app(self, variant: str) -> None:
        """Write the module; its first task is the busy one, of *variant*."""
        source = APP.format(first=self.messages // 5, last=self.messages // 5 + self.messages)
        for number, name in enumerate(self.names):
            is_async = variant == "async" if number == 0 else number % 2 == 1
            body = "note()" if number == 0 else "pass"
            gates = "[hold]" if number == 0 else "[]"
            source += TASK.format(name=name, prefix="async " if is_async else "", body=body, gates=gates)
        (self.folder / "app.py").write_text(source, encoding="utf-8")

    def start(self, *tasks: str) -> subprocess.Popen[bytes]:
        """Start a run of *tasks* and return when all its loops run, the busy one held back."""
        probe = self.folder / f"probe-{time.monotonic_ns()}.json"
        process = subprocess.Popen(
            [*ERGON, "run", *tasks, "--probe-file", str(probe), "--log-level", "error"],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: probe.exists() and is_running(json.loads(probe.read_text(encoding="utf-8"))))
        return process

    def measure_throughput(self, *tasks: str) -> tuple[float, float]:
        """Return the messages of the busy task a second, and a second of processor time, while *tasks* run."""
        seconds = self.folder / "seconds"
        go = self.folder / "go"
        for path in (seconds, go):
            path.unlink(missing_ok=True)
        queue = RedisQueue("queue_task_0", url=self.url)
        rest = range(self.messages // 5 + self.messages)
        for start in range(0, len(rest), 1_000):
            queue.dispatch(
                [Transaction({}, id=f"order-{time.monotonic_ns()}-{n}") for n in rest[start : start + 1_000]]
            )
        queue.close()
        process = self.start(*tasks)
        try:
            go.touch()
            wait_until(seconds.exists)
        finally:
            stop(process)
        wall_seconds, cpu_seconds = json.loads(seconds.read_text(encoding="utf-8"))
        return self.messages / wall_seconds, self.messages / cpu_seconds


def is_running(health: dict[str, object]) -> bool:
    return all("held back" in reason for reason in health["reasons"])


def wait_until(condition) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the workers did not make it in time")
        time.sleep(0.05)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(TIMEOUT_SECONDS)


def measure_memory(processes) -> dict[str, float]:
    """Return the memory of *processes* in megabytes: resident, and with shared pages divided among their users."""
    infos = [psutil.Process(each.pid).memory_full_info() for each in processes]
    return {"rss": sum(info.rss for info in infos) / 1e6, "pss": sum(info.pss for info in infos) / 1e6}


def compare_memory(bench: Bench, process_count: int) -> dict[str, float]:
    """Return the memory of all tasks in one process and of one process for each of some tasks, for forty of them."""
    one = bench.start("app")
    try:
        together = measure_memory([one])
    finally:
        stop(one)
    processes = []
    try:
        processes += [bench.start(f"app:{name}") for name in bench.names[:process_count]]
        apart = measure_memory(processes)
    finally:
        for each in processes:
            each.send_signal(signal.SIGTERM)
        for each in processes:
            each.wait(TIMEOUT_SECONDS)
    factor = TASK_COUNT / process_count
    return {
        "one_process_rss_mb": round(together["rss"], 1),
        "one_process_pss_mb": round(together["pss"], 1),
        "forty_processes_rss_mb": round(apart["rss"] * factor, 1),
        "forty_processes_pss_mb": round(apart["pss"] * factor, 1),
        "processes_measured": process_count,
        "memory_ratio": round(together["rss"] / (apart["rss"] * factor), 4),
    }


def compare_throughput(bench: Bench, variant: str, rounds: int) -> dict[str, object]:
    """Return the throughput of the busy task alone and among forty, and their proportion, as medians."""
    bench.write_app(variant)
    alone, among = [], []
    for number in range(rounds):
        # In turns, and each of them first in every other round.
        for runs, tasks in ((alone, "app:task_0"), (among, "app"))[:: 1 if number % 2 else -1]:
            runs.append(bench.measure_throughput(tasks))
        print(
            f"  {variant} {alone[-1][0]:8.0f}/s alone {among[-1][0]:8.0f}/s among forty; a second of processor time: "
            f"{alone[-1][1]:8.0f} {among[-1][1]:8.0f}",
            file=sys.stderr,
            flush=True,
        )
    ratios, cpu_ratios = (
        [together[index] / single[index] for together, single in zip(among, alone, strict=True)] for index in (0, 1)
    )
    return {
        f"{variant}_alone_per_second": round(statistics.median(each[0] for each in alone)),
        f"{variant}_among_forty_per_second": round(statistics.median(each[0] for each in among)),
        f"{variant}_ratio": round(statistics.median(ratios), 3),
        f"{variant}_ratios": [round(each, 3) for each in sorted(ratios)],
        f"{variant}_cpu_ratio": round(statistics.median(cpu_ratios), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    tenth = 10 if arguments.quick else 1
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        server = PrivateRedis(Path(folder) / "redis", settings={"appendfsync": "everysec"})
        server.start()
        try:
            bench = Bench(Path(folder), server.url, messages=MESSAGE_COUNT // tenth)
            bench.write_app("async")
            figures: dict[str, object] = dict(compare_memory(bench, TASK_COUNT // tenth))
            print(f"  {figures}", file=sys.stderr, flush=True)
            for variant in ("async", "sync"):
                figures |= compare_throughput(bench, variant, arguments.rounds)
        finally:
            server.stop()
    missed = [name for name in ("async_ratio", "sync_ratio") if figures[name] < MIN_THROUGHPUT_RATIO]
    missed += ["memory_ratio"] if figures["memory_ratio"] > MAX_MEMORY_RATIO else []
    print(json.dumps({**figures, "missed": missed}))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
