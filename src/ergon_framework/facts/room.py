"""Room: how much a zone's store can still take, and an alert before it is full.

A zone runs alone for as long as its disk lasts. A full store refuses with BufferFull before anything is lost; this
says so while there is still time to do something about it.
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
from ergon_framework.telemetry.metrics import Bound, Counts, Numbers, registry_of
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts")


class RoomPolicy(Policy):
    """When it is said that room ends."""

    alert: float = Described(
        default=0.8, gt=0, le=1, description="Share of a limit from which on it is nearly reached."
    )
    clear: float = Described(default=0.7, ge=0, lt=1, description="Share below which it is no longer.")
    interval: float = Described(default=10.0, gt=0, description="Seconds between two looks.")

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.clear >= self.alert:
            raise ValueError(
                f"clear is {self.clear:g} and alert {self.alert:g}; clear is the lower one, so that an alert does not "
                "come and go with every fact"
            )
        return self


class Level(NamedTuple):
    """How much of one limit is used."""

    name: str
    used: int
    limit: int

    @property
    def share(self) -> float:
        """From 0 to 1; a limit of nothing is always reached."""
        return self.used / self.limit if self.limit else 1.0


Measure = Callable[[], Iterable[Level]]


def of_store(boundary: Boundary, *, max_facts: int | None = None, max_bytes: int | None = None) -> Measure:
    """What *boundary* retains, against the limits that it was given: bytes are those of facts and of artifacts.

    A store that cannot say what its artifacts have counts facts alone. Their disk is another limit: see ``of_disk``.
    """

    def measure() -> Iterator[Level]:
        states = boundary.survey()
        if max_facts is not None:
            yield Level("facts", sum(state.last - state.first + 1 for state in states), max_facts)
        if max_bytes is not None:
            artifacts = boundary.artifact_bytes() or 0
            yield Level("bytes", sum(state.bytes for state in states) + artifacts, max_bytes)

    return measure


def of_disk(folder: str | Path) -> Measure:
    """The file system that *folder* is on, as far as whoever runs this may use it."""

    def measure() -> Iterator[Level]:
        found = os.statvfs(folder)
        # What is reserved for root is not there for anybody else.
        usable = found.f_blocks - found.f_bfree + found.f_bavail
        yield Level("disk", (usable - found.f_bavail) * found.f_frsize, usable * found.f_frsize)

    return measure


class Room:
    """Looks at the limits of one store, and says when one of them is nearly reached; any thread may ask."""

    def __init__(self, *measures: Measure, buffer: Buffer, policy: RoomPolicy | None = None) -> None:
        self._measures = measures
        self._buffer = buffer
        self._policy = policy or RoomPolicy()
        self._levels: dict[str, Level] = {}
        self._raised: set[str] = set()

    @property
    def levels(self) -> Sequence[Level]:
        """As last seen."""
        return tuple(self._levels.values())

    @property
    def troubles(self) -> tuple[str, ...]:
        """A sentence for each limit that is nearly reached, for probes."""
        return tuple(
            f"room ends: {level.share:.0%} of {level.limit} {_UNITS[level.name]} are used; have readers confirm, let "
            "retention run, or give it more"
            for level in self.levels
            if level.name in self._raised
        )

    def look(self) -> Sequence[Level]:
        """Measure once, and say what has changed. What cannot be measured is as it was."""
        for measure in self._measures:
            try:
                found = list(measure())
            except (ErgonError, OSError):
                continue  # a store that is down is told of by whoever needs it
            for level in found:
                self._judge(level)
        return self.levels

    @contextmanager
    def watched(self) -> Iterator[Self]:
        """Look again and again for as long as this lasts, on a thread of its own."""
        over = threading.Event()
        registry = registry_of()
        tally = registry.join(partial(_RoomTally, room=self), self._buffer.value)

        def watch() -> None:
            while True:
                self.look()
                if over.wait(self._policy.interval):
                    return

        thread = threading.Thread(target=watch, name="ergon-room", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            registry.close(tally)

    def gauged(self) -> Numbers:
        """As metrics."""
        found: Numbers = {}
        for level in self.levels:
            found[names.ROOM.name, (level.name,)] = level.share
            found[names.ROOM_ALERTS.name, (level.name,)] = float(level.name in self._raised)
        return found

    def _judge(self, level: Level) -> None:
        self._levels = {**self._levels, level.name: level}
        if level.name not in self._raised and level.share >= self._policy.alert:
            self._raised = self._raised | {level.name}
            self._say(logging.WARNING, Event.ROOM_ENDS, level)
        elif level.name in self._raised and level.share < self._policy.clear:
            self._raised = self._raised - {level.name}
            self._say(logging.INFO, Event.ROOM_AGAIN, level)

    @staticmethod
    def _say(level: int, event: str, found: Level) -> None:
        fields = {Field.ROOM: found.name, Field.USED: found.used, Field.LIMIT: found.limit}
        logs.say(level, event, fields, to=log)


_UNITS: Final = {"facts": "facts", "bytes": "bytes of facts and artifacts", "disk": "bytes of the disk"}


class _RoomTally(Counts):
    def __init__(self, name: str, *, bound: Bound, room: Room) -> None:
        super().__init__(name, steps=(), everyday=("", ""), bound=bound)
        self._room = room

    def gauged(self) -> Numbers:
        return self._room.gauged()
