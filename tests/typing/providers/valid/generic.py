"""The generic classes: calls without tenant, campaign and context, and with all the fields of the document."""

from typing import Any, assert_type

from ergon_framework.providers import (
    AsyncProviderBase,
    BreakerPolicy,
    MemoryProviderState,
    ProviderBase,
    ProviderExecutionContext,
    ProviderExecutionResult,
    ProviderPolicy,
    ProviderReply,
    QuotaPolicy,
    RetryPolicy,
)


class Ranks(ProviderBase):
    provider_name = "ranks"
    capability = "snapshots"
    policy = ProviderPolicy(
        retry=RetryPolicy(max_attempts=2), quota=QuotaPolicy(minute=5), breaker=BreakerPolicy(failure_threshold=1)
    )

    def _execute_impl(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> dict[str, Any]:
        return payload


class AsyncRanks(AsyncProviderBase):
    provider_name = "ranks"
    capability = "snapshots"

    async def _execute_impl(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> ProviderReply:
        return ProviderReply(payload, 200)


ranks = Ranks(state_store=MemoryProviderState())
assert_type(ranks.execute(operation="snapshot", payload={}), ProviderExecutionResult)
assert_type(
    ranks.execute(
        tenant_id="acme", campaign_id=None, operation="snapshot", payload={}, context=ProviderExecutionContext()
    ),
    ProviderExecutionResult,
)
assert_type(ranks.call("snapshot"), dict[str, Any])


async def main() -> None:
    assert_type(await AsyncRanks().execute(operation="snapshot", payload={}), ProviderExecutionResult)
    assert_type(await AsyncRanks().call("snapshot", {"page": "/"}), dict[str, Any])
