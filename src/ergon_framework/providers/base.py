"""Providers: the base classes through which threads and asyncio tasks call third parties.

A call makes one or more attempts. Each attempt must be admitted by the provider state: a quota limits the calls per
window of time, a circuit breaker stops calls to a failing provider, and an idempotency key names a call, so that
repeating the call does not carry it out twice. A canonical error is one of ``providers.errors``, whatever the client
library raised. A gate is a check before a worker fetches, which can pause the worker.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

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
    ProviderExecutionContext,
    ProviderExecutionResult,
    ProviderReply,
    ProviderRequest,
    current_task_execution,
)
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.process_state import process_state
from ergon_framework.providers.state import AsyncProviderState, AttemptRecorder, ProviderScope, ProviderState
from ergon_framework.providers.telemetry import ProviderTelemetry, suppress_errors

#: The kind of state store, and the runner of the script.
B = TypeVar("B", bound=AttemptRecorder)
C = TypeVar("C", InlineRunner, AsyncInlineRunner)

_runner: Final = InlineRunner()
_async_runner: Final = AsyncInlineRunner()
#: Seconds between two polls of a closed gate.
_GATE_POLL_SECONDS: Final = 1.0


class Provider(ABC, Generic[B, C]):
    """The common part of the sync and async variants: the provider's identity and the context of a call.

    Operations in ``reads`` change nothing, so they get no idempotency key and may be called repeatedly.
    """

    provider_name: ClassVar[str]
    capability: ClassVar[str]
    policy: ProviderPolicy = ProviderPolicy()
    reads: frozenset[str] = frozenset()
    _state_store: B | None = None
    _runner: C

    def __init__(
        self, *, state_store: B | None = None, policy: ProviderPolicy | None = None, runner: C | None = None
    ) -> None:
        self._check_names()
        self._state_store = state_store
        if policy is not None:
            self.policy = policy
        if runner is not None:
            self._runner = runner

    @property
    def state_store(self) -> B:
        # The state of the process serves both threads and asyncio tasks.
        return cast("B", process_state()) if self._state_store is None else self._state_store

    @property
    def uses_process_state(self) -> bool:
        """Whether the provider uses the state of the process because no state store was passed."""
        return self._state_store is None

    def gate(self) -> Pause | None:
        """Pause the fetches of a task that names this provider in ``uses`` while the breaker of all tenants is open.

        A breaker of one tenant does not pause the task: the transactions of other tenants can proceed.
        """
        return self._create_pause(self.state_store, self._runner.clock.wall())

    def _build_request(
        self,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        *,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> ProviderRequest:
        """Return the request; values that the caller left out come from the handler's scope."""
        current_scope = scope.current()
        if context.task_execution_id is None and (execution_id := current_task_execution.get()) is not None:
            context = replace(context, task_execution_id=execution_id)
        key = context.idempotency_key
        if key is None and current_scope is not None and operation not in self.reads:
            key = current_scope.derive(effect_name(self.provider_name, operation, context.name))
        correlation_id = context.correlation_id or (_new_id() if current_scope is None else current_scope.correlation)
        return ProviderRequest(
            provider_name=self.provider_name,
            capability=self.capability,
            tenant_id=tenant_id,
            campaign_id=campaign_id,
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
        execute_attempt: Callable[[ProviderExecutionContext], Any],
        admit: Callable[..., Any],
        complete: Callable[..., Any],
    ) -> CallDependencies:
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

    def _create_pause(self, state_store: AttemptRecorder, now: float) -> Pause | None:
        if self.policy.scope != "provider":
            return None
        until = state_store.blocked_until(ProviderScope(None, self.provider_name, self.capability))
        if until is None or until <= now:
            return None
        # An operator may clear an override at any time, so the gate polls instead of waiting until the end.
        return Pause(f"the breaker of {self.provider_name} is open", min(until - now, _GATE_POLL_SECONDS))

    def _check_names(self) -> None:
        for name in ("provider_name", "capability"):
            value = getattr(self, name, None)
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{type(self).__name__} has no {name}: set a non-empty class attribute")


