"""Isolation: any consumer's process step in an executor, where it can be killed.

The rest of the task stays where it is: connector, policy, success and exception handlers, lifespan.
"""

from __future__ import annotations

import asyncio
import copy
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
from ergon_framework.executor.pool import ExecutorPool, Patience, PoolClosed, PoolPolicy
from ergon_framework.executor.process import Command
from ergon_framework.executor.protocol import ExecutionOutcome, Status
from ergon_framework.executor.verdict import asked_delay, blamed
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.telemetry.context import outbound
from ergon_framework.transaction import Transaction

T = TypeVar("T", bound=Task | AsyncTask)
#: Seconds that a task waits for its first executor before it takes work.
_FIRST: Final = 5.0
#: The share of the step's time that goes by at most while all executors are busy, and while nobody is up.
_BUSY: Final = 0.25
_START: Final = 0.75


def isolated(task: T, command: Command, *, handler: str | None = None, pool: PoolPolicy | None = None) -> T:
    """*task* with its process step in executors that *command* starts.

    The executor's handler is called *handler*, by default as the task is, and is given the payload.
    At the step's timeout its process is killed, so a body that hangs neither stays nor holds a slot
    for longer than the pool's grace. Keep that grace below ``retry.abandon_grace``.
    """
    twin: type[Any]
    if isinstance(task, AsyncTask) and isinstance(task, AsyncConsumerMixin):
        twin = _AsyncIsolated
    elif isinstance(task, Task) and isinstance(task, ConsumerMixin):
        twin = _Isolated
    else:
        raise ConfigurationError(f"{task.name} is no consumer; only a process step can be isolated")
    made: Any = copy.copy(task)
    made.__class__ = type(type(task).__name__, (twin, type(task)), {})
    made.isolation = _Isolation(command, handler=handler or task.name, policy=pool, name=task.name)
    isolated_task: T = made
    return isolated_task


class _Isolation:
    """The pool of one task, while the task runs, and how a transaction becomes a job of it."""

    def __init__(self, command: Command, *, handler: str, policy: PoolPolicy | None, name: str) -> None:
        self.command = command
        self._handler = handler
        self._policy = policy
        self._name = name
        self._pool: ExecutorPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The pool, on the loop that is running."""
        async with ExecutorPool(self.command, policy=self._policy, name=self._name) as pool:
            self._pool = pool
            # The clock of a step runs while its body waits for a start; the first one is nobody's time.
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST):
                    await pool.tried()
            try:
                yield
            finally:
                self._pool = None

    @contextmanager
    def opened_aside(self) -> Iterator[None]:
        """The pool, on a loop of its own in a thread of its own, for tasks that run on threads."""
        loop = self._loop = asyncio.new_event_loop()
        thread = Thread(target=loop.run_forever, name=f"{self._name}-pool", daemon=True)
        thread.start()
        pool = self.opened()
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
        """What the executor makes of *transaction*: its result, or the error that it stands for."""
        return await self._run(transaction, scope.current(), outbound())

    def process_aside(self, transaction: Transaction) -> Any:
        """As ``process``, from a thread."""
        if self._loop is None:
            raise PoolClosed("the executors are not open; run the task with run(), or within opened()")
        job = self._run(transaction, scope.current(), outbound())
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()

    async def _run(self, transaction: Transaction, below: scope.Scope | None, carrier: Mapping[str, str]) -> Any:
        if self._pool is None:
            raise PoolClosed("the executors are not open; run the task with run(), or within opened()")
        left = None if below is None else below.remaining()
        # The step's time runs meanwhile. Whoever has lost so much of it comes back later, at no cost.
        patience = None if left is None else Patience(_BUSY * left, _START * left)
        with await self._pool.reserve(patience) as place:
            outcome = await self._pool.run(
                self._handler,
                [transaction.payload],
                job_id=transaction.id,
                timeout=None if below is None else below.remaining(),
                attempt_number=1 if below is None else below.attempt + 1,
                enqueued_at=transaction.created_at,
                queue_name=transaction.source or "default",
                carrier=carrier or transaction.trace,
                place=place,
            )
        return _value(outcome)


def _value(outcome: ExecutionOutcome) -> Any:
    """The result, or the error that a task's policy understands."""
    if outcome.status is Status.SUCCESS:
        return outcome.result
    blame = blamed(outcome)
    raise TransactionException(
        blame.message,
        blame.category,
        retry_after=asked_delay(outcome),
        final=blame.final or None,
        code=blame.code,
    )


class _Isolated:
    """What is different in a task that runs on threads."""

    isolation: _Isolation

    @contextmanager
    def lifespan(self) -> Iterator[Mapping[str, Any] | None]:
        outer: AbstractContextManager[Mapping[str, Any] | None] = super().lifespan()  # type: ignore[misc]
        with outer as given, self.isolation.opened_aside():
            yield given

    def process_transaction(self, transaction: Transaction) -> Any:
        return self.isolation.process_aside(transaction)


class _AsyncIsolated:
    """What is different in a task that runs on an event loop."""

    isolation: _Isolation

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[Mapping[str, Any] | None]:
        outer: AbstractAsyncContextManager[Mapping[str, Any] | None] = super().lifespan()  # type: ignore[misc]
        async with outer as given, self.isolation.opened():
            yield given

    async def process_transaction(self, transaction: Transaction) -> Any:
        return await self.isolation.process(transaction)
