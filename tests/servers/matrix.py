"""Run the conformance suites of the connectors on every installed release of the servers.

    python tests/servers/matrix.py [--release NAME]... [--server NAME]... [--workers 2]

It prints one line for each server and release with the version that ran, and one line of JSON at the end. The exit code
is 1 if a check failed, or if a release is not installed: then run ``tools/install-servers --current``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.servers import releases  # noqa: E402 - this file is also run as a script

#: The command that prints the version of each server, its suite, and the environment that selects it.
SERVERS: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "postgres": (["postgres", "--version"], "postgres", {}),
    "rabbitmq": (["rabbitmqctl", "version"], "rabbitmq", {}),
    "redis": (["redis-server", "--version"], "redis", {}),
    "valkey": (["valkey-server", "--version"], "redis", {"ERGON_REDIS": "valkey"}),
    "nats": (["nats-server", "--version"], "nats", {}),
}


def main() -> int:
    options = parse_options()
    rows = [
        run_suite(release, server, workers=options.workers)
        for release in options.release or releases.RELEASES
        for server in options.server or SERVERS
        if (release, server) != ("debian12", "valkey")  # Debian 12 has no Valkey
    ]
    print(json.dumps({"target": "server matrix", "ok": all(row["ok"] for row in rows), "runs": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--release", action="append", choices=list(releases.RELEASES))
    parser.add_argument("--server", action="append", choices=list(SERVERS))
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


def run_suite(release: str, server: str, *, workers: int) -> dict[str, Any]:
    """Run the suite of *server* in *release*; return its version and the counts of its results."""
    command, suite, variables = SERVERS[server]
    environment = {**os.environ, "ERGON_SERVERS": release, **variables}
    version = read_version(release, command)
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        tests = [f"tests/conformance/test_{suite}.py", "-q", "-p", "no:cacheprovider", "-n", str(workers)]
        subprocess.run(
            [sys.executable, "-m", "pytest", *tests, f"--junitxml={report.name}"],
            cwd=ROOT,
            env=environment,
            stdout=sys.stderr,
            check=False,
        )
        content = Path(report.name).read_text(encoding="utf-8")
    counts = {"tests": 0, "failures": 0, "errors": 0}
    for element in ET.fromstring(content).iter("testsuite") if content else []:
        counts = {name: counts[name] + int(element.get(name, 0)) for name in counts}
    row = {
        "release": release,
        "server": server,
        "version": version,
        "seconds": round(time.monotonic() - began),
        **counts,
    }
    row["ok"] = bool(version and counts["tests"] and not counts["failures"] and not counts["errors"])
    print(f"{server} {version} ({release}): {counts['tests']} checks, {counts['failures']} failed", flush=True)
    return row


def read_version(release: str, command: list[str]) -> str:
    """Return the version that the program of the release prints; empty if it has none."""
    os.environ["ERGON_SERVERS"] = release
    folders = ["/usr/lib/postgresql/*/bin", "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin"]
    found = [f"{folder}/{command[0]}" for pattern in folders for folder in releases.find_folders(pattern)]
    root = releases.find_root() or Path("/")
    program = next((path for path in found if (root / path[1:]).exists()), releases.find_program(command[0]))
    if program is None:
        return ""
    completed = subprocess.run(
        releases.in_release([program, *command[1:]]), capture_output=True, text=True, check=False, timeout=60
    )
    words = completed.stdout.replace("v=", " ").replace("v2", "2").split()
    return next((word for word in words if word[:1].isdigit()), "")


if __name__ == "__main__":
    sys.exit(main())
