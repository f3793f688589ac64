"""Registry: the handlers of a Python executor by name, and what fits their parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, TypeVar, overload

from pydantic import ConfigDict, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from ergon_framework.errors import Category, ConfigurationError, ErgonError, explain_fault
from ergon_framework.executor.protocol import LONGEST_NAME

F = TypeVar("F", bound=Callable[..., Any])


class Retry(ErgonError):
    """Raised or returned by a handler: try this job again, after *after* seconds if they are given.

    It is an attempt like any other. How often and after which delay is the orchestrator's decision.
    """

    code = "retry"

    def __init__(self, message: str = "", *, after: float | None = None) -> None:
        super().__init__(message, retry_after=after)


class InvalidArgumentError(ErgonError):
    """The arguments of a request do not fit the handler; its message names parameters and no value."""

    category = Category.BUSINESS
    final = True
    code = "invalid_argument"


class Handler:
    """One function under its name; arguments are validated against its annotations before it is called."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self._fit: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None

    def prepare(self) -> None:
        """Read the annotations; here and not at the decorator, because they may name what is defined below it."""
        if self._fit is not None:
            return

        def capture(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs

        try:
            # The validated call is not the handler's, so that an error inside of it is never taken for a bad argument.
            signature = inspect.signature(self.function)
            below = _below(self.function)
            hints = getattr(below, "__annotations__", {})
            capture.__module__ = below.__module__
            capture.__annotations__ = {name: hints[name] for name in signature.parameters if name in hints}
            capture.__signature__ = signature  # type: ignore[attr-defined]
            self._fit = validate_call(config=ConfigDict(hide_input_in_errors=True))(capture)
        except (PydanticUserError, NameError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the annotations of handler {self.name!r} cannot be used: {type(error).__name__}: {str(error)[:300]}"
            ) from error

    def fit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """*args* and *kwargs* as the function's annotations want them, or InvalidArgumentError."""
        self.prepare()
        assert self._fit is not None  # noqa: S101 - prepared above
        try:
            return self._fit(*args, **kwargs)
        except ValidationError as error:
            # Not chained: the other error holds the values.
            raise InvalidArgumentError(self._told(error)) from None

    def _told(self, error: ValidationError) -> str:
        names = list(inspect.signature(self.function).parameters)
        faults = error.errors(include_url=False, include_input=False)
        told = []
        for fault in faults[:_NAMED]:
            first, *rest = fault["loc"] or ("",)
            name = names[first] if isinstance(first, int) and first < len(names) else str(first)[:LONGEST_SHOWN]
            place = ".".join([name, *(str(part)[:LONGEST_SHOWN] for part in rest)])
            told.append(f"{place}: {explain_fault(fault)}")
        more = len(faults) - _NAMED
        return f"{self.name}: " + "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _below(function: Any) -> Any:
    """What holds the annotations of *function*: that which a partial or a decorator was put around, or a method."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.isroutine(function) or isinstance(function, type):
            return function
        else:
            function = type(function).__call__


#: How many faults of one call are named, and how much of a name that came with the request is shown.
_NAMED: Final = 5
LONGEST_SHOWN: Final = 100


class Registry:
    """The handlers of an executor.

    >>> registry = Registry()
    >>> @registry.handler
    ... def add(a: int, b: int) -> int:
    ...     return a + b
    >>> registry.names
    ['add']
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    @overload
    def handler(self, given: F, /) -> F: ...

    @overload
    def handler(self, given: str, /) -> Callable[[F], F]: ...

    def handler(self, given: F | str, /) -> F | Callable[[F], F]:
        """Register a function, ``def`` or ``async def``, under its own name or under the one given."""
        if isinstance(given, str):
            return functools.partial(self._add, given)
        name = getattr(given, "__name__", None)
        if name is None or name == "<lambda>":
            raise ConfigurationError("this handler has no name of its own; write @registry.handler('name')")
        return self._add(name, given)

    def _add(self, name: str, function: F) -> F:
        if not callable(function):
            raise ConfigurationError(f"the handler {name!r} is no function but a {type(function).__name__}")
        if not 1 <= len(name) <= LONGEST_NAME:
            raise ConfigurationError(f"a handler's name has 1 to {LONGEST_NAME} characters, not {len(name)}")
        if name in self._handlers:
            raise ConfigurationError(f"there is already a handler {name!r}; each needs a name of its own")
        self._handlers[name] = Handler(name, function)
        return function

    @property
    def names(self) -> list[str]:
        return sorted(self._handlers)

    def get(self, name: str) -> Handler | None:
        return self._handlers.get(name)

    def prepare(self) -> None:
        """Read every handler's annotations, so that a wrong one is told at the start and not by a job."""
        for handler in self._handlers.values():
            handler.prepare()

    def unknown(self, name: str) -> str:
        """What to say about a handler that is not there."""
        near = get_close_matches(name[:LONGEST_SHOWN], self._handlers, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {len(self._handlers)} others"
        return f"there is no handler {name[:LONGEST_SHOWN]!r}; {hint}"
