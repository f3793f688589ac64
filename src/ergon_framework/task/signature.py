"""Signatures: the parameters of a function with their annotations, and whether a type fits an annotation."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction

MISSING: Final = inspect.Parameter.empty
#: Annotations that say nothing about the type.
ANY_TYPE: Final = (MISSING, Any, object)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter with its annotation: a type, text that cannot be resolved, or MISSING."""

    name: str
    annotation: Any
    has_default: bool

    @property
    def is_transaction(self) -> bool:
        annotation = self.annotation
        if annotation is MISSING:
            return self.name == "transaction"
        if isinstance(annotation, str):
            return annotation.partition("[")[0] == "Transaction"
        return (get_origin(annotation) or annotation) is Transaction

    @property
    def payload_type(self) -> Any:
        """The payload type that ``Transaction[...]`` names."""
        arguments = get_args(self.annotation) if get_origin(self.annotation) is Transaction else ()
        return arguments[0] if arguments and arguments[0] not in ANY_TYPE else MISSING


def read_signature(fn: Callable[..., Any], names: Mapping[str, Any] | None) -> tuple[list[Parameter], Any]:
    """Return the parameters of *fn*, and the annotation of its result; reject parameters that cannot be bound."""
    signature = inspect.signature(fn)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigurationError(f"{parameter.name} of {callable_name(fn)} is positional-only; remove the slash")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigurationError(
                f"{callable_name(fn)} takes *{parameter.name}; declare each service as a separate parameter"
            )
    return list_parameters(fn, names), _resolve_annotation(signature.return_annotation, _get_routine(fn), names)


def list_parameters(fn: Callable[..., Any], names: Mapping[str, Any] | None) -> list[Parameter]:
    """List the parameters of *fn*; *names* are the local names of its declaration."""
    routine = _get_routine(fn)
    return [
        Parameter(p.name, _resolve_annotation(p.annotation, routine, names), p.default is not MISSING)
        for p in inspect.signature(fn).parameters.values()
    ]


def _get_routine(fn: Any) -> Any:
    """Return the function behind *fn*, which may be a method, a partial function or an object."""
    return inspect.unwrap(fn if inspect.isroutine(fn) else getattr(fn, "func", getattr(fn, "__call__", fn)))  # noqa: B004 - it is inspected


def _resolve_annotation(annotation: Any, routine: Any, names: Mapping[str, Any] | None) -> Any:
    """Return the type that *annotation* names; its text if a name in it exists only for type checkers."""
    if annotation is MISSING:
        return MISSING
    holder = types.SimpleNamespace(__annotations__={"annotation": annotation})
    function = getattr(routine, "__func__", routine)
    closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    local_names = {**(names or {}), **closure}
    try:
        hints = get_type_hints(holder, getattr(function, "__globals__", {}), local_names, include_extras=True)
    except (NameError, AttributeError):
        return annotation if isinstance(annotation, str) else Any
    return hints["annotation"]


def _list_union_members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:  # a constraint of the value, such as pydantic's Field, is not a type
        return _list_union_members(get_args(annotation)[0])
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def is_optional(annotation: Any) -> bool:
    """Return whether *annotation* allows None."""
    return annotation in ANY_TYPE or type(None) in _list_union_members(annotation)


def accepts(annotation: Any, value_type: Any) -> bool:
    """Return whether *annotation* names *value_type*, alone or with None, or some members of that union."""
    if annotation in ANY_TYPE or value_type in ANY_TYPE:
        return False
    members, accepted = _list_union_members(value_type), _list_union_members(annotation)
    return all(member in members or member is type(None) for member in accepted) and accepted != (type(None),)


def is_conflict(annotation: Any, value_type: Any) -> bool:
    """Return whether a parameter with *annotation* clearly cannot hold a value of *value_type*."""
    if any(kind in ANY_TYPE or isinstance(kind, str) for kind in (annotation, value_type)):
        return False
    accepted = [get_origin(member) or member for member in _list_union_members(annotation)]
    members = [get_origin(member) or member for member in _list_union_members(value_type)]
    if not all(map(inspect.isclass, (*accepted, *members))):
        return False
    return not any(
        getattr(kind, "_is_protocol", False) or issubclass(member, kind) for kind in accepted for member in members
    )


def show(annotation: Any) -> str:
    """Return *annotation* as it is written in code."""
    return annotation.__name__ if inspect.isclass(annotation) and not get_args(annotation) else str(annotation)


def callable_name(fn: Any) -> str:
    """Return the name of *fn*; for objects and partial functions, the name of their class or function."""
    return str(getattr(fn, "__name__", None) or getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__))


def is_async(fn: Any) -> bool:
    """Return whether calling *fn* returns an awaitable."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004 - it is inspected, not tested
