"""What is counted and logged of facts and artifacts: outcomes by buffer, never a payload."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Final

from ergon_framework.facts.boundary import Appended
from ergon_framework.facts.errors import ArtifactConflict, ArtifactLost, BufferFull, FactConflict, FactError
from ergon_framework.facts.model import Buffer
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import Bound, Counts, Numbers, registry_of
from ergon_framework.telemetry.names import LIBRARY, Event, Field, Metric

log: Final = logging.getLogger(f"{LIBRARY}.facts")


class Tally(Counts):
    """What is counted of one buffer, or of one call of the service, from all threads."""

    def __init__(self, buffer: str, *, bound: Bound) -> None:
        super().__init__(buffer, steps=(), everyday=("", ""), bound=bound)
        self._lock = threading.Lock()

    def renew(self) -> None:
        self._lock = threading.Lock()

    def count(self, metric: Metric, value: str, amount: int = 1) -> None:
        with self._lock:
            self.add(metric, value, amount=amount)

    def counted(self) -> Numbers:
        with self._lock:
            return super().counted()


def appended(buffer: Buffer, result: Appended) -> None:
    """A fact was given to *buffer*, and this is what came of it."""
    tally_of(buffer).count(names.FACTS, _outcome(result))


def appended_all(buffer: Buffer, results: Iterable[Appended]) -> None:
    """The same for many, which is cheaper."""
    tally = tally_of(buffer)
    for outcome, amount in Counter(map(_outcome, results)).items():
        tally.count(names.FACTS, outcome, amount)


def _outcome(result: Appended) -> str:
    if isinstance(result, FactError):
        return _blame(result)
    return "repeated" if result.duplicate else "stored"


def put(buffer: Buffer, outcome: str) -> None:
    """An artifact was given to the store of *buffer*."""
    tally_of(buffer).count(names.ARTIFACTS, outcome)


def put_failed(buffer: Buffer, error: BaseException) -> None:
    """An artifact was not stored: refused, or its bytes broke off."""
    put(buffer, _blame(error) if isinstance(error, FactError) else "broken")


def lost(buffer: Buffer, error: ArtifactLost) -> None:
    """An artifact that a fact names could not be read: somebody has to look at its producer."""
    tally_of(buffer).count(names.ARTIFACTS_LOST, error.from_zone)
    fields = {
        Field.ZONE: error.from_zone,
        Field.MESSAGE_ID: error.message_id,
        Field.BUCKET: error.bucket,
        Field.KEY: error.key,
    }
    logs.say(logging.ERROR, Event.ARTIFACT_LOST, fields, to=log)


def epoch_changed(epoch: str) -> None:
    """The store is not the one that it was: whoever has cursors of before will notice."""
    logs.say(logging.WARNING, Event.EPOCH_CHANGED, {Field.EPOCH: epoch}, to=log)


def _blame(error: FactError) -> str:
    if isinstance(error, FactConflict | ArtifactConflict):
        return "conflict"
    return "full" if isinstance(error, BufferFull) else "refused"


def called(method: str, outcome: str) -> None:
    """A call of the service is over."""
    _tally(method).count(names.FACT_CALLS, outcome)


_lock = threading.Lock()
_tallies: Final[dict[str, Tally]] = {}


def tally_of(buffer: Buffer) -> Tally:
    """The one tally of all buffers of that name in this process."""
    return _tally(buffer.value)


def _tally(name: str) -> Tally:
    found = _tallies.get(name)
    if found is None:
        with _lock:
            found = _tallies.get(name) or registry_of().join(Tally, name)
            _tallies[name] = found
    return found


def _forked() -> None:
    """A child of a fork: whoever held one of these locks is not here."""
    global _lock  # noqa: PLW0603 - a lock that somebody else holds for ever has to be replaced
    _lock = threading.Lock()
    for tally in _tallies.values():
        tally.renew()


os.register_at_fork(after_in_child=_forked)
