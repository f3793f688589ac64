"""Telemetry of provider calls: spans, metrics, log events; no payload in any of them."""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ergon_framework import scope
from ergon_framework.providers import telemetry
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.errors import ProviderDependencyError, ProviderError
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.models import ProviderExecutionContext, ProviderReply
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.telemetry import provider_metrics, suppress_errors
from ergon_framework.scope import Scope
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.transaction import Transaction
from tests.log_events import get_event, list_events

SECRET = "card 4111 1111"
numbers = count()
FAST_POLICY = ProviderPolicy(
    retry=RetryPolicy(max_attempts=2, base_delay_seconds=0.0), breaker=BreakerPolicy(failure_threshold=3)
)


def make_provider(*answers, name=None):
    """Return a provider with its own name, whose n-th attempt gets the n-th answer."""
    remaining = iter(answers)

    class Some(ProviderBase):
        provider_name = name or f"seen-{next(numbers)}"
        capability = "charging"
        reads = frozenset({"status"})

        def _execute_impl(self, *, context, **_):
            self.context, self.current = context, trace.get_current_span()
            answer = next(remaining, {"ok": True})
            if isinstance(answer, BaseException):
                raise answer
            return answer

    return Some(state_store=MemoryProviderState(), policy=FAST_POLICY)


def make_outage():
    return ProviderDependencyError("down", http_status=503)


def execute(some, **context):
    arguments = {"tenant_id": "acme", "campaign_id": "spring", "operation": "charge", "payload": {"card": SECRET}}
    return some.execute(**arguments, context=ProviderExecutionContext(correlation_id="c1", **context))


@pytest.fixture
def exporter(monkeypatch):
    exporter, tracing = InMemorySpanExporter(), TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracing)
    return exporter


def test_a_call_is_a_span_and_each_attempt_a_child_span(exporter):
    some = make_provider(make_outage(), ProviderReply({"id": SECRET}, 201))
    execute(some)
    first, second, call = exporter.get_finished_spans()
    assert [first.name, second.name, call.name] == ["provider_call.attempt"] * 2 + ["provider_call"]
    assert first.parent.span_id == second.parent.span_id == call.context.span_id
    assert (first.kind, call.kind) == (trace.SpanKind.CLIENT, trace.SpanKind.INTERNAL)
    provider_labels = {"ergon.provider.name": some.provider_name, "ergon.provider.capability": "charging"}
    provider_labels["ergon.provider.operation"] = "charge"
    assert call.attributes == provider_labels | {"ergon.outcome": "success", "ergon.provider.replayed": False}
    assert first.attributes == provider_labels | {
        "ergon.attempt": 0,
        "ergon.outcome": "retry",
        "ergon.code": "dependency_unavailable",
        "ergon.exception.type": "ProviderDependencyError",
        "ergon.exception.message": "down",
        "ergon.provider.http_status": 503,
    }
    assert second.attributes == provider_labels | {
        "ergon.attempt": 1,
        "ergon.outcome": "success",
        "ergon.provider.http_status": 201,
    }
    assert some.current.get_span_context() == second.context, "the client's own spans are below it"
    assert SECRET not in str([span.to_json() for span in (first, second, call)])


def test_a_failed_call_is_a_span_with_an_error(exporter):
    with pytest.raises(ProviderError):
        execute(make_provider(make_outage(), make_outage()))
    call = exporter.get_finished_spans()[-1]
    assert call.status.status_code is trace.StatusCode.ERROR
    assert (call.attributes["ergon.outcome"], call.attributes["ergon.code"]) == ("failed", "dependency_unavailable")


def test_a_call_that_was_interrupted_leaves_no_open_span(exporter):
    started = asyncio.Event()

    class Hanging(AsyncProviderBase):
        provider_name, capability = f"seen-{next(numbers)}", "charging"

        async def _execute_impl(self, **_):
            started.set()
            await asyncio.sleep(60)

    some = Hanging(state_store=MemoryProviderState())

    async def main():
        task = asyncio.create_task(some.call("charge", {}))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [span.name for span in exporter.get_finished_spans()] == ["provider_call.attempt", "provider_call"]


