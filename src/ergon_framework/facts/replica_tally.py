"""Metrics and logs of a replicator: its lag, what it has copied, and each change of its state."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from ergon_framework.facts.replica import ReplicaState, ReplicaStatus
from ergon_framework.facts.replicate import Replication
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, Numbers, get_registry
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.redaction import mask_credentials

log: Final = logging.getLogger(f"{LIBRARY}.facts")


class ReplicaMetrics(LoopMetrics):
    """The metrics of one replicator, for the metrics registry; readable from any thread."""

    def __init__(self, name: str, *, bound: LabelLimiter, replication: Replication) -> None:
        super().__init__(name, steps=(), success_steps=("", ""), bound=bound)
        self._replication = replication

    def counters(self) -> Numbers:
        replication = self._replication
        zones = self._zones
        artifacts, size = replication.copied_artifacts
        numbers: Numbers = {
            (names.REPLICA_FACTS.name, zones): replication.forwarded_count,
            (names.REPLICA_ARTIFACTS.name, zones): artifacts,
            (names.REPLICA_BYTES.name, zones): size,
        }
        for status, times in list(replication.failure_counts.items()):
            numbers[names.REPLICA_TROUBLES.name, (*zones, status.value)] = times
        return numbers

    def gauges(self) -> Numbers:
        state, zones = self._replication.state(), self._zones
        numbers: Numbers = {(names.REPLICA_STATUS.name, (*zones, state.status.value)): 1}
        if state.lag is not None:
            numbers[names.REPLICA_LAG.name, zones] = state.lag.facts
            numbers[names.REPLICA_LAG_BYTES.name, zones] = state.lag.bytes
            numbers[names.REPLICA_LAG_SECONDS.name, zones] = state.lag.seconds
        return numbers

    @property
    def _zones(self) -> tuple[str, ...]:
        return self._bound(names.REPLICA_LAG, tuple(self._replication.state().pair))


@contextmanager
def track_metrics(replication: Replication) -> Iterator[None]:
    """Register the metrics of *replication* until the context exits; its counters are kept afterwards."""
    registry = get_registry()
    metrics = registry.register(partial(ReplicaMetrics, replication=replication), replication.state().name)
    try:
        yield
    finally:
        registry.close(metrics)


_LEVELS: Final = {
    ReplicaStatus.FOLLOWING: logging.INFO,
    ReplicaStatus.STARTING: logging.INFO,
    ReplicaStatus.STOPPED: logging.INFO,
}


def log_state_change(state: ReplicaState) -> None:
    """Log a state change of a replicator, with the action expected from the operator: once for each change."""
    level = logging.ERROR if state.needs_operator else _LEVELS.get(state.status, logging.WARNING)
    problem = state.problem if state.status not in _LEVELS else None
    fields = {
        Field.REPLICA: state.name,
        Field.FROM_ZONE: state.pair.from_zone,
        Field.TO_ZONE: state.pair.to_zone,
        Field.STATUS: state.status.value,
        Field.OFFSET: state.offset,
        Field.MESSAGE_ID: None if problem is None else problem.message_id,
        Field.REASON: None if problem is None else mask_credentials(problem.reason),
        Field.ACTION: None if problem is None else problem.action,
    }
    logs.log_event(level, Event.REPLICA_HALTED if state.needs_operator else Event.REPLICA_CHANGED, fields, to=log)
