"""Routing: one consumer of one queue with several functions, one of which handles each transaction.

A router is one task: it has one loop, one policy and one name. Its handlers are functions, each for one type of
transactions; each has its own payload type, success handler and failure handler. A transaction of a type without a
handler is dead-lettered at its first attempt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from ergon_framework.connectors.base import AsyncConnector, Connector, DeadLetter
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.gates import Gate
from ergon_framework.task.base import AsyncTask, Services, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.decorators import (
    AsyncHandlers,
    Dependency,
    Lifespan,
    SyncHandlers,
    read_local_names,
    resolve,
)
from ergon_framework.task.handler import FunctionSet, TaskServices, validate_handler
from ergon_framework.task.keywords import apply_consumer_keywords, refuse_unknown_keywords
from ergon_framework.task.middleware import AsyncMiddleware, Middleware, check_middleware
from ergon_framework.task.send import Sender
from ergon_framework.task.signature import callable_name, is_async
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.lifecycle import LifecycleSpec
from ergon_framework.worker.policies import ConsumerPolicy

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: The reason of a dead letter whose type has no handler.
UNKNOWN_TYPE: Final = "unknown_type"
#: Maximum number of characters of an unknown type in the error: its failure record must have room for the known ones.
_MAX_TYPE_CHARS: Final = 100


class _RouterSender(Sender):
    """Sends to the queue of a router, as transactions of one type."""

    def __init__(self, router: Router, functions: FunctionSet, *, type: str) -> None:  # noqa: A002 - the envelope field
        self.router = router
        self._functions = functions
        self._type = type
        self.__doc__ = functions.work.fn.__doc__
        self.__module__ = functions.work.fn.__module__

    @property
    def type(self) -> str:
        """The type of the transactions that the function handles."""
        return self._type

    @property
    def connector(self) -> Connector | AsyncConnector:  # type: ignore[override] # a test replaces that of the router
        return self.router.connector


class RouteHandler(SyncHandlers[P, R], _RouterSender, Generic[P, R]):
    """A function that handles one type of a router's transactions, which can still be called as one."""


class AsyncRouteHandler(AsyncHandlers[P, Coroutine[Any, Any, R]], _RouterSender, Generic[P, R]):
    """A coroutine function that handles one type of a router's transactions, which can still be called as one."""


