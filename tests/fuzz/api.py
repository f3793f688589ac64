"""Run Schemathesis against the provider API in a process of its own, with PostgreSQL: api.py --seconds 60.

A valid token has half of the time, and five bad ones a tenth each. The run fails if Schemathesis finds
an answer that is a server error or not in the description, if a bad token gets anything but a refusal, or if the
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

from ergon_framework.providers.sql.writer import MetricsWriter
from tests.integration.metering import attempt
from tests.servers.databases import migrated
from tests.servers.postgres import PrivatePostgres, free_port

SECRET = "a secret of the issuer that is long enough for all hashes of the family"
ACCESS = re.compile(r'" (\d{3}) ')
#: A path or a method that is not there is refused before the token is looked at; so is a request that is no HTTP.
REFUSED = {"400", "401", "404", "405"}
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


def _token(key: str = SECRET, lasts: float = 3600) -> str:
    return jwt.encode({"tenant_id": "acme", "exp": time.time() + lasts}, key, algorithm="HS256")


def tokens() -> dict[str, str | None]:
    return {
        "valid": f"Bearer {_token()}",
        "none": None,
        "expired": f"Bearer {_token(lasts=-3600)}",
        "foreign": f"Bearer {_token(key=SECRET[::-1])}",
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
    words = ["-m", "uvicorn", "--factory", "ergon_framework.providers.api:app", "--port", str(port), "--no-use-colors"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log)
    where = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{where}/openapi.json", timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return process, where
    process.kill()
    raise SystemExit((folder / "log").read_text(encoding="utf-8", errors="replace"))


def attack(where: str, folder: Path, token: str | None, seconds: float) -> tuple[int, Counter[str], str]:
    """Run Schemathesis with *token*; its exit code, how often each status was answered, and what it said."""
    log = folder / "log"
    before = log.stat().st_size
    words = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{where}/openapi.json", "--no-color", "--max-time"),
        *(str(max(1, round(seconds))), "--max-examples", "100000", "--checks", ",".join(CHECKS), "--warnings", "off"),
        *("--generation-with-security-parameters", "false", "--request-timeout", "20"),
        *(() if token is None else ("--header", f"Authorization:{token}")),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, timeout=seconds + 300)
    with log.open("rb") as file:
        file.seek(before)
        seen = Counter(ACCESS.findall(file.read().decode(errors="replace")))
    return done.returncode, seen, done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    told: dict[str, object] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        postgres = PrivatePostgres(folder / "postgres", fsync=False)
        postgres.start()
        try:
            dsn = migrated(postgres)
            writer = MetricsWriter(dsn)
            writer.record(attempt(tenant_id="acme", provider_name="pay"))
            writer.close(20)
            process, where = serve(folder, dsn)
            try:
                for kind, token in tokens().items():
                    code, seen, said = attack(where, folder, token, given.seconds * (0.5 if kind == "valid" else 0.1))
                    # The description is read first, without a token.
                    seen["200"] -= 1
                    seen = +seen
                    told[kind] = dict(seen)
                    if code:
                        problems.append(f"{kind}: Schemathesis ended with {code}: {said[-1500:]}")
                    if kind != "valid" and set(seen) - REFUSED:
                        problems.append(f"{kind}: answered with {sorted(seen)}")
                    if kind == "valid" and not {"200", "403", "422"} & set(seen):
                        problems.append(f"valid: reached no answer of the API: {dict(seen)}")
                    if any(status.startswith("5") for status in seen) or not seen:
                        problems.append(f"{kind}: answered with {dict(seen)}")
                if process.poll() is not None:
                    problems.append(f"the server has ended with {process.returncode}")
            finally:
                process.terminate()
                process.wait(30)
            text = (folder / "log").read_text(encoding="utf-8", errors="replace")
            problems += [word for word in ("Traceback", "ERROR", "level=error") if word in text]
        finally:
            postgres.stop("immediate")
    print(json.dumps({"seconds": given.seconds, "answers": told, "problems": problems}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