class ProviderBase(Provider[ProviderState, InlineRunner]):
    """A provider that is called from threads. A subclass implements ``_execute_impl``; only ``execute`` calls it.

    Without *state_store* all providers of the process share one state: in PostgreSQL, shared with all other processes,
    if ``ERGON_POSTGRES__DSN`` is set, else in memory. Two objects with the same name share one quota and one breaker.
    """

    _runner: InlineRunner = _runner

    def execute(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> ProviderExecutionResult:
        """Call the provider under quota and breaker, with the retries of the policy, within one deadline.

        A failure raises the canonical error, which carries its result. A call that hangs is abandoned
        when the budget ends: its thread continues, and its return value is discarded.
        """
        request = self._build_request(tenant_id, campaign_id, operation, payload=payload, context=context)
        state_store = self.state_store

        def execute_attempt(context: ProviderExecutionContext) -> dict[str, Any] | ProviderReply:
            return self._execute_impl(
                tenant_id=tenant_id, campaign_id=campaign_id, operation=operation, payload=payload, context=context
            )

        dependencies = self._build_dependencies(
            request,
            state_store,
            self._runner.clock,
            execute_attempt=execute_attempt,
            admit=state_store.admit,
            complete=state_store.complete,
        )
        try:
            return _unwrap_outcome(self._runner.run(execute_call(request, dependencies)), dependencies)
        except BaseException as error:
            dependencies.observer.on_failure(error)
            raise

    def call(
        self,
        operation: str,
        payload: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
        tenant: str | None = None,
        campaign: str | None = None,
    ) -> dict[str, Any]:
        """Call ``execute`` with defaults from the handler's scope and return the provider's answer.

        Tenant, deadline, correlation and key come from the scope of the handler. A second call of the same
        operation in one handler needs its own *name*.
        """
        context = ProviderExecutionContext(idempotency_key=key, timeout=timeout, name=name)
        result = self.execute(
            tenant_id=_resolve_tenant(tenant),
            campaign_id=campaign,
            operation=operation,
            payload={} if payload is None else payload,
            context=context,
        )
        return result.value or {}

    @abstractmethod
    def _execute_impl(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> dict[str, Any] | ProviderReply:
        """Make one attempt; ``context.timeout`` limits the client's wait, ``context.idempotency_key`` is sent along.

        Any exception is mapped to a canonical error; an implementation that knows the cause raises the canonical error.
        """


class AsyncProviderBase(Provider[AsyncProviderState, AsyncInlineRunner]):
    """The asyncio variant of ProviderBase. A call that hangs is cancelled, and its end is not awaited."""

    _runner: AsyncInlineRunner = _async_runner

    async def execute(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> ProviderExecutionResult:
        """Call the provider; see ``ProviderBase.execute``."""
        request = self._build_request(tenant_id, campaign_id, operation, payload=payload, context=context)
        state_store = self.state_store
        admit, complete = _select_operations(state_store)

        def execute_attempt(context: ProviderExecutionContext) -> Awaitable[dict[str, Any] | ProviderReply]:
            return self._execute_impl(
                tenant_id=tenant_id, campaign_id=campaign_id, operation=operation, payload=payload, context=context
            )

        dependencies = self._build_dependencies(
            request, state_store, self._runner.clock, execute_attempt=execute_attempt, admit=admit, complete=complete
        )
        try:
            return _unwrap_outcome(await self._runner.run(execute_call(request, dependencies)), dependencies)
        except BaseException as error:
            dependencies.observer.on_failure(error)
            raise

    async def call(
        self,
        operation: str,
        payload: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
        tenant: str | None = None,
        campaign: str | None = None,
    ) -> dict[str, Any]:
        """Call the provider with defaults from the handler's scope; see ``ProviderBase.call``."""
        context = ProviderExecutionContext(idempotency_key=key, timeout=timeout, name=name)
        result = await self.execute(
            tenant_id=_resolve_tenant(tenant),
            campaign_id=campaign,
            operation=operation,
            payload={} if payload is None else payload,
            context=context,
        )
        return result.value or {}

    @abstractmethod
    async def _execute_impl(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> dict[str, Any] | ProviderReply:
        """Make one attempt; see ``ProviderBase._execute_impl``."""


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
