"""Typed operations: methods of a provider whose arguments and results have types.

``@operation`` turns a method into a call of ``execute``. The method's body is one attempt. Its arguments become the
payload, and its return value becomes the stored result, both as plain JSON values.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Annotated, Any, Final, TypeVar, overload

from pydantic import BaseModel, PydanticUserError, RootModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.errors import ProviderBadRequestError, ProviderResponseFormatError
from ergon_framework.providers.models import ProviderExecutionContext, ProviderReply

F = TypeVar("F", bound=Callable[..., Any])

#: The attribute of a decorated method that holds its Operation.
_ATTRIBUTE: Final = "__ergon_operation__"
#: The key of a result that is not an object, such as a number.
_RESULT_KEY: Final = "result"
#: The code of the error of arguments, or of a payload, that do not match the operation's parameters.
PAYLOAD_INVALID: Final = "payload_invalid"
#: The code of the error of a stored result that does not match the operation's return type.
RESULT_INVALID: Final = "result_invalid"


@overload
def operation(body: F, /) -> F: ...
@overload
def operation(*, name: str | None = None, reads: bool = False) -> Callable[[F], F]: ...
def operation(
    body: Callable[..., Any] | None = None, /, *, name: str | None = None, reads: bool = False
) -> Callable[..., Any]:
    """Make a method of a Provider an operation: a call of it runs under the provider's policy.

    The body makes one attempt; ``self.attempt`` has its timeout and idempotency key. Parameters and the return value
    have annotations: dataclasses, pydantic models, TypedDicts or plain types. *name* is the name of the operation in
    keys and records, by default that of the method. An operation that *reads* changes nothing, so it has no key.
    """
    if body is None:
        return lambda fn: _decorate(fn, name, reads=reads)
    return _decorate(body, name, reads=reads)


def _decorate(body: Callable[..., Any], name: str | None, *, reads: bool) -> Callable[..., Any]:
    if not inspect.isfunction(body) or inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise ConfigurationError(
            f"@operation cannot decorate {body!r}: it must be a function, def or async def, that returns its result; "
            "put @operation above a method"
        )
    own = Operation(body, name or body.__name__, reads=reads)
    wrapper: Callable[..., Any]
    if own.is_async:

        @wraps(body)
        async def call_async(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return await self._call_operation_async(own, args, kwargs)

        wrapper = call_async
    else:

        @wraps(body)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._call_operation(own, args, kwargs)

        wrapper = call
    setattr(wrapper, _ATTRIBUTE, own)
    return wrapper


def find_operations(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Operation]]:
    """Yield the operations of a class's namespace with the names of their methods."""
    for method_name, value in namespace.items():
        own = getattr(value, _ATTRIBUTE, None)
        if isinstance(own, Operation):
            yield method_name, own


# -- the running attempt --------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class OperationAttempt:
    """The attempt that an operation's body makes.

    ``timeout`` is the time in seconds that is left for it, which is the limit to pass to a client; send
    ``idempotency_key`` to the provider. Set ``http_status`` to record the status of a successful response.
    """

    operation: str
    tenant_id: str
    campaign_id: str | None
    correlation_id: str
    idempotency_key: str | None
    timeout: float
    number: int
    http_status: int | None = None
    _provider: Any = field(repr=False)
    _outer: OperationAttempt | None = field(repr=False)
    _is_running: bool = field(default=True, repr=False)


_current: Final[ContextVar[OperationAttempt | None]] = ContextVar("ergon_operation_attempt", default=None)


def find_attempt(provider_name: str, capability: str) -> OperationAttempt | None:
    """Return the attempt of this provider whose body runs in this context; None outside of its operations."""
    attempt = _current.get()
    while attempt is not None:
        provider = attempt._provider  # noqa: SLF001 - the same module
        # A task that a body has left behind may still have its context.
        is_own = (provider.provider_name, provider.capability) == (provider_name, capability)
        if attempt._is_running and is_own:  # noqa: SLF001 - the same module
            return attempt
        attempt = attempt._outer  # noqa: SLF001 - the same module
    return None


