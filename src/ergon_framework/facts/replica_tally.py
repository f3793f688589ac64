"""What is seen of a replicator: how far behind it is, what it has copied, and each change of its state."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from ergon_framework.facts.replica import ReplicaState, Status
from ergon_framework.facts.replicate import Replication
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import Bound, Counts, Numbers, registry_of
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.redaction import masked

log: Final = logging.getLogger(f"{LIBRARY}.facts")


class ReplicaTally(Counts):
    """The figures of one replicator, for the registry of metrics; any thread may ask."""

    def __init__(self, name: str, *, bound: Bound, replication: Replication) -> None:
        super().__init__(name, steps=(), everyday=("", ""), bound=bound)
        self._replication = replication

    def counted(self) -> Numbers:
        replication = self._replication
        zones = self._zones
        artifacts, size = replication.carried
        found: Numbers = {
            (names.REPLICA_FACTS.name, zones): replication.forwarded,
            (names.REPLICA_ARTIFACTS.name, zones): artifacts,
            (names.REPLICA_BYTES.name, zones): size,
        }
        for status, times in list(replication.troubles.items()):
            found[names.REPLICA_TROUBLES.name, (*zones, status.value)] = times
        return found

    def gauged(self) -> Numbers:
        state, zones = self._replication.state(), self._zones
        found: Numbers = {(names.REPLICA_STATUS.name, (*zones, state.status.value)): 1}
        if state.lag is not None:
            found[names.REPLICA_LAG.name, zones] = state.lag.facts
            found[names.REPLICA_LAG_BYTES.name, zones] = state.lag.bytes
            found[names.REPLICA_LAG_SECONDS.name, zones] = state.lag.seconds
        return found

    @property
    def _zones(self) -> tuple[str, ...]:
        return self._bound(names.REPLICA_LAG, tuple(self._replication.state().pair))


@contextmanager
def counted(replication: Replication) -> Iterator[None]:
    """Have the figures of *replication* seen for as long as this lasts; what it has counted stays."""
    registry = registry_of()
    tally = registry.join(partial(ReplicaTally, replication=replication), replication.state().name)
    try:
        yield
    finally:
        registry.close(tally)


_LEVELS: Final = {Status.FOLLOWING: logging.INFO, Status.STARTING: logging.INFO, Status.STOPPED: logging.INFO}


def tell(state: ReplicaState) -> None:
    """Log what has become of a replicator, with what is to be done about it: once for each change."""
    level = logging.ERROR if state.halted else _LEVELS.get(state.status, logging.WARNING)
    trouble = state.trouble if state.status not in _LEVELS else None
    fields = {
        Field.REPLICA: state.name,
        Field.FROM_ZONE: state.pair.from_zone,
        Field.TO_ZONE: state.pair.to_zone,
        Field.STATUS: state.status.value,
        Field.OFFSET: state.offset,
        Field.MESSAGE_ID: None if trouble is None else trouble.message_id,
        Field.REASON: None if trouble is None else masked(trouble.reason),
        Field.ACTION: None if trouble is None else trouble.action,
    }
    logs.say(level, Event.REPLICA_HALTED if state.halted else Event.REPLICA_CHANGED, fields, to=log)
