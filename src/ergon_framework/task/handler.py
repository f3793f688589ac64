"""Calls of decorated functions: what each parameter gets, decided when the function is declared.

A parameter is bound by its annotation, then by its name: the transaction, its payload, the result or the error, or a
service (an object such as a client that was passed to the task by name). A parameter that is none of these is an error
of the declaration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Annotated, Any, Final, TypeAlias

from ergon_framework.connectors.base import DeadLetter
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.payload import UNDECODABLE, PayloadReader
from ergon_framework.task.signature import (
    ANY_TYPE,
    MISSING,
    Parameter,
    accepts,
    callable_name,
    is_async,
    is_conflict,
    is_optional,
    read_signature,
    show,
)
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException


class _RawPayloadMarker:
    """Marks the annotation RawPayload."""


#: Annotates the parameter of a failure handler that gets the payload as it arrived, whether or not it fits its type.
RawPayload: TypeAlias = Annotated[Any, _RawPayloadMarker()]

_PAYLOAD_NAME: Final = "payload"


class Role(Enum):
    """What a parameter gets."""

    TRANSACTION = "transaction"
    PAYLOAD = "payload"
    RAW_PAYLOAD = "raw payload"
    RESULT = "result"
    ERROR = "error"
    SERVICE = "service"


class HandlerKind(Enum):
    """The kinds of handlers, each with the names of the parameter that gets the result or the error."""

    SUCCESS = ("result",)
    FAILURE = ("error", "exc")


@dataclass(frozen=True, slots=True)
class TaskServices:
    """The services that a task declares; those of a lifespan are known only while it is open."""

    names: Collection[str] = ()
    has_lifespan: bool = False


class HandlerFunction:
    """A function whose parameters are bound to what they get."""

    def __init__(self, fn: Callable[..., Any], binder: _Binder, reader: PayloadReader, *, is_handler: bool) -> None:
        self.fn = fn
        self.name = binder.owner
        self.reader = reader
        self.payload_name = binder.payload_name
        self.payload_type = binder.payload_type
        self.result_type = binder.result_type
        roles = binder.roles
        self._is_handler = is_handler
        self._transactions = _list_names(roles, Role.TRANSACTION)
        self._typed_transactions = {p.name for p in binder.parameters if p.payload_type is not MISSING}
        self._payloads = _list_names(roles, Role.PAYLOAD)
        self._raw_payloads = _list_names(roles, Role.RAW_PAYLOAD)
        self._extras = _list_names(roles, Role.RESULT, Role.ERROR)
        self._services = {p.name: p.has_default for p in binder.parameters if roles[p.name] is Role.SERVICE}
        self._needs_payload = bool(self._payloads or self._typed_transactions)

    @property
    def takes_raw_payload(self) -> bool:
        """Whether the function can be called with a payload that does not fit its type."""
        return bool(self._raw_payloads)

    @property
    def services(self) -> frozenset[str]:
        """The services that the function takes, including those with a default."""
        return frozenset(self._services)

    def list_missing(self, services: Mapping[str, Any]) -> list[str]:
        """List the required services that are missing from *services*."""
        return [name for name, optional in self._services.items() if not optional and name not in services]

    def call(self, transaction: Transaction, services: Mapping[str, Any], extra: Any = None) -> Any:
        """Call the function for *transaction*; *extra* is the result or the error."""
        arguments: dict[str, Any] = {}
        payload = None
        if self._needs_payload and not (self._is_handler and self._raw_payloads and not self.fits(transaction)):
            payload = self.reader.read(transaction)
        for name in self._payloads:
            arguments[name] = payload
        for name in self._transactions:
            is_typed = name in self._typed_transactions
            arguments[name] = transaction.replace(payload=payload) if is_typed else transaction
        for name in self._raw_payloads:
            arguments[name] = transaction.payload
        for name in self._extras:
            arguments[name] = extra
        for name in self._services:
            if name in services:
                arguments[name] = services[name]
        return self.fn(**arguments)

    def fits(self, transaction: Transaction) -> bool:
        """Return whether the payload of *transaction* fits its type."""
        return self.reader.is_valid(transaction)


def _list_names(roles: Mapping[str, Role], *wanted: Role) -> list[str]:
    return [name for name, role in roles.items() if role in wanted]


# -- binding ----------------------------------------------------------------------------------------


def bind_work(
    fn: Callable[..., Any],
    *,
    task: TaskServices = TaskServices(),  # noqa: B008 - it is immutable
    payload: Any = None,
    names: Mapping[str, Any] | None = None,
) -> HandlerFunction:
    """Bind the function that does the work; its payload is read as *payload*, by default as its annotation.

    *names* are the names of the scope of the declaration, for annotations that name local types.
    """
    binder = _Binder(fn, task, names)
    candidates = [p for p in binder.unbound if payload is not None and p.annotation == payload] or binder.unbound
    if candidates:
        chosen = candidates[0]
        binder.assign(chosen, Role.PAYLOAD)
        binder.payload_name, binder.payload_type = chosen.name, chosen.annotation
    else:
        typed = (p.payload_type for p in binder.parameters if p.payload_type is not MISSING)
        binder.payload_type = next(typed, MISSING)
    binder.bind_rest(["transaction"])
    if payload is not None:
        if is_conflict(binder.payload_type, payload):
            raise ConfigurationError(
                f"parameter {binder.payload_name!r} of {binder.owner} is annotated {show(binder.payload_type)}, but "
                f"payload= is {show(payload)}; remove one of the two"
            )
        binder.payload_type = payload
    if isinstance(binder.payload_type, str):
        raise ConfigurationError(
            f"the annotation {binder.payload_type!r} of {binder.payload_name!r} of {binder.owner} cannot be resolved; "
            "import the type where the function is declared, and not only for type checkers, or pass payload="
        )
    model = None if binder.payload_type in ANY_TYPE else binder.payload_type
    return HandlerFunction(fn, binder, PayloadReader.for_annotation(model, owner=binder.owner), is_handler=False)


def bind_handler(
    fn: Callable[..., Any],
    kind: HandlerKind,
    *,
    work: HandlerFunction,
    task: TaskServices,
    names: Mapping[str, Any] | None = None,
) -> HandlerFunction:
    """Bind a success or failure handler of the task whose work *work* does."""
    binder = _Binder(fn, task, names)
    binder.payload_type = work.payload_type
    binder.bind_by_annotation(kind, work)
    binder.bind_by_name(kind, work)
    binder.bind_rest(["transaction", work.payload_name or _PAYLOAD_NAME, kind.value[0]])
    binder.check_raw_payload()
    return HandlerFunction(fn, binder, work.reader, is_handler=True)


class _Binder:
    """Assigns a role to each parameter of one function."""

    def __init__(self, fn: Callable[..., Any], task: TaskServices, names: Mapping[str, Any] | None) -> None:
        self.owner = callable_name(fn)
        self.parameters, self.result_type = read_signature(fn, names)
        self.payload_name: str | None = None
        self.payload_type: Any = MISSING
        self.roles: dict[str, Role] = {}
        self.unbound: list[Parameter] = []
        self._task = task
        for parameter in self.parameters:
            if parameter.is_transaction:
                self.roles[parameter.name] = Role.TRANSACTION
            elif parameter.annotation in (RawPayload, "RawPayload"):
                self.roles[parameter.name] = Role.RAW_PAYLOAD
            elif parameter.name in task.names:
                self.roles[parameter.name] = Role.SERVICE
            else:
                self.unbound.append(parameter)

    def bind_by_annotation(self, kind: HandlerKind, work: HandlerFunction) -> None:
        """Bind each parameter whose annotation fits one role; of two roles, the name decides."""
        for parameter in list(self.unbound):
            roles = []
            if accepts(parameter.annotation, work.payload_type):
                roles.append(Role.PAYLOAD)
            if kind is HandlerKind.SUCCESS and accepts(parameter.annotation, work.result_type):
                roles.append(Role.RESULT)
            if kind is HandlerKind.FAILURE and self._is_error(parameter):
                roles.append(Role.ERROR)
            if len(roles) == 1:
                self.assign(parameter, roles[0])

    def bind_by_name(self, kind: HandlerKind, work: HandlerFunction) -> None:
        """Bind the payload, the result and the error by their names; an annotation of another type is an error."""
        for parameter in list(self.unbound):
            if parameter.name in (work.payload_name, _PAYLOAD_NAME):
                self._check_type(parameter, work.payload_type, f"the payload of {work.name}", " or RawPayload")
                self.assign(parameter, Role.PAYLOAD)
            elif parameter.name in kind.value and kind is HandlerKind.SUCCESS:
                self._check_type(parameter, work.result_type, f"the result of {work.name}")
                self.assign(parameter, Role.RESULT)
            elif parameter.name in kind.value:
                if parameter.annotation not in ANY_TYPE and not isinstance(parameter.annotation, str):
                    raise self._wrong_error(parameter)
                self.assign(parameter, Role.ERROR)

    def bind_rest(self, known: list[str]) -> None:
        """Bind parameters as services of the lifespan or with a default; reject all others."""
        for parameter in self.unbound:
            if not (self._task.has_lifespan or parameter.has_default):
                candidates = [name for name in (*self._task.names, *known) if name not in self.roles]
                near = get_close_matches(parameter.name, candidates, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(candidates) or 'none'}"
                raise ConfigurationError(
                    f"parameter {parameter.name!r} of {self.owner} is bound neither by its annotation nor by its name; "
                    f'{hint}; pass a service with services={{"{parameter.name}": ...}}'
                )
            self.roles[parameter.name] = Role.SERVICE

    def assign(self, parameter: Parameter, role: Role) -> None:
        other = next((name for name, taken in self.roles.items() if taken is role), None)
        if other is not None:
            raise ConfigurationError(
                f"parameters {other!r} and {parameter.name!r} of {self.owner} both get the {role.value}; remove one"
            )
        self.roles[parameter.name] = role
        self.unbound.remove(parameter)

    def check_raw_payload(self) -> None:
        """Reject a payload parameter beside a raw one if it cannot be None, its value if the payload does not fit."""
        if Role.RAW_PAYLOAD not in self.roles.values():
            return
        for parameter in self.parameters:
            is_payload = self.roles[parameter.name] is Role.PAYLOAD
            if (is_payload and not is_optional(parameter.annotation)) or parameter.payload_type is not MISSING:
                raise ConfigurationError(
                    f"parameter {parameter.name!r} of {self.owner} has no value if the payload does not fit its type; "
                    "remove it, or annotate it with the type or None: RawPayload gets the payload in both cases"
                )

    def _check_type(self, parameter: Parameter, expected: Any, subject: str, alternative: str = "") -> None:
        if is_conflict(parameter.annotation, expected):
            raise ConfigurationError(
                f"parameter {parameter.name!r} of {self.owner} is annotated {show(parameter.annotation)}, but "
                f"{subject} is {show(expected)}; annotate it {show(expected)}{alternative}"
            )

    def _is_error(self, parameter: Parameter) -> bool:
        annotation = parameter.annotation
        if not (inspect.isclass(annotation) and issubclass(annotation, BaseException)):
            return False
        if issubclass(TransactionException, annotation):
            return True
        raise self._wrong_error(parameter)

    def _wrong_error(self, parameter: Parameter) -> ConfigurationError:
        return ConfigurationError(
            f"parameter {parameter.name!r} of {self.owner} is annotated {show(parameter.annotation)}, but a failure "
            "handler gets a TransactionException, whose cause is the original error; annotate it TransactionException"
        )


# -- functions --------------------------------------------------------------------------------------


class FunctionSet:
    """A function that does work, with its success and failure handlers."""

    def __init__(
        self, fn: Callable[..., Any], *, name: str, task: TaskServices, payload: Any, names: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.work = bind_work(fn, task=task, payload=payload, names=names)
        self.success: HandlerFunction | None = None
        self.failure: HandlerFunction | None = None
        self.is_async = is_async(fn)
        self._task = task

    def set_success(self, fn: Callable[..., Any], names: Mapping[str, Any]) -> None:
        self.success = self._create_handler(fn, HandlerKind.SUCCESS, names)

    def set_failure(self, fn: Callable[..., Any], names: Mapping[str, Any]) -> None:
        self.failure = self._create_handler(fn, HandlerKind.FAILURE, names)

    def _create_handler(self, fn: Callable[..., Any], kind: HandlerKind, names: Mapping[str, Any]) -> HandlerFunction:
        validate_handler(fn)
        if is_async(fn) != self.is_async:
            expected = "async def" if self.is_async else "def"
            raise ConfigurationError(f"{callable_name(fn)} must be declared with {expected}, as {self.name} is")
        return bind_handler(fn, kind, work=self.work, task=self._task, names=names)

    def call_success(self, transaction: Transaction, services: Mapping[str, Any], result: Any) -> Any:
        """Call the success handler, if there is one."""
        return None if self.success is None else self.success.call(transaction, services, result)

    def call_failure(self, transaction: Transaction, services: Mapping[str, Any], exc: TransactionException) -> Any:
        """Call the failure handler; dead-letter a transaction whose payload is of no use to that handler."""
        handler = self.failure
        if (handler is None or not handler.takes_raw_payload) and not self.work.fits(transaction):
            return DeadLetter(UNDECODABLE)
        return None if handler is None else handler.call(transaction, services, exc)

    def list_services(self) -> frozenset[str]:
        """List the services that the functions take, including those with a default."""
        return frozenset(name for function in self._list_functions() for name in function.services)

    def list_missing(self, services: Mapping[str, Any]) -> list[str]:
        """List the required services that are missing from *services*."""
        return [name for function in self._list_functions() for name in function.list_missing(services)]

    def _list_functions(self) -> list[HandlerFunction]:
        return [function for function in (self.work, self.success, self.failure) if function is not None]


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
