"""Isolation: run the process step of any consumer in an executor, where it can be killed.

An executor is a process that runs handlers; the process step is the one that calls the task's handler.

The rest of the task is unchanged: connector, policy, success and exception handlers, lifespan. The scope of the running
attempt, which the engine sets, has the remaining time of the step and the number of the attempt, counted from 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from threading import Thread
from typing import Any, Final, TypeVar

from ergon_framework import scope
from ergon_framework.errors import ConfigurationError
from ergon_framework.executors.decision import cause_of, requested_delay
from ergon_framework.executors.pool import ExecutorPool, PoolClosed, PoolPolicy, WaitLimits
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.executors.protocol import ExecutionOutcome, Status
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.telemetry.context import inject_carrier
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException

T = TypeVar("T", bound=Task | AsyncTask)
#: Seconds that a task waits for its first executor before it fetches work.
_FIRST_START_TIMEOUT_SECONDS: Final = 5.0
#: Maximum share of the step's time that is spent waiting while all executors are busy, and while none is running.
_MAX_BUSY_WAIT_SHARE: Final = 0.25
_MAX_START_WAIT_SHARE: Final = 0.75


def run_in_executor(
    task: T, command: ExecutorCommand, *, handler: str | None = None, pool: PoolPolicy | None = None
) -> T:
    """Return *task* with its process step in executors that *command* starts.

    The executor's handler has the name *handler*, by default the task's name, and gets the payload. At the step's
    timeout its process is killed, so a handler call that hangs ends, and occupies a slot for no longer than the
    pool's grace. Keep that grace below ``retry.exit_grace``.
    """
    mixin: type[Any]
    if isinstance(task, AsyncTask) and isinstance(task, AsyncConsumerMixin):
        mixin = _AsyncIsolatedOverrides
    elif isinstance(task, Task) and isinstance(task, ConsumerMixin):
        mixin = _IsolatedOverrides
    else:
        raise ConfigurationError(f"{task.name} is not a consumer; only a process step can be isolated")
    isolated_class = type(type(task).__name__, (mixin, type(task)), {})
    copied: Any = isolated_class.__new__(isolated_class)
    copied.__dict__.update(task.__dict__)
    copied.isolation = _TaskIsolation(command, handler=handler or task.name, policy=pool, name=task.name)
    isolated_task: T = copied
    return isolated_task


class _TaskIsolation:
    """The pool of one task while the task runs, and the conversion of a transaction to a job."""

    def __init__(self, command: ExecutorCommand, *, handler: str, policy: PoolPolicy | None, name: str) -> None:
        self.command = command
        self._handler = handler
        self._policy = policy
        self._name = name
        self._pool: ExecutorPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Open the pool on the running event loop."""
        async with ExecutorPool(self.command, policy=self._policy, name=self._name) as pool:
            self._pool = pool
            # A step's timeout runs while its call waits for a start; the first start should not reduce it.
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_START_TIMEOUT_SECONDS):
                    await pool.wait_first_start()
            try:
                yield
            finally:
                self._pool = None

    @contextmanager
    def open_in_thread(self) -> Iterator[None]:
        """Open the pool on a separate event loop in a separate thread, for tasks that run on threads."""
        loop = self._loop = asyncio.new_event_loop()
        thread = Thread(target=loop.run_forever, name=f"{self._name}-pool", daemon=True)
        thread.start()
        pool = self.open()
        try:
            asyncio.run_coroutine_threadsafe(pool.__aenter__(), loop).result()
            try:
                yield
            finally:
                asyncio.run_coroutine_threadsafe(pool.__aexit__(None, None, None), loop).result()
        finally:
            asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            self._loop = None

    async def process(self, transaction: Transaction) -> Any:
        """Run *transaction* in an executor; return the result, or raise the error of the outcome."""
        return await self._run(transaction, scope.current(), inject_carrier())

    def process_in_thread(self, transaction: Transaction) -> Any:
        """Run *transaction* as ``process`` does, from a thread."""
        if self._loop is None:
            raise PoolClosed("the executors are not open: use run() or open()")
        job = self._run(transaction, scope.current(), inject_carrier())
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()

    async def _run(
        self, transaction: Transaction, current_scope: scope.Scope | None, carrier: Mapping[str, str]
    ) -> Any:
        if self._pool is None:
            raise PoolClosed("the executors are not open: use run() or open()")
        remaining = None if current_scope is None else current_scope.remaining()
        # The timeout of the step runs while the call waits for an executor. After these shares of the remaining time,
        # the transaction is redelivered without counting an attempt, because too little time is left for the handler.
        limits = (
            None
            if remaining is None
            else WaitLimits(_MAX_BUSY_WAIT_SHARE * remaining, _MAX_START_WAIT_SHARE * remaining)
        )
        with await self._pool.reserve(limits) as reservation:
            outcome = await self._pool.run(
                self._handler,
                [transaction.payload],
                job_id=transaction.id,
                timeout=None if current_scope is None else current_scope.remaining(),
                attempt_number=1 if current_scope is None else current_scope.attempt + 1,
                enqueued_at=transaction.created_at,
                queue_name=transaction.source or "default",
                carrier=carrier or transaction.trace,
                reservation=reservation,
            )
        return _to_result(outcome)


def _to_result(outcome: ExecutionOutcome) -> Any:
    """Return the result, or raise the error that a task's policy understands."""
    if outcome.status is Status.SUCCESS:
        return outcome.result
    cause = cause_of(outcome)
    raise TransactionException(
        cause.message,
        cause.category,
        retry_after=requested_delay(outcome),
        final=cause.final or None,
        code=cause.code,
    )


class _IsolatedOverrides:
    """The overrides of a task that runs on threads."""

    isolation: _TaskIsolation

    @contextmanager
    def lifespan(self) -> Iterator[Mapping[str, Any] | None]:
        outer: AbstractContextManager[Mapping[str, Any] | None] = super().lifespan()  # type: ignore[misc]
        with outer as services, self.isolation.open_in_thread():
            yield services

    def process_transaction(self, transaction: Transaction) -> Any:
        return self.isolation.process_in_thread(transaction)


class _AsyncIsolatedOverrides:
    """The overrides of a task that runs on an event loop."""

    isolation: _TaskIsolation

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[Mapping[str, Any] | None]:
        outer: AbstractAsyncContextManager[Mapping[str, Any] | None] = super().lifespan()  # type: ignore[misc]
        async with outer as services, self.isolation.open():
            yield services

    async def process_transaction(self, transaction: Transaction) -> Any:
        return await self.isolation.process(transaction)