@pytest.mark.spec("PRV-26")
def test_failing_telemetry_fails_no_call(monkeypatch, caplog):
    class Broken:
        def get_tracer(self, *_):
            return self

        def start_span(self, *_):
            raise RuntimeError("exporter gone")

    monkeypatch.setattr(trace, "get_tracer_provider", Broken)
    assert execute(make_provider()).value == {"ok": True}
    assert "telemetry failed" in list_events(caplog.records)
    assert suppress_errors(lambda: 1 / 0) is None

    class Frail(Broken):
        def start_span(self, *_):
            return self

        def set_attributes(self, *_):
            raise RuntimeError("processor gone")

        def get_span_context(self):
            return trace.INVALID_SPAN_CONTEXT

    monkeypatch.setattr(trace, "get_tracer_provider", Frail)
    assert execute(make_provider()).value == {"ok": True}


def test_calls_attempts_and_transitions_are_counted():
    some = make_provider(make_outage(), {"ok": True}, *[make_outage() for _ in range(3)])
    execute(some)
    for _ in range(2):
        with pytest.raises(ProviderError):
            execute(some)
    provider_labels = {"ergon.provider.name": some.provider_name, "ergon.provider.capability": "charging"}
    assert read_metric(names.PROVIDER_ATTEMPTS, provider_labels) == {
        ("retry", "dependency_unavailable"): 3,
        ("success", None): 1,
        ("failed", "dependency_unavailable"): 1,
        ("failed", "circuit_open"): 1,
    }
    assert read_metric(names.PROVIDER_CALLS, provider_labels) == {
        ("success", None): 1,
        ("failed", "dependency_unavailable"): 1,
        ("failed", "circuit_open"): 1,
    }
    (opened,) = [
        labels
        for labels, _ in get_registry().read(names.PROVIDER_BREAKERS)
        if provider_labels.items() <= labels.items()
    ]
    assert opened["ergon.provider.breaker.state"] == "open"
    (seconds,) = [value for labels, value in get_registry().read(names.PROVIDER_SECONDS) if labels == provider_labels]
    assert 0 < seconds < 5
    assert provider_metrics(some.provider_name) is provider_metrics(some.provider_name)


def read_metric(metric, provider_labels):
    return {
        (labels["ergon.outcome"], labels.get("ergon.code")): value
        for labels, value in get_registry().read(metric)
        if provider_labels.items() <= labels.items()
    }


@pytest.mark.spec("PRV-12", "PRV-25", "DX-30")
def test_a_failed_call_is_logged_once_with_its_fields(caplog):
    caplog.set_level(logging.DEBUG, "ergon_framework.providers")
    some = make_provider(*[make_outage() for _ in range(2)])
    with pytest.raises(ProviderError):
        execute(some, idempotency_key="k1")
    (record,) = [one for one in caplog.records if get_event(one) == "provider call failed"]
    assert record.levelno == logging.WARNING
    fields = {name: getattr(record, name, None) for name in ("tenant_id", "campaign_id", "provider_name", "capability")}
    assert fields == {
        "tenant_id": "acme",
        "campaign_id": "spring",
        "provider_name": some.provider_name,
        "capability": "charging",
    }
    assert (record.operation, record.correlation_id, record.idempotency_key) == ("charge", "c1", "k1")
    assert (record.attempt, record.reason_code, record.outcome) == (2, "dependency_unavailable", "failed")
    assert SECRET not in str(vars(record))
    for pair in (
        *(f"provider_name={some.provider_name}", "capability=charging", "operation=charge", "correlation_id=c1"),
        *("idempotency_key=k1", "attempt=2", "reason_code=dependency_unavailable", "outcome=failed"),
    ):
        assert f" {pair}" in record.message


def test_a_breaker_that_opens_is_a_warning(caplog):
    some = make_provider(*[make_outage() for _ in range(4)])
    for _ in range(2):
        with pytest.raises(ProviderError):
            execute(some)
    (record,) = [one for one in caplog.records if get_event(one) == "breaker changed"]
    assert (record.levelno, record.breaker_state) == (logging.WARNING, "open")
    assert f"provider_name={some.provider_name} capability=charging" in record.message
    assert record.message.endswith("breaker_state=open")


# -- the common case --------------------------------------------------------------------------------


def test_inside_a_handler_only_the_transaction_logs_the_failure(caplog):
    caplog.set_level(logging.INFO, "ergon_framework.providers")
    scope.set_scope(Scope(Transaction(id="order-7", source="shop", tenant="acme"), "process", 0))
    try:
        some = make_provider(make_outage(), make_outage())
        with pytest.raises(ProviderError) as caught:
            some.call("charge", {})
    finally:
        scope.set_scope(None)
    assert caught.value.result.tenant_id == "acme"
    assert "provider call failed" not in list_events(caplog.records)


