"""The decorator form of a task: a decorated function is equivalent to a class with mixins.

The classes are generic over the signature of the function, so that type checkers know its payload and its result. A
HandlerFunction calls a function with the arguments that its parameters ask for: the transaction, its payload, the
result or error, and services by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import Category
from ergon_framework.gates import Gate, Pause
from ergon_framework.task.base import AsyncTask, Services, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.handler import FunctionSet, TaskServices, validate_handler
from ergon_framework.task.keywords import apply_consumer_keywords, apply_producer_keywords, refuse_unknown_keywords
from ergon_framework.task.middleware import AsyncMiddleware, Middleware
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.task.send import Sender
from ergon_framework.task.signature import callable_name, is_async
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
AsyncF = TypeVar("AsyncF", bound=Callable[..., Awaitable[Any]])
T = TypeVar("T")

#: Opens the clients of a task while it runs; the yielded mapping becomes services.
Lifespan: TypeAlias = Callable[
    [], AbstractContextManager[Mapping[str, Any] | None] | AbstractAsyncContextManager[Mapping[str, Any] | None]
]


class Dependency(Protocol):
    """A dependency of a task, such as a provider, with a gate that pauses fetching while it is unavailable."""

    def gate(self) -> Pause | None: ...


class _Function(Generic[P, R]):
    """A decorated function, which can still be called as one; other functions can become its handlers."""

    _functions: FunctionSet

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function unchanged: for tests and for other code."""
        return cast("R", self._functions.work.fn(*args, **kwargs))


class SyncHandlers(_Function[P, R]):
    """The decorators of a sync function's handlers."""

    def on_success(self, fn: F) -> F:
        """Make *fn* the success handler; it may return a settlement.

        It gets what its parameters ask for: the payload, the result of the task's function (annotated as that function
        returns it, or called ``result``), the transaction, and services.
        """
        self._functions.set_success(fn, read_local_names())
        return fn

    def on_failure(self, fn: F) -> F:
        """Make *fn* the failure handler; it may return a settlement.

        It gets what its parameters ask for: the payload, the error (annotated as an exception, or called ``error``),
        the transaction, and services. A handler without a parameter annotated ``RawPayload`` is not called for a
        payload that does not fit its type; such a transaction is dead-lettered.
        """
        self._functions.set_failure(fn, read_local_names())
        return fn


class AsyncHandlers(_Function[P, R]):
    """The decorators of an async function's handlers."""

    def on_success(self, fn: AsyncF) -> AsyncF:
        """Make *fn* the success handler, as a sync function does."""
        self._functions.set_success(fn, read_local_names())
        return fn

    def on_failure(self, fn: AsyncF) -> AsyncF:
        """Make *fn* the failure handler, as a sync function does."""
        self._functions.set_failure(fn, read_local_names())
        return fn


class _FunctionTask:
    """The common part of all tasks that are made of a function."""

    services: Services
    _functions: FunctionSet

    def declare(
        self,
        fn: Callable[..., Any],
        *,
        payload: Any,
        name: str | None,
        lifespan: Lifespan | None,
        services: Mapping[str, Any],
        names: Mapping[str, Any],
    ) -> None:
        """Store the options of the decorator; *names* is the scope of the declaration."""
        task_services = TaskServices(frozenset(services), has_lifespan=lifespan is not None)
        self._name = name or callable_name(fn)
        self._functions = FunctionSet(fn, name=self._name, task=task_services, payload=payload, names=names)
        self._lifespan = lifespan
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__

    @property
    def name(self) -> str:
        return self._name

    def lifespan(self) -> Any:
        base: Any = super()
        return base.lifespan() if self._lifespan is None else self._lifespan()

    def read_payload(self, transaction: Transaction) -> Any:
        """Return the payload as the declared type; raise TransactionException if it does not fit."""
        return self._functions.work.reader.read(transaction)

    def _call_work(self, transaction: Transaction) -> Any:
        return self._functions.work.call(transaction, self.services)

    def _call_success(self, transaction: Transaction, result: Any) -> Any:
        return self._functions.call_success(transaction, self.services, result)

    def _call_failure(self, transaction: Transaction, exc: TransactionException) -> Any:
        return self._functions.call_failure(transaction, self.services, exc)

    # Read by the mixins: no middleware surrounds a handler that the task does not have, and no success step calls it.

    @property
    def _has_default_success(self) -> bool:
        return self._functions.success is None

    @property
    def _has_default_produce_success(self) -> bool:
        return self._functions.success is None

    @property
    def _has_default_exception(self) -> bool:
        return self._functions.failure is None

    @property
    def _has_default_produce_exception(self) -> bool:
        return self._functions.failure is None

    @property
    def service_names(self) -> frozenset[str]:
        """The services that the functions of this task take; other services that it is given are not used."""
        return self._functions.list_services()

    def _merge_services(self, extra_services: Mapping[str, Any] | None) -> Services:
        services = Services({**self.services, **(extra_services or {})}, owner=self._name)
        for name in self._functions.list_missing(services):
            services[name]  # raises, and lists the available services
        return services


