"""Peers: jobs per second of other libraries, each with a private Redis and the same number of processes.

python bench/executors/peers/peer.py [--jobs 5000] [--processes 4] [--only rrq]

A job is an echo whose result is stored and read back. The time is measured from the first submit to the last result,
submission included. The peers have their own environment (`make peers`). Each is run with two settings, and the better
one counts. Redis writes nothing to disk, which favours the peers. It ends with one line of JSON.
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

PEERS_FOLDER = Path(__file__).parent
VENV = Path(os.environ.get("PEERS", PEERS_FOLDER.parents[2] / ".venv-peers"))
#: RabbitMQ as its packages open it to every user of this machine.
BROKER = os.environ.get("PEERS_BROKER", "amqp://guest:guest@127.0.0.1:5672//")
#: The settings of each peer; the best one counts. RRQ: jobs in flight per process and seconds between polls, by default
#: 1 and 0.1, with which it is far slower. Celery: messages prefetched per process, by default 4.
SETTINGS = {"rrq": ("1/0.001", "10/0.01"), "celery": ("1", "4")}
#: Seconds for one run. One run of RRQ did not end within 5 minutes, for an unknown reason; such a run is reported on
#: stderr and repeated.
RUN_TIMEOUT_SECONDS = 60.0
MAX_TRIES = 3


def measure_peer(name, jobs=5000, processes=4):
    """Return jobs per second of *name*, with the better of its settings."""
    return max(measure_rates(name, jobs, processes).values())


def measure_rates(name, jobs, processes):
    """Return jobs per second of *name* by setting."""
    if not (VENV / "bin" / "python").exists():
        raise SystemExit(f"there is no environment with the peers in {VENV}: run `make peers`, or set PEERS")
    return {setting: _measure_with_retries(name, setting, jobs, processes) for setting in SETTINGS[name]}


def _measure_with_retries(name, setting, jobs, processes):
    for _ in range(MAX_TRIES):
        with suppress(subprocess.TimeoutExpired):
            return _measure_once(name, setting, jobs, processes)
        print(f"{name} with {setting}: not every job ended within {RUN_TIMEOUT_SECONDS:g} s", file=sys.stderr)
    raise SystemExit(f"{name} with {setting}: {MAX_TRIES} times some job did not end")


def _measure_once(name, setting, jobs, processes):
    with tempfile.TemporaryDirectory(prefix="ergon-peer-") as folder, run_redis(folder) as port:
        environment = {
            "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(PEERS_FOLDER),
            "HOME": folder,
            "PEER_FOLDER": folder,
            "PEER_REDIS": f"redis://127.0.0.1:{port}/0",
            "PEER_BROKER": BROKER,
            "PEER_SETTING": setting,
            "PEER_PROCESSES": str(processes),
            "PEER_PORT": str(find_free_ports(processes)),
        }
        command = [str(VENV / "bin" / "python"), str(PEERS_FOLDER / f"{name}_client.py"), str(jobs)]
        # Its own process group, so that all of it can be stopped.
        with subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, start_new_session=True
        ) as client:
            try:
                output, _ = client.communicate(timeout=RUN_TIMEOUT_SECONDS)
            finally:
                _stop_group(client.pid)
        if client.returncode != 0:
            raise SystemExit(f"{name} failed with exit code {client.returncode}")
        return json.loads(output.splitlines()[-1])["jobs_per_second"]


def _stop_group(group):
    """Stop a process group, SIGTERM first: RRQ's worker has its runners in other groups, and ends them itself."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


@contextmanager
def run_redis(folder):
    """Start a private Redis server in *folder*, and yield its port."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("the peers need redis-server (Debian: apt install redis-server)")
    port = find_free_ports()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            _wait_for_port(port)
            yield port
        finally:
            server.terminate()


def _wait_for_port(port):
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def find_free_ports(count=1):
    """Return the first of *many* free consecutive ports, below those that the system uses for connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        if all(_is_free(port + n) for n in range(count)):
            return port


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    results = {}
    for name in [options.only] if options.only else SETTINGS:
        results[name] = {
            setting: round(rate) for setting, rate in measure_rates(name, options.jobs, options.processes).items()
        }
        print(name, results[name], file=sys.stderr)
    print(json.dumps({"jobs": options.jobs, "processes": options.processes, "jobs_per_second": results}))


if __name__ == "__main__":
    main()
