"""The two doors of the consumer engine; what they have in common is behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.engine.attempts import Step
from ergon_framework.engine.drivers.aio import Asyncio
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.effects import Script
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.slots import Slots
from ergon_framework.task.consume import Broker, Consumption
from ergon_framework.task.defaults import choose_gates, choose_policy
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.functions import refuse_async
from ergon_framework.task.gates import Gate
from ergon_framework.task.lifecycle import Course, Watch, classify, classify_handler, expired, lifecycle
from ergon_framework.task.loops import loops_of
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.observe import observing, safely
from ergon_framework.task.report import Outcome, Report
from ergon_framework.task.watch import Onlooker
from ergon_framework.task.worst import refuse_too_long
from ergon_framework.transaction import Transaction

OnOutcome = Callable[[Outcome], None]


class _Consumer:
    """What both variants share: everything but how a call is made."""

    connector: Any

    def stop(self) -> None:
        """Have the loops of this task drain and end; asked again, they end at once. Any thread may ask."""
        loops_of(self).stop()

    @property
    def live(self) -> bool:
        """False when a loop of this task can start nothing more because abandoned bodies hold its slots."""
        return loops_of(self).live

    def _start_processing(
        self, course: Course, transaction: Transaction, watch: Watch | None = None
    ) -> Script[Outcome]:
        """Start the lifecycle of one transaction; the loop calls this in the slot of the transaction."""
        return lifecycle(course, transaction, watch)

    def _consume_transactions(
        self,
        policy: ConsumerPolicy,
        driver: Slots,
        broker: Broker,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: OnOutcome | None = None,
    ) -> Consumption:
        """One run of the loop, ready to be driven."""
        name = str(getattr(self, "name", type(self).__name__))
        watch = observing(self, policy, fenced=driver.came_late)
        return Consumption(
            self._process_course(policy, driver.senses, watch),
            broker,
            policy,
            name=name,
            mailbox=driver.mailbox,
            fenced=driver.came_late,
            start=self._start_processing,
            gates=choose_gates(self, gates),
            watch=watch,
            on_outcome=None if on_outcome is None else safely(on_outcome),
            on_fetch=loops_of(self).note_fetch,
        )

    def _process_course(self, policy: ConsumerPolicy, senses: Senses, watch: Onlooker | None = None) -> Course:
        task: Any = self
        steps = policy.steps
        on_retry = None if watch is None else watch.on_retry
        handler = partial(Step, classify=classify_handler, expired=expired, on_retry=on_retry)
        return Course(
            Step(
                "process",
                task.process_transaction,
                steps.process.retry,
                classify=classify,
                expired=expired,
                defers=True,
                max_deferral=policy.loop.max_deferral,
                on_retry=on_retry,
            ),
            handler("success", task.handle_transaction_success, steps.success.retry),
            handler("exception", task.handle_transaction_exception, steps.exception.retry),
            senses=senses,
            timeout=policy.loop.transaction_timeout,
            plain=self._plain,
        )

    @property
    def _plain(self) -> bool:
        """Whether the success handler is the one below, which does nothing."""
        handler = getattr(self.handle_transaction_success, "__func__", None)  # type: ignore[attr-defined]
        return handler in (ConsumerMixin.handle_transaction_success, AsyncConsumerMixin.handle_transaction_success)


class _Ears:
    """Hears the connector, on whichever thread it speaks, and tells the loop."""

    def __init__(self, driver: Slots, consumption: Consumption) -> None:
        self._driver = driver
        self._consumption = consumption

    def wake(self) -> None:
        self._consumption.wake(self._driver.signal)

    def lost(self, receipts: Sequence[Any]) -> None:
        self._consumption.lose(receipts, self._driver.signal)


class ConsumerMixin(_Consumer, ABC):
    """Consumes on threads. The task says what to do; how often, how long and how many is the policy's."""

    connector: Connector | AsyncConnector

    @abstractmethod
    def process_transaction(self, transaction: Transaction) -> Any:
        """Do the work. A returned value is success; what is raised decides what happens next."""

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        """After success; a returned settlement (Ack, Later, DeadLetter) decides what becomes of the delivery.

        Without one, a settlement that process returned decides.
        """

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        """After failure, once; a returned settlement decides, None leaves it to the policy."""

    def consume_transactions(
        self,
        policy: ConsumerPolicy | None = None,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: OnOutcome | None = None,
        driver: Callable[[int], Threads] = Threads,
    ) -> Report:
        """Consume until the policy says that it is enough; blocks, and drains when it is stopped."""
        policy = choose_policy(self, policy, ConsumerPolicy)
        refuse_async(self.process_transaction, self.handle_transaction_success, self.handle_transaction_exception)
        connector = as_sync(self.connector)
        refuse_too_long(policy, connector.capabilities, queue=connector.name)
        connector.limit_deliveries(policy.loop.max_deliveries)
        threads = driver(policy.loop.concurrency.value)
        broker = Broker(
            fetch=partial(connector.fetch_transactions, **policy.steps.fetch.extra),
            settle=connector.settle,
            extend=connector.extend,
            lease=_lease(connector),
            write_refusal=lambda: connector.write_refusal,
        )
        consumption = self._consume_transactions(policy, threads, broker, gates=gates, on_outcome=on_outcome)
        ears = _Ears(threads, consumption)
        unlisten = connector.listen(ears)
        try:
            with loops_of(self).entered(consumption, threads.stop, wake=ears.wake):
                return threads.run(consumption.run())
        finally:
            unlisten()


class AsyncConsumerMixin(_Consumer, ABC):
    """Consumes on tasks of the running event loop; in every other respect the same."""

    connector: Connector | AsyncConnector

    @abstractmethod
    async def process_transaction(self, transaction: Transaction) -> Any: ...

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any: ...

    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any: ...

    async def consume_transactions(
        self,
        policy: ConsumerPolicy | None = None,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: OnOutcome | None = None,
        driver: Callable[[], Asyncio] = Asyncio,
    ) -> Report:
        """Consume until the policy says that it is enough; cancelling it is a stop."""
        policy = choose_policy(self, policy, ConsumerPolicy)
        connector = as_async(self.connector)
        refuse_too_long(policy, connector.capabilities, queue=connector.name)
        connector.limit_deliveries(policy.loop.max_deliveries)
        tasks = driver()
        broker = Broker(
            fetch=partial(connector.fetch_transactions_async, **policy.steps.fetch.extra),
            settle=connector.settle_async,
            extend=connector.extend_async,
            lease=_lease(connector),
            write_refusal=lambda: connector.write_refusal,
        )
        consumption = self._consume_transactions(policy, tasks, broker, gates=gates, on_outcome=on_outcome)
        ears = _Ears(tasks, consumption)
        unlisten = connector.listen(ears)
        try:
            with loops_of(self).entered(consumption, tasks.stop, wake=ears.wake):
                return await tasks.run(consumption.run())
        finally:
            unlisten()


def _lease(connector: Connector | AsyncConnector) -> float | None:
    return connector.capabilities.lease if connector.capabilities.renewable else None