class Consumer(SyncHandlers[P, R], _FunctionTask, Sender, ConsumerMixin, Task):
    """A consumer made of a function, which can still be called as one."""

    def process_transaction(self, transaction: Transaction) -> Any:
        return self._call_work(transaction)

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        return self._call_success(transaction, result)

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return self._call_failure(transaction, exc)


class AsyncConsumer(AsyncHandlers[P, Coroutine[Any, Any, R]], _FunctionTask, Sender, AsyncConsumerMixin, AsyncTask):
    """A consumer made of a coroutine function, which can still be called as one."""

    async def process_transaction(self, transaction: Transaction) -> Any:
        return await self._call_work(transaction)

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        return await resolve(self._call_success(transaction, result))

    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return await resolve(self._call_failure(transaction, exc))


class Producer(SyncHandlers[P, R], _FunctionTask, ProducerMixin, Task):
    """A producer made of a function; a transaction that it returns is dispatched."""

    def produce_transaction(self, transaction: Transaction) -> Any:
        produced = self._call_work(transaction)
        return (
            as_sync(self.connector).dispatch([produced])[0]
            if isinstance(produced, Transaction)
            else _require_produced(produced)
        )

    def handle_produce_success(self, transaction: Transaction, result: Any) -> Any:
        return self._call_success(transaction, result)

    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return self._call_failure(transaction, exc)


class AsyncProducer(AsyncHandlers[P, Coroutine[Any, Any, R]], _FunctionTask, AsyncProducerMixin, AsyncTask):
    """A producer made of a coroutine function; a transaction that it returns is dispatched."""

    async def produce_transaction(self, transaction: Transaction) -> Any:
        produced = await self._call_work(transaction)
        if isinstance(produced, Transaction):
            return (await as_async(self.connector).dispatch_async([produced]))[0]
        return _require_produced(produced)

    async def handle_produce_success(self, transaction: Transaction, result: Any) -> Any:
        return await resolve(self._call_success(transaction, result))

    async def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return await resolve(self._call_failure(transaction, exc))


async def resolve(result: Any) -> Any:
    """Await the call of a handler; anything else, such as a settlement, is the result itself."""
    return await result if inspect.isawaitable(result) else result


def _require_produced(produced: Any) -> Any:
    if produced is None:
        raise TransactionException(
            "the producer returned None; return the transaction to dispatch, or the confirmation of a sent one",
            Category.BUSINESS,
            code="nothing_produced",
        )
    return produced


# -- the decorators ---------------------------------------------------------------------------------


class ConsumerDecorator(Protocol):
    """Makes a function a consumer of its kind."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncConsumer[P, T]: ...  # type: ignore[overload-overlap] # a coroutine function is a function
    @overload
    def __call__(self, fn: Callable[P, T], /) -> Consumer[P, T]: ...


class ProducerDecorator(Protocol):
    """Makes a function a producer of its kind."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncProducer[P, T]: ...  # type: ignore[overload-overlap] # a coroutine function is a function
    @overload
    def __call__(self, fn: Callable[P, T], /) -> Producer[P, T]: ...


