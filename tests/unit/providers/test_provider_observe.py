"""What is seen of provider calls: spans, metrics, log events; no payload in any of them."""

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
from ergon_framework.providers import observe
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.errors import ProviderDependencyError, ProviderError
from ergon_framework.providers.execution import ProviderExecutionContext, Reply
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.observe import safely, tally_of
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.scope import Scope
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.transaction import Transaction
from tests.log_events import event_of, events_of

SECRET = "card 4111 1111"
numbers = count()
QUICK = ProviderPolicy(
    retry=RetryPolicy(max_attempts=2, base_delay_seconds=0.0), breaker=BreakerPolicy(failure_threshold=3)
)


def provider(*answers, name=None):
    """A provider with a name of its own, whose n-th attempt meets the n-th answer."""
    given = iter(answers)

    class Some(ProviderBase):
        provider_name = name or f"seen-{next(numbers)}"
        capability = "charging"
        reads = frozenset({"status"})

        def _execute_impl(self, *, context, **_):
            self.context, self.current = context, trace.get_current_span()
            answer = next(given, {"ok": True})
            if isinstance(answer, BaseException):
                raise answer
            return answer

    return Some(books=MemoryBooks(), policy=QUICK)


def down():
    return ProviderDependencyError("down", http_status=503)


def execute(some, **context):
    asked = {"tenant_id": "acme", "campaign_id": "spring", "operation": "charge", "payload": {"card": SECRET}}
    return some.execute(**asked, context=ProviderExecutionContext(correlation_id="c1", **context))


@pytest.fixture
def exporter(monkeypatch):
    exporter, tracing = InMemorySpanExporter(), TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracing)
    return exporter


def test_a_call_is_a_span_and_each_attempt_one_below_it(exporter):
    some = provider(down(), Reply({"id": SECRET}, 201))
    execute(some)
    first, second, call = exporter.get_finished_spans()
    assert [first.name, second.name, call.name] == ["provider_call.attempt"] * 2 + ["provider_call"]
    assert first.parent.span_id == second.parent.span_id == call.context.span_id
    assert (first.kind, call.kind) == (trace.SpanKind.CLIENT, trace.SpanKind.INTERNAL)
    who = {"ergon.provider.name": some.provider_name, "ergon.provider.capability": "charging"}
    who["ergon.provider.operation"] = "charge"
    assert call.attributes == who | {"ergon.outcome": "success", "ergon.provider.replayed": False}
    assert first.attributes == who | {
        "ergon.attempt": 0,
        "ergon.outcome": "retry",
        "ergon.code": "dependency_unavailable",
        "ergon.exception.type": "ProviderDependencyError",
        "ergon.exception.message": "down",
        "ergon.provider.http_status": 503,
    }
    assert second.attributes == who | {
        "ergon.attempt": 1,
        "ergon.outcome": "success",
        "ergon.provider.http_status": 201,
    }
    assert some.current.get_span_context() == second.context, "the client's own spans are below it"
    assert SECRET not in str([span.to_json() for span in (first, second, call)])


def test_a_call_that_was_given_up_is_a_span_with_an_error(exporter):
    with pytest.raises(ProviderError):
        execute(provider(down(), down()))
    call = exporter.get_finished_spans()[-1]
    assert call.status.status_code is trace.StatusCode.ERROR
    assert (call.attributes["ergon.outcome"], call.attributes["ergon.code"]) == ("failed", "dependency_unavailable")


def test_a_call_that_was_interrupted_leaves_no_open_span(exporter):
    begun = asyncio.Event()

    class Hanging(AsyncProviderBase):
        provider_name, capability = f"seen-{next(numbers)}", "charging"

        async def _execute_impl(self, **_):
            begun.set()
            await asyncio.sleep(60)

    some = Hanging(books=MemoryBooks())

    async def main():
        task = asyncio.create_task(some.call("charge", {}))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [span.name for span in exporter.get_finished_spans()] == ["provider_call.attempt", "provider_call"]


