"""Run a real consumer loop of the framework over a client, on threads or on asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.report import Outcome, Report
from ergon_framework.testing.conformance.check import expect
from ergon_framework.testing.conformance.client import Client, in_thread
from ergon_framework.testing.conformance.sitting import CheckContext
from ergon_framework.transaction import Transaction

Body = Callable[[Transaction], Any]
#: How long a handler waits before it decides: until an event, or a number of seconds.
Stay = Callable[[Transaction], threading.Event | float]

#: Seconds after which a handler continues, and after which a stopped loop counts as hanging.
STUCK = 15.0


def policy(**loop: Any) -> ConsumerPolicy:
    """Create a consumer policy with short waits."""
    quick = {"backoff": 0.01, "multiplier": 1.0}
    around: dict[str, Any] = {
        "concurrency": {"value": 4},
        "streaming": True,
        "empty_queue": {"backoff": 0.02, "multiplier": 1.0, "cap": 0.1},
        "identity_delay": 0.05,
        "drain_timeout": 5.0,
    }
    steps = {name: {"retry": quick} for name in ("fetch", "process", "success", "exception", "settle")}
    for name in ("fetch", "settle"):  # retries outlast an outage
        steps[name]["retry"] = {**quick, "max_attempts": 10_000, "cap": 0.0}
    return ConsumerPolicy.load({"loop": around | loop, "steps": steps})


class _Threads(ConsumerMixin, Task):
    name = "Exam"

    def process_transaction(self, transaction: Transaction) -> Any:
        return self.services.loop.handle(transaction)


class _Asyncio(AsyncConsumerMixin, AsyncTask):
    name = "Exam"

    async def process_transaction(self, transaction: Transaction) -> Any:
        return await self.services.loop.handle_async(transaction)


class Loop:
    """One run: how often the handler of each transaction ran, and the outcome of each delivery."""

    def __init__(self, sitting: CheckContext, body: Body, stay: Stay | None) -> None:
        self._sitting = sitting
        self._body = body
        self._stay = stay
        self.runs: Counter[str] = Counter()
        self.outcomes: list[Outcome] = []
        self.task: Any = None
        self.report: Report | None = None
        self._stopping = False

    def stop(self) -> None:
        """Drain and stop the loop; a second call does nothing, because a second stop of the task would abort it."""
        if not self._stopping:
            self._stopping = True
            self.task.stop()

    def handle(self, transaction: Transaction) -> Any:
        self.runs[transaction.id] += 1
        if self._stay is not None:
            stay = self._stay(transaction)
            (stay if isinstance(stay, threading.Event) else threading.Event()).wait(
                STUCK if isinstance(stay, threading.Event) else stay
            )
        return self._body(transaction)

    async def handle_async(self, transaction: Transaction) -> Any:
        self.runs[transaction.id] += 1
        if self._stay is not None:
            stay = self._stay(transaction)
            if isinstance(stay, threading.Event):
                await in_thread(lambda: stay.wait(STUCK))
            else:
                await asyncio.sleep(stay)
        return self._body(transaction)

    def ended(self, kind: str) -> list[str]:
        """Return the ids of the transactions with that outcome, in order."""
        return [outcome.transaction.id for outcome in tuple(self.outcomes) if outcome.kind == kind]

    async def until(self, holds: Callable[[], object], words: str) -> None:
        await self._sitting.until(holds, words)


@asynccontextmanager
async def running_loop(
    sitting: CheckContext,
    client: Client,
    body: Body,
    *,
    stay: Stay | None = None,
    prepare: Callable[[Any], Any] | None = None,
    **loop_policy: Any,
) -> AsyncIterator[Loop]:
    """Run a consumer loop during the block; on exit it has stopped and settled everything it claimed."""
    loop = Loop(sitting, body, stay)
    kind: Any = _Threads if sitting.variant == "sync" else _Asyncio
    task = kind(client.connector, loop=loop)
    task = task if prepare is None else prepare(task)
    loop.task = task
    rules = policy(**loop_policy)
    if sitting.variant == "sync":
        running = in_thread(lambda: task.consume_transactions(rules, on_outcome=loop.outcomes.append))
    else:
        running = task.consume_transactions(rules, on_outcome=loop.outcomes.append)
    consumption = asyncio.ensure_future(running)
    try:
        yield loop
    finally:
        loop.stop()
        done, _ = await asyncio.wait([consumption], timeout=STUCK)
        if not done:
            task.stop()
        expect(done, f"a stopped loop has not ended after {STUCK:g} s")
    loop.report = consumption.result()
