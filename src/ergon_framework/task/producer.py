"""The sync and async entry points of the producer engine, and their common part.

To produce a transaction is to send it through the task's connector, with retries and handlers as for a consumed one. An
entry point creates the script of a produce call (a generator that decides), and the driver that runs it (a Scheduler):
on threads for sync handlers, on asyncio for async ones. A LifecycleSpec has the three steps of each transaction's
lifecycle: produce, and then the success or the exception handler. To classify an error is to turn it into a
TransactionException, whose category (BUSINESS, SYSTEM or TIMEOUT) and flags decide about a retry.

A produce call runs the lifecycles of its transactions concurrently, one per slot. Its mailbox is the queue of the
events that the driver sends it: a lifecycle has ended, a slot is free. A call of a handler that has timed out or was
interrupted may run on: it is abandoned, and the result that it returns later is a late one, counted and discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ergon_framework.clock import Clock
from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.engine.aio import AsyncioDriver
from ergon_framework.engine.effects import Script
from ergon_framework.engine.retry import Step
from ergon_framework.engine.scheduler import Scheduler
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.task.context import choose_policy
from ergon_framework.task.handler import reject_async_handlers
from ergon_framework.task.middleware_calls import choose_middleware, wrap_lifecycle
from ergon_framework.transaction import Transaction
from ergon_framework.worker.events import LoopObserver, TransactionObserver
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.lifecycle import (
    LifecycleSpec,
    LifecycleStarter,
    classify,
    classify_handler,
    run_lifecycle,
    timeout_error,
)
from ergon_framework.worker.policies import ProducerPolicy
from ergon_framework.worker.produce import ProduceRun
from ergon_framework.worker.report import Outcome, ProduceReport
from ergon_framework.worker.running import running_loops
from ergon_framework.worker.telemetry import producer_observer


class _Producer:
    """The common part of both variants: everything except how a call is made."""

    connector: Any

    def stop(self) -> None:
        """Make the calls of this task drain and end; after a second call they end immediately. Thread-safe."""
        running_loops(self).stop()

    @property
    def live(self) -> bool:
        """Whether every produce call of this task can start work: false if hanging handlers hold all its slots."""
        return running_loops(self).live

    def _start_producing(
        self, spec: LifecycleSpec, transaction: Transaction, observer: TransactionObserver | None = None
    ) -> Script[Outcome]:
        """Return the script of one transaction's lifecycle; a method, so that a test can observe each start."""
        return run_lifecycle(spec, transaction, observer)

    def _produce_transactions(
        self, transactions: Sequence[Transaction], policy: ProducerPolicy, driver: Scheduler
    ) -> ProduceRun:
        """Create the run of one produce call, ready for *driver*."""
        observer = producer_observer(self, policy, late_results=driver.late_result_count)
        spec = self._create_produce_spec(policy, driver.time_source, observer)
        start: LifecycleStarter = self._start_producing
        middleware = choose_middleware(self, is_async=isinstance(self, AsyncProducerMixin))
        if middleware is not None:
            handles_exception = not self._has_default_produce_exception
            spec, start = wrap_lifecycle(middleware, spec, start, handles_exception=handles_exception)
        return ProduceRun(
            spec,
            transactions,
            policy,
            create_mailbox=driver.create_mailbox,
            late_results=driver.late_result_count,
            start=start,
            observer=observer,
        )

    def _create_produce_spec(
        self, policy: ProducerPolicy, clock: Clock, observer: LoopObserver | None = None
    ) -> LifecycleSpec:
        """Return the steps of each transaction's lifecycle: the task's handlers under *policy*."""
        task: Any = self
        steps = policy.steps
        on_retry = None if observer is None else observer.on_retry
        # The work is done or has failed already when these handlers run, so classify_handler makes their errors SYSTEM,
        # never BUSINESS. timeout_error creates the error of an attempt that exceeds its timeout.
        handler = partial(Step, classify=classify_handler, timeout_error=timeout_error, on_retry=on_retry)
        return LifecycleSpec(
            Step(
                "produce",
                task.produce_transaction,
                steps.produce.retry,
                classify=classify,
                timeout_error=timeout_error,
                on_retry=on_retry,
            ),
            handler("success", task.handle_produce_success, steps.success.retry),
            handler("exception", task.handle_produce_exception, steps.exception.retry),
            clock=clock,
            timeout=policy.loop.transaction_timeout,
            skips_success=self._has_default_produce_success,
        )

    @property
    def _has_default_produce_success(self) -> bool:
        """Whether the success handler is the default one of the mixin, which does nothing."""
        handler = getattr(self.handle_produce_success, "__func__", None)  # type: ignore[attr-defined]
        return handler in (ProducerMixin.handle_produce_success, AsyncProducerMixin.handle_produce_success)

    @property
    def _has_default_produce_exception(self) -> bool:
        """Whether the exception handler is the default one of the mixin, which does nothing."""
        handler = getattr(self.handle_produce_exception, "__func__", None)  # type: ignore[attr-defined]
        return handler in (ProducerMixin.handle_produce_exception, AsyncProducerMixin.handle_produce_exception)


class ProducerMixin(_Producer):
    """Produces on threads."""

    connector: Connector | AsyncConnector

    def produce_transaction(self, transaction: Transaction) -> Any:
        """Produce one transaction and return its confirmation; the default dispatches it unchanged."""
        return as_sync(self.connector).dispatch([transaction])[0]

    def handle_produce_success(self, transaction: Transaction, result: Any) -> Any:
        """Handle a success; *result* is what ``produce_transaction`` returned. The default does nothing."""

    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        """Handle a transaction that has failed and is not retried any more; the default does nothing.

        It is called once for the transaction, and again only for the retries of this step.
        """

    def produce_transactions(
        self,
        transactions: Sequence[Transaction],
        policy: ProducerPolicy | None = None,
        *,
        driver: Callable[[int], ThreadDriver] = ThreadDriver,
    ) -> ProduceReport:
        """Produce all transactions; return one outcome each, in input order."""
        policy = choose_policy(self, policy, ProducerPolicy)
        reject_async_handlers(self.produce_transaction, self.handle_produce_success, self.handle_produce_exception)
        thread_driver = driver(policy.loop.concurrency.value)
        produce_run = self._produce_transactions(transactions, policy, thread_driver)
        with running_loops(self).track(produce_run, thread_driver.stop):
            return thread_driver.run(produce_run.run())


class AsyncProducerMixin(_Producer):
    """Produces on asyncio tasks of the running event loop; otherwise the same as ProducerMixin."""

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
        driver: Callable[[], AsyncioDriver] = AsyncioDriver,
    ) -> ProduceReport:
        """Produce all transactions; return one outcome each, in input order. A cancellation stops it."""
        policy = choose_policy(self, policy, ProducerPolicy)
        asyncio_driver = driver()
        produce_run = self._produce_transactions(transactions, policy, asyncio_driver)
        with running_loops(self).track(produce_run, asyncio_driver.stop):
            return await asyncio_driver.run(produce_run.run())
