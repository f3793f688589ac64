"""Peers: how many jobs a second other libraries carry, each with a private Redis and the same number of processes.

python bench/executors/peers/peer.py [--jobs 5000] [--processes 4] [--only rrq]

A job is an echo whose result is stored and read back. Time runs from the first submit to the last result seen,
submission included. The peers have an environment of their own (`make peers`). Each is run with two settings, and the
better one counts. Redis writes nothing to disk, which favours the peers. It ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).parent
VENV = Path(os.environ.get("PEERS", HERE.parents[2] / ".venv-peers"))
#: RabbitMQ as its packages open it to everybody on this machine.
BROKER = os.environ.get("PEERS_BROKER", "amqp://guest:guest@127.0.0.1:5672//")
#: What each peer is run with, and the best of it counts. RRQ: jobs in flight per process and seconds between polls, by
#: default 1 and 0.1, with which it is far slower. Celery: messages prefetched per process, by default 4.
SETTINGS = {"rrq": ("1/0.001", "10/0.01"), "celery": ("1", "4")}
#: Seconds for one run. One of RRQ's was seen not to end within 5 minutes, for a reason that was not found; such a run
#: is told on stderr and made again.
PATIENCE = 60.0
TRIES = 3


def peer(name, jobs=5000, processes=4):
    """Jobs per second of *name*, with the better of its settings."""
    return max(rates(name, jobs, processes).values())


def rates(name, jobs, processes):
    """Jobs per second of *name* by setting."""
    if not (VENV / "bin" / "python").exists():
        raise SystemExit(f"there is no environment with the peers in {VENV}: run `make peers`, or set PEERS")
    return {setting: _rated(name, setting, jobs, processes) for setting in SETTINGS[name]}


def _rated(name, setting, jobs, processes):
    for _ in range(TRIES):
        with suppress(subprocess.TimeoutExpired):
            return _rate(name, setting, jobs, processes)
        print(f"{name} with {setting}: not every job ended within {PATIENCE:g} s", file=sys.stderr)
    raise SystemExit(f"{name} with {setting}: {TRIES} times some job did not end")


def _rate(name, setting, jobs, processes):
    with tempfile.TemporaryDirectory(prefix="ergon-peer-") as folder, redis(folder) as port:
        environment = {
            "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(HERE),
            "HOME": folder,
            "PEER_FOLDER": folder,
            "PEER_REDIS": f"redis://127.0.0.1:{port}/0",
            "PEER_BROKER": BROKER,
            "PEER_SETTING": setting,
            "PEER_PROCESSES": str(processes),
            "PEER_PORT": str(free_port(processes)),
        }
        words = [str(VENV / "bin" / "python"), str(HERE / f"{name}_client.py"), str(jobs)]
        # A group of its own, so that nothing of it is left whatever happens.
        with subprocess.Popen(
            words, env=environment, cwd=folder, stdout=subprocess.PIPE, start_new_session=True
        ) as client:
            try:
                told, _ = client.communicate(timeout=PATIENCE)
            finally:
                _end(client.pid)
        if client.returncode != 0:
            raise SystemExit(f"{name} failed with exit code {client.returncode}")
        return json.loads(told.splitlines()[-1])["jobs_per_second"]


def _end(group):
    """SIGTERM first: RRQ's worker has its runners in groups of their own, and ends them itself."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        end = time.monotonic() + 15
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


@contextmanager
def redis(folder):
    """A Redis server of the bench's own, in *folder*; its port."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("the peers need redis-server (Debian: apt install redis-server)")
    port = free_port()
    words = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as server:
        try:
            _wait(port)
            yield port
        finally:
            server.terminate()


def _wait(port):
    end = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return


def free_port(many=1):
    """The first of so many ports in a row that are free, below those that the system gives to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        if all(_free(port + n) for n in range(many)):
            return port


def _free(port):
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    found = {}
    for name in [options.only] if options.only else SETTINGS:
        found[name] = {setting: round(rate) for setting, rate in rates(name, options.jobs, options.processes).items()}
        print(name, found[name], file=sys.stderr)
    print(json.dumps({"jobs": options.jobs, "processes": options.processes, "jobs_per_second": found}))


if __name__ == "__main__":
    main()