class RouteDecorator(Protocol):
    """Makes a function the handler of one type."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncRouteHandler[P, T]: ...  # type: ignore[overload-overlap] # a coroutine function is a function
    @overload
    def __call__(self, fn: Callable[P, T], /) -> RouteHandler[P, T]: ...


class Router:
    """A consumer whose handlers are chosen by the type of the transaction; ``router`` creates it."""

    connector: Connector | AsyncConnector
    services: Services

    # The types of these depend on the handlers: with async handlers, await run() and consume_transactions().
    policy: Any
    run: Any
    open: Any
    consume_transactions: Any
    stop: Any

    def declare(
        self,
        *,
        name: str,
        module: str,
        lifespan: Lifespan | None,
        services: Mapping[str, Any],
        middleware: Sequence[Middleware] | Sequence[AsyncMiddleware],
    ) -> None:
        """Store the options; *module* is the name of the module that declares the router."""
        self._name = name
        self._task_services = TaskServices(frozenset(services), has_lifespan=lifespan is not None)
        self._lifespan = lifespan
        self._unchecked_middleware = middleware
        self._handlers: dict[str, FunctionSet] = {}
        self.__module__ = module

    @property
    def name(self) -> str:
        return self._name

    def on(self, type: str, *, payload: Any = None) -> RouteDecorator:  # noqa: A002 - the name of the envelope field
        """Make a function the handler of transactions of *type*; it gets what its parameters ask for.

        The payload is read as the type that its parameter is annotated with; *payload* overrides it. All handlers of a
        router are ``def``, or all are ``async def``.
        """
        if not isinstance(type, str):
            raise ConfigurationError(
                f"the type of a handler of {self._name} must be a str, not {_describe(type)}; write "
                '@router.on("order.created")'
            )

        def decorate(fn: Callable[..., Any]) -> Any:
            functions = self._create_functions(type, fn, payload=payload, names=read_local_names())
            if not self._handlers:
                self._set_variant(is_async=functions.is_async)
            self._handlers[type] = functions
            return (AsyncRouteHandler if functions.is_async else RouteHandler)(self, functions, type=type)

        return cast("RouteDecorator", decorate)

    def _create_functions(
        self,
        type: str,  # noqa: A002 - the name of the envelope field
        fn: Callable[..., Any],
        *,
        payload: Any,
        names: Mapping[str, Any],
    ) -> FunctionSet:
        validate_handler(fn)
        name = callable_name(fn)
        if type in self._handlers:
            raise ConfigurationError(
                f"{self._name} has two handlers for type {type!r}, {self._handlers[type].name} and {name}; remove one"
            )
        first = next(iter(self._handlers.values()), None)
        if first is not None and is_async(fn) != first.is_async:
            expected = "async def" if first.is_async else "def"
            raise ConfigurationError(
                f"{name} must be declared with {expected}, as {first.name} of the same router is; or give it a router "
                "and a queue of its own"
            )
        return FunctionSet(fn, name=name, task=self._task_services, payload=payload, names=names)

    def _set_variant(self, *, is_async: bool) -> None:
        """Become a sync or an async task: the first handler decides, which is declared after the router."""
        if self._unchecked_middleware:
            check_middleware(self._unchecked_middleware, task=self._name, is_async=is_async)
        task: Any = self
        task.__class__ = _AsyncRouter if is_async else _SyncRouter
        task.middleware = self._unchecked_middleware

    def read_payload(self, transaction: Transaction) -> Any:
        """Return the payload as the handler of its type declares it; TransactionException if it does not fit."""
        return self._find_functions(transaction).work.reader.read(transaction)

    def lifespan(self) -> Any:
        base: Any = super()
        return base.lifespan() if self._lifespan is None else self._lifespan()

    @property
    def service_names(self) -> frozenset[str]:
        """The services that the handlers take; other services that the router is given are not used."""
        return frozenset().union(*(functions.list_services() for functions in self._handlers.values()))

    def _find_functions(self, transaction: Transaction) -> FunctionSet:
        functions = self._handlers.get(transaction.type)
        if functions is None:
            unknown_type = transaction.type[:_MAX_TYPE_CHARS]
            raise TransactionException(
                f"the queue {self.connector.name!r} has no handler for type {unknown_type!r}; it has handlers for: "
                f"{', '.join(known or repr(known) for known in sorted(self._handlers))}",
                Category.BUSINESS,
                final=True,
                code=UNKNOWN_TYPE,
            )
        return functions

    def _call_work(self, transaction: Transaction) -> Any:
        return self._find_functions(transaction).work.call(transaction, self.services)

    def _call_success(self, transaction: Transaction, result: Any) -> Any:
        return self._find_functions(transaction).call_success(transaction, self.services, result)

    def _call_failure(self, transaction: Transaction, exc: TransactionException) -> Any:
        functions = self._handlers.get(transaction.type)
        if functions is None:  # whatever the policy says: a version of the program that knows the type may handle it
            return DeadLetter(UNKNOWN_TYPE)
        return functions.call_failure(transaction, self.services, exc)

    @property
    def _has_default_success(self) -> bool:
        return all(functions.success is None for functions in self._handlers.values())

    @property
    def _has_default_exception(self) -> bool:
        return all(functions.failure is None for functions in self._handlers.values())

    def _merge_services(self, extra_services: Mapping[str, Any] | None) -> Services:
        self._require_handlers()
        services = Services({**self.services, **(extra_services or {})}, owner=self._name)
        for functions in self._handlers.values():
            for name in functions.list_missing(services):
                services[name]  # raises, and lists the available services
        return services

    def _require_handlers(self) -> None:
        if not self._handlers:
            raise ConfigurationError(
                f"{self._name} has no handler; declare one with @router.on(type), and import the modules that do so"
            )


class _SyncRouter(Router, ConsumerMixin, Task):
    def process_transaction(self, transaction: Transaction) -> Any:
        return self._call_work(transaction)

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        return self._call_success(transaction, result)

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return self._call_failure(transaction, exc)

    def _create_process_spec(self, *args: Any, **kwargs: Any) -> LifecycleSpec:
        self._require_handlers()  # a router without handlers is a sync one
        return super()._create_process_spec(*args, **kwargs)


class _AsyncRouter(Router, AsyncConsumerMixin, AsyncTask):
    async def process_transaction(self, transaction: Transaction) -> Any:
        return await self._call_work(transaction)

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        return await resolve(self._call_success(transaction, result))

    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Any:
        return await resolve(self._call_failure(transaction, exc))


@refuse_unknown_keywords
def router(
    connector: Connector | AsyncConnector,
    *,
    retries: int | None = None,
    timeout: float | None = None,
    backoff: float | None = None,
    concurrency: int | None = None,
    max_deliveries: int | None = None,
    policy: ConsumerPolicy | None = None,
    name: str | None = None,
    services: Mapping[str, Any] | None = None,
    lifespan: Lifespan | None = None,
    middleware: Sequence[Middleware] | Sequence[AsyncMiddleware] = (),
    uses: Sequence[Dependency] = (),
    gates: Sequence[Gate] = (),
    isolated: bool = False,
) -> Router:
    """Return a consumer of *connector* whose handlers are chosen by the type of the transaction.

    ``@router.on(type)`` declares a handler. The options are those of ``consumer``, and apply to all handlers; *name* is
    by default that of the queue.
    """
    if not isinstance(connector, Connector | AsyncConnector):
        raise ConfigurationError(f"router needs a connector, such as queue(name), not {_describe(connector)}")
    keywords = {
        "retries": retries,
        "timeout": timeout,
        "backoff": backoff,
        "concurrency": concurrency,
        "max_deliveries": max_deliveries,
    }
    name = name or connector.name
    task = _SyncRouter.__new__(_SyncRouter)
    task.declare(
        name=name, module=_read_caller_module(), lifespan=lifespan, services=services or {}, middleware=middleware
    )
    Task.__init__(
        task,
        connector,
        policy=apply_consumer_keywords(policy, keywords, owner=name),
        gates=(*gates, *(dependency.gate for dependency in uses)),
        services=services,
        isolated=isolated,
    )
    return task


def _read_caller_module() -> str:
    """Return the name of the module that calls ``router``."""
    frame = inspect.currentframe()
    for _ in range(3):  # this function, router, and the check of its keywords
        frame = None if frame is None else frame.f_back
    return __name__ if frame is None else str(frame.f_globals.get("__name__", __name__))


def _describe(value: Any) -> str:
    return f"the function {callable_name(value)}" if inspect.isroutine(value) else repr(value)
