"""PrivatePrometheus: a real, private Prometheus with its own port and folder."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.servers.postgres import free_port

_SERVER_TIMEOUT_SECONDS = 30.0


class PrometheusServerError(RuntimeError):
    """The private server is missing, or does not do what it should."""


def find_program(name: str = "prometheus") -> str:
    program = shutil.which(name)
    if program is None:
        raise PrometheusServerError(f"these tests need {name} on the PATH; install it (Debian: apt install prometheus)")
    return program


class PrivatePrometheus:
    """A server in *folder* that scrapes *targets* every *interval* and evaluates the rules in *rules*."""

    def __init__(self, folder: Path, targets: Sequence[str], *, rules: Path, interval: str = "500ms") -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            # As JSON, which is YAML too.
            "scrape_configs": [{"job_name": "ergon", "static_configs": [{"targets": list(targets)}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")

    def start(self) -> None:
        command = [
            find_program(),
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_tail = (self.folder / "server.log").read_text(encoding="utf-8", errors="replace")[-2000:]
                self.stop()
                raise PrometheusServerError(f"the server did not start: {log_tail}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Return the current value of the expression."""
        results: list[dict[str, Any]] = self._get_data("query", query=expression)["result"]
        return results

    def ask_range(self, expression: str, *, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return its values from *start* to *end*, every *step* seconds."""
        parameters = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        results: list[dict[str, Any]] = self._get_data("query_range", **parameters)["result"]
        return results

    def _get_data(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_SERVER_TIMEOUT_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusServerError(f"{parameters}: {error.read().decode()}") from error

    def list_rules(self) -> list[dict[str, Any]]:
        """Return every alert with its state and its last error."""
        return [rule for group in self._get_data("rules")["groups"] for rule in group["rules"]]

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_SERVER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_SERVER_TIMEOUT_SECONDS)
        self._process = None