@pytest.mark.parametrize("explicit_tenant, tenant", [(None, "acme"), ("other", "other")])
def test_the_tenant_is_the_transactions_unless_it_is_given(explicit_tenant, tenant):
    some = make_provider()
    scope.set_scope(Scope(Transaction(id="order-7", source="shop", tenant="acme"), "process", 0))
    try:
        some.call("charge", {}, tenant=explicit_tenant, key="k")
    finally:
        scope.set_scope(None)
    assert [row.tenant_id for row in some.state_store.list_attempts()] == [tenant]
    some.call("charge", {})
    assert some.state_store.list_attempts()[-1].tenant_id == "default"


def test_a_read_operation_has_no_key_and_may_be_repeated():
    some = make_provider()
    scope.set_scope(Scope(Transaction(id="order-7", source="shop"), "process", 0))
    try:
        for _ in range(3):
            some.call("status", {"id": 1})
            assert some.context.idempotency_key is None
    finally:
        scope.set_scope(None)
    assert len(some.state_store.list_attempts()) == 3


def read_gauge(some, metric):
    """Return the gauge of *some* as it is read."""
    provider_labels = {"ergon.provider.name": some.provider_name, "ergon.provider.capability": "charging"}
    return [value for labels, value in get_registry().read(metric) if labels == provider_labels]


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of the metrics."""
    now = [1000.0]
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.spec("RUN-04")
def test_the_breaker_gauge_is_set_until_the_cooldown_ends(clock):
    some = make_provider(*[make_outage() for _ in range(4)])
    some.policy = ProviderPolicy(retry=FAST_POLICY.retry, breaker=BreakerPolicy(failure_threshold=4))
    assert read_gauge(some, names.PROVIDER_OPEN) == []
    execute_and_fail(some)
    assert read_gauge(some, names.PROVIDER_OPEN) == [0]
    execute_and_fail(some)  # its last attempt opens the breaker, and none is rejected
    assert read_gauge(some, names.PROVIDER_OPEN) == [1]
    assert read_gauge(some, names.PROVIDER_EXHAUSTED) == [0]
    clock[0] += FAST_POLICY.breaker.open_cooldown_seconds + 0.1
    assert read_gauge(some, names.PROVIDER_OPEN) == [0]
    execute_and_fail(some)  # it is rejected, and the error says until when
    assert read_gauge(some, names.PROVIDER_OPEN) == [1]


@pytest.mark.spec("RUN-04")
def test_the_quota_gauge_is_set_until_a_call_is_admitted(clock):
    some = make_provider()
    some.policy = ProviderPolicy(quota=QuotaPolicy(month=1))
    execute(some)
    execute_and_fail(some)
    assert read_gauge(some, names.PROVIDER_EXHAUSTED) == [1]
    some.policy = ProviderPolicy(quota=QuotaPolicy(month=2))
    execute(some)
    assert read_gauge(some, names.PROVIDER_EXHAUSTED) == [0]


def test_a_blocked_tenant_sets_the_gauge_while_others_are_free(clock):
    metrics = provider_metrics(f"tenants-{next(numbers)}")
    metrics.set_blocked(names.PROVIDER_OPEN, "charging", "acme", seconds=5.0)
    metrics.clear_blocked("charging", "other", [names.PROVIDER_OPEN])
    assert metrics.gauges() == {(names.PROVIDER_OPEN.name, ("charging",)): 1}
    metrics.clear_blocked("charging", "acme", [names.PROVIDER_OPEN])
    assert metrics.gauges() == {}


def test_blocked_tenants_are_remembered_within_bounds(clock):
    metrics = provider_metrics(f"many-{next(numbers)}")
    for number in range(3_000):
        metrics.set_blocked(names.PROVIDER_OPEN, "charging", f"tenant-{number}", seconds=5.0 if number % 2 else 0.0)
    assert len(metrics._blocked_until) <= 1_000
    assert (names.PROVIDER_OPEN.name, "charging", "tenant-2999") in metrics._blocked_until


def execute_and_fail(some):
    with pytest.raises(ProviderError):
        execute(some)
