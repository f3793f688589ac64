"""CapacityMonitor: how much free capacity a zone's store has, and an alert before it is full.

A zone, a site with its own store of facts, runs independently for as long as its disk has space. Retention removes only
facts that all readers, the consumers, have confirmed. A full store rejects appends with BufferFull before data is lost;
the monitor warns early enough to act.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Self

from pydantic import Field as Described
from pydantic import model_validator

from ergon_framework.errors import ErgonError
from ergon_framework.facts.boundary import Boundary
from ergon_framework.facts.model import Buffer
from ergon_framework.policy import Policy
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, Numbers, get_registry
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts")


class CapacityPolicy(Policy):
    """When the monitor warns that capacity runs out."""

    alert: float = Described(default=0.8, gt=0, le=1, description="Fraction of a limit at which the alert starts.")
    clear: float = Described(default=0.7, ge=0, lt=1, description="Fraction of a limit below which the alert ends.")
    interval: float = Described(default=10.0, gt=0, description="Seconds between two checks.")

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if self.clear >= self.alert:
            raise ValueError(
                f"clear is {self.clear:g} and alert is {self.alert:g}: clear must be lower, so that the alert does not "
                "flap with every fact"
            )
        return self


class Usage(NamedTuple):
    """How much of one limit is used."""

    name: str
    used: int
    limit: int

    @property
    def share(self) -> float:
        """The used share of the limit, from 0 to 1; a limit of 0 counts as fully used."""
        return self.used / self.limit if self.limit else 1.0


Measure = Callable[[], Iterable[Usage]]


def store_usage(boundary: Boundary, *, max_facts: int | None = None, max_bytes: int | None = None) -> Measure:
    """Return a measure of what *boundary* retains against the given limits; bytes include facts and artifacts.

    A store that cannot report the size of its artifacts counts facts only. Their disk has its own limit: see
    ``disk_usage``.
    """

    def measure() -> Iterator[Usage]:
        states = boundary.list_logs()
        if max_facts is not None:
            yield Usage("facts", sum(state.last - state.first + 1 for state in states), max_facts)
        if max_bytes is not None:
            artifacts = boundary.artifact_bytes() or 0
            yield Usage("bytes", sum(state.bytes for state in states) + artifacts, max_bytes)

    return measure


def disk_usage(folder: str | Path) -> Measure:
    """Return a measure of the file system of *folder*, as far as the user of this process may use it."""

    def measure() -> Iterator[Usage]:
        stats = os.statvfs(folder)
        # Blocks reserved for root are not available to other users.
        # f_bfree counts them as free, f_bavail does not.
        usable = stats.f_blocks - stats.f_bfree + stats.f_bavail
        yield Usage("disk", (usable - stats.f_bavail) * stats.f_frsize, usable * stats.f_frsize)

    return measure


class CapacityMonitor:
    """Checks the limits of one store and warns when one is nearly reached; readable from any thread."""

    def __init__(self, *measures: Measure, buffer: Buffer, policy: CapacityPolicy | None = None) -> None:
        self._measures = measures
        self._buffer = buffer
        self._policy = policy or CapacityPolicy()
        self._usages: dict[str, Usage] = {}
        self._alerting: set[str] = set()

    @property
    def usages(self) -> Sequence[Usage]:
        """The usage of each limit at the last check."""
        return tuple(self._usages.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each limit that is nearly reached, for probes."""
        return tuple(
            f"capacity is running out: {usage.share:.0%} of {usage.limit} {_UNITS[usage.name]} are used; have "
            "readers confirm, run retention, or raise the limit"
            for usage in self.usages
            if usage.name in self._alerting
        )

    def check(self) -> Sequence[Usage]:
        """Measure once and log changes. A limit that cannot be measured keeps its last usage."""
        for measure in self._measures:
            try:
                usages = list(measure())
            except (ErgonError, OSError):
                continue  # callers that need the store report that it is down
            for usage in usages:
                self._update_alert(usage)
        return self.usages

    @contextmanager
    def run_in_background(self) -> Iterator[Self]:
        """Check periodically on a dedicated thread until the context exits."""
        stopped = threading.Event()
        registry = get_registry()
        metrics = registry.register(partial(_CapacityMetrics, monitor=self), self._buffer.value)

        def run() -> None:
            while True:
                self.check()
                if stopped.wait(self._policy.interval):
                    return

        thread = threading.Thread(target=run, name="ergon-capacity", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stopped.set()
            registry.close(metrics)

    def to_gauges(self) -> Numbers:
        """Return the usages and alerts as metrics."""
        numbers: Numbers = {}
        for usage in self.usages:
            numbers[names.CAPACITY_USED_RATIO.name, (usage.name,)] = usage.share
            numbers[names.CAPACITY_NEAR_LIMIT.name, (usage.name,)] = float(usage.name in self._alerting)
        return numbers

    def _update_alert(self, usage: Usage) -> None:
        self._usages = {**self._usages, usage.name: usage}
        if usage.name not in self._alerting and usage.share >= self._policy.alert:
            self._alerting = self._alerting | {usage.name}
            self._log_change(logging.WARNING, Event.STORAGE_NEAR_LIMIT, usage)
        elif usage.name in self._alerting and usage.share < self._policy.clear:
            self._alerting = self._alerting - {usage.name}
            self._log_change(logging.INFO, Event.STORAGE_BELOW_LIMIT, usage)

    @staticmethod
    def _log_change(level: int, event: str, usage: Usage) -> None:
        fields = {Field.CAPACITY: usage.name, Field.USED: usage.used, Field.LIMIT: usage.limit}
        logs.log_event(level, event, fields, to=log)


_UNITS: Final = {"facts": "facts", "bytes": "bytes of facts and artifacts", "disk": "bytes of the disk"}


class _CapacityMetrics(LoopMetrics):
    def __init__(self, name: str, *, label_limiter: LabelLimiter, monitor: CapacityMonitor) -> None:
        # The steps are those of a handler; a store has none.
        super().__init__(name, steps=(), success_steps=("", ""), label_limiter=label_limiter)
        self._monitor = monitor

    def gauges(self) -> Numbers:
        return self._monitor.to_gauges()
