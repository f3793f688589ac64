"""Relay: a task that moves transactions from one connector to another, for example from an outbox to a broker.

An outbox holds messages that were written in a database transaction of the application; the depth of a queue is the
number of its messages by state. A coalescer joins the transactions that several slots send at the same time into one
dispatch (the call that sends them), because a broker confirms many at once much faster.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from ergon_framework.connectors.base import AsyncConnector, Connector, Defer, Depth
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.gates import Gate
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.telemetry.options import get_options
from ergon_framework.transaction import Transaction
from ergon_framework.worker.coalesce import AsyncCoalescer, Coalescer
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    ProcessPolicy,
    RetryPolicy,
)

#: The default policy of a relay: it runs without limit, and makes up to 20 attempts while the target fails.
DEFAULT_POLICY: Final = ConsumerPolicy(
    loop=ConsumerLoopPolicy(
        streaming=True, concurrency=ConcurrencyPolicy(value=32), batch=BatchPolicy(size=32), prefetch=32
    ),
    steps=ConsumerSteps(process=ProcessPolicy(retry=RetryPolicy(max_attempts=20, backoff=0.5, jitter=0.2))),
)
#: Delay in seconds before a transaction is redelivered that could not be moved under the policy.
RETRY_DELAY_SECONDS: Final = 30.0
#: Seconds that the end of a relay waits for a depth query that has started.
_EXIT_GRACE_SECONDS: Final = 5.0


def publish_queue_depth(task: Any, depth: Depth | None) -> None:
    """Publish *depth* in the metrics of *task*; None removes the published values."""
    registry = get_registry(get_options(task).meter_provider)
    if depth is None:
        registry.set_queue_depth(task.name, None)
        return
    by_state = {"ready": depth.ready, "delayed": depth.delayed, "in_flight": depth.in_flight, "dead": depth.dead}
    registry.set_queue_depth(task.name, by_state, depth.oldest_age)


class _RelayBase:
    """The common part of both variants: preparing transactions and settling failures."""

    policy: Any
    target: Any
    _label: str
    _depth_interval: float

    @property
    def name(self) -> str:
        return self._label

    def _configure(self, source: Any, target: Any, *, name: str | None, depth_interval: float) -> None:
        if source is target:
            raise ConfigurationError("relay has the same connector as source and target; pass two connectors")
        if not isinstance(target, Connector | AsyncConnector):
            raise ConfigurationError(f"relay target must be a connector, not a {type(target).__name__}")
        if not 0 < depth_interval < float("inf"):
            raise ConfigurationError(f"depth_every must be a finite number of seconds > 0, not {depth_interval!r}")
        self.target = target
        self._label = name or f"{getattr(source, 'name', source)}-to-{target.name}"
        self._depth_interval = depth_interval

    def _prepare(self, transaction: Transaction) -> Transaction:
        """Return *transaction* for the target, without its attempts and deferrals, which belong to the relay.

        The source has held it until it was due, so the target gets it without delay; a target without priorities
        gets it without priority.

        Its source and trace are set here and not by the dispatch, which is shared by several transactions and so may
        run in the trace of another one.
        """
        transaction = transaction.reset()
        if transaction.priority and self.target.capabilities.priority is False:
            transaction = transaction.replace(priority=0)
        stamped: Transaction = self.target.prepare(transaction)
        return stamped

    def _choose_settlement(self, exc: TransactionException) -> Defer | None:
        """Redeliver a transaction without limit after a failure of the target; None, after its own, dead-letters it.

        A misconfigured target raises final errors, but they are not failures of the waiting transactions.
        """
        is_own_failure = exc.category is Category.BUSINESS or exc.final
        return (
            None if is_own_failure and not isinstance(exc.__cause__, ConfigurationError) else Defer(RETRY_DELAY_SECONDS)
        )

    def _publish_depth(self, depth: Depth | None) -> None:
        publish_queue_depth(self, depth)


class Relay(_RelayBase, ConsumerMixin, Task):
    """Moves every transaction of *source* to *target*, on threads.

    Id, key, type, tenant, correlation, times and trace stay unchanged. A transaction is acked when the target has
    confirmed it, so a crash in between sends it twice, under the same id. Of one key, one transaction is in progress
    at a time: their order at the target is the order in which the source delivers them. Every *depth_every* seconds
    the relay queries the depth of the source, for the metrics.
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
        self._configure(source, target, name=name, depth_interval=depth_every)
        super().__init__(source, policy=policy or DEFAULT_POLICY, gates=gates)
        self._coalescer = Coalescer(as_sync(target).dispatch)

    def process_transaction(self, transaction: Transaction) -> None:
        self._coalescer.submit(self._prepare(transaction))

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Defer | None:  # noqa: ARG002 - the same for all
        return self._choose_settlement(exc)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open source and target, and start the depth polling."""
        target = as_sync(self.target)
        target.open()
        try:
            with super().open(), self._poll_depth():
                yield
        finally:
            target.close()

    @contextmanager
    def _poll_depth(self) -> Iterator[None]:
        stopped = threading.Event()
        poller = threading.Thread(
            target=self._run_polling, args=(stopped,), name=f"ergon-{self.name}-depth", daemon=True
        )
        poller.start()
        try:
            yield
        finally:
            stopped.set()
            poller.join(_EXIT_GRACE_SECONDS)
            self._publish_depth(None)

    def _run_polling(self, stopped: threading.Event) -> None:
        source = as_sync(self.connector)
        while not stopped.is_set():
            try:
                self._publish_depth(source.depth())
            except Exception:  # noqa: BLE001 - the depth is unknown then, and fetching reports the cause
                self._publish_depth(None)
            stopped.wait(self._depth_interval)


class AsyncRelay(_RelayBase, AsyncConsumerMixin, AsyncTask):
    """Moves every transaction of *source* to *target*, on the event loop; see Relay."""

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
        self._configure(source, target, name=name, depth_interval=depth_every)
        super().__init__(source, policy=policy or DEFAULT_POLICY, gates=gates)

    async def process_transaction(self, transaction: Transaction) -> None:
        await self._coalescer.submit(self._prepare(transaction))

    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Defer | None:  # noqa: ARG002 - the same for all
        return self._choose_settlement(exc)

    async def consume_transactions(self, *args: Any, **options: Any) -> Any:
        # One per event loop: its asyncio primitives belong to the loop that runs it.
        self._coalescer = AsyncCoalescer(as_async(self.target).dispatch_async)
        return await super().consume_transactions(*args, **options)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        target = as_async(self.target)
        await target.open_async()
        try:
            async with super().open(), self._poll_depth():
                yield
        finally:
            await target.close_async()

    @asynccontextmanager
    async def _poll_depth(self) -> AsyncIterator[None]:
        poller = asyncio.create_task(self._run_polling(), name=f"ergon-{self.name}-depth")
        try:
            yield
        finally:
            poller.cancel()
            await asyncio.wait([poller], timeout=_EXIT_GRACE_SECONDS)
            self._publish_depth(None)

    async def _run_polling(self) -> None:
        source = as_async(self.connector)
        while True:
            try:
                self._publish_depth(await source.depth_async())
            except Exception:  # noqa: BLE001 - the depth is unknown then, and fetching reports the cause
                self._publish_depth(None)
            await asyncio.sleep(self._depth_interval)


def relay(source: Connector | AsyncConnector, target: Connector | AsyncConnector, **options: Any) -> Relay:
    """Create a task that moves every transaction of *source* to *target*, on threads; see Relay."""
    return Relay(source, target, **options)


def relay_async(source: Connector | AsyncConnector, target: Connector | AsyncConnector, **options: Any) -> AsyncRelay:
    """Create a task that moves every transaction of *source* to *target*, on the event loop; see AsyncRelay."""
    return AsyncRelay(source, target, **options)