@refuse_unknown_keywords
def consumer(
    connector: Connector | AsyncConnector,
    *,
    retries: int | None = None,
    timeout: float | None = None,
    backoff: float | None = None,
    concurrency: int | None = None,
    max_deliveries: int | None = None,
    policy: ConsumerPolicy | None = None,
    payload: Any = None,
    name: str | None = None,
    services: Mapping[str, Any] | None = None,
    lifespan: Lifespan | None = None,
    middleware: Sequence[Middleware] | Sequence[AsyncMiddleware] | None = None,
    uses: Sequence[Dependency] = (),
    gates: Sequence[Gate] = (),
    isolated: bool = False,
) -> ConsumerDecorator:
    """Make a function a consumer of *connector*: ``def`` runs on threads, ``async def`` on the event loop.

    *retries* is the number of retries after the first attempt, *timeout* the seconds of each attempt, *backoff* the
    seconds before the first retry, which double with every further one. *concurrency* is the number of transactions
    that run at once, *max_deliveries* the number of deliveries after which a transaction is dead-lettered. *policy* has
    all other settings; a setting cannot be in both.

    The payload is read as the type that its parameter is annotated with; *payload* overrides it. *services* are passed
    to the parameters with their names; *lifespan* is a context manager whose yielded mapping becomes services.
    *middleware* surrounds each transaction and each attempt. *uses* names dependencies: while the gate of one of them
    returns a pause, nothing is fetched. An *isolated* async task has an event loop and a thread of its own in a process
    that runs several tasks.
    """
    keywords = {
        "retries": retries,
        "timeout": timeout,
        "backoff": backoff,
        "concurrency": concurrency,
        "max_deliveries": max_deliveries,
    }

    def decorate(fn: Callable[..., Any]) -> Any:
        task_class: Any = AsyncConsumer if is_async(fn) else Consumer
        return _create_task(
            task_class,
            fn,
            connector,
            names=read_local_names(),
            task_options={"payload": payload, "name": name, "lifespan": lifespan, "services": services or {}},
            init_arguments={
                "policy": apply_consumer_keywords(policy, keywords, owner=name or callable_name(fn)),
                "gates": (*gates, *(dependency.gate for dependency in uses)),
                "middleware": middleware,
                "services": services,
                "isolated": isolated,
            },
        )

    return cast("ConsumerDecorator", decorate)


@refuse_unknown_keywords
def producer(
    connector: Connector | AsyncConnector,
    *,
    retries: int | None = None,
    timeout: float | None = None,
    backoff: float | None = None,
    concurrency: int | None = None,
    policy: ProducerPolicy | None = None,
    payload: Any = None,
    name: str | None = None,
    services: Mapping[str, Any] | None = None,
    lifespan: Lifespan | None = None,
    middleware: Sequence[Middleware] | Sequence[AsyncMiddleware] | None = None,
) -> ProducerDecorator:
    """Make a function a producer to *connector*: a transaction that it returns is dispatched.

    The options are those of ``consumer``.
    """
    keywords = {"retries": retries, "timeout": timeout, "backoff": backoff, "concurrency": concurrency}

    def decorate(fn: Callable[..., Any]) -> Any:
        task_class: Any = AsyncProducer if is_async(fn) else Producer
        return _create_task(
            task_class,
            fn,
            connector,
            names=read_local_names(),
            task_options={"payload": payload, "name": name, "lifespan": lifespan, "services": services or {}},
            init_arguments={
                "policy": apply_producer_keywords(policy, keywords, owner=name or callable_name(fn)),
                "middleware": middleware,
                "services": services,
            },
        )

    return cast("ProducerDecorator", decorate)


def _create_task(
    task_class: Any,
    fn: Callable[..., Any],
    connector: Connector | AsyncConnector,
    *,
    names: Mapping[str, Any],
    task_options: Mapping[str, Any],
    init_arguments: Mapping[str, Any],
) -> Any:
    validate_handler(fn)
    # declare() comes before the constructor, which needs the name of the task for its error messages.
    task = task_class.__new__(task_class)
    task.declare(fn, names=names, **task_options)
    task.__init__(connector, **init_arguments)
    return task


def read_local_names() -> Mapping[str, Any]:
    """Return the local names of the code that applies a decorator: annotations may name types that are local there."""
    frame = inspect.currentframe()
    for _ in range(2):  # this function, and the decorator that calls it
        frame = None if frame is None else frame.f_back
    return {} if frame is None else frame.f_locals
