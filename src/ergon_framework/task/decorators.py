"""The decorator form of a task: a decorated function is equivalent to a class with mixins.

A HandlerFunction calls a function with the arguments that its parameters ask for: the transaction, its payload, the
result or error, and services by name. A PayloadReader validates a payload as the declared type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeAlias

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.gates import Gate, Pause
from ergon_framework.task.base import AsyncTask, Services, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.handler import (
    HandlerFunction,
    PayloadReader,
    callable_name,
    is_async,
    validate_handler,
)
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy

Lifespan: TypeAlias = Callable[
    [], AbstractContextManager[Mapping[str, Any] | None] | AbstractAsyncContextManager[Mapping[str, Any] | None]
]


class Dependency(Protocol):
    """A dependency of a task, such as a provider, with a gate that pauses fetching while it is unavailable."""

    def gate(self) -> Pause | None: ...


class _FunctionTask:
    """The common part of sync and async function tasks."""

    services: Services

    def declare(self, fn: Callable[..., Any], *, payload: Any, name: str | None, lifespan: Lifespan | None) -> None:
        """Store the options of the decorator."""
        self._payload = PayloadReader(payload)
        self._function = HandlerFunction(fn, self._payload)
        self._success: HandlerFunction | None = None
        self._failure: HandlerFunction | None = None
        self._name = name or callable_name(fn)
        self._lifespan = lifespan
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__

    @property
    def name(self) -> str:
        return self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function unchanged: for tests and for other code."""
        return self._function.fn(*args, **kwargs)

    def read_payload(self, transaction: Transaction) -> Any:
        """Return the payload as the declared type; raise TransactionException if it does not fit."""
        return self._payload.read(transaction)

    def on_success(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Make *fn* the success handler: it gets the payload and the result, and may return a settlement."""
        self._success = self._create_handler(fn)
        return fn

    def on_failure(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Make *fn* the exception handler: it gets the payload and the error, and may return a settlement."""
        self._failure = self._create_handler(fn)
        return fn

    def _create_handler(self, fn: Callable[..., Any]) -> HandlerFunction:
        validate_handler(fn)
        if is_async(fn) != isinstance(self, AsyncTask):
            expected = "async def" if isinstance(self, AsyncTask) else "def"
            raise ConfigurationError(f"{callable_name(fn)} must be declared with {expected}, as {self._name} is")
        return HandlerFunction(fn, self._payload, positional=2)

    # Read by the mixins, which skip the success step of a task without such a handler.

    @property
    def _has_default_success(self) -> bool:
        return self._success is None

    @property
    def _has_default_produce_success(self) -> bool:
        return self._success is None

    @property
    def service_names(self) -> frozenset[str]:
        """The services that the functions of this task take; other services that it is given are not used."""
        functions = (self._function, self._success, self._failure)
        return frozenset(name for function in functions if function is not None for name in function.services)

    def _merge_services(self, extra_services: Mapping[str, Any] | None) -> Services:
        services = Services({**self.services, **(extra_services or {})}, owner=self._name)
        for function in (self._function, self._success, self._failure):
            for name in function.list_missing(services) if function is not None else ():
                services[name]  # raises, and lists the available services
        return services


class FunctionConsumer(_FunctionTask, ConsumerMixin, Task):
    """A consumer made of a function."""

    def lifespan(self) -> Any:
        return super().lifespan() if self._lifespan is None else self._lifespan()

    def process_transaction(self, transaction: Transaction) -> Any:
        return self._function.call(transaction, self.services)

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        return None if self._success is None else self._success.call(transaction, self.services, result)

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return None if self._failure is None else self._failure.call(transaction, self.services, exc)


class AsyncFunctionConsumer(_FunctionTask, AsyncConsumerMixin, AsyncTask):
    """A consumer made of a coroutine function."""

    def lifespan(self) -> Any:
        return super().lifespan() if self._lifespan is None else self._lifespan()

    async def process_transaction(self, transaction: Transaction) -> Any:
        return await self._function.call(transaction, self.services)

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        return None if self._success is None else await self._success.call(transaction, self.services, result)

    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return None if self._failure is None else await self._failure.call(transaction, self.services, exc)


class FunctionProducer(_FunctionTask, ProducerMixin, Task):
    """A producer made of a function; a transaction that it returns is dispatched."""

    def lifespan(self) -> Any:
        return super().lifespan() if self._lifespan is None else self._lifespan()

    def produce_transaction(self, transaction: Transaction) -> Any:
        produced = self._function.call(transaction, self.services)
        return (
            as_sync(self.connector).dispatch([produced])[0]
            if isinstance(produced, Transaction)
            else _require_produced(produced)
        )

    def handle_produce_success(self, transaction: Transaction, result: Any) -> Any:
        return None if self._success is None else self._success.call(transaction, self.services, result)

    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return None if self._failure is None else self._failure.call(transaction, self.services, exc)


class AsyncFunctionProducer(_FunctionTask, AsyncProducerMixin, AsyncTask):
    """A producer made of a coroutine function; a transaction that it returns is dispatched."""

    def lifespan(self) -> Any:
        return super().lifespan() if self._lifespan is None else self._lifespan()

    async def produce_transaction(self, transaction: Transaction) -> Any:
        produced = await self._function.call(transaction, self.services)
        if isinstance(produced, Transaction):
            return (await as_async(self.connector).dispatch_async([produced]))[0]
        return _require_produced(produced)

    async def handle_produce_success(self, transaction: Transaction, result: Any) -> Any:
        return None if self._success is None else await self._success.call(transaction, self.services, result)

    async def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return None if self._failure is None else await self._failure.call(transaction, self.services, exc)


def _require_produced(produced: Any) -> Any:
    if produced is None:
        raise TransactionException(
            "the producer returned None; return the transaction to dispatch, or the confirmation of a sent one",
            Category.BUSINESS,
            code="nothing_produced",
        )
    return produced


def consumer(
    connector: Connector | AsyncConnector,
    *,
    payload: Any = None,
    policy: ConsumerPolicy | None = None,
    name: str | None = None,
    uses: Sequence[Dependency] = (),
    gates: Sequence[Gate] = (),
    lifespan: Lifespan | None = None,
    **services: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a consumer of *connector*: ``def`` runs on threads, ``async def`` on the event loop.

    *payload* is the type its payloads are read as. *uses* names its dependencies: while the gate of one of them
    returns a pause, nothing is fetched. *lifespan* is a context manager whose yielded mapping becomes services;
    further keywords are services too.
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        task_class = AsyncFunctionConsumer if is_async(fn) else FunctionConsumer
        return _create_task(
            task_class,
            fn,
            connector,
            task_options={"payload": payload, "name": name, "lifespan": lifespan},
            init_arguments={"policy": policy, "gates": (*gates, *(dependency.gate for dependency in uses)), **services},
        )

    return decorate


def producer(
    connector: Connector | AsyncConnector,
    *,
    payload: Any = None,
    policy: ProducerPolicy | None = None,
    name: str | None = None,
    lifespan: Lifespan | None = None,
    **services: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a producer to *connector*: a transaction that it returns is dispatched."""

    def decorate(fn: Callable[..., Any]) -> Any:
        task_class = AsyncFunctionProducer if is_async(fn) else FunctionProducer
        return _create_task(
            task_class,
            fn,
            connector,
            task_options={"payload": payload, "name": name, "lifespan": lifespan},
            init_arguments={"policy": policy, **services},
        )

    return decorate


def _create_task(
    task_class: Any,
    fn: Callable[..., Any],
    connector: Connector | AsyncConnector,
    *,
    task_options: Mapping[str, Any],
    init_arguments: Mapping[str, Any],
) -> Any:
    validate_handler(fn)
    # declare() comes before the constructor, which needs the name of the task for its error messages.
    task = task_class.__new__(task_class)
    task.declare(fn, **task_options)
    task.__init__(connector, **init_arguments)
    return task
