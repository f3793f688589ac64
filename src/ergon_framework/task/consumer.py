"""The sync and async entry points of the consumer engine, and their common part.

An entry point creates the script of the consume loop (a generator that decides), and the driver that runs it: on
threads for sync handlers, on asyncio for async ones. The lifecycle of a transaction is the processing of one delivery:
process, then the success or the exception handler. A lease is a claim that expires unless the loop renews it. Two calls
prepare a connector: ``check_fits_broker_deadline`` raises if the policy lets a claim last longer than the broker does,
and ``limit_deliveries`` tells the connector after how many deliveries a message is dead-lettered, so that it need not
load the body of such a message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from ergon_framework.gates import Gate
from ergon_framework.task.context import choose_gates, choose_policy
from ergon_framework.task.handler import reject_async_handlers
from ergon_framework.task.middleware_calls import choose_middleware, wrap_lifecycle
from ergon_framework.task.payload import convert_payload, read_payload_type
from ergon_framework.transaction import Transaction
from ergon_framework.worker.consume import ConnectorCalls, ConsumeLoop
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
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.report import Outcome, Report
from ergon_framework.worker.running import running_loops
from ergon_framework.worker.telemetry import consumer_observer, log_exceptions
from ergon_framework.worker.worst_case import check_fits_broker_deadline

OnOutcome = Callable[[Outcome], None]


class _Consumer:
    """The common part of both variants: everything except how a call is made."""

    connector: Any

    def stop(self) -> None:
        """Make the loops of this task drain and end; after a second call they end immediately. Thread-safe."""
        running_loops(self).stop()

    @property
    def live(self) -> bool:
        """Whether every loop of this task can start work: false if calls that hang hold all slots of a loop."""
        return running_loops(self).live

    def _start_processing(
        self, spec: LifecycleSpec, transaction: Transaction, observer: TransactionObserver | None = None
    ) -> Script[Outcome]:
        """Return the script of one transaction's lifecycle; a method, so that a test can observe each start."""
        return run_lifecycle(spec, transaction, observer)

    def _consume_transactions(
        self,
        policy: ConsumerPolicy,
        driver: Scheduler,
        connector_calls: ConnectorCalls,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: OnOutcome | None = None,
    ) -> ConsumeLoop:
        """Create one run of the loop, ready for the driver."""
        name = str(getattr(self, "name", type(self).__name__))
        observer = consumer_observer(self, policy, late_results=driver.late_result_count)
        spec = self._create_process_spec(policy, driver.time_source, observer)
        start: LifecycleStarter = self._start_processing
        middleware = choose_middleware(self, is_async=isinstance(self, AsyncConsumerMixin))
        if middleware is not None:
            spec, start = wrap_lifecycle(middleware, spec, start, handles_exception=not self._has_default_exception)
        return ConsumeLoop(
            spec,
            connector_calls,
            policy,
            name=name,
            create_mailbox=driver.create_mailbox,
            late_results=driver.late_result_count,
            start=start,
            gates=choose_gates(self, gates),
            observer=observer,
            on_outcome=None if on_outcome is None else log_exceptions(on_outcome),
            on_fetch=running_loops(self).note_fetch,
            solo_run=running_loops(self).solo_run,
        )

    def _create_process_spec(
        self, policy: ConsumerPolicy, clock: Clock, observer: LoopObserver | None = None
    ) -> LifecycleSpec:
        """Return the steps of each transaction's lifecycle: the task's handlers under *policy*."""
        task: Any = self
        steps = policy.steps
        on_retry = None if observer is None else observer.on_retry
        handler = partial(Step, classify=classify_handler, timeout_error=timeout_error, on_retry=on_retry)
        return LifecycleSpec(
            Step(
                "process",
                _convert(task.process_transaction),
                steps.process.retry,
                classify=classify,
                timeout_error=timeout_error,
                defers=True,
                max_deferral=policy.loop.max_deferral,
                on_retry=on_retry,
            ),
            handler("success", _convert(task.handle_transaction_success), steps.success.retry),
            handler("exception", self._choose_failure_handler(), steps.exception.retry),
            clock=clock,
            timeout=policy.loop.transaction_timeout,
            skips_success=self._has_default_success,
        )

    def _choose_failure_handler(self) -> Callable[..., Any]:
        """Return the failure handler; a transaction whose payload does not fit its type is dead-lettered instead."""
        task: Any = self
        method = task.handle_transaction_exception
        # Without a handler of its own, the task expects the payload type of its work.
        declared = task.process_transaction if self._has_default_exception else method
        return convert_payload(method, read_payload_type(declared), is_failure=True)

    @property
    def _has_default_success(self) -> bool:
        """Whether the success handler is the default one of the mixin, which does nothing."""
        handler = getattr(self.handle_transaction_success, "__func__", None)  # type: ignore[attr-defined]
        return handler in (ConsumerMixin.handle_transaction_success, AsyncConsumerMixin.handle_transaction_success)

    @property
    def _has_default_exception(self) -> bool:
        """Whether the exception handler is the default one of the mixin, which does nothing."""
        handler = getattr(self.handle_transaction_exception, "__func__", None)  # type: ignore[attr-defined]
        return handler in (ConsumerMixin.handle_transaction_exception, AsyncConsumerMixin.handle_transaction_exception)


