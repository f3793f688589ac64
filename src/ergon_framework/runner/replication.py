"""Run the replicators of a zone in one process: receive signals, drain the replicators, and exit in time.

A zone is a site. A replicator copies the facts that another zone sends into the store of this one; the two zones form a
pair. A replicator that copies or is caught up is following; any other status has a reason that the probes report.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf
from signal import Signals
from threading import Thread
from typing import TypeAlias

from ergon_framework.facts.capacity import CapacityMonitor
from ergon_framework.facts.replica_state import ReplicaState, ReplicaStatus
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.runner.exit import RunExit
from ergon_framework.runner.probes import ProcessHealth
from ergon_framework.runner.signals import SignalQueue, handle_signals
from ergon_framework.telemetry.redaction import mask_credentials

#: Seconds that a replicator has beyond its own drain before the process exits without it.
EXIT_MARGIN_SECONDS = 2.0

ReplicationPart: TypeAlias = Replicator | AsyncReplicator | CapacityMonitor
OnSignal: TypeAlias = Callable[[Signals, int], None]


class _ThreadEnded:
    """Event: a thread has ended, with an error if it failed."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class ReplicationRunner:
    """Runs replicators until a signal arrives, and monitors the capacity of their store."""

    def __init__(self, parts: Sequence[ReplicationPart], *, on_signal: OnSignal | None = None) -> None:
        self.replicators = [part for part in parts if not isinstance(part, CapacityMonitor)]
        self._monitors = [part for part in parts if isinstance(part, CapacityMonitor)]
        self._on_signal = on_signal
        self._events: SignalQueue[Signals | _ThreadEnded] = SignalQueue()
        self._stop_count = 0
        self._deadline = inf
        self.error: BaseException | None = None

    def run(self) -> RunExit:
        """Run them all; only to be called in the main thread, because only that receives signals."""
        with ExitStack() as stack:
            stack.enter_context(handle_signals(self._events))
            for monitor in self._monitors:
                stack.enter_context(monitor.run_in_background())
            threads = self._start_threads()
            while threads:
                event = self._events.get(None if self._deadline == inf else max(0.0, self._deadline - time.monotonic()))
                if event is None:
                    return RunExit.FORCED
                if isinstance(event, _ThreadEnded):
                    threads -= 1
                    # A replicator that fails has a defect: after a restart the others continue together with it.
                    if event.error is not None:
                        self.error = self.error or event.error
                        self._stop()
                    continue
                self._stop()
                if self._on_signal is not None:
                    self._on_signal(event, self._stop_count)
        return RunExit.OK if self.error is None else RunExit.FAILED

    def states(self) -> list[ReplicaState]:
        """Return the state of each pair; thread-safe."""
        return [replicator.state() for replicator in self.replicators]

    def health(self) -> ProcessHealth:
        """Return the health: ready while all replicators follow. Thread-safe."""
        states = self.states()
        reasons = [
            *(_describe_state(state) for state in states if state.status is not ReplicaStatus.FOLLOWING),
            *(warning for monitor in self._monitors for warning in monitor.warnings),
        ]
        ready = not self._stop_count and all(state.status is ReplicaStatus.FOLLOWING for state in states)
        return ProcessHealth(live=True, ready=ready, reasons=tuple(reasons))

    def _start_threads(self) -> int:
        plain = [replicator.run for replicator in self.replicators if isinstance(replicator, Replicator)]
        others = [replicator for replicator in self.replicators if isinstance(replicator, AsyncReplicator)]
        calls: list[Callable[[], None]] = [*plain]
        if others:
            calls.append(lambda: asyncio.run(_run_all(others)))
        for call in calls:
            Thread(target=self._run_call, args=(call,), name="ergon-replicate", daemon=True).start()
        return len(calls)

    def _run_call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            self._events.put(_ThreadEnded(error))
        else:
            self._events.put(_ThreadEnded(None))

    def _stop(self) -> None:
        self._stop_count += 1
        max_drain = max((replicator.policy.drain for replicator in self.replicators), default=0.0)
        self._deadline = min(
            self._deadline, time.monotonic() + EXIT_MARGIN_SECONDS + (max_drain if self._stop_count == 1 else 0.0)
        )
        for replicator in self.replicators:
            replicator.stop()


async def _run_all(replicators: Sequence[AsyncReplicator]) -> None:
    async with asyncio.TaskGroup() as group:
        for replicator in replicators:
            group.create_task(replicator.run())


def _describe_state(state: ReplicaState) -> str:
    message = f"{state.pair.from_zone} to {state.pair.to_zone}: {state.status}"
    return (
        message
        if state.problem is None
        else f"{message}: {mask_credentials(state.problem.reason)}; {state.problem.action}"
    )
