"""Stopwatch: from the start of the first handler to the last, the same for every library."""

from __future__ import annotations

import json
import os
import threading
import time

#: The name of a fresh queue.
QUEUE_NAME = os.environ.get("BENCH_QUEUE", "bench")
#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}


class Stopwatch:
    """Counts handlers; when all have run it prints their number per second, and ends the process."""

    def __init__(self, count):
        self._count = count
        self._lock = threading.Lock()
        self._done = 0
        self._began = 0.0

    def tick(self):
        with self._lock:
            self._done += 1
            if self._done == 1:
                self._began = time.perf_counter()
            if self._done < self._count:
                return
            seconds = time.perf_counter() - self._began
        # Not sys.stdout: some workers replace it.
        os.write(1, json.dumps({"rate": (self._count - 1) / seconds}).encode() + b"\n")
        # The rest is not measured, and some workers cannot be ended otherwise.
        os._exit(0)
