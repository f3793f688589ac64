"""How a plain function is called: what its parameters ask for, and where that comes from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ergon_framework.errors import Category, ConfigurationError
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
                f"{'.'.join(map(str, fault['loc'])) or 'payload'}: {fault['msg']}"
                for fault in error.errors(include_url=False, include_input=False, include_context=False)
            )
            raise TransactionException(
                f"the payload does not fit: {faults}", Category.BUSINESS, final=True, code="invalid_payload"
            ) from None


class Function:
    """A function whose parameters are filled: by position what is handled, by name what was injected.

    A parameter annotated ``Transaction`` gets the transaction. The first other ones get the
    payload and, in handlers, the result or the error. All further ones are services, by name.
    """

    def __init__(self, fn: Callable[..., Any], payload: Payload, *, positional: int = 1) -> None:
        self.fn = fn
        self._payload = payload
        parameters = list(inspect.signature(fn).parameters.values())
        hints = _hints(fn)
        self._transactions = [p.name for p in parameters if hints.get(p.name) in (Transaction, "Transaction")]
        others = [p for p in parameters if p.name not in self._transactions]
        for parameter in others:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigurationError(
                    f"{fn.__name__} takes *{parameter.name}; name each service it needs as a parameter of its own"
                )
        self._positional = [p.name for p in others[:positional]]
        self._services = {p.name: p.default is not p.empty for p in others[positional:]}

    def missing(self, services: Mapping[str, Any]) -> list[str]:
        """The services that it needs and nobody gave."""
        return [name for name, optional in self._services.items() if not optional and name not in services]

    def call(self, transaction: Transaction, services: Mapping[str, Any], *more: Any) -> Any:
        """Call it for *transaction*; *more* are the result or the error."""
        given: dict[str, Any] = dict.fromkeys(self._transactions, transaction)
        for name, value in zip(self._positional, (_READ, *more), strict=False):
            given[name] = self._payload.read(transaction) if value is _READ else value
        for name in self._services:
            if name in services:
                given[name] = services[name]
        return self.fn(**given)


_READ = object()


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(fn)
    except NameError:
        # A name that exists for the type checker only; what is left are the words themselves.
        return dict(getattr(fn, "__annotations__", {}))