@pytest.mark.spec("PRV-26")
def test_telemetry_that_breaks_breaks_no_call(monkeypatch, caplog):
    class Broken:
        def get_tracer(self, *_):
            return self

        def start_span(self, *_):
            raise RuntimeError("exporter gone")

    monkeypatch.setattr(trace, "get_tracer_provider", Broken)
    assert execute(provider()).value == {"ok": True}
    assert "telemetry failed" in events_of(caplog.records)
    assert safely(lambda: 1 / 0) is None

    class Frail(Broken):
        def start_span(self, *_):
            return self

        def set_attributes(self, *_):
            raise RuntimeError("processor gone")

        def get_span_context(self):
            return trace.INVALID_SPAN_CONTEXT

    monkeypatch.setattr(trace, "get_tracer_provider", Frail)
    assert execute(provider()).value == {"ok": True}


def test_calls_attempts_and_transitions_are_counted():
    some = provider(down(), {"ok": True}, *[down() for _ in range(3)])
    execute(some)
    for _ in range(2):
        with pytest.raises(ProviderError):
            execute(some)
    who = {"ergon.provider.name": some.provider_name, "ergon.provider.capability": "charging"}
    assert read(names.PROVIDER_ATTEMPTS, who) == {
        ("retry", "dependency_unavailable"): 3,
        ("success", None): 1,
        ("failed", "dependency_unavailable"): 1,
        ("failed", "circuit_open"): 1,
    }
    assert read(names.PROVIDER_CALLS, who) == {
        ("success", None): 1,
        ("failed", "dependency_unavailable"): 1,
        ("failed", "circuit_open"): 1,
    }
    (opened,) = [labels for labels, _ in registry_of().read(names.PROVIDER_BREAKERS) if who.items() <= labels.items()]
    assert opened["ergon.provider.breaker.state"] == "open"
    (spent,) = [value for labels, value in registry_of().read(names.PROVIDER_SECONDS) if labels == who]
    assert 0 < spent < 5
    assert tally_of(some.provider_name) is tally_of(some.provider_name)


def read(metric, who):
    return {
        (labels["ergon.outcome"], labels.get("ergon.code")): value
        for labels, value in registry_of().read(metric)
        if who.items() <= labels.items()
    }


