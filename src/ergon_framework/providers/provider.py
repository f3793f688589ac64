"""Provider: the class whose typed operations call a third party, and the common part of the generic base classes.

A call makes one or more attempts. Each attempt must be admitted by the provider state: a quota limits the calls per
window of time, a circuit breaker stops calls to a failing provider, and an idempotency key names a call, so that
repeating the call does not carry it out twice. A canonical error is one of ``providers.errors``, whatever the client
library raised. A gate is a check before a worker fetches, which can pause the worker.
"""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self, TypeAlias, cast

from ergon_framework import scope
from ergon_framework.clock import Clock
from ergon_framework.engine.effects import Err, Ok
from ergon_framework.engine.inline import AsyncInlineRunner, InlineRunner
from ergon_framework.errors import ConfigurationError
from ergon_framework.gates import Pause
from ergon_framework.providers.execution import CallDependencies, execute_call
from ergon_framework.providers.idempotency import compute_fingerprint, effect_name
from ergon_framework.providers.models import (
    DEFAULT_TENANT,
    AttemptRecord,
    CallOptions,
    ProviderExecutionContext,
    ProviderExecutionResult,
    ProviderReply,
    ProviderRequest,
    current_task_execution,
)
from ergon_framework.providers.operations import (
    Arguments,
    Operation,
    OperationAttempt,
    enter_attempt,
    find_attempt,
    find_operations,
)
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.process_state import process_state
from ergon_framework.providers.state import AsyncProviderState, AttemptRecorder, ProviderScope, ProviderState
from ergon_framework.providers.telemetry import ProviderTelemetry, suppress_errors

#: What one attempt returns.
Reply: TypeAlias = dict[str, Any] | ProviderReply

_runner: Final = InlineRunner()
_async_runner: Final = AsyncInlineRunner()
_NO_OPTIONS: Final = CallOptions()
#: Seconds between two polls of a closed gate.
_GATE_POLL_SECONDS: Final = 1.0


