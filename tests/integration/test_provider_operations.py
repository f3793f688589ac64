"""Typed operations with provider state in PostgreSQL: results keep their types, and rows have the document's fields."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

import psycopg
import pytest
from psycopg.rows import dict_row

from ergon_framework.database import migrate
from ergon_framework.providers import Provider, ProviderBadRequestError, ProviderPolicy, operation
from ergon_framework.providers.postgres import PostgresProviderState

PAID_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass
class ChargeRequest:
    order: str
    amount: Decimal


@dataclass
class ChargeResult:
    number: int
    amount: Decimal
    paid_at: datetime


class ThreadsPayments(Provider):
    provider_name = "payments"
    capability = "charging"
    policy = ProviderPolicy(retries=1, timeout=20, backoff=0.0, calls_per_month=100)
    calls = 0

    @operation
    def charge(self, request: ChargeRequest) -> ChargeResult:
        self.calls += 1
        if self.attempt.number == 1:
            raise ConnectionResetError("gone")
        self.attempt.http_status = 201
        return ChargeResult(self.calls, request.amount, PAID_AT)


class AsyncioPayments(Provider):
    provider_name = "payments"
    capability = "charging"
    policy = ProviderPolicy(retries=1, timeout=20, backoff=0.0, calls_per_month=100)
    calls = 0

    @operation
    async def charge(self, request: ChargeRequest) -> ChargeResult:
        self.calls += 1
        await asyncio.sleep(0)
        if self.attempt.number == 1:
            raise ConnectionResetError("gone")
        self.attempt.http_status = 201
        return ChargeResult(self.calls, request.amount, PAID_AT)


def charge(provider, request, **options):
    async def main():
        return await provider.with_options(**options).charge(request)

    return asyncio.run(main()) if provider.is_async else provider.with_options(**options).charge(request)


@pytest.mark.spec("PRV-09", "PRV-11", "PRV-22")
@pytest.mark.parametrize("kind", [ThreadsPayments, AsyncioPayments])
def test_another_process_gets_the_stored_result_with_its_type_and_rows_are_complete(postgres, kind):
    dsn = postgres.create_database(f"provider_operations_{os.getpid()}_{kind.__name__.lower()}")
    migrate.upgrade(dsn)
    # Two states share nothing in memory, as two processes.
    states = [PostgresProviderState(dsn) for _ in range(2)]
    first, second = (kind(state_store=state) for state in states)
    options = {"tenant_id": "acme", "campaign_id": "spring", "correlation_id": "c1", "idempotency_key": "k1"}
    request = ChargeRequest("17", Decimal("12.50"))
    try:
        results = [charge(provider, request, **options) for provider in (first, second)]
        assert results == [ChargeResult(2, Decimal("12.50"), PAID_AT)] * 2
        assert (first.calls, second.calls) == (2, 0)
        with pytest.raises(ProviderBadRequestError) as caught:
            charge(second, ChargeRequest("17", Decimal(13)), **options)
        assert caught.value.code == "idempotency_conflict"
    finally:
        for state in states:
            state.close()
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        rows = connection.execute(
            "select tenant_id, provider_name, capability, operation, idempotency_key, correlation_id, attempt_number, "
            "max_attempts, timeout_budget_ms, outcome, reason_code, retryable, http_status "
            "from ergon.provider_execution_metrics order by attempt_number"
        ).fetchall()
        quota = connection.execute("select tenant_id, used_count from ergon.provider_quota_states").fetchall()
    shared = {
        "tenant_id": "acme",
        "provider_name": "payments",
        "capability": "charging",
        "operation": "charge",
        "idempotency_key": "k1",
        "correlation_id": "c1",
        "max_attempts": 2,
        "timeout_budget_ms": 20_000,
    }
    retried = {"attempt_number": 1, "outcome": "retry", "reason_code": "connection_error", "retryable": True}
    succeeded = {"attempt_number": 2, "outcome": "success", "reason_code": None, "retryable": False}
    assert rows == [shared | retried | {"http_status": None}, shared | succeeded | {"http_status": 201}]
    assert quota == [{"tenant_id": "acme", "used_count": 2}]
