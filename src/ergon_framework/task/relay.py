"""Relay: a task that moves transactions from one connector to another, as from an outbox to a broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from ergon_framework.connectors.base import AsyncConnector, Connector, Depth, Later
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.gates import Gate
from ergon_framework.task.gathering import AsyncGathering, Gathering
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    ProcessPolicy,
    RetryPolicy,
)
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.telemetry.options import options_of
from ergon_framework.transaction import Transaction

#: What a relay obeys unless it is given something else: it goes on for ever, and is patient with its target.
POLICY: Final = ConsumerPolicy(
    loop=ConsumerLoopPolicy(
        streaming=True, concurrency=ConcurrencyPolicy(value=32), batch=BatchPolicy(size=32), prefetch=32
    ),
    steps=ConsumerSteps(process=ProcessPolicy(retry=RetryPolicy(max_attempts=20, backoff=0.5, jitter=0.2))),
)
#: Seconds after which what could not be moved under the policy comes again.
AGAIN: Final = 30.0
#: How long the end of a relay waits for a look at the queue that has begun.
_LEAVE: Final = 5.0


def tell_depth(task: Any, depth: Depth | None) -> None:
    """Have *depth* in the metrics of *task*; None takes out what is there."""
    registry = registry_of(options_of(task).meter_provider)
    if depth is None:
        registry.level(task.name, None)
        return
    by_state = {"ready": depth.ready, "delayed": depth.delayed, "in_flight": depth.in_flight, "dead": depth.dead}
    registry.level(task.name, by_state, depth.oldest_age)


class _Relaying:
    """What both flavours share: what is sent, and what becomes of what cannot be."""

    policy: Any
    target: Any
    _label: str
    _every: float

    @property
    def name(self) -> str:
        return self._label

    def _declare(self, source: Any, target: Any, *, name: str | None, every: float) -> None:
        if source is target:
            raise ConfigurationError("a relay from a connector to itself would move the same transactions for ever")
        if not isinstance(target, Connector | AsyncConnector):
            raise ConfigurationError(f"a relay's target is a connector, not a {type(target).__name__}")
        if not 0 < every < float("inf"):
            raise ConfigurationError(f"depth_every must be a finite number of seconds > 0, not {every!r}")
        self.target = target
        self._label = name or f"{getattr(source, 'name', source)}-to-{target.name}"
        self._every = every

    def _sent(self, transaction: Transaction) -> Transaction:
        """*transaction* as it goes on: all of it but the attempts and deferrals, which were the relay's own.

        Stamped here and not by the dispatch, which may happen in another transaction's trace.
        """
        stamped: Transaction = self.target.stamped(transaction.reset())
        return stamped

    def _verdict(self, exc: TransactionException) -> Later | None:
        """What is the transaction's own fault is put aside; what is the target's is tried again, for ever.

        A target that is set up wrongly says that trying again cannot help, but it is no fault of what waits for it.
        """
        own = exc.category is Category.BUSINESS or exc.final
        return None if own and not isinstance(exc.__cause__, ConfigurationError) else Later(AGAIN)

    def _level(self, depth: Depth | None) -> None:
        tell_depth(self, depth)


class Relay(_Relaying, ConsumerMixin, Task):
    """Moves every transaction of *source* to *target*, on threads.

    Id, key, type, tenant, correlation, times and trace stay as they are. A transaction is acked
    when the target has confirmed it, so a crash in between sends it twice, under the same id. Of
    one key one is under way at a time: their order at the target is that in which the source hands
    them out. Every *depth_every* seconds the source is asked for its depth, for the metrics.
    """

    def __init__(
        self,
        source: Connector | AsyncConnector,
        target: Connector | AsyncConnector,
        *,
        name: str | None = None,
        policy: ConsumerPolicy | None = None,
        gates: Sequence[Gate] | None = None,
        depth_every: float = 15.0,
    ) -> None:
        self._declare(source, target, name=name, every=depth_every)
        super().__init__(source, policy=policy or POLICY, gates=gates)
        self._gathering = Gathering(as_sync(target).dispatch)

    def process_transaction(self, transaction: Transaction) -> None:
        self._gathering.send(self._sent(transaction))

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Later | None:  # noqa: ARG002 - the same for all
        return self._verdict(exc)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Source and target open, and somebody who looks how much there is to do."""
        target = as_sync(self.target)
        target.open()
        try:
            with super().opened(), self._measured():
                yield
        finally:
            target.close()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        over = threading.Event()
        looking = threading.Thread(target=self._look, args=(over,), name=f"ergon-{self.name}-depth", daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join(_LEAVE)
            self._level(None)

    def _look(self, over: threading.Event) -> None:
        source = as_sync(self.connector)
        while not over.is_set():
            try:
                self._level(source.depth())
            except Exception:  # noqa: BLE001 - how much there is is unknown then, and fetching says why
                self._level(None)
            over.wait(self._every)


class AsyncRelay(_Relaying, AsyncConsumerMixin, AsyncTask):
    """The same on the event loop."""

    def __init__(
        self,
        source: Connector | AsyncConnector,
        target: Connector | AsyncConnector,
        *,
        name: str | None = None,
        policy: ConsumerPolicy | None = None,
        gates: Sequence[Gate] | None = None,
        depth_every: float = 15.0,
    ) -> None:
        self._declare(source, target, name=name, every=depth_every)
        super().__init__(source, policy=policy or POLICY, gates=gates)

    async def process_transaction(self, transaction: Transaction) -> None:
        await self._gathering.send(self._sent(transaction))

    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Later | None:  # noqa: ARG002 - as its twin
        return self._verdict(exc)

    async def consume_transactions(self, *args: Any, **options: Any) -> Any:
        # Of this loop's own: what tasks of one event loop wait for belongs to that loop.
        self._gathering = AsyncGathering(as_async(self.target).dispatch_async)
        return await super().consume_transactions(*args, **options)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        target = as_async(self.target)
        await target.open_async()
        try:
            async with super().opened(), self._measured():
                yield
        finally:
            await target.close_async()

    @asynccontextmanager
    async def _measured(self) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._look(), name=f"ergon-{self.name}-depth")
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking], timeout=_LEAVE)
            self._level(None)

    async def _look(self) -> None:
        source = as_async(self.connector)
        while True:
            try:
                self._level(await source.depth_async())
            except Exception:  # noqa: BLE001 - as its twin
                self._level(None)
            await asyncio.sleep(self._every)


def relay(source: Connector | AsyncConnector, target: Connector | AsyncConnector, **options: Any) -> Relay:
    """A task that moves every transaction of *source* to *target*, on threads; see Relay."""
    return Relay(source, target, **options)


def relay_async(source: Connector | AsyncConnector, target: Connector | AsyncConnector, **options: Any) -> AsyncRelay:
    """The same on the event loop."""
    return AsyncRelay(source, target, **options)
