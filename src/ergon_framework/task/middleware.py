"""Middleware: user code around each transaction of a task, and around each attempt of a step.

A middleware is an object with two methods that return context managers. ``transaction`` surrounds one transaction, from
the first attempt to the decision about its outcome. ``attempt`` surrounds one call of a handler. This module has what
users write; ``middleware_calls`` runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction
from ergon_framework.worker.report import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionContext:
    """One transaction of a task; ``outcome`` is a copy of its outcome, and None until that is decided."""

    task: str
    queue: str
    transaction: Transaction
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """One attempt of a step: ``process``, ``produce``, ``success`` or ``exception``; ``attempt`` counts from 0."""

    task: str
    queue: str
    transaction: Transaction
    step: str
    attempt: int


class Middleware:
    """The base of middleware for sync tasks; override one method or both, usually with ``@contextmanager``.

    A middleware cannot suppress an exception. The exception that it raises itself fails the attempt. One instance
    serves all transactions, on several threads at once.
    """

    def transaction(self, context: TransactionContext) -> AbstractContextManager[object]:  # noqa: ARG002 - for subclasses
        """Surround one transaction. Entry and exit may happen on different threads, with the same context variables."""
        return nullcontext()

    def attempt(self, context: AttemptContext) -> AbstractContextManager[object]:  # noqa: ARG002 - for subclasses
        """Surround one call of a handler, on the thread of the handler."""
        return nullcontext()


class AsyncMiddleware:
    """The base of middleware for async tasks; override one method or both, usually with ``@asynccontextmanager``."""

    def transaction(self, context: TransactionContext) -> AbstractAsyncContextManager[object]:  # noqa: ARG002 - for subclasses
        """Surround one transaction. Entry and exit may happen in different tasks, with the same context variables."""
        return nullcontext()

    def attempt(self, context: AttemptContext) -> AbstractAsyncContextManager[object]:  # noqa: ARG002 - for subclasses
        """Surround one call of a handler, in the asyncio task of the handler."""
        return nullcontext()


#: The methods of a middleware.
METHODS: Final = ("transaction", "attempt")


def check_middleware(middleware: Sequence[Any], *, task: str, is_async: bool) -> tuple[Any, ...]:
    """Return *middleware* as a tuple; raise ConfigurationError if the task named *task* cannot run it."""
    if not isinstance(middleware, Sequence):
        raise ConfigurationError(f"middleware of {task} is a {_describe(middleware)}; pass a list: middleware=[…]")
    base, other = (AsyncMiddleware, Middleware) if is_async else (Middleware, AsyncMiddleware)
    for each in middleware:
        if inspect.isclass(each):
            raise ConfigurationError(
                f"middleware of {task} has the class {each.__name__}; pass an instance: {each.__name__}()"
            )
        if isinstance(each, other) and not isinstance(each, base):
            raise ConfigurationError(
                f"middleware {_describe(each)} is {'sync' if is_async else 'async'}, and {task} is not; "
                f"derive it from {base.__name__}"
            )
        if not isinstance(each, base):
            raise ConfigurationError(
                f"middleware of {task} has a {_describe(each)}; derive its class from {base.__name__}"
            )
        for name in METHODS:
            _check_method(each, name, is_async=is_async)
    return tuple(middleware)


def _check_method(middleware: Any, name: str, *, is_async: bool) -> None:
    """Refuse a method that does not return a context manager of the variant."""
    method = getattr(middleware, name)
    remedy = "@asynccontextmanager" if is_async else "@contextmanager"
    label = f"{name} of middleware {_describe(middleware)}"
    if _yields(method):
        raise ConfigurationError(f"{label} returns no context manager; decorate it with {remedy}")
    function = inspect.unwrap(method)
    if function is not method and _yields(function) and inspect.isasyncgenfunction(function) != is_async:
        variant = "sync" if is_async else "async"
        raise ConfigurationError(f"{label} is {variant}, and its task is not; decorate it with {remedy}")


def _yields(function: Any) -> bool:
    """Return whether a call of *function* creates a generator or a coroutine."""
    return (
        inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
        or inspect.iscoroutinefunction(function)
    )


def _describe(value: Any) -> str:
    return type(value).__name__
