"""The everyday form: a function with a decorator is the same thing as a class with mixins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeAlias

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.task.base import AsyncTask, Services, Task
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.functions import Function, Payload, check_function, is_async, name_of
from ergon_framework.task.gates import Gate, Pause
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.transaction import Transaction

Lifespan: TypeAlias = Callable[
    [], AbstractContextManager[Mapping[str, Any] | None] | AbstractAsyncContextManager[Mapping[str, Any] | None]
]


class Used(Protocol):
    """Something a task depends on, which may hold it back while it cannot be used."""

    def gate(self) -> Pause | None: ...


class _Decorated:
    """What function tasks of both variants share."""

    services: Services

    def declare(self, fn: Callable[..., Any], *, payload: Any, name: str | None, lifespan: Lifespan | None) -> None:
        """Take in what the decorator was given."""
        self._payload = Payload(payload)
        self._function = Function(fn, self._payload)
        self._success: Function | None = None
        self._failure: Function | None = None
        self._name = name or name_of(fn)
        self._lifespan = lifespan
        self.__doc__ = fn.__doc__

    @property
    def name(self) -> str:
        return self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, as it was written: for tests and for other code."""
        return self._function.fn(*args, **kwargs)

    def read_payload(self, transaction: Transaction) -> Any:
        """The payload as the type that the task was declared with; one that does not fit is a TransactionException."""
        return self._payload.read(transaction)

    def on_success(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Make *fn* the success handler: it gets the payload and the result, and may return a settlement."""
        self._success = self._handler(fn)
        return fn

    def on_failure(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Make *fn* the exception handler: it gets the payload and the error, and may return a settlement."""
        self._failure = self._handler(fn)
        return fn

    def _handler(self, fn: Callable[..., Any]) -> Function:
        check_function(fn)
        if is_async(fn) != isinstance(self, AsyncTask):
            wanted = "async def" if isinstance(self, AsyncTask) else "def"
            raise ConfigurationError(f"{name_of(fn)} must be declared with {wanted}, as {self._name} is")
        return Function(fn, self._payload, positional=2)

    @property
    def _plain(self) -> bool:
        return self._success is None

    @property
    def _plain_produce(self) -> bool:
        return self._success is None

    @property
    def taken(self) -> frozenset[str]:
        """The services that its functions take; whatever else it is given reaches nobody."""
        functions = (self._function, self._success, self._failure)
        return frozenset(name for one in functions if one is not None for name in one.services)

    def _given(self, more: Mapping[str, Any] | None) -> Services:
        services = Services({**self.services, **(more or {})}, owner=self._name)
        for function in (self._function, self._success, self._failure):
            for name in function.missing(services) if function is not None else ():
                services[name]  # raises, and says what there is
        return services


class FunctionConsumer(_Decorated, ConsumerMixin, Task):
    """A consumer made of a function."""

    def lifespan(self) -> Any:
        return super().lifespan() if self._lifespan is None else self._lifespan()

    def process_transaction(self, transaction: Transaction) -> Any:
        return self._function.call(transaction, self.services)

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        return None if self._success is None else self._success.call(transaction, self.services, result)

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return None if self._failure is None else self._failure.call(transaction, self.services, exc)


class AsyncFunctionConsumer(_Decorated, AsyncConsumerMixin, AsyncTask):
    """A consumer made of a coroutine function."""

    def lifespan(self) -> Any:
        return super().lifespan() if self._lifespan is None else self._lifespan()

    async def process_transaction(self, transaction: Transaction) -> Any:
        return await self._function.call(transaction, self.services)

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        return None if self._success is None else await self._success.call(transaction, self.services, result)

    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return None if self._failure is None else await self._failure.call(transaction, self.services, exc)


class FunctionProducer(_Decorated, ProducerMixin, Task):
    """A producer made of a function; a transaction that it returns is dispatched."""

    def lifespan(self) -> Any:
        return super().lifespan() if self._lifespan is None else self._lifespan()

    def produce_transaction(self, transaction: Transaction) -> Any:
        made = self._function.call(transaction, self.services)
        return as_sync(self.connector).dispatch([made])[0] if isinstance(made, Transaction) else _confirmed(made)

    def handle_produce_success(self, transaction: Transaction, result: Any) -> Any:
        return None if self._success is None else self._success.call(transaction, self.services, result)

    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return None if self._failure is None else self._failure.call(transaction, self.services, exc)


class AsyncFunctionProducer(_Decorated, AsyncProducerMixin, AsyncTask):
    """A producer made of a coroutine function; a transaction that it returns is dispatched."""

    def lifespan(self) -> Any:
        return super().lifespan() if self._lifespan is None else self._lifespan()

    async def produce_transaction(self, transaction: Transaction) -> Any:
        made = await self._function.call(transaction, self.services)
        if isinstance(made, Transaction):
            return (await as_async(self.connector).dispatch_async([made]))[0]
        return _confirmed(made)

    async def handle_produce_success(self, transaction: Transaction, result: Any) -> Any:
        return None if self._success is None else await self._success.call(transaction, self.services, result)

    async def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return None if self._failure is None else await self._failure.call(transaction, self.services, exc)


def _confirmed(made: Any) -> Any:
    if made is None:
        raise TransactionException(
            "the producer returned nothing; return the transaction to dispatch, or the confirmation of what was sent",
            Category.BUSINESS,
            code="nothing_produced",
        )
    return made


def consumer(
    connector: Connector | AsyncConnector,
    *,
    payload: Any = None,
    policy: ConsumerPolicy | None = None,
    name: str | None = None,
    uses: Sequence[Used] = (),
    gates: Sequence[Gate] = (),
    lifespan: Lifespan | None = None,
    **services: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a consumer of *connector*: ``def`` runs on threads, ``async def`` on the event loop.

    *payload* is the type its payloads are read as. *uses* names what it depends on: while one of
    them says so, nothing is fetched. *lifespan* is a context manager whose yielded mapping becomes
    services; further keywords are services too.
    """

    def made(fn: Callable[..., Any]) -> Any:
        kind = AsyncFunctionConsumer if is_async(fn) else FunctionConsumer
        return _declared(
            kind,
            fn,
            connector,
            declared={"payload": payload, "name": name, "lifespan": lifespan},
            given={"policy": policy, "gates": (*gates, *(used.gate for used in uses)), **services},
        )

    return made


def producer(
    connector: Connector | AsyncConnector,
    *,
    payload: Any = None,
    policy: ProducerPolicy | None = None,
    name: str | None = None,
    lifespan: Lifespan | None = None,
    **services: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a producer to *connector*: what it returns is dispatched if it is a transaction."""

    def made(fn: Callable[..., Any]) -> Any:
        kind = AsyncFunctionProducer if is_async(fn) else FunctionProducer
        return _declared(
            kind,
            fn,
            connector,
            declared={"payload": payload, "name": name, "lifespan": lifespan},
            given={"policy": policy, **services},
        )

    return made


def _declared(
    kind: Any,
    fn: Callable[..., Any],
    connector: Connector | AsyncConnector,
    *,
    declared: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Any:
    check_function(fn)
    task = kind.__new__(kind)
    task.declare(fn, **declared)
    task.__init__(connector, **given)
    return task