@contextmanager
def enter_attempt(
    provider: Any, name: str, context: ProviderExecutionContext, *, tenant_id: str, campaign_id: str | None
) -> Iterator[OperationAttempt]:
    """Make the attempt of *context* the current one, so that the body can read it."""
    attempt = OperationAttempt(
        operation=name,
        tenant_id=tenant_id,
        campaign_id=campaign_id,
        correlation_id=context.correlation_id or "",
        idempotency_key=context.idempotency_key,
        timeout=0.0 if context.timeout is None else context.timeout,
        number=context.attempt_number,
        _provider=provider,
        _outer=_current.get(),
    )
    token = _current.set(attempt)
    try:
        yield attempt
    finally:
        attempt._is_running = False  # noqa: SLF001 - the same module
        _current.reset(token)


# -- types ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call of an operation, as the caller passed them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Operation:
    """The declaration of an operation: its body, and the conversion of arguments and result to JSON and back.

    The types are resolved at first use, so that they may be defined below the class.
    """

    def __init__(self, body: Callable[..., Any], name: str, *, reads: bool) -> None:
        self.body = body
        self.name = name
        self.reads = reads
        self.is_async = inspect.iscoroutinefunction(body)
        self._signature = _read_signature(body)

    def __repr__(self) -> str:
        return f"<operation {self.name!r}: {self.body.__qualname__}>"

    def prepare(self) -> None:
        """Resolve all types; raise ConfigurationError for one that has no JSON form."""
        _ = self._parameters, self._result

    def encode_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        """Return the arguments of a call and their payload; raise TypeError if they do not fit the signature."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.body.__qualname__}(): {error}") from None
        bound.apply_defaults()
        payload = {
            name: self._encode_argument(self._parameters[name], name, value) for name, value in bound.arguments.items()
        }
        arguments = Arguments(bound.args, bound.kwargs)
        return arguments, next(iter(payload.values())) if self._is_spread else payload

    def decode_payload(self, payload: Mapping[str, Any]) -> Arguments:
        """Return the arguments that *payload* holds; raise ProviderBadRequestError if it does not match."""
        values = dict.fromkeys(self._parameters, payload) if self._is_spread else payload
        if unknown := values.keys() - self._parameters.keys():
            raise self._payload_error(f"{sorted(unknown)} are not parameters of it")
        arguments = {}
        for name, parameter in self._signature.parameters.items():
            if name not in values and parameter.default is not parameter.empty:
                continue
            if name not in values:
                raise self._payload_error(f"{name} is missing")
            try:
                arguments[name] = self._parameters[name].decode(values[name])
            except ValidationError as error:
                raise self._payload_error(_explain(name, error)) from None
        bound = inspect.BoundArguments(self._signature, arguments)
        bound.apply_defaults()
        return Arguments(bound.args, bound.kwargs)

    def encode_result(self, returned: Any, *, http_status: int | None = None) -> ProviderReply:
        """Return the stored form of a body's return value; raise ProviderResponseFormatError if its type is wrong."""
        # Data that does not validate usually comes from the provider; another type is an error of the body.
        fault = isinstance(returned, Mapping | list)
        try:
            value = self._result.encode(self._result.decode(returned))
            self._result.decode(value)
        except (ValidationError, PydanticSerializationError) as error:
            raise ProviderResponseFormatError(
                f"the operation {self.name} returned an invalid result: {_explain(type(returned).__name__, error)}",
                http_status=http_status,
                fault=fault,
            ) from None
        return ProviderReply(value if self._result.is_object else {_RESULT_KEY: value}, http_status)

    def decode_result(self, value: Mapping[str, Any]) -> Any:
        """Return the result whose stored form is *value*; raise ProviderResponseFormatError if its type has changed."""
        try:
            return self._result.decode(value if self._result.is_object else value.get(_RESULT_KEY))
        except ValidationError as error:
            raise ProviderResponseFormatError(
                f"the stored result of {self.name} does not match its return type: {_explain('result', error)}; "
                "keep the type compatible with the results of earlier releases",
                code=RESULT_INVALID,
                fault=False,
                final=True,
            ) from None

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self.body, include_extras=True)
        except NameError as error:
            raise ConfigurationError(
                f"an annotation of {self.body.__qualname__} cannot be resolved: {error}; define or import the type at "
                "module level, not only for the type checker"
            ) from error

    @cached_property
    def _parameters(self) -> dict[str, _JsonType]:
        where = self.body.__qualname__
        return {name: _JsonType(self._hints[name], f"{name} of {where}") for name in self._signature.parameters}

    @cached_property
    def _result(self) -> _JsonType:
        result = _JsonType(self._hints["return"], f"the return value of {self.body.__qualname__}")
        result.check_readable()
        return result

    @property
    def _is_spread(self) -> bool:
        """Whether the payload is the one parameter itself, not a mapping of parameters."""
        return len(self._parameters) == 1 and next(iter(self._parameters.values())).is_record

    def _encode_argument(self, parameter: _JsonType, name: str, value: Any) -> Any:
        try:
            parameter.check(value)
            return parameter.encode(value)
        except (ValidationError, PydanticSerializationError) as error:
            raise self._payload_error(_explain(name, error)) from None

    def _payload_error(self, reason: str) -> ProviderBadRequestError:
        return ProviderBadRequestError(
            f"the payload of {self.name} is invalid: {reason}", code=PAYLOAD_INVALID, sent=False, final=True
        )


