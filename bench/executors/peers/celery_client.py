"""Celery: one prefork worker with several processes, and one client; prints jobs per second as a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

os.environ["PEER_QUEUE"] = f"ergon-peer-{uuid.uuid4()}"

from celery import group
from celery_app import QUEUE, app, echo

VALUE = {"order": "o-1", "total": 5, "lines": ["a", "b", "c"]}


def measure_rate(jobs):
    began = time.perf_counter()
    results = group(echo.s(VALUE) for _ in range(jobs)).apply_async().get(timeout=240)
    rate = jobs / (time.perf_counter() - began)
    if results != [VALUE] * jobs:
        raise RuntimeError("some results are not what was sent")
    return rate


def main():
    folder = Path(os.environ["PEER_FOLDER"])
    command = ["celery", "-A", "celery_app", "worker", "--pool", "prefork", "--loglevel", "WARNING"]
    command += ["--concurrency", os.environ["PEER_PROCESSES"], "--without-gossip", "--without-mingle"]
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        # All processes run before the measurement starts.
        measure_rate(200)
        rate = measure_rate(int(sys.argv[1]))
    except BaseException:
        sys.stderr.write((folder / "worker.log").read_text()[-4000:])
        raise
    finally:
        worker.terminate()
        worker.wait()
        with app.connection_for_write() as connection:
            connection.default_channel.queue_delete(QUEUE)
            connection.default_channel.exchange_delete(QUEUE)
    print(json.dumps({"jobs_per_second": rate}))


main()
