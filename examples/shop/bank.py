"""The bank: charges cards over HTTP, once for each idempotency key, and writes every charge down before it answers.

python bank.py --port 8700 --ledger charges.jsonl --trouble 0.1

So many of its answers are late, are an error before or after the charge was made, or never come.
"""

import argparse
import contextlib
import json
import os
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Ledger:
    """Every charge a line, synced; what a crash left of the last line was never answered for."""

    def __init__(self, path: Path, *, forgetful: bool) -> None:
        self._forgetful = forgetful
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(len(whole) + 1 if whole else 0)
        self._file.seek(0, os.SEEK_END)
        for line in whole.splitlines():
            charge = json.loads(line)
            self._known[charge["key"]] = charge

    def charge(self, key: str, asked: dict[str, Any]) -> dict[str, Any]:
        """The charge under *key*, made now or before."""
        with self._lock:
            if key in self._known and not self._forgetful:
                return self._known[key]
            made = {
                "key": key,
                "receipt": f"r-{len(self._known) + 1}",
                "order": asked["order"],
                "cents": asked["cents"],
            }
            self._file.write(json.dumps(made).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._known[key] = made
            return made


class Desk(BaseHTTPRequestHandler):
    ledger: Ledger
    trouble: float
    timeout = 30

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mood = random.choice(("slow", "before", "after", "silent")) if random.random() < self.trouble else "good"  # noqa: S311
        if mood == "slow":
            time.sleep(random.uniform(0.2, 1.0))  # noqa: S311 - no secret
        if mood == "before":
            return self._answer(503, {})
        if asked["card"] == "empty":
            return self._answer(200, {"status": "declined"})
        made = self.ledger.charge(self.headers["Idempotency-Key"], asked)
        if mood == "after":
            return self._answer(503, {})
        if mood == "silent":
            self.close_connection = True
            return None
        return self._answer(200, {"status": "paid", "receipt": made["receipt"]})

    def _answer(self, status: int, told: dict[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(ConnectionError):  # whoever asked waits no longer
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: an order is nobody's business here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--trouble", type=float, default=0.0, help="the share of requests that do not go well")
    parser.add_argument("--forgetful", action="store_true", help="ignore keys, as a bank must not")
    options = parser.parse_args()
    Desk.ledger = Ledger(options.ledger, forgetful=options.forgetful)
    Desk.trouble = options.trouble
    ThreadingHTTPServer(("127.0.0.1", options.port), Desk).serve_forever()


if __name__ == "__main__":
    main()