class Provider(ABC):
    """A third party with typed operations: methods that are decorated with ``@operation``.

    All operations of a class are ``def``, called from threads, or all are ``async def``, called from asyncio tasks.
    Without *state_store* all providers of the process share one state: in PostgreSQL, shared with all other processes,
    if ``ERGON_POSTGRES__DSN`` is set, else in memory. Two objects with the same name share one quota and one breaker.
    Operations in ``reads`` change nothing, so they get no idempotency key and may be called repeatedly.
    """

    provider_name: ClassVar[str]
    capability: ClassVar[str]
    policy: ProviderPolicy = ProviderPolicy()
    reads: frozenset[str] = frozenset()
    #: Whether calls are awaited; for a class with operations it follows from them.
    is_async: ClassVar[bool] = False
    #: The operations by their names.
    operations: ClassVar[Mapping[str, Operation]] = MappingProxyType({})
    _implements_attempt: ClassVar[bool] = False
    _state_store: ProviderState | AsyncProviderState | None = None
    _runner: InlineRunner | AsyncInlineRunner | None = None
    _options: CallOptions = _NO_OPTIONS
    #: The object that ``with_options`` was called on: attempts run on it, so that the attributes they set are kept.
    _origin: Self | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _declare_operations(cls)

    def __init__(
        self,
        *,
        state_store: ProviderState | AsyncProviderState | None = None,
        policy: ProviderPolicy | None = None,
        runner: InlineRunner | AsyncInlineRunner | None = None,
    ) -> None:
        self._check_class()
        if state_store is not None:
            self._check_state_store(state_store)
        self._state_store = state_store
        if policy is not None:
            self.policy = policy
        if runner is not None:
            self._runner = runner

    @property
    def state_store(self) -> ProviderState | AsyncProviderState:
        # The state of the process serves both threads and asyncio tasks.
        return process_state() if self._state_store is None else self._state_store

    @property
    def uses_process_state(self) -> bool:
        """Whether the provider uses the state of the process because no state store was passed."""
        return self._state_store is None

    @property
    def attempt(self) -> OperationAttempt:
        """The running attempt; only the body of an operation may read it."""
        attempt = find_attempt(self.provider_name, self.capability)
        if attempt is None:
            raise ConfigurationError(
                f"{type(self).__name__}.attempt is read outside of an operation; read it in a method with @operation"
            )
        return attempt

    def with_options(
        self,
        *,
        tenant_id: str | None = None,
        campaign_id: str | None = None,
        correlation_id: str | None = None,
        idempotency_key: str | None = None,
        timeout: float | None = None,
        name: str | None = None,
    ) -> Self:
        """Return this provider with options for its calls: ``payments.with_options(timeout=2).charge(request)``.

        The result shares everything with this object. An option that is None keeps its value: that of this object,
        else of the handler's scope. *name* distinguishes two calls of one operation in one handler.
        """
        options = CallOptions(
            tenant_id=tenant_id,
            campaign_id=campaign_id,
            correlation_id=correlation_id,
            idempotency_key=idempotency_key,
            timeout=timeout,
            name=name,
        )
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._origin = self if self._origin is None else self._origin
        view._options = _merge_options(options, self._options)
        return view

    def execute(
        self,
        *,
        operation: str,
        payload: dict[str, Any],
        tenant_id: str | None = None,
        campaign_id: str | None = None,
        context: ProviderExecutionContext | None = None,
    ) -> ProviderExecutionResult | Awaitable[ProviderExecutionResult]:
        """Call the operation with this name with the JSON form of its arguments; see ``ProviderBase.execute``.

        A class whose operations are ``async def`` returns an awaitable. A call of the operation itself has the types.
        """
        request = self._build_request(tenant_id, campaign_id, operation, payload=payload, context=context)
        return self._execute_async(request) if self.is_async else self._execute_sync(request)

    def gate(self) -> Pause | None:
        """Pause the fetches of a task that names this provider in ``uses`` while the breaker of all tenants is open.

        A breaker of one tenant does not pause the task: the transactions of other tenants can proceed.
        """
        return self._create_pause(self.state_store, self._get_runner().clock.wall())

    def _execute_impl(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> Reply | Awaitable[Reply]:
        """Make one attempt: run the body of the operation."""
        declared = self.operations[operation]
        arguments = declared.decode_payload(payload) if context.arguments is None else context.arguments
        attempt = enter_attempt(self, operation, context, tenant_id=tenant_id, campaign_id=campaign_id)
        run_body = _run_body_async if declared.is_async else _run_body
        return run_body(self, declared, arguments, attempt)

    def _call_operation(self, called: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call an operation of a class with ``def`` operations."""
        if self._is_overridden_body(called):
            return called.body(self, *args, **kwargs)
        arguments, payload = called.encode_arguments(args, kwargs)
        context = ProviderExecutionContext(arguments=arguments)
        result = cast("ProviderExecutionResult", self.execute(operation=called.name, payload=payload, context=context))
        return called.decode_result(result.value or {})

    async def _call_operation_async(self, called: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call an operation of a class with ``async def`` operations."""
        if self._is_overridden_body(called):
            return await called.body(self, *args, **kwargs)
        arguments, payload = called.encode_arguments(args, kwargs)
        context = ProviderExecutionContext(arguments=arguments)
        result = await cast(
            "Awaitable[ProviderExecutionResult]", self.execute(operation=called.name, payload=payload, context=context)
        )
        return called.decode_result(result.value or {})

    def _is_overridden_body(self, called: Operation) -> bool:
        """Return whether *called* is reached through ``super()`` from the body that overrides it, in one attempt."""
        attempt = find_attempt(self.provider_name, self.capability)
        return (
            attempt is not None and attempt.operation == called.name and self.operations.get(called.name) is not called
        )

    def _build_request(
        self,
        tenant_id: str | None,
        campaign_id: str | None,
        operation: str,
        *,
        payload: dict[str, Any],
        context: ProviderExecutionContext | None,
    ) -> ProviderRequest:
        """Return the request; values that the caller left out come from the options, then from the handler's scope."""
        if self.operations:
            self._check_operation(operation)
        context = context or ProviderExecutionContext()
        current_scope, options = scope.current(), self._options
        if options is not _NO_OPTIONS:
            context = _complete_context(context, options)
        if context.task_execution_id is None and (execution_id := current_task_execution.get()) is not None:
            context = replace(context, task_execution_id=execution_id)
        key = context.idempotency_key
        if key is None and current_scope is not None and operation not in self.reads:
            key = current_scope.derive(effect_name(self.provider_name, operation, context.name))
        correlation_id = context.correlation_id or (_new_id() if current_scope is None else current_scope.correlation)
        return ProviderRequest(
            provider_name=self.provider_name,
            capability=self.capability,
            tenant_id=_resolve_tenant(options.tenant_id) if tenant_id is None else tenant_id,
            campaign_id=options.campaign_id if campaign_id is None else campaign_id,
            operation=operation,
            payload=payload,
            correlation_id=correlation_id,
            idempotency_key=key,
            fingerprint="" if key is None else compute_fingerprint(operation, payload),
            owner="" if key is None else _new_id(),
            context=context,
        )

    def _build_dependencies(
        self,
        request: ProviderRequest,
        state_store: AttemptRecorder,
        clock: Clock,
        *,
        admit: Callable[..., Any],
        complete: Callable[..., Any],
    ) -> CallDependencies:
        target = self if self._origin is None else self._origin
        execute_impl = target._execute_impl  # noqa: SLF001 - an object of the same class

        def execute_attempt(context: ProviderExecutionContext) -> Any:
            return execute_impl(
                tenant_id=request.tenant_id,
                campaign_id=request.campaign_id,
                operation=request.operation,
                payload=request.payload,
                context=context,
            )

        return CallDependencies(
            policy=self.policy,
            admit=admit,
            complete=complete,
            record=partial(_record_attempt, state_store),
            execute_attempt=execute_attempt,
            clock=clock,
            may_block=state_store.may_block,
            is_self_timed=state_store.is_self_timed,
            handler_scope=scope.current(),
            observer=ProviderTelemetry(request, cooldown=self.policy.breaker.open_cooldown_seconds),
        )

    def _execute_sync(self, request: ProviderRequest) -> ProviderExecutionResult:
        state_store, runner = cast("ProviderState", self.state_store), cast("InlineRunner", self._get_runner())
        dependencies = self._build_dependencies(
            request, state_store, runner.clock, admit=state_store.admit, complete=state_store.complete
        )
        try:
            return _unwrap_outcome(runner.run(execute_call(request, dependencies)), dependencies)
        except BaseException as error:
            dependencies.observer.on_failure(error)
            raise

    async def _execute_async(self, request: ProviderRequest) -> ProviderExecutionResult:
        state_store = cast("AsyncProviderState", self.state_store)
        runner = cast("AsyncInlineRunner", self._get_runner())
        admit, complete = _select_operations(state_store)
        dependencies = self._build_dependencies(request, state_store, runner.clock, admit=admit, complete=complete)
        try:
            return _unwrap_outcome(await runner.run(execute_call(request, dependencies)), dependencies)
        except BaseException as error:
            dependencies.observer.on_failure(error)
            raise

    def _create_pause(self, state_store: AttemptRecorder, now: float) -> Pause | None:
        if self.policy.scope != "provider":
            return None
        until = state_store.blocked_until(ProviderScope(None, self.provider_name, self.capability))
        if until is None or until <= now:
            return None
        # An operator may clear an override at any time, so the gate polls instead of waiting until the end.
        return Pause(f"the breaker of {self.provider_name} is open", min(until - now, _GATE_POLL_SECONDS))

    def _get_runner(self) -> InlineRunner | AsyncInlineRunner:
        return self._runner or (_async_runner if self.is_async else _runner)

    def _check_class(self) -> None:
        for name in ("provider_name", "capability"):
            value = getattr(self, name, None)
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{type(self).__name__} has no {name}: set a non-empty class attribute")
        if not self.operations and not self._implements_attempt:
            raise ConfigurationError(
                f"{type(self).__name__} has no operations: decorate a method with @operation, or implement "
                "_execute_impl in a subclass of ProviderBase or AsyncProviderBase"
            )
        for declared in self.operations.values():
            declared.prepare()

    def _check_state_store(self, state_store: AttemptRecorder) -> None:
        required = AsyncProviderState if self.is_async else ProviderState
        if not isinstance(state_store, required):
            raise ConfigurationError(
                f"{type(self).__name__} cannot use the state store {type(state_store).__name__}: it needs the type "
                f"{required.__name__}"
            )

    def _check_operation(self, operation: str) -> None:
        if operation not in self.operations:
            raise ConfigurationError(
                f"{type(self).__name__} has no operation {operation!r}: it has {', '.join(sorted(self.operations))}"
            )
        attempt = find_attempt(self.provider_name, self.capability)
        if attempt is not None:
            raise ConfigurationError(
                f"the operation {attempt.operation!r} of {type(self).__name__} calls its operation {operation!r}: a "
                "call inside an attempt would have a separate quota, key and retries; move the common code to a method "
                "without @operation"
            )


#: Attributes of Provider that an operation must not replace.
_RESERVED_NAMES: Final = frozenset(name for name in dir(Provider) if not name.startswith("__"))


def _declare_operations(cls: type[Provider]) -> None:
    """Set ``operations``, ``reads`` and ``is_async`` of a new class."""
    own = dict(find_operations(vars(cls)))
    for method_name, declared in own.items():
        if cls._implements_attempt:
            raise ConfigurationError(
                f"{cls.__name__} has the operation {declared.name!r} and implements _execute_impl: derive a class with "
                "operations from Provider"
            )
        if method_name in _RESERVED_NAMES:
            raise ConfigurationError(
                f"the operation {cls.__name__}.{method_name} replaces a part of Provider: use another method name, and "
                f"@operation(name={method_name!r})"
            )
    if not own and len(cls.__bases__) == 1:
        return
    operations: dict[str, Operation] = {}
    for base in reversed(cls.__bases__):
        operations |= getattr(base, "operations", {})
    operations |= {declared.name: declared for declared in own.values()}
    by_variant = {
        is_async: sorted(name for name, declared in operations.items() if declared.is_async is is_async)
        for is_async in (False, True)
    }
    if by_variant[False] and by_variant[True]:
        raise ConfigurationError(
            f"{cls.__name__} mixes operations with def ({', '.join(by_variant[False])}) and with async def "
            f"({', '.join(by_variant[True])}): write all of them in one way, or make two classes with one provider_name"
        )
    cls.operations = MappingProxyType(operations)
    cls.reads = (cls.reads - {declared.name for declared in own.values()}) | {
        name for name, declared in operations.items() if declared.reads
    }
    if operations:
        cls.is_async = bool(by_variant[True])


def _run_body(
    provider: Provider, declared: Operation, arguments: Arguments, running: AbstractContextManager[OperationAttempt]
) -> ProviderReply:
    with running as attempt:
        returned = declared.body(provider, *arguments.args, **arguments.kwargs)
    return declared.encode_result(returned, http_status=attempt.http_status)


async def _run_body_async(
    provider: Provider, declared: Operation, arguments: Arguments, running: AbstractContextManager[OperationAttempt]
) -> ProviderReply:
    with running as attempt:
        returned = await declared.body(provider, *arguments.args, **arguments.kwargs)
    return declared.encode_result(returned, http_status=attempt.http_status)


def _merge_options(options: CallOptions, outer: CallOptions) -> CallOptions:
    """Return *options*, with those of *outer* in place of None."""
    return CallOptions(
        **{
            field.name: getattr(outer, field.name) if (value := getattr(options, field.name)) is None else value
            for field in fields(CallOptions)
        }
    )


def _complete_context(context: ProviderExecutionContext, options: CallOptions) -> ProviderExecutionContext:
    """Return *context*, with the values of *options* in place of None."""
    names = ("correlation_id", "idempotency_key", "timeout", "name")
    values = {name: getattr(options, name) for name in names if getattr(context, name) is None}
    return replace(context, **values)


def _new_id() -> str:
    return os.urandom(16).hex()


def _select_operations(state_store: AsyncProviderState) -> tuple[Callable[..., Any], Callable[..., Any]]:
    # A store that never waits is called synchronously: a coroutine that never suspends only costs time.
    if not state_store.may_block and isinstance(state_store, ProviderState):
        return state_store.admit, state_store.complete
    return state_store.admit_async, state_store.complete_async


def _resolve_tenant(tenant: str | None) -> str:
    current_scope = scope.current()
    return tenant or (None if current_scope is None else current_scope.tenant) or DEFAULT_TENANT


def _record_attempt(state_store: AttemptRecorder, row: AttemptRecord) -> None:
    """Record an attempt; an error of the store is suppressed, because telemetry must not fail a call."""
    suppress_errors(state_store.record, row)


def _unwrap_outcome(outcome: Ok | Err, dependencies: CallDependencies) -> ProviderExecutionResult:
    try:
        if isinstance(outcome, Err):
            raise outcome.error
        result: ProviderExecutionResult = outcome.value
    finally:
        del outcome  # breaks the cycle of frame and error
    dependencies.observer.on_success(result)
    return result
