"""Replicating: the replicators of a zone in one process. It hears signals, has them drain, and is over in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf
from signal import Signals
from threading import Thread
from typing import TypeAlias

from ergon_framework.facts.replica import ReplicaState, Status
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.room import Room
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.health import Health
from ergon_framework.runner.signals import heard
from ergon_framework.runner.tokens import Tokens
from ergon_framework.telemetry.redaction import masked

#: Seconds that a replicator has beyond its own drain before the process leaves without it.
MARGIN = 2.0

Part: TypeAlias = Replicator | AsyncReplicator | Room
OnSignal: TypeAlias = Callable[[Signals, int], None]


class _Over:
    """A thread has ended, with an error if it should not have."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Replicating:
    """Runs replicators until a signal comes, and watches the room that their store has."""

    def __init__(self, parts: Sequence[Part], *, on_signal: OnSignal | None = None) -> None:
        self.replicators = [part for part in parts if not isinstance(part, Room)]
        self._rooms = [part for part in parts if isinstance(part, Room)]
        self._on_signal = on_signal
        self._tokens: Tokens[Signals | _Over] = Tokens()
        self._stops = 0
        self._deadline = inf
        self.error: BaseException | None = None

    def run(self) -> Exit:
        """Run them all; to be called in the main thread, because only that hears signals."""
        with ExitStack() as stack:
            stack.enter_context(heard(self._tokens))
            for room in self._rooms:
                stack.enter_context(room.watched())
            threads = self._started()
            while threads:
                token = self._tokens.get(None if self._deadline == inf else max(0.0, self._deadline - time.monotonic()))
                if token is None:
                    return Exit.FORCED
                if isinstance(token, _Over):
                    threads -= 1
                    # One that fails by itself has a defect: the others are to go on with it after a restart.
                    if token.error is not None:
                        self.error = self.error or token.error
                        self._stop()
                    continue
                self._stop()
                if self._on_signal is not None:
                    self._on_signal(token, self._stops)
        return Exit.OK if self.error is None else Exit.FAILED

    def states(self) -> list[ReplicaState]:
        """Of each pair; any thread may ask."""
        return [replicator.state() for replicator in self.replicators]

    def health(self) -> Health:
        """Ready while all of them follow. Any thread may ask."""
        states = self.states()
        reasons = [
            *(_reason(state) for state in states if state.status is not Status.FOLLOWING),
            *(trouble for room in self._rooms for trouble in room.troubles),
        ]
        ready = not self._stops and all(state.status is Status.FOLLOWING for state in states)
        return Health(live=True, ready=ready, reasons=tuple(reasons))

    def _started(self) -> int:
        plain = [replicator.run for replicator in self.replicators if isinstance(replicator, Replicator)]
        others = [replicator for replicator in self.replicators if isinstance(replicator, AsyncReplicator)]
        bodies: list[Callable[[], None]] = [*plain]
        if others:
            bodies.append(lambda: asyncio.run(_together(others)))
        for body in bodies:
            Thread(target=self._work, args=(body,), name="ergon-replicate", daemon=True).start()
        return len(bodies)

    def _work(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - the main thread says it
            self._tokens.put(_Over(error))
        else:
            self._tokens.put(_Over(None))

    def _stop(self) -> None:
        self._stops += 1
        longest = max((replicator.policy.drain for replicator in self.replicators), default=0.0)
        self._deadline = min(self._deadline, time.monotonic() + MARGIN + (longest if self._stops == 1 else 0.0))
        for replicator in self.replicators:
            replicator.stop()


async def _together(replicators: Sequence[AsyncReplicator]) -> None:
    async with asyncio.TaskGroup() as group:
        for replicator in replicators:
            group.create_task(replicator.run())


def _reason(state: ReplicaState) -> str:
    said = f"{state.pair.from_zone} to {state.pair.to_zone}: {state.status}"
    return said if state.trouble is None else f"{said}: {masked(state.trouble.reason)}; {state.trouble.action}"
