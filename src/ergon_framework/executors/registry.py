"""The handlers of a Python executor by name, and the validation of their arguments.

An executor is a process that runs handlers for an orchestrator; a request names the handler and has its arguments as
JSON.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, TypeVar, overload

from pydantic import ConfigDict, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from ergon_framework.errors import Category, ConfigurationError, ErgonError, explain_fault
from ergon_framework.executors.protocol import MAX_NAME_CHARS

F = TypeVar("F", bound=Callable[..., Any])


class Retry(ErgonError):
    """Raised or returned by a handler to request another attempt, after *after* seconds if that is given.

    An attempt that ends with it counts like any other. The orchestrator decides on the number and delay of retries.
    """

    code = "retry"

    def __init__(self, message: str = "", *, after: float | None = None) -> None:
        super().__init__(message, retry_after=after)


class InvalidArgumentError(ErgonError):
    """The arguments of a request do not match the handler; the message names parameters but no values."""

    category = Category.BUSINESS
    final = True
    code = "invalid_argument"


class Handler:
    """One function with its name; arguments are validated against its annotations before it is called."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self._validate: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None

    def prepare(self) -> None:
        """Read the annotations; not in the decorator, because they may name types that are defined after it."""
        if self._validate is not None:
            return

        def capture(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs

        try:
            # The validated call is not the handler's, so that an error inside it is not reported as a bad argument.
            signature = inspect.signature(self.function)
            unwrapped = _unwrap(self.function)
            hints = getattr(unwrapped, "__annotations__", {})
            capture.__module__ = unwrapped.__module__
            capture.__annotations__ = {name: hints[name] for name in signature.parameters if name in hints}
            capture.__signature__ = signature  # type: ignore[attr-defined]
            self._validate = validate_call(config=ConfigDict(hide_input_in_errors=True))(capture)
        except (PydanticUserError, NameError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the annotations of handler {self.name!r} cannot be used: {type(error).__name__}: {str(error)[:300]}"
            ) from error

    def validate_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return *args* and *kwargs* converted to the function's annotations, or raise InvalidArgumentError."""
        self.prepare()
        assert self._validate is not None  # noqa: S101 - prepared above
        try:
            return self._validate(*args, **kwargs)
        except ValidationError as error:
            # Not chained: the validation error holds the values.
            raise InvalidArgumentError(self._describe_faults(error)) from None

    def _describe_faults(self, error: ValidationError) -> str:
        names = list(inspect.signature(self.function).parameters)
        faults = error.errors(include_url=False, include_input=False)
        descriptions = []
        for fault in faults[:_MAX_NAMED_FAULTS]:
            first, *rest = fault["loc"] or ("",)
            name = names[first] if isinstance(first, int) and first < len(names) else str(first)[:MAX_SHOWN_CHARS]
            path = ".".join([name, *(str(part)[:MAX_SHOWN_CHARS] for part in rest)])
            descriptions.append(f"{path}: {explain_fault(fault)}")
        more = len(faults) - _MAX_NAMED_FAULTS
        return f"{self.name}: " + "; ".join(descriptions) + (f"; and {more} more" if more > 0 else "")


def _unwrap(function: Any) -> Any:
    """Return the function that holds the annotations of *function*, inside a partial, a decorator or an instance."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.isroutine(function) or isinstance(function, type):
            return function
        else:
            function = type(function).__call__


#: Maximum number of faults of one call that an error names, and of characters shown of a name from the request.
_MAX_NAMED_FAULTS: Final = 5
MAX_SHOWN_CHARS: Final = 100


class HandlerRegistry:
    """The handlers of an executor.

    >>> registry = HandlerRegistry()
    >>> @registry.handler
    ... def add(a: int, b: int) -> int:
    ...     return a + b
    >>> registry.names
    ['add']
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    @overload
    def handler(self, name_or_function: F, /) -> F: ...

    @overload
    def handler(self, name_or_function: str, /) -> Callable[[F], F]: ...

    def handler(self, name_or_function: F | str, /) -> F | Callable[[F], F]:
        """Register a function, ``def`` or ``async def``, under its own name or a given name."""
        if isinstance(name_or_function, str):
            return functools.partial(self._register, name_or_function)
        name = getattr(name_or_function, "__name__", None)
        if name is None or name == "<lambda>":
            raise ConfigurationError("this handler has no name; write @registry.handler('name')")
        return self._register(name, name_or_function)

    def _register(self, name: str, function: F) -> F:
        if not callable(function):
            raise ConfigurationError(f"the handler {name!r} is not a function but a {type(function).__name__}")
        if not 1 <= len(name) <= MAX_NAME_CHARS:
            raise ConfigurationError(f"a handler's name has 1 to {MAX_NAME_CHARS} characters, not {len(name)}")
        if name in self._handlers:
            raise ConfigurationError(f"there is already a handler {name!r}; each name must be unique")
        self._handlers[name] = Handler(name, function)
        return function

    @property
    def names(self) -> list[str]:
        return sorted(self._handlers)

    def get(self, name: str) -> Handler | None:
        return self._handlers.get(name)

    def prepare(self) -> None:
        """Read every handler's annotations, so that an invalid one fails the start and not a job."""
        for handler in self._handlers.values():
            handler.prepare()

    def describe_unknown_handler(self, name: str) -> str:
        """Return the error message for a handler that does not exist."""
        near = get_close_matches(name[:MAX_SHOWN_CHARS], self._handlers, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {len(self._handlers)} others"
        return f"there is no handler {name[:MAX_SHOWN_CHARS]!r}; {hint}"
