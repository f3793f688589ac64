"""The generic base classes of providers, for threads and for asyncio: a subclass makes one attempt of any operation.

``Provider`` has typed operations instead. These classes have the form of the source document.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

from ergon_framework.engine.inline import AsyncInlineRunner, InlineRunner
from ergon_framework.providers.models import ProviderExecutionContext, ProviderExecutionResult
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.provider import Provider, Reply
from ergon_framework.providers.state import AsyncProviderState, ProviderState

__all__ = ["AsyncProviderBase", "Provider", "ProviderBase"]


class ProviderBase(Provider):
    """A provider that is called from threads and implements ``_execute_impl``; only ``execute`` calls it.

    ``Provider`` has typed operations in place of the generic ``call``.
    """

    _implements_attempt = True

    def __init__(
        self,
        *,
        state_store: ProviderState | None = None,
        policy: ProviderPolicy | None = None,
        runner: InlineRunner | None = None,
    ) -> None:
        super().__init__(state_store=state_store, policy=policy, runner=runner)

    @property
    def state_store(self) -> ProviderState:
        return cast("ProviderState", super().state_store)

    def execute(
        self,
        *,
        operation: str,
        payload: dict[str, Any],
        tenant_id: str | None = None,
        campaign_id: str | None = None,
        context: ProviderExecutionContext | None = None,
    ) -> ProviderExecutionResult:
        """Call the provider under quota and breaker, with the retries of the policy, within one deadline.

        Without *tenant_id* the tenant is that of the handler's scope, else ``default``. A failure raises the canonical
        error, which carries its result. A call that hangs is abandoned when the budget ends: its thread continues, and
        its return value is discarded.
        """
        return self._execute_sync(
            self._build_request(tenant_id, campaign_id, operation, payload=payload, context=context)
        )

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
            tenant_id=tenant or None,
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
    ) -> Reply:
        """Make one attempt; ``context.timeout`` limits the client's wait, ``context.idempotency_key`` is sent along.

        Any exception is mapped to a canonical error; an implementation that knows the cause raises the canonical error.
        """


class AsyncProviderBase(Provider):
    """The asyncio variant of ProviderBase. A call that hangs is cancelled, and its end is not awaited."""

    is_async = True
    _implements_attempt = True

    def __init__(
        self,
        *,
        state_store: AsyncProviderState | None = None,
        policy: ProviderPolicy | None = None,
        runner: AsyncInlineRunner | None = None,
    ) -> None:
        super().__init__(state_store=state_store, policy=policy, runner=runner)

    @property
    def state_store(self) -> AsyncProviderState:
        return cast("AsyncProviderState", super().state_store)

    async def execute(
        self,
        *,
        operation: str,
        payload: dict[str, Any],
        tenant_id: str | None = None,
        campaign_id: str | None = None,
        context: ProviderExecutionContext | None = None,
    ) -> ProviderExecutionResult:
        """Call the provider; see ``ProviderBase.execute``."""
        return await self._execute_async(
            self._build_request(tenant_id, campaign_id, operation, payload=payload, context=context)
        )

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
            tenant_id=tenant or None,
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
    ) -> Reply:
        """Make one attempt; see ``ProviderBase._execute_impl``."""