class _ConnectorListener:
    """Receives notifications of the connector, on any thread, and forwards them to the loop.

    ``wake`` means that messages may have arrived, ``on_lost`` that the claims with these receipts are lost.
    """

    def __init__(self, driver: Scheduler, loop: ConsumeLoop) -> None:
        self._driver = driver
        self._loop = loop

    def wake(self) -> None:
        self._loop.wake(self._driver.put_from_any_thread)

    def on_lost(self, receipts: Sequence[Any]) -> None:
        self._loop.mark_lost(receipts, self._driver.put_from_any_thread)


class ConsumerMixin(_Consumer, ABC):
    """Consumes on threads. The task defines the work; the policy defines attempts, timeouts and concurrency."""

    connector: Connector | AsyncConnector

    @abstractmethod
    def process_transaction(self, transaction: Transaction) -> Any:
        """Do the work. A returned value means success; the category of an exception decides what follows."""

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        """Handle a success; a returned settlement (Ack, Defer, DeadLetter) is used for the delivery.

        Without one, a settlement that process returned is used.
        """

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        """Handle a failure, once; a returned settlement is used, None leaves the choice to the policy."""

    def consume_transactions(
        self,
        policy: ConsumerPolicy | None = None,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: OnOutcome | None = None,
        driver: Callable[[int], ThreadDriver] = ThreadDriver,
    ) -> Report:
        """Consume until the policy ends the loop; blocks, and drains when it is stopped."""
        policy = choose_policy(self, policy, ConsumerPolicy)
        reject_async_handlers(
            self.process_transaction, self.handle_transaction_success, self.handle_transaction_exception
        )
        connector = as_sync(self.connector)
        check_fits_broker_deadline(policy, connector.capabilities, queue=connector.name)
        connector.limit_deliveries(policy.loop.max_deliveries)
        threads = driver(policy.loop.concurrency.value)
        connector_calls = ConnectorCalls(
            fetch=partial(connector.fetch_transactions, **policy.steps.fetch.extra),
            settle=connector.settle,
            extend=connector.extend,
            lease=_get_lease(connector),
            write_refusal=lambda: connector.write_refusal,
        )
        loop = self._consume_transactions(policy, threads, connector_calls, gates=gates, on_outcome=on_outcome)
        listener = _ConnectorListener(threads, loop)
        stop_listening = connector.listen(listener)
        try:
            with running_loops(self).track(loop, threads.stop, wake=listener.wake):
                return threads.run(loop.run())
        finally:
            stop_listening()
            loop.leave()


class AsyncConsumerMixin(_Consumer, ABC):
    """Consumes on tasks of the running event loop; otherwise the same as ConsumerMixin."""

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
        driver: Callable[[], AsyncioDriver] = AsyncioDriver,
    ) -> Report:
        """Consume until the policy ends the loop; a cancellation stops it, which drains."""
        policy = choose_policy(self, policy, ConsumerPolicy)
        connector = as_async(self.connector)
        check_fits_broker_deadline(policy, connector.capabilities, queue=connector.name)
        connector.limit_deliveries(policy.loop.max_deliveries)
        tasks = driver()
        connector_calls = ConnectorCalls(
            fetch=partial(connector.fetch_transactions_async, **policy.steps.fetch.extra),
            settle=connector.settle_async,
            extend=connector.extend_async,
            lease=_get_lease(connector),
            write_refusal=lambda: connector.write_refusal,
        )
        loop = self._consume_transactions(policy, tasks, connector_calls, gates=gates, on_outcome=on_outcome)
        listener = _ConnectorListener(tasks, loop)
        stop_listening = connector.listen(listener)
        try:
            with running_loops(self).track(loop, tasks.stop, wake=listener.wake):
                return await tasks.run(loop.run())
        finally:
            stop_listening()
            loop.leave()


def _convert(method: Callable[..., Any]) -> Callable[..., Any]:
    return convert_payload(method, read_payload_type(method))


def _get_lease(connector: Connector | AsyncConnector) -> float | None:
    """Return the seconds after which an unrenewed claim ends; None if the loop need not or cannot renew claims."""
    return connector.capabilities.lease if connector.capabilities.renewable else None
