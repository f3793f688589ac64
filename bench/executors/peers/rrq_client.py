"""RRQ: one worker with so many Python runners, and one client; prints jobs per second as a line of JSON."""

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
#: How many calls of the client are under way at a time: more than its threads, so that none of them waits for one.
ABREAST = 64
UNDER_WAY = {JobStatus.PENDING, JobStatus.ACTIVE, JobStatus.RETRYING}
VALUE = {"order": "o-1", "total": 5, "lines": ["a", "b", "c"]}


async def each(do, many):
    """Do it with all of them, a good number at a time; what came of each, in order."""
    found = []
    for start in range(0, len(many), ABREAST):
        found += await asyncio.gather(*map(do, many[start : start + ABREAST]))
    return found


async def measured(client, jobs):
    async def submit(_):
        return await client.enqueue("echo", {"params": {"value": VALUE}})

    async def result(job_id):
        # Its wait_for_completion blocks the one connection that all calls of the client share.
        while (found := await client.get_job_status(job_id)) is None or found.status in UNDER_WAY:  # noqa: ASYNC110 - another process ends it
            await asyncio.sleep(0.005)
        if found.result != VALUE:
            raise RuntimeError(f"job {job_id} ended as {found}")

    began = time.perf_counter()
    await each(result, await each(submit, range(jobs)))
    return jobs / (time.perf_counter() - began)


def main():
    folder = Path(os.environ["PEER_FOLDER"])
    in_flight, poll = os.environ["PEER_SETTING"].split("/")
    told = {key: os.environ[f"PEER_{key.upper()}"] for key in ("redis", "port", "processes")}
    configuration = folder / "rrq.toml"
    configuration.write_text(CONFIGURATION.format(in_flight=in_flight, poll=poll, **told))
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(["rrq", "worker", "run", "--config", str(configuration)], stdout=log, stderr=log)
    try:
        client = RRQClient(config_path=str(configuration))
        # Everybody is awake before the clock runs.
        asyncio.run(measured(client, 200))
        rate = asyncio.run(measured(client, int(sys.argv[1])))
    except BaseException:
        sys.stderr.write((folder / "worker.log").read_text()[-4000:])
        raise
    finally:
        worker.terminate()
        worker.wait()
    print(json.dumps({"jobs_per_second": rate}))


main()
