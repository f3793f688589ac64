"""The overhead of the pool per job, over a bare asyncio pipe with the same JSON to the same executor.

It ends with one line of JSON, and with exit code 1 where the target is missed. Rounds take turns, so that other load on
the machine affects both.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

from ergon_framework.executors.pool import ExecutorPool, PoolPolicy
from ergon_framework.executors.process import ExecutorCommand

COMMAND = (sys.executable, "-S", str(Path(__file__).parents[2] / "reference" / "python" / "stdio_executor.py"))
ROUNDS = 20
JOBS_PER_ROUND = 500
#: Microseconds that the pool may add.
MAX_ADDED_MICROSECONDS = 100
ARGS = [{"order": "o-1", "total": 5, "lines": ["a", "b", "c"]}]


def encode_request(job_id):
    context = {"job_id": job_id, "attempt": 1, "enqueue_time": "2026-01-31T23:59:59Z", "queue_name": "default"}
    fields = {
        "protocol_version": "1",
        "job_id": job_id,
        "function_name": "conformance.echo",
        "args": ARGS,
        "kwargs": {},
    }
    return json.dumps(fields | {"context": context}).encode() + b"\n"


async def run_bare(process):
    for number in range(JOBS_PER_ROUND):
        process.stdin.write(encode_request(str(number)))
        outcome = json.loads(await process.stdout.readline())
        assert outcome["job_id"] == str(number)


async def run_pooled(pool):
    for number in range(JOBS_PER_ROUND):
        outcome = await pool.run("conformance.echo", ARGS, job_id=str(number), timeout=60)
        assert outcome.job_id == str(number)


async def measure(work):
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) / JOBS_PER_ROUND * 1e6


async def main():
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*COMMAND, **pipes)
    command = ExecutorCommand(words=COMMAND, environment={"PATH": os.environ["PATH"]})
    async with ExecutorPool(command, policy=PoolPolicy(size=1)) as pool:
        for warm_up in (run_bare(process), run_pooled(pool)):
            await warm_up
        rounds = [(await measure(run_bare(process)), await measure(run_pooled(pool))) for _ in range(ROUNDS)]
    process.stdin.close()
    await process.wait()
    bare_time, pool_time = (statistics.median(values) for values in zip(*rounds, strict=True))
    added = statistics.median(pair[1] - pair[0] for pair in rounds)
    figures = {"bare_us": bare_time, "pool_us": pool_time, "added_us": added}
    print(
        json.dumps(
            {name: round(value, 1) for name, value in figures.items()}
            | {"bar_us": MAX_ADDED_MICROSECONDS, "met": added <= MAX_ADDED_MICROSECONDS}
        )
    )
    return 0 if added <= MAX_ADDED_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
