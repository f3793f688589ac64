"""RRQ: one worker with several Python runners, and one client; prints jobs per second as a line of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rrq.client import RRQClient
from rrq.job import JobStatus

CONFIGURATION = """
[rrq]
redis_dsn = "{redis}"
default_runner_name = "python"
default_poll_delay_seconds = {poll}

[rrq.runners.python]
type = "socket"
cmd = ["rrq-runner", "--settings", "rrq_handlers.settings"]
tcp_port = {port}
pool_size = {processes}
max_in_flight = {in_flight}
"""
#: Concurrent calls of the client: more than its threads, so that none of them waits for a call.
MAX_CONCURRENT_CALLS = 64
UNFINISHED = {JobStatus.PENDING, JobStatus.ACTIVE, JobStatus.RETRYING}
VALUE = {"order": "o-1", "total": 5, "lines": ["a", "b", "c"]}


async def call_all(call, items):
    """Call the function for all items, many at a time; return the results in order."""
    results = []
    for start in range(0, len(items), MAX_CONCURRENT_CALLS):
        results += await asyncio.gather(*map(call, items[start : start + MAX_CONCURRENT_CALLS]))
    return results


async def measure_rate(client, jobs):
    async def submit(_):
        return await client.enqueue("echo", {"params": {"value": VALUE}})

    async def wait_for_result(job_id):
        # Its wait_for_completion blocks the one connection that all calls of the client share.
        while (status := await client.get_job_status(job_id)) is None or status.status in UNFINISHED:  # noqa: ASYNC110 - another process ends it
            await asyncio.sleep(0.005)
        if status.result != VALUE:
            raise RuntimeError(f"job {job_id} ended as {status}")

    began = time.perf_counter()
    await call_all(wait_for_result, await call_all(submit, range(jobs)))
    return jobs / (time.perf_counter() - began)


def main():
    folder = Path(os.environ["PEER_FOLDER"])
    in_flight, poll = os.environ["PEER_SETTING"].split("/")
    settings = {key: os.environ[f"PEER_{key.upper()}"] for key in ("redis", "port", "processes")}
    configuration = folder / "rrq.toml"
    configuration.write_text(CONFIGURATION.format(in_flight=in_flight, poll=poll, **settings))
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(["rrq", "worker", "run", "--config", str(configuration)], stdout=log, stderr=log)
    try:
        client = RRQClient(config_path=str(configuration))
        # All processes run before the measurement starts.
        asyncio.run(measure_rate(client, 200))
        rate = asyncio.run(measure_rate(client, int(sys.argv[1])))
    except BaseException:
        sys.stderr.write((folder / "worker.log").read_text()[-4000:])
        raise
    finally:
        worker.terminate()
        worker.wait()
    print(json.dumps({"jobs_per_second": rate}))


main()
