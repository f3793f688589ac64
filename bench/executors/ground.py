"""The ground that all parts stand on: a private server, orchestrators that run, and bars."""

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

from ergon_framework.executor.jobs.client import JobClient
from ergon_framework.executor.jobs.request import Request
from ergon_framework.schema import migrate

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.postgres import PrivatePostgres

HERE = Path(__file__).parent
VALUE = {"order": "o-1", "total": 5, "lines": ["a", "b", "c"]}
#: Seconds for anything that is waited for.
PATIENCE = 240.0


#: It tells about its end, which is no news.
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@contextmanager
def server():
    """A server of our own, synced as in production."""
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        Path(folder).chmod(0o755)
        settings = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
        postgres = PrivatePostgres(Path(folder) / "data", settings=settings)
        postgres.start()
        try:
            yield postgres
        finally:
            postgres.stop("fast")


def database(postgres, name):
    """The dsn of a new database with our schema."""
    dsn = postgres.create_database(name)
    migrate.upgrade(dsn)
    return dsn


@contextmanager
def orchestrator(dsn, kinds):
    """One orchestrator, in a process of its own; *kinds* by name: how many executors, and jobs in flight in each."""
    words = [str(Path(sys.executable).parent / "ergon"), "run", "bench_jobs:orchestrator"]
    environment = os.environ | {"ERGON_POSTGRES__DSN": dsn, "BENCH_KINDS": json.dumps(kinds), "PYTHONPATH": str(HERE)}
    with subprocess.Popen(words, env=environment, cwd=HERE, **QUIET) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE)
    if code != 0:
        raise SystemExit(f"the orchestrator ended with exit code {code}")


def echo(kind, value=VALUE):
    return Request(function=f"{kind}#exam.echo", args=(value,))


def client(dsn):
    return JobClient(dsn)


@contextmanager
def clocked(took):
    """Add the seconds that this lasts to *took*."""
    began = time.perf_counter()
    yield
    took.append(time.perf_counter() - began)


def say(text):
    print(text, file=sys.stderr, flush=True)
