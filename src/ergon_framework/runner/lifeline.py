"""The lifeline: two pipes between a parent and one of its processes.

Down come orders, and the end of the pipe when the parent is gone, however it went: the system closes
it even for one that was killed. Up go reports. Both are lines of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock, Thread
from typing import Any

from ergon_framework.runner.process import Order

#: The longest line that is read; a longer one is passed over.
LONGEST = 1_000_000


class Lifeline:
    """The child's end."""

    def __init__(self, orders: int, reports: int) -> None:
        for end in (orders, reports):
            # What the task starts has no business on this line, and would keep it open.
            os.set_inheritable(end, False)  # noqa: FBT003 - its only argument
        self._orders = orders
        self._reports = reports
        self._lock = Lock()

    def listen(self, told: Callable[[Order], None]) -> None:
        """Have *told* called with every order; a parent that is gone has ordered to stop."""

        def hear() -> None:
            known = {order.value: order for order in Order}
            for line in lines(self._orders):
                order = known.get(line.decode(errors="replace"))
                if order is not None:
                    told(order)
            told(Order.STOP)

        Thread(target=hear, name="ergon-lifeline", daemon=True).start()

    def report(self, kind: str, told: dict[str, Any]) -> None:
        """Tell the parent; may wait for one that does not listen, never fails for one that is gone."""
        data = memoryview(f"{json.dumps({'kind': kind, **told})}\n".encode())
        with self._lock, suppress(OSError):
            while data:
                data = data[os.write(self._reports, data) :]


def lines(end: int) -> Iterator[bytes]:
    """The lines that come out of a pipe, until nobody can write into it any more; *end* is closed then."""
    held = b""
    skipping = False
    try:
        while data := os.read(end, 65_536):
            *whole, held = (held + data).split(b"\n")
            for line in whole:
                if not skipping and len(line) <= LONGEST:
                    yield line
                skipping = False
            if len(held) > LONGEST:
                held, skipping = b"", True
    finally:
        os.close(end)


def reports(end: int) -> Iterator[dict[str, Any]]:
    """The reports that come out of a pipe; what is none is passed over."""
    for line in lines(end):
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found