class _JsonType:
    """One type, with the conversion of its values to plain JSON values and back."""

    def __init__(self, hint: Any, where: str) -> None:
        self._where = where
        self.is_record = _is_record(hint)
        self.is_object = self.is_record or _is_mapping(hint)
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(hint)
        except PydanticUserError as error:
            raise ConfigurationError(
                f"the type of {where} has no JSON form: {error.message.splitlines()[0]}; use a dataclass, a pydantic "
                "model, a TypedDict or plain types"
            ) from error

    def check(self, value: Any) -> None:
        self._adapter.validate_python(value, strict=True)

    def encode(self, value: Any) -> Any:
        return self._adapter.dump_python(value, mode="json", round_trip=True, by_alias=False, warnings="error")

    def decode(self, value: Any) -> Any:
        return self._adapter.validate_python(value, by_alias=True, by_name=True)

    def check_readable(self) -> None:
        """Reject a type whose secrets are masked in JSON: the stored result would be the mask."""
        try:
            schema = json.dumps(self._adapter.json_schema())
        except PydanticUserError:
            return
        if '"writeOnly": true' in schema:
            raise ConfigurationError(
                f"the type of {self._where} has a secret field, which is masked when it is stored; return a plain str "
                "or leave the field out"
            )


def _read_signature(body: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of *body* without self; raise ConfigurationError if it cannot be an operation."""
    signature = inspect.signature(body)
    parameters = list(signature.parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            raise ConfigurationError(
                f"the operation {body.__qualname__} takes any number of {parameter.name!r}: name each parameter"
            )
        if parameter.annotation is parameter.empty:
            raise ConfigurationError(
                f"the parameter {parameter.name!r} of the operation {body.__qualname__} has no annotation: add its type"
            )
    if signature.return_annotation is signature.empty:
        raise ConfigurationError(
            f"the operation {body.__qualname__} has no return annotation: add its type, None if it returns nothing"
        )
    return signature.replace(parameters=parameters)


def _strip(hint: Any) -> Any:
    """Return the class of *hint*, without Annotated and without type arguments."""
    while typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    origin = typing.get_origin(hint)
    return origin if isinstance(origin, type) and not isinstance(hint, types.UnionType) else hint


def _is_record(hint: Any) -> bool:
    kind = _strip(hint)
    if not isinstance(kind, type) or issubclass(kind, RootModel):
        return False
    # typing.is_typeddict does not know the TypedDict of typing_extensions, which pydantic needs before Python 3.12.
    is_typed_dict = hasattr(kind, "__required_keys__")
    return is_typed_dict or dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel)


def _is_mapping(hint: Any) -> bool:
    kind = _strip(hint)
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _explain(where: str, error: Exception) -> str:
    """Return what is wrong, without values: they may hold secrets."""
    if not isinstance(error, ValidationError):
        return f"{where}: it cannot be written as JSON; a field may have a value of another type"
    return "; ".join(
        f"{'.'.join(map(str, (where, *fault['loc'])))}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_input=False, include_context=False)
    )
