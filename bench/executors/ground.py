"""Shared by all parts: a private server, running orchestrators, and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from ergon_framework.database import migrate
from ergon_framework.jobs.client import JobClient
from ergon_framework.jobs.model import JobRequest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.postgres import PrivatePostgres

HERE = Path(__file__).parent
VALUE = {"order": "o-1", "total": 5, "lines": ["a", "b", "c"]}
#: Seconds for any wait.
WAIT_TIMEOUT_SECONDS = 240.0


#: Hides the orchestrator's output, which only reports its normal end.
NO_OUTPUT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@contextmanager
def server():
    """Start a private server, synced as in production."""
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        Path(folder).chmod(0o755)
        settings = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
        postgres = PrivatePostgres(Path(folder) / "data", settings=settings)
        postgres.start()
        try:
            yield postgres
        finally:
            postgres.stop("fast")


def create_database(postgres, name):
    """Return the address of a new database with the schema."""
    dsn = postgres.create_database(name)
    migrate.upgrade(dsn)
    return dsn


@contextmanager
def orchestrator(dsn, kinds):
    """Run one orchestrator in its own process; *kinds* by name: the number of executors, and jobs in flight in each."""
    command = [str(Path(sys.executable).parent / "ergon"), "run", "bench_jobs:orchestrator"]
    environment = os.environ | {"ERGON_POSTGRES__DSN": dsn, "BENCH_KINDS": json.dumps(kinds), "PYTHONPATH": str(HERE)}
    with subprocess.Popen(command, env=environment, cwd=HERE, **NO_OUTPUT) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(WAIT_TIMEOUT_SECONDS)
    if code != 0:
        raise SystemExit(f"the orchestrator ended with exit code {code}")


def echo_request(kind, value=VALUE):
    return JobRequest(function=f"{kind}#conformance.echo", args=(value,))


def connect_client(dsn):
    return JobClient(dsn)


@contextmanager
def time_block(durations):
    """Append the seconds of the block to *took*."""
    began = time.perf_counter()
    yield
    durations.append(time.perf_counter() - began)


def say(text):
    print(text, file=sys.stderr, flush=True)
