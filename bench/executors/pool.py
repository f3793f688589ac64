"""What the pool adds to a job, over a bare asyncio pipe with the same json to the same executor.

It ends with one line of JSON, and with exit code 1 where the bar is missed. Rounds take turns, so that a busy machine
is busy for both.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

from ergon_framework.executor.pool import ExecutorPool, PoolPolicy
from ergon_framework.executor.process import Command

WORDS = (sys.executable, "-S", str(Path(__file__).parents[2] / "reference" / "python" / "stdio_executor.py"))
ROUNDS = 20
JOBS = 500
#: What the pool may add, in microseconds.
BAR = 100
ARGS = [{"order": "o-1", "total": 5, "lines": ["a", "b", "c"]}]


def request(job_id):
    context = {"job_id": job_id, "attempt": 1, "enqueue_time": "2026-01-31T23:59:59Z", "queue_name": "default"}
    told = {"protocol_version": "1", "job_id": job_id, "function_name": "exam.echo", "args": ARGS, "kwargs": {}}
    return json.dumps(told | {"context": context}).encode() + b"\n"


async def bare(process):
    for number in range(JOBS):
        process.stdin.write(request(str(number)))
        outcome = json.loads(await process.stdout.readline())
        assert outcome["job_id"] == str(number)


async def pooled(pool):
    for number in range(JOBS):
        outcome = await pool.run("exam.echo", ARGS, job_id=str(number), timeout=60)
        assert outcome.job_id == str(number)


async def timed(work):
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) / JOBS * 1e6


async def main():
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*WORDS, **pipes)
    command = Command(words=WORDS, environment={"PATH": os.environ["PATH"]})
    async with ExecutorPool(command, policy=PoolPolicy(size=1)) as pool:
        for warm in (bare(process), pooled(pool)):
            await warm
        rounds = [(await timed(bare(process)), await timed(pooled(pool))) for _ in range(ROUNDS)]
    process.stdin.close()
    await process.wait()
    alone, together = (statistics.median(each) for each in zip(*rounds, strict=True))
    added = statistics.median(one[1] - one[0] for one in rounds)
    told = {"bare_us": alone, "pool_us": together, "added_us": added}
    print(json.dumps({name: round(value, 1) for name, value in told.items()} | {"bar_us": BAR, "met": added <= BAR}))
    return 0 if added <= BAR else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
