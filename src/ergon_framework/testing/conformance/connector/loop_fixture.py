"""Run a real consume loop of the framework over a client of the connector under test, on threads or on asyncio.

The task of the loop gets its LoopRun as the service *loop*, and passes every transaction to it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.testing.conformance.check import expect
from ergon_framework.testing.conformance.connector.client import CheckContext, Client, run_in_thread
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.report import Outcome, Report

HandlerFunction = Callable[[Transaction], Any]
#: How long a handler waits before it decides: until an event, or a number of seconds.
HandlerDelay = Callable[[Transaction], threading.Event | float]

#: Seconds after which a handler continues, and after which a stopped loop counts as hanging.
HANG_TIMEOUT_SECONDS = 15.0


def make_policy(**loop: Any) -> ConsumerPolicy:
    """Create a consumer policy with short waits."""
    retry = {"backoff": 0.01, "multiplier": 1.0}
    loop_defaults: dict[str, Any] = {
        "concurrency": {"value": 4},
        "streaming": True,
        "empty_queue": {"backoff": 0.02, "multiplier": 1.0, "cap": 0.1},
        "duplicate_delay": 0.05,
        "drain_timeout": 5.0,
    }
    steps = {name: {"retry": retry} for name in ("fetch", "process", "success", "exception", "settle")}
    for name in ("fetch", "settle"):  # retries outlast an outage
        steps[name]["retry"] = {**retry, "max_attempts": 10_000, "cap": 0.0}
    return ConsumerPolicy.load({"loop": loop_defaults | loop, "steps": steps})


class _SyncCheckTask(ConsumerMixin, Task):
    name = "Conformance"

    def process_transaction(self, transaction: Transaction) -> Any:
        return self.services.loop.handle(transaction)


class _AsyncCheckTask(AsyncConsumerMixin, AsyncTask):
    name = "Conformance"

    async def process_transaction(self, transaction: Transaction) -> Any:
        return await self.services.loop.handle_async(transaction)


class LoopRun:
    """One run: how often the handler of each transaction ran, and the outcome of each delivery."""

    def __init__(self, context: CheckContext, handler: HandlerFunction, delay: HandlerDelay | None) -> None:
        self._context = context
        self._handler = handler
        self._delay = delay
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
        if self._delay is not None:
            delay = self._delay(transaction)
            (delay if isinstance(delay, threading.Event) else threading.Event()).wait(
                HANG_TIMEOUT_SECONDS if isinstance(delay, threading.Event) else delay
            )
        return self._handler(transaction)

    async def handle_async(self, transaction: Transaction) -> Any:
        self.runs[transaction.id] += 1
        if self._delay is not None:
            stay = self._delay(transaction)
            if isinstance(stay, threading.Event):
                await run_in_thread(lambda: stay.wait(HANG_TIMEOUT_SECONDS))
            else:
                await asyncio.sleep(stay)
        return self._handler(transaction)

    def list_ids(self, kind: str) -> list[str]:
        """Return the ids of the transactions with that outcome, in order."""
        return [outcome.transaction.id for outcome in tuple(self.outcomes) if outcome.kind == kind]

    async def wait_until(self, condition: Callable[[], object], description: str) -> None:
        await self._context.wait_until(condition, description)


@asynccontextmanager
async def running_loop(
    context: CheckContext,
    client: Client,
    handler: HandlerFunction,
    *,
    delay: HandlerDelay | None = None,
    prepare: Callable[[Any], Any] | None = None,
    **loop_policy: Any,
) -> AsyncIterator[LoopRun]:
    """Run a consumer loop during the block; on exit it has stopped and settled everything it claimed."""
    loop = LoopRun(context, handler, delay)
    task_class: Any = _SyncCheckTask if context.variant == "sync" else _AsyncCheckTask
    task = task_class(client.connector, services={"loop": loop})
    task = task if prepare is None else prepare(task)
    loop.task = task
    policy = make_policy(**loop_policy)
    if context.variant == "sync":
        run = run_in_thread(lambda: task.consume_transactions(policy, on_outcome=loop.outcomes.append))
    else:
        run = task.consume_transactions(policy, on_outcome=loop.outcomes.append)
    consumption = asyncio.ensure_future(run)
    try:
        yield loop
    finally:
        loop.stop()
        done, _ = await asyncio.wait([consumption], timeout=HANG_TIMEOUT_SECONDS)
        if not done:
            task.stop()
        expect(done, f"a stopped loop did not end within {HANG_TIMEOUT_SECONDS:g} s")
    loop.report = consumption.result()
