"""Calls of decorated functions: the arguments for their parameters, from the transaction and the services.

The services are the objects, such as clients, that were passed to the task by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from ergon_framework.errors import ConfigurationError
from ergon_framework.task.payload import PayloadReader
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException


class HandlerFunction:
    """A function whose parameters are filled from the transaction by position and from the services by name.

    A parameter annotated ``Transaction``, or called ``transaction``, gets the transaction. Of the others, the first
    *positional* ones get the payload and, in a success or exception handler, the result or the error. All further ones
    are services, by name.
    """

    def __init__(self, fn: Callable[..., Any], payload: PayloadReader, *, positional: int = 1) -> None:
        self.fn = fn
        self._payload = payload
        parameters = list(inspect.signature(fn).parameters.values())
        hints = _get_hints(fn)
        self._transactions = [p.name for p in parameters if _wants_transaction(p, hints)]
        others = [p for p in parameters if p.name not in self._transactions]
        for parameter in others:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigurationError(
                    f"{parameter.name} of {callable_name(fn)} is positional-only; remove the slash"
                )
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigurationError(
                    f"{callable_name(fn)} takes *{parameter.name}; declare each service as a separate parameter"
                )
        self._positional = [p.name for p in others[:positional]]
        self._services = {p.name: p.default is not p.empty for p in others[positional:]}

    @property
    def services(self) -> frozenset[str]:
        """The services that the function takes, including those with a default."""
        return frozenset(self._services)

    def list_missing(self, services: Mapping[str, Any]) -> list[str]:
        """List the required services that are missing from *services*."""
        return [name for name, optional in self._services.items() if not optional and name not in services]

    def call(self, transaction: Transaction, services: Mapping[str, Any], *extra_args: Any) -> Any:
        """Call the function for *transaction*; *extra_args* are the result or the error."""
        arguments: dict[str, Any] = dict.fromkeys(self._transactions, transaction)
        for name, value in zip(self._positional, (_PAYLOAD_PLACEHOLDER, *extra_args), strict=False):
            arguments[name] = (
                self._read_payload(transaction, is_handler=bool(extra_args)) if value is _PAYLOAD_PLACEHOLDER else value
            )
        for name in self._services:
            if name in services:
                arguments[name] = services[name]
        return self.fn(**arguments)

    def _read_payload(self, transaction: Transaction, *, is_handler: bool) -> Any:
        try:
            return self._payload.read(transaction)
        except TransactionException:
            if not is_handler:
                raise
            # The exception handler must handle a payload that does not fit, so it gets the original.
            return transaction.payload


#: Stands for the payload in the list of arguments: a payload is read only if the function has a parameter for it.
_PAYLOAD_PLACEHOLDER = object()


def is_async(fn: Any) -> bool:
    """Return whether calling *fn* returns an awaitable."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004 - it is inspected, not tested


def validate_handler(fn: Any) -> None:
    """Reject classes, generator functions and other objects whose call would not run the work."""
    if inspect.isclass(fn) or not callable(fn):
        raise ConfigurationError(f"only functions can be decorated, not {_describe(fn)}")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise ConfigurationError(
            f"{callable_name(fn)} is a generator function, so a call would run none of it; use return"
        )


def reject_async_handlers(*handlers: Any) -> None:
    """Reject async handlers in a sync task, which would not await them."""
    for handler in handlers:
        if is_async(handler):
            raise ConfigurationError(
                f"{callable_name(handler)} is async, but its task runs on threads; use the Async mixins, or def"
            )


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else type(value).__name__


def _wants_transaction(parameter: inspect.Parameter, hints: dict[str, Any]) -> bool:
    unannotated = parameter.annotation is parameter.empty
    return hints.get(parameter.name) in (Transaction, "Transaction") or (
        unannotated and parameter.name == "transaction"
    )


def _get_hints(fn: Any) -> dict[str, Any]:
    routine = fn if inspect.isroutine(fn) else getattr(fn, "func", fn.__call__)
    try:
        return get_type_hints(routine)
    except NameError:
        # A name that exists only for the type checker; the annotations then remain text.
        return dict(getattr(routine, "__annotations__", {}))


def callable_name(fn: Any) -> str:
    """Return the name of *fn*; for objects and partial functions, the name of their class or function."""
    return str(getattr(fn, "__name__", None) or getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__))
