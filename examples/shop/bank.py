"""The bank: charges cards over HTTP, once per idempotency key, and stores every charge before it responds.

python bank.py --port 8700 --ledger charges.jsonl --trouble 0.1

The share of responses given by --trouble is late, is an error before or after the charge, or never comes.
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
    """A file with one synced line per charge; an incomplete last line belongs to a charge without a response."""

    def __init__(self, path: Path, *, forgetful: bool) -> None:
        self._forgetful = forgetful
        self._lock = threading.Lock()
        self._charges: dict[str, dict[str, Any]] = {}
        complete = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(len(complete) + 1 if complete else 0)
        self._file.seek(0, os.SEEK_END)
        for line in complete.splitlines():
            charge = json.loads(line)
            self._charges[charge["key"]] = charge

    def charge(self, key: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the charge under *key*, made now or before."""
        with self._lock:
            if key in self._charges and not self._forgetful:
                return self._charges[key]
            record = {
                "key": key,
                "receipt": f"r-{len(self._charges) + 1}",
                "order": request["order"],
                "cents": request["cents"],
            }
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._charges[key] = record
            return record


class ChargeHandler(BaseHTTPRequestHandler):
    ledger: Ledger
    trouble: float
    timeout = 30

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        behaviour = random.choice(("slow", "before", "after", "silent")) if random.random() < self.trouble else "good"  # noqa: S311
        if behaviour == "slow":
            time.sleep(random.uniform(0.2, 1.0))  # noqa: S311 - no secret
        if behaviour == "before":
            return self._respond(503, {})
        if request["card"] == "empty":
            return self._respond(200, {"status": "declined"})
        record = self.ledger.charge(self.headers["Idempotency-Key"], request)
        if behaviour == "after":
            return self._respond(503, {})
        if behaviour == "silent":
            self.close_connection = True
            return None
        return self._respond(200, {"status": "paid", "receipt": record["receipt"]})

    def _respond(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(ConnectionError):  # the client may have timed out
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--trouble", type=float, default=0.0, help="the share of requests that do not go well")
    parser.add_argument("--forgetful", action="store_true", help="ignore keys, as a bank must not")
    options = parser.parse_args()
    ChargeHandler.ledger = Ledger(options.ledger, forgetful=options.forgetful)
    ChargeHandler.trouble = options.trouble
    ThreadingHTTPServer(("127.0.0.1", options.port), ChargeHandler).serve_forever()


if __name__ == "__main__":
    main()