@pytest.mark.spec("PRV-12", "PRV-25", "DX-30")
def test_what_was_given_up_is_logged_once_with_its_fields(caplog):
    caplog.set_level(logging.DEBUG, "ergon_framework.providers")
    some = provider(*[down() for _ in range(2)])
    with pytest.raises(ProviderError):
        execute(some, idempotency_key="k1")
    (record,) = [one for one in caplog.records if event_of(one) == "provider call failed"]
    assert record.levelno == logging.WARNING
    told = {name: getattr(record, name, None) for name in ("tenant_id", "campaign_id", "provider_name", "capability")}
    assert told == {
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
    some = provider(*[down() for _ in range(4)])
    for _ in range(2):
        with pytest.raises(ProviderError):
            execute(some)
    (record,) = [one for one in caplog.records if event_of(one) == "breaker changed"]
    assert (record.levelno, record.breaker_state) == (logging.WARNING, "open")
    assert f"provider_name={some.provider_name} capability=charging" in record.message
    assert record.message.endswith("breaker_state=open")


# -- the everyday form ------------------------------------------------------------------------------


def test_below_a_handler_it_is_the_transaction_that_speaks(caplog):
    caplog.set_level(logging.INFO, "ergon_framework.providers")
    scope.enter(Scope(Transaction("order-7", source="shop", tenant="acme"), "process", 0))
    try:
        some = provider(down(), down())
        with pytest.raises(ProviderError) as caught:
            some.call("charge", {})
    finally:
        scope.enter(None)
    assert caught.value.result.tenant_id == "acme"
    assert "provider call failed" not in events_of(caplog.records)


@pytest.mark.parametrize("given, tenant", [(None, "acme"), ("other", "other")])
def test_the_tenant_is_the_transactions_unless_it_is_given(given, tenant):
    some = provider()
    scope.enter(Scope(Transaction("order-7", source="shop", tenant="acme"), "process", 0))
    try:
        some.call("charge", {}, tenant=given, key="k")
    finally:
        scope.enter(None)
    assert [row.tenant_id for row in some.books.rows()] == [tenant]
    some.call("charge", {})
    assert some.books.rows()[-1].tenant_id == "default"


def test_what_only_reads_has_no_key_and_may_be_called_again_and_again():
    some = provider()
    scope.enter(Scope(Transaction("order-7", source="shop"), "process", 0))
    try:
        for _ in range(3):
            some.call("status", {"id": 1})
            assert some.context.idempotency_key is None
    finally:
        scope.enter(None)
    assert len(some.books.rows()) == 3


def held(some, metric):
    """The gauge of *some*, as it is read."""
    who = {"ergon.provider.name": some.provider_name, "ergon.provider.capability": "charging"}
    return [value for labels, value in registry_of().read(metric) if labels == who]


@pytest.fixture
def clock(monkeypatch):
    """What the tallies take for the time."""
    now = [1000.0]
    monkeypatch.setattr(observe, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.spec("RUN-04")
def test_a_breaker_is_told_to_be_open_until_its_cooldown_is_over(clock):
    some = provider(*[down() for _ in range(4)])
    some.policy = ProviderPolicy(retry=QUICK.retry, breaker=BreakerPolicy(failure_threshold=4))
    assert held(some, names.PROVIDER_OPEN) == []
    execute_and_fail(some)
    assert held(some, names.PROVIDER_OPEN) == [0]
    execute_and_fail(some)  # its last attempt opens it, and none is refused
    assert held(some, names.PROVIDER_OPEN) == [1]
    assert held(some, names.PROVIDER_EXHAUSTED) == [0]
    clock[0] += QUICK.breaker.open_cooldown_seconds + 0.1
    assert held(some, names.PROVIDER_OPEN) == [0]
    execute_and_fail(some)  # it is refused, and that says for how long
    assert held(some, names.PROVIDER_OPEN) == [1]


@pytest.mark.spec("RUN-04")
def test_a_quota_is_told_to_be_used_up_until_a_call_is_made_again(clock):
    some = provider()
    some.policy = ProviderPolicy(quota=QuotaPolicy(month=1))
    execute(some)
    execute_and_fail(some)
    assert held(some, names.PROVIDER_EXHAUSTED) == [1]
    some.policy = ProviderPolicy(quota=QuotaPolicy(month=2))
    execute(some)
    assert held(some, names.PROVIDER_EXHAUSTED) == [0]


def test_what_holds_one_tenant_back_is_told_while_others_are_well(clock):
    tally = tally_of(f"tenants-{next(numbers)}")
    tally.hold(names.PROVIDER_OPEN, "charging", "acme", seconds=5.0)
    tally.free("charging", "other", [names.PROVIDER_OPEN])
    assert tally.gauged() == {(names.PROVIDER_OPEN.name, ("charging",)): 1}
    tally.free("charging", "acme", [names.PROVIDER_OPEN])
    assert tally.gauged() == {}


def test_tenants_that_are_held_back_are_remembered_within_bounds(clock):
    tally = tally_of(f"many-{next(numbers)}")
    for number in range(3_000):
        tally.hold(names.PROVIDER_OPEN, "charging", f"tenant-{number}", seconds=5.0 if number % 2 else 0.0)
    assert len(tally._held) <= 1_000
    assert (names.PROVIDER_OPEN.name, "charging", "tenant-2999") in tally._held


def execute_and_fail(some):
    with pytest.raises(ProviderError):
        execute(some)
