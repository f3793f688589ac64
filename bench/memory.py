"""The memory of a streaming loop: its growth between 100,000 and 1,000,000 transactions.

    python bench/memory.py              both variants, one line of JSON at the end, exit 1 where the target is missed
    python bench/memory.py --quick      a tenth of the transactions: to see that it runs, not for figures

Each variant has its own process. The queue is fed from the loop's own outcomes, so its size stays small and constant.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy

FIRST_SAMPLE, LAST_SAMPLE = 100_000, 1_000_000
#: Transactions that are added at a time; at most two such chunks are in the queue.
CHUNK_SIZE = 1_000
#: Megabytes by which the process may grow between the first sample and the last.
MAX_GROWTH_MB = 10.0


class ThreadedStreamTask(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


class AsyncStreamTask(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


class Feeder:
    """Counts outcomes, adds a chunk for each finished one, samples the memory, and stops after the last."""

    def __init__(self, task, first, last):
        self._task = task
        self._process = psutil.Process()
        self._first, self._last = first, last
        self._added = self._done = 0
        self._began = time.perf_counter()
        self.samples = {}
        self._add()
        self._add()

    def __call__(self, outcome):
        self._done += 1
        if self._done % CHUNK_SIZE:
            return
        if self._done % self._first == 0:
            self._sample()
        if self._added < self._last:
            self._add()
        elif self._done == self._last:
            self._task.stop()

    def _add(self):
        numbers = range(self._added, self._added + CHUNK_SIZE)
        self._task.connector.dispatch([Transaction({"number": number}, id=f"t{number}") for number in numbers])
        self._added += CHUNK_SIZE

    def _sample(self):
        gc.collect()
        megabytes = self._process.memory_info().rss / 1e6
        self.samples[self._done] = round(megabytes, 2)
        seconds = time.perf_counter() - self._began
        print(f"  {self._done:>9,} transactions  {megabytes:7.2f} MB  {seconds:6.1f} s", file=sys.stderr, flush=True)


def measure(variant, share):
    task = {"asyncio": AsyncStreamTask, "threads": ThreadedStreamTask}[variant]()
    task.connector = MemoryConnector("memory")
    feeder = Feeder(task, int(FIRST_SAMPLE * share), int(LAST_SAMPLE * share))
    policy = ConsumerPolicy.load({"loop": {"streaming": True}})
    loop = task.consume_transactions(policy, on_outcome=feeder)
    report = asyncio.run(loop) if variant == "asyncio" else loop
    megabytes = list(feeder.samples.values())
    grown = round(megabytes[-1] - megabytes[0], 2)
    print(
        json.dumps(
            {
                "transactions": report.finished,
                "end": report.stop_reason,
                "mb": feeder.samples,
                "grown_mb": grown,
                "bar_mb": MAX_GROWTH_MB,
                "ok": grown <= MAX_GROWTH_MB and report.finished == int(LAST_SAMPLE * share),
            }
        )
    )


def measure_in_process(variant, share):
    print(f"{variant}:", file=sys.stderr, flush=True)
    command = [sys.executable, str(Path(__file__)), "--variant", variant, "--share", str(share)]
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    return json.loads(completed.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=["asyncio", "threads"], help="measure one variant in this process")
    parser.add_argument("--share", type=float, default=1.0, help="share of the transactions to run")
    parser.add_argument("--quick", action="store_true", help="a tenth of the transactions")
    options = parser.parse_args()
    if options.variant:
        measure(options.variant, options.share)
        return 0
    share = 0.1 if options.quick else options.share
    figures = {variant: measure_in_process(variant, share) for variant in ("asyncio", "threads")}
    ok = all(figure["ok"] for figure in figures.values())
    print(json.dumps({"variants": figures, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
