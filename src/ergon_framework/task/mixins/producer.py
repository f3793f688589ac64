"""The two doors of the producer engine; what they have in common is behind them."""

from __future__ import annotations

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
from ergon_framework.task.defaults import choose_policy
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.functions import refuse_async
from ergon_framework.task.lifecycle import Course, Watch, classify, classify_handler, expired, lifecycle
from ergon_framework.task.loops import loops_of
from ergon_framework.task.mixins.policies import ProducerPolicy
from ergon_framework.task.observe import observing_produce
from ergon_framework.task.produce import Production
from ergon_framework.task.report import Outcome, ProduceReport
from ergon_framework.task.watch import Onlooker
from ergon_framework.transaction import Transaction


class _Producer:
    """What both variants share: everything but how a call is made."""

    connector: Any

    def stop(self) -> None:
        """Have the calls of this task drain and end; asked again, they end at once. Any thread may ask."""
        loops_of(self).stop()

    @property
    def live(self) -> bool:
        """False when a call of this task can start nothing more because abandoned bodies hold its slots."""
        return loops_of(self).live

    def _start_producing(self, course: Course, transaction: Transaction, watch: Watch | None = None) -> Script[Outcome]:
        """Start the lifecycle of one transaction; the call does this in the slot of the transaction."""
        return lifecycle(course, transaction, watch)

    def _produce_transactions(
        self, transactions: Sequence[Transaction], policy: ProducerPolicy, driver: Slots
    ) -> Production:
        """One run over one list, ready to be driven."""
        watch = observing_produce(self, policy, fenced=driver.came_late)
        return Production(
            self._produce_course(policy, driver.senses, watch),
            transactions,
            policy,
            mailbox=driver.mailbox,
            fenced=driver.came_late,
            start=self._start_producing,
            watch=watch,
        )

    def _produce_course(self, policy: ProducerPolicy, senses: Senses, watch: Onlooker | None = None) -> Course:
        task: Any = self
        steps = policy.steps
        on_retry = None if watch is None else watch.on_retry
        handler = partial(Step, classify=classify_handler, expired=expired, on_retry=on_retry)
        return Course(
            Step(
                "produce",
                task.produce_transaction,
                steps.produce.retry,
                classify=classify,
                expired=expired,
                on_retry=on_retry,
            ),
            handler("success", task.handle_produce_success, steps.success.retry),
            handler("exception", task.handle_produce_exception, steps.exception.retry),
            senses=senses,
            timeout=policy.loop.transaction_timeout,
            plain=self._plain_produce,
        )

    @property
    def _plain_produce(self) -> bool:
        """Whether the success handler is the one below, which does nothing."""
        handler = getattr(self.handle_produce_success, "__func__", None)  # type: ignore[attr-defined]
        return handler in (ProducerMixin.handle_produce_success, AsyncProducerMixin.handle_produce_success)


class ProducerMixin(_Producer):
    """Produces on threads."""

    connector: Connector | AsyncConnector

    def produce_transaction(self, transaction: Transaction) -> Any:
        """Hand over one transaction and return its confirmation; by default, as it is."""
        return as_sync(self.connector).dispatch([transaction])[0]

    def handle_produce_success(self, transaction: Transaction, result: Any) -> Any:
        """After success."""

    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        """After failure, once."""

    def produce_transactions(
        self,
        transactions: Sequence[Transaction],
        policy: ProducerPolicy | None = None,
        *,
        driver: Callable[[int], Threads] = Threads,
    ) -> ProduceReport:
        """Produce them all; one outcome each, in input order."""
        policy = choose_policy(self, policy, ProducerPolicy)
        refuse_async(self.produce_transaction, self.handle_produce_success, self.handle_produce_exception)
        threads = driver(policy.loop.concurrency.value)
        production = self._produce_transactions(transactions, policy, threads)
        with loops_of(self).entered(production, threads.stop):
            return threads.run(production.run())


class AsyncProducerMixin(_Producer):
    """Produces on tasks of the running event loop; in every other respect the same."""

    connector: Connector | AsyncConnector

    async def produce_transaction(self, transaction: Transaction) -> Any:
        return (await as_async(self.connector).dispatch_async([transaction]))[0]

    async def handle_produce_success(self, transaction: Transaction, result: Any) -> Any: ...

    async def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> Any: ...

    async def produce_transactions(
        self,
        transactions: Sequence[Transaction],
        policy: ProducerPolicy | None = None,
        *,
        driver: Callable[[], Asyncio] = Asyncio,
    ) -> ProduceReport:
        """Produce them all; one outcome each, in input order. Cancelling it is a stop."""
        policy = choose_policy(self, policy, ProducerPolicy)
        tasks = driver()
        production = self._produce_transactions(transactions, policy, tasks)
        with loops_of(self).entered(production, tasks.stop):
            return await tasks.run(production.run())
