"""Sums: what several processes have counted, as one. A counter never goes back, whoever dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from ergon_framework.telemetry.metrics import BY_NAME, VALUES, Bound, Key, Numbers, add, snapshot

#: How many values go into one report: a line of them stays far below the longest that is read.
PART: Final = 2_000


class Sums:
    """Adds up what this process counts, and what others tell of themselves. Any thread may tell, and any may read."""

    def __init__(self, own: Callable[[], Numbers] = snapshot, *, limit: int = VALUES) -> None:
        self._own = own
        self._lock = threading.Lock()
        self._bound = Bound(limit)
        self._told: dict[int, Numbers] = {}
        #: Of reports that are not complete yet.
        self._parts: dict[int, Numbers] = {}
        self._gone: Numbers = {}
        self._shown: Numbers = {}

    def tell(self, source: int, report: dict[str, Any]) -> None:
        """A part of what process *source* has counted so far; with the last one all of it takes the place of before."""
        with self._lock:
            parts = self._parts.setdefault(source, {})
            parts.update(_heard(report.get("numbers")))
            if report.get("last") is True:
                self._told[source] = self._parts.pop(source)

    def gone(self, source: int) -> None:
        """Process *source* is no more: what it has counted is kept, how it was is not."""
        with self._lock:
            self._parts.pop(source, None)
            left = {key: value for key, value in self._told.pop(source, {}).items() if _counts(key)}
            add(self._gone, self._bounded(left))

    def read(self) -> Numbers:
        """Every value now, by the metric's name and the values of all its attributes."""
        own = self._own()
        with self._lock:
            found = dict(self._gone)
            for numbers in (own, *self._told.values()):
                add(found, self._bounded(numbers))
            for key in filter(_counts, found):
                # Fractions come out otherwise by a hair when they are added in another order, as after a death. To
                # whoever collects, a counter that goes back by a hair has begun anew.
                found[key] = self._shown[key] = max(found[key], self._shown.get(key, 0))
        return found

    def _bounded(self, numbers: Numbers) -> Numbers:
        """Each process has bounded its own labels; those of many, one after the other, are bounded here."""
        found: Numbers = {}
        for key, value in numbers.items():
            metric = BY_NAME[key[0]]
            add(found, {(metric.name, self._bound(metric, key[1])): value})
        return found


def told(numbers: Numbers) -> Iterator[dict[str, Any]]:
    """*numbers* as reports of plain data; there is always one that is the last."""
    rows = [[name, list(values), value] for (name, values), value in numbers.items()]
    for at in range(0, max(1, len(rows)), PART):
        yield {"numbers": rows[at : at + PART], "last": at + PART >= len(rows)}


def _heard(rows: Any) -> Iterator[tuple[Key, float]]:
    """Of plain data, nothing is believed but what fits."""
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [str(name), list(values), int() | float() as value] if name in BY_NAME:
                if len(values) == len(BY_NAME[name].attributes):
                    yield (name, tuple(map(str, values))), value


def _counts(key: Key) -> bool:
    return BY_NAME[key[0]].kind == "counter"
