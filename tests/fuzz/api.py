"""Run Schemathesis against the provider API in a separate process, with PostgreSQL: api.py --seconds 60.

A valid token gets half of the time, and five invalid ones a tenth each. The run fails if Schemathesis finds
a server error or an undocumented answer, if an invalid token gets anything but a rejection, or if the
server logs an error. It prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import jwt

from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from tests.integration.metering import make_attempt
from tests.servers.databases import create_migrated_database
from tests.servers.postgres import PrivatePostgres, free_port

SECRET = "a secret of the issuer that is long enough for all hashes of the family"
ACCESS_LOG_STATUS = re.compile(r'" (\d{3}) ')
#: Unknown paths and methods and malformed HTTP are rejected before the token is checked.
REJECTED_STATUSES = {"400", "401", "404", "405"}
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


def _make_token(key: str = SECRET, lifetime_seconds: float = 3600) -> str:
    return jwt.encode({"tenant_id": "acme", "exp": time.time() + lifetime_seconds}, key, algorithm="HS256")


def make_tokens() -> dict[str, str | None]:
    return {
        "valid": f"Bearer {_make_token()}",
        "none": None,
        "expired": f"Bearer {_make_token(lifetime_seconds=-3600)}",
        "foreign": f"Bearer {_make_token(key=SECRET[::-1])}",
        "garbage": "Bearer ..%%..",
        "basic": "Basic YWNtZTphY21l",
    }


def serve(folder: Path, dsn: str) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    environment = {
        **os.environ,
        "ERGON_API__ALGORITHM": "HS256",
        "ERGON_API__SECRET": SECRET,
        "ERGON_POSTGRES__DSN": dsn,
    }
    arguments = [
        "-m",
        "uvicorn",
        "--factory",
        "ergon_framework.providers.http.api:app",
        "--port",
        str(port),
        "--no-use-colors",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=log, stderr=log)
    base_url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{base_url}/openapi.json", timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return process, base_url
    process.kill()
    raise SystemExit((folder / "log").read_text(encoding="utf-8", errors="replace"))


def attack(base_url: str, folder: Path, token: str | None, seconds: float) -> tuple[int, Counter[str], str]:
    """Run Schemathesis with *token*; return its exit code, how often each status was answered, and its output."""
    log = folder / "log"
    log_size = log.stat().st_size
    arguments = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{base_url}/openapi.json", "--no-color", "--max-time"),
        *(str(max(1, round(seconds))), "--max-examples", "100000", "--checks", ",".join(CHECKS), "--warnings", "off"),
        *("--generation-with-security-parameters", "false", "--request-timeout", "20"),
        *(() if token is None else ("--header", f"Authorization:{token}")),
    ]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=folder, timeout=seconds + 300)
    with log.open("rb") as file:
        file.seek(log_size)
        statuses = Counter(ACCESS_LOG_STATUS.findall(file.read().decode(errors="replace")))
    return result.returncode, statuses, result.stdout + result.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    answers: dict[str, object] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        postgres = PrivatePostgres(folder / "postgres", fsync=False)
        postgres.start()
        try:
            dsn = create_migrated_database(postgres)
            writer = MetricsWriter(dsn)
            writer.record(make_attempt(tenant_id="acme", provider_name="pay"))
            writer.close(20)
            process, base_url = serve(folder, dsn)
            try:
                for kind, token in make_tokens().items():
                    exit_code, statuses, output = attack(
                        base_url, folder, token, options.seconds * (0.5 if kind == "valid" else 0.1)
                    )
                    # The description is read first, without a token.
                    statuses["200"] -= 1
                    statuses = +statuses
                    answers[kind] = dict(statuses)
                    if exit_code:
                        problems.append(f"{kind}: Schemathesis ended with {exit_code}: {output[-1500:]}")
                    if kind != "valid" and set(statuses) - REJECTED_STATUSES:
                        problems.append(f"{kind}: answered with {sorted(statuses)}")
                    if kind == "valid" and not {"200", "403", "422"} & set(statuses):
                        problems.append(f"valid: reached no answer of the API: {dict(statuses)}")
                    if any(status.startswith("5") for status in statuses) or not statuses:
                        problems.append(f"{kind}: answered with {dict(statuses)}")
                if process.poll() is not None:
                    problems.append(f"the server has ended with {process.returncode}")
            finally:
                process.terminate()
                process.wait(30)
            text = (folder / "log").read_text(encoding="utf-8", errors="replace")
            problems += [marker for marker in ("Traceback", "ERROR", "level=error") if marker in text]
        finally:
            postgres.stop("immediate")
    print(json.dumps({"seconds": options.seconds, "answers": answers, "problems": problems}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
