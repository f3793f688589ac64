"""How a plain function is called: what its parameters ask for, and where that comes from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ergon_framework.errors import Category, ConfigurationError, explain_fault
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.transaction import Transaction


class Payload:
    """Reads payloads as the type that a task was declared with."""

    def __init__(self, model: Any = None) -> None:
        self._adapter: TypeAdapter[Any] | None = None if model is None else TypeAdapter(model)

    def read(self, transaction: Transaction) -> Any:
        """The typed payload; one that does not fit is a BUSINESS failure: it will never fit."""
        if self._adapter is None:
            return transaction.payload
        try:
            return self._adapter.validate_python(transaction.payload)
        except ValidationError as error:
            # Places and rules, not values: messages end up in logs.
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'payload'}: {explain_fault(fault)}"
                for fault in error.errors(include_url=False, include_input=False)
            )
            raise TransactionException(
                f"the payload does not fit: {faults}", Category.BUSINESS, final=True, code="invalid_payload"
            ) from None


class Function:
    """A function whose parameters are filled: by position what is handled, by name what was injected.

    A parameter annotated ``Transaction``, or called ``transaction``, gets the transaction. The first other ones get the
    payload and, in handlers, the result or the error. All further ones are services, by name.
    """

    def __init__(self, fn: Callable[..., Any], payload: Payload, *, positional: int = 1) -> None:
        self.fn = fn
        self._payload = payload
        parameters = list(inspect.signature(fn).parameters.values())
        hints = _hints(fn)
        self._transactions = [p.name for p in parameters if _wants_transaction(p, hints)]
        others = [p for p in parameters if p.name not in self._transactions]
        for parameter in others:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigurationError(f"{name_of(fn)} takes {parameter.name} by position only; remove the slash")
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigurationError(
                    f"{name_of(fn)} takes *{parameter.name}; name each service it needs as a parameter of its own"
                )
        self._positional = [p.name for p in others[:positional]]
        self._services = {p.name: p.default is not p.empty for p in others[positional:]}

    @property
    def services(self) -> frozenset[str]:
        """The services that it takes, those with a default among them."""
        return frozenset(self._services)

    def missing(self, services: Mapping[str, Any]) -> list[str]:
        """The services that it needs and nobody gave."""
        return [name for name, optional in self._services.items() if not optional and name not in services]

    def call(self, transaction: Transaction, services: Mapping[str, Any], *more: Any) -> Any:
        """Call it for *transaction*; *more* are the result or the error."""
        given: dict[str, Any] = dict.fromkeys(self._transactions, transaction)
        for name, value in zip(self._positional, (_READ, *more), strict=False):
            given[name] = self._read(transaction, handled=bool(more)) if value is _READ else value
        for name in self._services:
            if name in services:
                given[name] = services[name]
        return self.fn(**given)

    def _read(self, transaction: Transaction, *, handled: bool) -> Any:
        try:
            return self._payload.read(transaction)
        except TransactionException:
            if not handled:
                raise
            # A handler is told of the payload that did not fit, and so gets it as it came.
            return transaction.payload


_READ = object()


def is_async(fn: Any) -> bool:
    """Whether calling *fn* gives something to await."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004 - it is looked into, not asked for


def check_function(fn: Any) -> None:
    """Refuse what looks like a function but would run nothing when it is called."""
    if inspect.isclass(fn) or not callable(fn):
        raise ConfigurationError(f"only functions can be decorated, not {_described(fn)}")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise ConfigurationError(f"{name_of(fn)} yields, so calling it would run nothing of it; use return")


def refuse_async(*handlers: Any) -> None:
    """Refuse async handlers where nobody would await them."""
    for handler in handlers:
        if is_async(handler):
            raise ConfigurationError(
                f"{name_of(handler)} is async, but its task runs on threads; use the Async mixins, or plain def"
            )


def _described(thing: Any) -> str:
    return f"the class {thing.__name__}" if inspect.isclass(thing) else type(thing).__name__


def _wants_transaction(parameter: inspect.Parameter, hints: dict[str, Any]) -> bool:
    unannotated = parameter.annotation is parameter.empty
    return hints.get(parameter.name) in (Transaction, "Transaction") or (
        unannotated and parameter.name == "transaction"
    )


def _hints(fn: Any) -> dict[str, Any]:
    routine = fn if inspect.isroutine(fn) else getattr(fn, "func", fn.__call__)
    try:
        return get_type_hints(routine)
    except NameError:
        # A name that exists for the type checker only; what is left are the words themselves.
        return dict(getattr(routine, "__annotations__", {}))


def name_of(fn: Any) -> str:
    """What *fn* is called; objects and partial functions are called after what they are made of."""
    return str(getattr(fn, "__name__", None) or getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__))
