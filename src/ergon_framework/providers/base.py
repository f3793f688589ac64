"""Providers: the one way in which a third party is called, for threads and for asyncio."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from ergon_framework import scope
from ergon_framework.engine.drivers.caller import AsyncCaller, Caller
from ergon_framework.engine.outcome import Err, Ok
from ergon_framework.engine.pause import Pause
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.books import Account, AsyncBooks, Books, Recording
from ergon_framework.providers.calling import Means, execution
from ergon_framework.providers.execution import (
    NO_TENANT,
    AttemptRow,
    ProviderExecutionContext,
    ProviderExecutionResult,
    Reply,
    Request,
    current_task_execution,
)
from ergon_framework.providers.idempotency import effect, fingerprint
from ergon_framework.providers.observe import Observer, safely
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.process_state import process_books

#: Which books, and who performs the script.
B = TypeVar("B", bound=Recording)
C = TypeVar("C", Caller, AsyncCaller)

_caller: Final = Caller()
_async_caller: Final = AsyncCaller()
#: Seconds after which a gate that is closed is looked at again.
_LOOK: Final = 1.0


class Provider(ABC, Generic[B, C]):
    """What the two variants share: who a provider is, and what a call of it is part of.

    Operations in ``reads`` change nothing, so they are given no key and may be called again and again.
    """

    provider_name: ClassVar[str]
    capability: ClassVar[str]
    policy: ProviderPolicy = ProviderPolicy()
    reads: frozenset[str] = frozenset()
    _books: B | None = None
    _caller: C

    def __init__(
        self, *, books: B | None = None, policy: ProviderPolicy | None = None, caller: C | None = None
    ) -> None:
        self._check()
        self._books = books
        if policy is not None:
            self.policy = policy
        if caller is not None:
            self._caller = caller

    @property
    def books(self) -> B:
        # Those of the process are for threads and for tasks.
        return cast("B", process_books()) if self._books is None else self._books

    @property
    def uses_process_books(self) -> bool:
        """Whether the state is that of the process, because none was passed."""
        return self._books is None

    def gate(self) -> Pause | None:
        """Hold back the fetches of a task that names this provider in ``uses``, while its breaker is open for all.

        A breaker of one tenant holds back nobody else's transactions, so that it is no gate.
        """
        return self._pause(self.books, self._caller.senses.wall())

    def _request(
        self,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        *,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> Request:
        below = scope.current()
        if context.task_execution_id is None and (execution_id := current_task_execution.get()) is not None:
            context = replace(context, task_execution_id=execution_id)
        key = context.idempotency_key
        if key is None and below is not None and operation not in self.reads:
            key = below.derive(effect(self.provider_name, operation, context.name))
        correlation = context.correlation_id or (_new_id() if below is None else below.correlation)
        return Request(
            provider_name=self.provider_name,
            capability=self.capability,
            tenant_id=tenant_id,
            campaign_id=campaign_id,
            operation=operation,
            payload=payload,
            correlation_id=correlation,
            idempotency_key=key,
            fingerprint="" if key is None else fingerprint(operation, payload),
            owner="" if key is None else _new_id(),
            context=context,
        )

    def _means(
        self,
        request: Request,
        books: Recording,
        senses: Senses,
        *,
        body: Callable[[ProviderExecutionContext], Any],
        admit: Callable[..., Any],
        conclude: Callable[..., Any],
    ) -> Means:
        return Means(
            policy=self.policy,
            admit=admit,
            conclude=conclude,
            record=partial(_recorded, books),
            body=body,
            senses=senses,
            waits=books.waits,
            punctual=books.punctual,
            outer=scope.current(),
            watch=Observer(request, cooldown=self.policy.breaker.open_cooldown_seconds),
        )

    def _pause(self, books: Recording, now: float) -> Pause | None:
        if self.policy.scope != "provider":
            return None
        until = books.held_until(Account(None, self.provider_name, self.capability))
        if until is None or until <= now:
            return None
        # An operator may lift it at any time, so nobody waits to the end without looking.
        return Pause(f"the breaker of {self.provider_name} is open", min(until - now, _LOOK))

    def _check(self) -> None:
        for name in ("provider_name", "capability"):
            given = getattr(self, name, None)
            if not isinstance(given, str) or not given:
                raise ConfigurationError(f"{type(self).__name__} needs a {name}: a short text, as a class attribute")


class ProviderBase(Provider[Books, Caller]):
    """A provider that is called from threads. A subclass writes ``_execute_impl``; nobody else calls it.

    Without *books* all providers of the process have one state: in PostgreSQL, shared with all other processes, if
    ``ERGON_POSTGRES__DSN`` is set, else in memory. Two objects of one name have one quota and one breaker.
    """

    _caller: Caller = _caller

    def execute(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> ProviderExecutionResult:
        """Call the provider: under quota and breaker, tried again as the policy says, within one deadline.

        A failure raises the canonical error, which carries its result. A call that hangs is abandoned
        when the budget ends: its thread goes on, and what it returns reaches nobody.
        """
        request = self._request(tenant_id, campaign_id, operation, payload=payload, context=context)
        books = self.books

        def body(context: ProviderExecutionContext) -> dict[str, Any] | Reply:
            return self._execute_impl(
                tenant_id=tenant_id, campaign_id=campaign_id, operation=operation, payload=payload, context=context
            )

        means = self._means(request, books, self._caller.senses, body=body, admit=books.admit, conclude=books.conclude)
        try:
            return _ended(self._caller.perform(execution(request, means)), means)
        except BaseException as error:
            means.watch.failed(error)
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
        """The everyday form of ``execute``: what the provider answered.

        Tenant, deadline, correlation and key come from the scope of the handler. A second call of one
        operation in one handler needs a *name* of its own.
        """
        context = ProviderExecutionContext(idempotency_key=key, timeout=timeout, name=name)
        result = self.execute(
            tenant_id=_tenant(tenant),
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
    ) -> dict[str, Any] | Reply:
        """One attempt. ``context.timeout`` is what the client may wait, ``context.idempotency_key`` what to send along.

        Whatever it raises is mapped to a canonical error; one that knows better raises that itself.
        """


class AsyncProviderBase(Provider[AsyncBooks, AsyncCaller]):
    """A provider that is called from asyncio; the same promises. A call that hangs is cancelled, and not awaited."""

    _caller: AsyncCaller = _async_caller

    async def execute(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> ProviderExecutionResult:
        """See ProviderBase."""
        request = self._request(tenant_id, campaign_id, operation, payload=payload, context=context)
        books = self.books
        admit, conclude = _visits(books)

        def body(context: ProviderExecutionContext) -> Awaitable[dict[str, Any] | Reply]:
            return self._execute_impl(
                tenant_id=tenant_id, campaign_id=campaign_id, operation=operation, payload=payload, context=context
            )

        means = self._means(request, books, self._caller.senses, body=body, admit=admit, conclude=conclude)
        try:
            return _ended(await self._caller.perform(execution(request, means)), means)
        except BaseException as error:
            means.watch.failed(error)
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
        """See ProviderBase."""
        context = ProviderExecutionContext(idempotency_key=key, timeout=timeout, name=name)
        result = await self.execute(
            tenant_id=_tenant(tenant),
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
    ) -> dict[str, Any] | Reply:
        """See ProviderBase."""


def _new_id() -> str:
    return os.urandom(16).hex()


def _visits(books: AsyncBooks) -> tuple[Callable[..., Any], Callable[..., Any]]:
    # Books that never wait are visited at once: a coroutine that suspends nowhere is a price for nothing.
    if not books.waits and isinstance(books, Books):
        return books.admit, books.conclude
    return books.admit_async, books.conclude_async


def _tenant(given: str | None) -> str:
    below = scope.current()
    return given or (None if below is None else below.tenant) or NO_TENANT


def _recorded(books: Recording, row: AttemptRow) -> None:
    """Telemetry cannot fail a call, not even one whose books break their promise."""
    safely(books.record, row)


def _ended(ended: Ok | Err, means: Means) -> ProviderExecutionResult:
    try:
        if isinstance(ended, Err):
            raise ended.error
        result: ProviderExecutionResult = ended.value
    finally:
        del ended  # a frame that holds the error which holds the frame
    means.watch.succeeded(result)
    return result
