"""What both variants show of themselves: spans, metrics and log events, and nothing of what they handle."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections import Counter

import pytest
from opentelemetry import baggage, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConnectionLost
from ergon_framework.task.exceptions import BusinessError, FetchException, TransactionException
from ergon_framework.task.gates import Pause
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.telemetry import context, names
from ergon_framework.telemetry.logs import TransactionFilter
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.transaction import Transaction
from tests.log_events import event_of, events_of

CANARY = "canary-7391"
ELSEWHERE = "0af7651916cd43dd8448eb211c80319c"
CARRIER = {"traceparent": f"00-{ELSEWHERE}-b7ad6b7169203331-01", "baggage": "customer=7"}
UNSAMPLED = {"traceparent": f"00-{ELSEWHERE}-b7ad6b7169203331-00"}
marker = contextvars.ContextVar("marker", default="clean")


class Seen:
    """Providers of one test's own, and what they were told."""

    def __init__(self, sampler=ALWAYS_ON):
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(sampler=sampler)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def options(self, **more):
        return TelemetryOptions(tracer_provider=self.tracers, meter_provider=self.meters, **more)

    @property
    def spans(self):
        return self.exporter.get_finished_spans()

    def named(self, name):
        return [span for span in self.spans if span.name == name]

    def one(self, name):
        (span,) = self.named(name)
        return span

    def tree(self):
        """Every span as its path of names from the root, sorted."""
        above = {span.context.span_id: span for span in self.spans}

        def path(span):
            parent = above.get(span.parent.span_id) if span.parent else None
            return (*path(parent), span.name) if parent else (span.name,)

        return sorted(path(span) for span in self.spans)

    def metric(self, metric):
        """The values of *metric* by its attributes after the task."""
        data = self.reader.get_metrics_data()
        points = [
            point
            for resource in (data.resource_metrics if data else ())
            for scoped in resource.scope_metrics
            for found in scoped.metrics
            if found.name == metric.name
            for point in found.data.data_points
        ]
        return {tuple(point.attributes.get(name) for name in metric.attributes[1:]): point.value for point in points}


@pytest.fixture
def seen():
    return Seen()


@pytest.fixture(params=["sync", "async"])
def flavour(request):
    return request.param


@pytest.fixture
def events():
    """The log records of the engine, as (message, fields)."""
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record)

    keep = Keep()
    log = logging.getLogger("ergon_framework")
    before = log.level
    log.addHandler(keep)
    log.setLevel(logging.DEBUG)
    yield records
    log.removeHandler(keep)
    log.setLevel(before)


def awaited(fn):
    async def coroutine(self, *args):
        return fn(*args)

    return coroutine


def called(fn):
    def method(self, *args):
        return fn(*args)

    return method


def task_of(flavour, sync, aio, **handlers):
    """A task whose handlers are plain functions, in either variant."""
    base, form = (sync, called) if flavour == "sync" else (aio, awaited)
    return type("Orders", (base,), {name: form(fn) for name, fn in handlers.items()})()


def run(call, *args, **more):
    answer = call(*args, **more)
    return asyncio.run(finished(answer)) if asyncio.iscoroutine(answer) else answer


async def finished(coroutine):
    return await coroutine


def policy(**more):
    retry = {"max_attempts": 2, "backoff": 0, "timeout": 5}
    steps = {name: {"retry": retry} for name in ("fetch", "process", "success", "exception")}
    loop = {"concurrency": {"value": 2}, "batch": {"size": 5}} | more.pop("loop", {})
    return ConsumerPolicy.load({"loop": loop, "steps": steps | more})


def consume(flavour, seen, transactions, *, rules=None, connector=None, gates=(), options=None, **handlers):
    connector = connector or MemoryConnector("orders")
    connector.dispatch(transactions)
    by_method = {
        "process_transaction": handlers.get("process", lambda transaction: None),
        "handle_transaction_success": handlers.get("success", lambda transaction, result: None),
        "handle_transaction_exception": handlers.get("exception", lambda transaction, exc: None),
    }
    task = task_of(flavour, ConsumerMixin, AsyncConsumerMixin, **by_method)
    task.connector = connector
    if seen is not None:
        task.telemetry = options or seen.options()
    with contextlib.suppress(FetchException):
        run(task.consume_transactions, rules or policy(), gates=gates)
    return connector


def produce(flavour, seen, transactions, *, options=None, **handlers):
    by_method = {
        "produce_transaction": handlers.get("produce", lambda transaction: "sent"),
        "handle_produce_success": handlers.get("success", lambda transaction, result: None),
        "handle_produce_exception": handlers.get("exception", lambda transaction, exc: None),
    }
    task = task_of(flavour, ProducerMixin, AsyncProducerMixin, **by_method)
    task.connector = MemoryConnector("orders")
    task.telemetry = options or seen.options()
    retry = {"max_attempts": 2, "backoff": 0, "timeout": 5}
    steps = {name: {"retry": retry} for name in ("produce", "success", "exception")}
    loop = {"concurrency": {"value": 2}, "batch": {"size": 2}}
    run(task.produce_transactions, transactions, ProducerPolicy.load({"loop": loop, "steps": steps}))


def orders(count, **fields):
    return [Transaction(f"order-{number}", {"secret": CANARY}, source="orders", **fields) for number in range(count)]


def fail_first(error=None):
    """A handler that fails once per transaction."""
    tried = Counter()
    error = error or RuntimeError("not yet")

    def handler(transaction, *_):
        tried[transaction.id] += 1
        if tried[transaction.id] == 1:
            raise error

    return handler


def always(error):
    def handler(*_):
        raise error

    return handler


# -- the tree -------------------------------------------------------------------------------------


@pytest.mark.spec("CON-16", "CON-17")
def test_a_consumed_transaction_is_a_subtree_with_a_span_for_every_attempt(flavour, seen):
    consume(flavour, seen, orders(1), process=fail_first())
    root, start = "consume_transactions", "start_processing"
    assert seen.tree() == [
        (root,),
        (root, "fetch_transactions"),
        (root, "fetch_transactions"),
        (root, "fetch_transactions", "fetch_transactions.attempt"),
        (root, "fetch_transactions", "fetch_transactions.attempt"),
        (root, start),
        (root, start, "handle_success"),
        (root, start, "handle_success", "handle_success.attempt"),
        (root, start, "process"),
        (root, start, "process", "process.attempt"),
        (root, start, "process", "process.attempt"),
    ]


@pytest.mark.spec("CON-16", "CON-17")
def test_a_failure_shows_the_exception_handler_and_its_attempts(flavour, seen):
    consume(flavour, seen, orders(1), process=always(BusinessError("no such customer")), exception=fail_first())
    below = [path[2:] for path in seen.tree() if path[1:2] == ("start_processing",)]
    assert below == [
        (),
        ("handle_exception",),
        ("handle_exception", "handle_exception.attempt"),
        ("handle_exception", "handle_exception.attempt"),
        ("process",),
        ("process", "process.attempt"),
    ]


@pytest.mark.spec("PRO-10", "PRO-11")
def test_produced_transactions_are_subtrees_of_one_trace(flavour, seen):
    produce(flavour, seen, orders(3), produce=fail_first())
    root, start = "produce_transactions", "start_producing"
    assert Counter(seen.tree()) == {
        (root,): 1,
        (root, start): 3,
        (root, start, "produce"): 3,
        (root, start, "produce", "produce.attempt"): 6,
        (root, start, "handle_produce_success"): 3,
        (root, start, "handle_produce_success", "handle_produce_success.attempt"): 3,
    }
    assert len({span.context.trace_id for span in seen.spans}) == 1


@pytest.mark.spec("PRO-10")
def test_a_failed_production_shows_the_exception_handler(flavour, seen):
    produce(flavour, seen, orders(1), produce=always(BusinessError("no")), exception=fail_first())
    below = ("produce_transactions", "start_producing", "handle_produce_exception")
    assert [path for path in seen.tree() if path[:3] == below] == [
        below,
        (*below, "handle_produce_exception.attempt"),
        (*below, "handle_produce_exception.attempt"),
    ]


@pytest.mark.spec("CON-17")
def test_an_inbound_trace_is_continued_and_linked_to_the_loop(flavour, seen):
    consume(flavour, seen, orders(1, trace=CARRIER))
    root, start = seen.one("consume_transactions"), seen.one("start_processing")
    assert f"{start.context.trace_id:032x}" == ELSEWHERE != f"{root.context.trace_id:032x}"
    assert f"{start.parent.span_id:016x}" == "b7ad6b7169203331"
    assert [link.context.span_id for link in start.links] == [root.context.span_id]
    assert seen.one("process").context.trace_id == start.context.trace_id


@pytest.mark.spec("CON-17")
def test_without_a_readable_carrier_a_transaction_belongs_to_the_loop(flavour, seen):
    consume(flavour, seen, orders(1, trace={"traceparent": "nonsense"}))
    start = seen.one("start_processing")
    assert start.parent.span_id == seen.one("consume_transactions").context.span_id
    assert start.links == ()
    assert start.kind is SpanKind.CONSUMER


@pytest.mark.spec("CON-17")
def test_a_streaming_loop_has_a_root_for_each_batch(flavour, seen):
    rules = policy(loop={"streaming": True, "limit": 4, "concurrency": {"value": 2}, "batch": {"size": 2}})
    consume(flavour, seen, orders(4), rules=rules)
    roots = {span.context.span_id: span for span in seen.named("consume_transactions")}
    per_root = Counter(span.parent.span_id for span in seen.named("start_processing"))
    fetches = Counter(span.parent.span_id for span in seen.named("fetch_transactions"))
    assert len(roots) >= 2
    assert sum(per_root.values()) == 4
    assert fetches == dict.fromkeys(roots, 1)
    for span in seen.named("start_processing"):
        root = roots[span.parent.span_id]
        assert root.start_time <= span.start_time
        assert span.end_time <= root.end_time
    assert all(root.attributes["ergon.batch.fetched"] == per_root[key] for key, root in roots.items())


@pytest.mark.spec("CON-17")
def test_a_loop_that_does_not_stream_has_one_root(flavour, seen):
    rules = policy(loop={"concurrency": {"value": 1}, "batch": {"size": 1}})
    consume(flavour, seen, orders(3), rules=rules)
    assert seen.one("consume_transactions").attributes["ergon.end"] == "empty"
    assert len(seen.named("fetch_transactions")) == 4


# -- attributes -----------------------------------------------------------------------------------


@pytest.mark.spec("CON-16", "DX-15")
def test_every_step_carries_the_transaction_and_its_attempts(flavour, seen):
    consume(flavour, seen, orders(1), process=fail_first(RuntimeError("down")))
    own = {"ergon.transaction.id": "order-0"}
    assert seen.one("process").attributes == own | {"ergon.attempts": 2}
    assert seen.one("handle_success").attributes == own | {"ergon.attempts": 1}


@pytest.mark.spec("CON-16", "DX-15")
def test_every_attempt_carries_the_attributes_that_were_promised(flavour, seen):
    consume(flavour, seen, orders(1), process=fail_first(RuntimeError("x" * 700)))
    first, second = sorted(seen.named("process.attempt"), key=lambda span: span.attributes["ergon.attempt"])
    shared = {
        "ergon.task": "Orders",
        "ergon.step": "process",
        "ergon.max_attempts": 2,
        "ergon.retry": "timeout=5 backoff=0 multiplier=2 cap=30 jitter=0",
        "ergon.retry.timeout": 5.0,
        "ergon.retry.backoff": 0.0,
        "ergon.retry.multiplier": 2.0,
        "ergon.retry.cap": 30.0,
        "ergon.retry.jitter": 0.0,
        "ergon.transaction.id": "order-0",
    }
    assert second.attributes == shared | {"ergon.attempt": 1}
    assert first.attributes == shared | {
        "ergon.attempt": 0,
        "ergon.exception.type": "RuntimeError",
        "ergon.exception.message": "x" * 499 + "…",
    }
    assert first.status.status_code is StatusCode.ERROR
    assert second.status.status_code is StatusCode.UNSET


@pytest.mark.spec("CON-16")
def test_a_failed_fetch_says_so_in_its_attempts(flavour, seen, events):
    class Broken(MemoryConnector):
        def fetch_transactions(self, batch_size, **extra):
            raise OSError("no route")

        async def fetch_transactions_async(self, batch_size, **extra):
            raise OSError("no route")

    consume(flavour, seen, [], connector=Broken("orders"))
    attempts = seen.named("fetch_transactions.attempt")
    assert [span.attributes["ergon.attempt"] for span in attempts] == [0, 1]
    assert all("no route" in span.attributes["ergon.exception.message"] for span in attempts)
    assert seen.one("fetch_transactions").status.status_code is StatusCode.ERROR
    assert seen.metric(names.FAILED_FETCHES) == {(): 1}
    assert seen.metric(names.ATTEMPTS) == {("fetch",): 2}
    (record,) = [record for record in events if event_of(record) == "fetch failed"]
    assert record.code == "fetch"


def test_a_transaction_span_says_how_it_ended(flavour, seen):
    consume(flavour, seen, orders(1), process=always(TransactionException("down", code="offline")))
    start = seen.one("start_processing")
    told = {key: start.attributes[key] for key in ("ergon.outcome", "ergon.attempts", "ergon.category", "ergon.code")}
    assert told == {"ergon.outcome": "failed", "ergon.attempts": 2, "ergon.category": "SYSTEM", "ergon.code": "offline"}
    assert start.status.status_code is StatusCode.ERROR


@pytest.mark.spec("PRO-10")
def test_a_producer_shows_type_and_size_of_the_result_and_not_its_value(flavour, seen):
    produce(flavour, seen, orders(1), produce=lambda transaction: CANARY)
    attributes = seen.one("produce").attributes
    assert attributes["ergon.result.type"] == "str"
    assert attributes["ergon.result.size"] == len(CANARY)
    assert "ergon.result.value" not in attributes


@pytest.mark.spec("PRO-10")
def test_a_result_that_may_be_recorded_is_redacted(flavour, seen):
    options = seen.options(record_results=True)
    produce(flavour, seen, orders(1), options=options, produce=lambda transaction: {"id": 7, "api_key": CANARY})
    assert seen.one("produce").attributes["ergon.result.value"] == "{'id': 7, 'api_key': [hidden]}"


# -- contexts -------------------------------------------------------------------------------------


@pytest.mark.spec("CON-14", "PRO-21")
@pytest.mark.parametrize("side", [consume, produce])
def test_all_attempts_share_the_transactions_context(flavour, seen, side):
    bodies = []

    def body(transaction):
        span = trace.get_current_span()
        bodies.append((span.get_span_context().trace_id, span.parent.span_id))
        if len(bodies) == 1:
            raise RuntimeError("again")

    if side is consume:
        consume(flavour, seen, orders(1), process=body)
    else:
        produce(flavour, seen, orders(1), produce=body)
    assert len(bodies) == 2
    assert len(set(bodies)) == 1


@pytest.mark.spec("CON-14", "CON-18")
def test_a_body_runs_below_its_own_attempt(flavour, seen):
    own = seen.tracers.get_tracer("mine")

    def process(transaction):
        own.start_span("query").end()

    consume(flavour, seen, orders(1), process=process)
    assert seen.one("query").parent.span_id == seen.one("process.attempt").context.span_id


@pytest.mark.spec("CON-25", "CON-27", "PRO-22")
@pytest.mark.parametrize("side", [consume, produce])
def test_nothing_crosses_from_one_transaction_to_the_next(flavour, seen, side):
    found = []

    def body(transaction):
        found.append((marker.get(), baggage.get_all()))
        marker.set(transaction.id)
        context.api.attach(baggage.set_baggage("left", transaction.id))

    if side is consume:
        consume(flavour, seen, orders(5), process=body)
    else:
        produce(flavour, seen, orders(5), produce=body)
    assert found == [("clean", {})] * 5
    by_id = {span.context.span_id: span for span in seen.spans}
    for span in seen.spans:
        above, mine = span, span.attributes.get("ergon.transaction.id")
        # A step says nothing of its transaction, so the question goes up to whoever does.
        while mine is not None and (above := above.parent and by_id.get(above.parent.span_id)):
            assert above.attributes.get("ergon.transaction.id") in (None, mine)
        assert span.links == ()


@pytest.mark.spec("CON-25")
def test_baggage_is_the_carriers_own(flavour, seen):
    found = {}

    def process(transaction):
        found[transaction.id] = dict(baggage.get_all())

    bare = Transaction("bare", source="orders", trace={"traceparent": CARRIER["traceparent"]})
    token = context.api.attach(baggage.set_baggage("caller", "me"))
    try:
        consume(flavour, seen, [*orders(1, trace=CARRIER), bare], process=process)
    finally:
        context.api.detach(token)
    assert found == {"order-0": {"customer": "7"}, "bare": {}}


@pytest.mark.spec("CON-17")
def test_what_a_body_sends_carries_the_trace_on(flavour, seen):
    sent = []
    consume(flavour, seen, orders(1), process=lambda tx: sent.append(context.carried(Transaction("next"))))
    attempt = seen.one("process.attempt").context
    assert sent[0].trace["traceparent"].startswith(f"00-{attempt.trace_id:032x}-{attempt.span_id:016x}-")


# -- sampling -------------------------------------------------------------------------------------


def test_a_transaction_that_is_sampled_out_makes_one_span_and_its_body_follows_the_decision(flavour):
    asked = []

    class Noting(ParentBased):
        def should_sample(self, parent_context, trace_id, name, *args, **more):
            asked.append(name)
            return super().should_sample(parent_context, trace_id, name, *args, **more)

    seen = Seen(Noting(ALWAYS_OFF))
    sent = []

    def process(transaction):
        sent.append(context.outbound())
        if len(sent) == 1:
            raise RuntimeError("again")

    consume(flavour, seen, orders(1, trace=UNSAMPLED), process=process)
    assert asked == ["consume_transactions", "start_processing"]
    assert seen.spans == ()
    assert len(sent) == 2
    assert all(carrier["traceparent"].startswith(f"00-{ELSEWHERE}-") for carrier in sent)
    assert all(carrier["traceparent"].endswith("-00") for carrier in sent)
    assert seen.metric(names.TRANSACTIONS) == {("succeeded", None): 1}


def test_a_sampled_carrier_is_recorded_in_a_loop_that_is_not(flavour):
    seen = Seen(ParentBased(ALWAYS_OFF))
    consume(flavour, seen, [*orders(1, trace=CARRIER), Transaction("other", source="orders")])
    assert {span.name for span in seen.spans} == {
        "start_processing",
        "process",
        "process.attempt",
        "handle_success",
        "handle_success.attempt",
    }
    assert len(seen.named("start_processing")) == 1


def test_without_an_sdk_nothing_is_attached(flavour):
    found = []
    consume(flavour, None, orders(1, trace=CARRIER), process=lambda tx: found.append(context.outbound()))
    assert found == [{}]


def test_a_sampler_that_breaks_costs_the_spans_and_not_the_work(flavour, events):
    class Broken(ParentBased):
        def should_sample(self, *args, **more):
            raise ZeroDivisionError

    seen = Seen(Broken(ALWAYS_ON))
    done = []
    consume(flavour, seen, orders(2), process=lambda tx: done.append(tx.id))
    assert sorted(done) == ["order-0", "order-1"]
    assert "telemetry failed" in events_of(events)


# -- what must not be seen ------------------------------------------------------------------------


@pytest.mark.spec("CON-07", "CON-26", "PRO-17")
def test_no_payload_setting_or_credential_is_in_any_span_metric_or_log(flavour, seen, events):
    class Wanting(MemoryConnector):
        def fetch_transactions(self, batch_size, *, token):
            return super().fetch_transactions(batch_size)

        async def fetch_transactions_async(self, batch_size, *, token):
            return await super().fetch_transactions_async(batch_size)

    def process(transaction):
        if transaction.id == "order-0":
            raise BusinessError(f"refused by amqp://guest:{CANARY}@broker, password={CANARY}")
        if transaction.id == "order-1":
            raise RuntimeError("down")
        return CANARY

    rules = policy(fetch={"extra": {"token": CANARY}})
    consume(flavour, seen, orders(4), rules=rules, connector=Wanting("orders"), process=process)
    produce(flavour, seen, orders(2), produce=always(RuntimeError("down")))
    assert len(events) >= 6
    assert len(seen.spans) > 20
    told = [span.to_json() for span in seen.spans]
    told += [repr(vars(record)) for record in events]
    told.append(seen.reader.get_metrics_data().to_json())
    assert [text for text in told if CANARY in text] == []


@pytest.mark.spec("CON-26")
def test_a_payload_that_may_be_recorded_passes_the_hook(flavour, seen):
    asked = []

    def hook(key, value):
        asked.append(key)
        return "seen by the hook"

    consume(flavour, seen, orders(1), options=seen.options(record_payloads=True, redact=hook))
    assert seen.one("start_processing").attributes["ergon.transaction.payload"] == "seen by the hook"
    assert asked == ["ergon.transaction.payload"]


# -- metrics --------------------------------------------------------------------------------------


def test_what_happened_is_counted(flavour, seen):
    def process(transaction):
        if transaction.id == "order-0":
            raise BusinessError("no")

    flaky = fail_first()
    rules = policy(loop={"concurrency": {"value": 5}})
    consume(flavour, seen, orders(3), rules=rules, process=process, success=flaky)
    assert seen.metric(names.TRANSACTIONS) == {("succeeded", None): 2, ("failed", "BUSINESS"): 1}
    assert seen.metric(names.ATTEMPTS) == {("fetch",): 2, ("process",): 3, ("success",): 4, ("exception",): 1}
    assert seen.metric(names.RETRIES) == {("success",): 2}
    assert seen.metric(names.STEPS) == {
        ("fetch",): 2,
        ("process",): 3,
        ("success",): 2,
        ("exception",): 1,
        ("settle",): seen.metric(names.STEPS)["settle",],
    }
    assert seen.metric(names.STEP_BUCKETS)["process", "+Inf"] == 3
    assert seen.metric(names.FETCHES) == {(): 2}
    assert seen.metric(names.EMPTY_FETCHES) == {(): 1}
    assert seen.metric(names.SETTLED) == {("settled",): 3}


def test_the_producer_counts_too(flavour, seen):
    produce(flavour, seen, orders(3), produce=fail_first())
    assert seen.metric(names.TRANSACTIONS) == {("succeeded", None): 3}
    assert seen.metric(names.ATTEMPTS) == {("produce",): 6, ("success",): 3}
    assert seen.metric(names.RETRIES) == {("produce",): 3}


def test_a_running_loop_shows_its_slots_and_the_age_of_its_queue(flavour, seen):
    shown = {}

    def process(transaction):
        shown["slots"] = seen.metric(names.SLOTS)
        shown["age"] = seen.metric(names.QUEUE_AGE)
        shown["oldest"] = seen.metric(names.QUEUE_AGE_MAX)

    consume(flavour, seen, orders(1, created_at=1.0), process=process)
    assert shown["slots"] == {("running",): 1, ("abandoned",): 0, ("held",): 0}
    assert shown["age"][()] > 1e9
    assert seen.metric(names.SLOTS) == {}


def test_a_second_loop_adds_to_what_the_first_has_counted(flavour, seen):
    for _ in range(2):
        consume(flavour, seen, orders(2))
    assert seen.metric(names.TRANSACTIONS) == {("succeeded", None): 4}


@pytest.mark.spec("CON-47")
def test_a_pause_is_shown_with_its_reason(flavour, seen, events):
    shown = []

    def gate():
        if not shown:
            shown.append(None)
            return Pause("breaker open", 0.01)
        if len(shown) == 1:
            shown.append(seen.metric(names.PAUSED))
        return None

    consume(flavour, seen, orders(1), gates=[gate])
    assert shown[1] == {("breaker open",): 1}
    assert seen.metric(names.PAUSED) == {}
    assert [event for event in events_of(events) if event and "loop" in event] == [
        "loop paused",
        "loop resumed",
        "loop ended",
    ]


@pytest.mark.spec("CON-20")
def test_a_breach_is_counted_each_time_and_logged_once(flavour, seen, events):
    class Generous(MemoryConnector):
        def fetch_transactions(self, batch_size, **extra):
            return super().fetch_transactions(batch_size + 1)

        async def fetch_transactions_async(self, batch_size, **extra):
            return await super().fetch_transactions_async(batch_size + 1)

    rules = policy(loop={"concurrency": {"value": 1}, "batch": {"size": 1}})
    consume(flavour, seen, orders(4), rules=rules, connector=Generous("orders"))
    assert seen.metric(names.BREACHES) == {(): 2}
    (record,) = [record for record in events if event_of(record) == "contract breach"]
    assert (record.asked, record.got) == (1, 2)


@pytest.mark.spec("CON-30")
def test_a_refusal_has_a_metric_and_an_event_of_its_own(flavour, seen, events):
    consume(flavour, seen, orders(1, expires_at=1.0))
    assert seen.metric(names.REFUSED) == {("expired",): 1}
    assert seen.metric(names.TRANSACTIONS) == {}
    (record,) = [record for record in events if event_of(record) == "transaction refused"]
    assert (record.transaction_id, record.reason) == ("order-0", "expired")


# -- logs -----------------------------------------------------------------------------------------


def test_a_failure_is_logged_once_with_its_ids(flavour, seen, events):
    consume(flavour, seen, orders(1), process=always(TransactionException("down", code="offline")))
    (record,) = [record for record in events if record.levelno >= logging.WARNING]
    start = seen.one("start_processing").context
    assert event_of(record) == "transaction failed"
    assert record.name.startswith("ergon_framework.")
    assert (record.transaction_id, record.task, record.attempts) == ("order-0", "Orders", 2)
    assert (record.category, record.code, record.error) == ("SYSTEM", "offline", "down")
    assert (record.trace_id, record.span_id) == (f"{start.trace_id:032x}", f"{start.span_id:016x}")


def test_a_deferral_is_logged_with_its_delay(flavour, seen, events):
    consume(flavour, seen, orders(1), process=always(TransactionException("busy", retry_after=3600)))
    (record,) = [record for record in events if event_of(record) == "transaction deferred"]
    assert record.delay == 3600
    assert seen.metric(names.TRANSACTIONS) == {("deferred", "SYSTEM"): 1}
    assert seen.metric(names.ATTEMPTS)["process",] == 1
    assert seen.metric(names.WAITS) == {}


def test_a_success_is_not_logged(flavour, seen, events):
    consume(flavour, seen, orders(2))
    assert events_of(events) == ["loop ended"]


@pytest.mark.spec("DX-12")
def test_a_lost_connection_is_logged_once_until_a_fetch_is_answered(flavour, seen, events):
    class Away(MemoryConnector):
        def __init__(self, name):
            super().__init__(name)
            self.errors = [ConnectionLost("no route"), ConnectionLost("refused"), OSError("odd")]

        def away(self):
            if self.errors:
                raise self.errors.pop(0)

        def fetch_transactions(self, batch_size, **extra):
            self.away()
            return super().fetch_transactions(batch_size)

        async def fetch_transactions_async(self, batch_size, **extra):
            self.away()
            return await super().fetch_transactions_async(batch_size)

    rules = policy(loop={"streaming": True, "limit": 1}, fetch={"retry": {"backoff": 0.01}})
    connector = Away(f"orders-{flavour}")
    consume(flavour, seen, orders(1), rules=rules, connector=connector)
    lost, restored = [record for record in events if "connection" in (event_of(record) or "")]
    assert (lost.event, lost.levelname, lost.error) == ("connection lost", "WARNING", "no route")
    assert (restored.event, restored.levelname) == ("connection restored", "INFO")
    assert lost.queue == restored.queue == connector.name
    assert restored.seconds >= 0


@pytest.mark.spec("DX-13", "DX-45")
def test_an_attempt_that_is_retried_is_logged_with_attempt_delay_and_error(flavour, seen, events):
    rules = policy(process={"retry": {"max_attempts": 3, "backoff": 0.01, "multiplier": 1}})
    consume(flavour, seen, orders(1), rules=rules, process=always(RuntimeError("password=pw not yet")))
    retried = [record for record in events if event_of(record) == "attempt failed"]
    assert [(record.levelname, record.step, record.attempt) for record in retried] == [
        ("INFO", "process", 1),
        ("INFO", "process", 2),
    ]
    for record in retried:
        assert (record.task, record.transaction_id, record.correlation_id) == ("Orders", "order-0", "order-0")
        assert (record.delay, record.error_type, record.category) == (0.01, "RuntimeError", "SYSTEM")
        assert "not yet" in record.error
        assert "pw " not in record.getMessage()
    assert 'attempt=2 delay=0.01 error="' in retried[1].getMessage()
    # The last attempt is not retried: the end of its transaction is what is logged.
    assert events_of(events)[-2:] == ["transaction failed", "loop ended"]
    attempts = seen.named("process.attempt")
    assert [span.attributes["ergon.attempt"] for span in attempts] == [0, 1, 2], "spans count from 0"


@pytest.mark.spec("DX-13")
def test_an_attempt_whose_wait_the_broker_keeps_is_logged_too(flavour, seen, events):
    consume(flavour, seen, orders(1), process=always(TransactionException("busy", retry_after=3600)))
    assert events_of(events) == ["attempt failed", "transaction deferred", "loop ended"]
    assert (events[0].attempt, events[0].delay) == (1, 3600)


@pytest.mark.spec("DX-13")
def test_failed_attempts_of_handlers_and_producers_are_logged(flavour, seen, events):
    consume(flavour, seen, orders(1), success=fail_first())
    produce(flavour, seen, orders(1), produce=fail_first())
    retried = [record for record in events if event_of(record) == "attempt failed"]
    assert [(record.step, record.attempt, record.delay) for record in retried] == [("success", 1, 0), ("produce", 1, 0)]


@pytest.mark.spec("DX-13")
def test_a_failed_fetch_that_is_tried_again_is_logged(flavour, seen, events):
    class Odd(MemoryConnector):
        errors = 1

        def odd(self):
            self.errors -= 1
            if self.errors >= 0:
                raise OSError("odd")

        def fetch_transactions(self, batch_size, **extra):
            self.odd()
            return super().fetch_transactions(batch_size)

        async def fetch_transactions_async(self, batch_size, **extra):
            self.odd()
            return await super().fetch_transactions_async(batch_size)

    consume(flavour, seen, orders(1), connector=Odd("orders"))
    (record,) = [record for record in events if event_of(record) == "attempt failed"]
    assert (record.levelname, record.task, record.step) == ("INFO", "Orders", "fetch")
    assert (record.attempt, record.delay, record.error_type) == (1, 0, "OSError")
    assert not hasattr(record, "transaction_id")


def test_dead_letters_name_the_trace(flavour, seen):
    connector = consume(flavour, seen, orders(1), process=always(BusinessError("no")))
    (letter,) = connector.dead_letters
    assert letter.trace_id == f"{seen.one('start_processing').context.trace_id:032x}"


def test_user_logs_get_the_ids_of_their_transaction(flavour, seen):
    records = []

    def process(transaction):
        record = logging.LogRecord("mine", logging.INFO, __file__, 1, "hello", (), None)
        TransactionFilter().filter(record)
        records.append(record)

    consume(flavour, seen, orders(1), process=process)
    attempt = seen.one("process.attempt").context
    (record,) = records
    assert (record.transaction_id, record.step, record.attempt) == ("order-0", "process", 1)
    assert (record.trace_id, record.span_id) == (f"{attempt.trace_id:032x}", f"{attempt.span_id:016x}")


@pytest.mark.spec("CON-16")
def test_a_transaction_that_is_stopped_says_so_and_names_no_error(flavour, seen, events):
    def stop_and_fail(transaction):
        tasks[0].stop()
        tasks[0].stop()
        raise OSError("down")

    tasks = []
    rules = {"loop": {"streaming": True, "drain_timeout": 0.0}, "steps": {"process": {"retry": {"backoff": 20.0}}}}
    connector = MemoryConnector("orders")
    connector.dispatch(orders(1))
    tasks.append(task_of(flavour, ConsumerMixin, AsyncConsumerMixin, process_transaction=stop_and_fail))
    tasks[0].connector, tasks[0].telemetry = connector, seen.options()
    run(tasks[0].consume_transactions, ConsumerPolicy.load(rules))
    assert seen.one("process").attributes["ergon.outcome"] == "stopped"
    ended = seen.one("start_processing").attributes
    assert (ended["ergon.outcome"], ended["ergon.reason"]) == ("released", "stop")


@pytest.mark.parametrize("written", [True, False])
def test_a_success_handler_that_nobody_wrote_is_neither_called_nor_counted(flavour, seen, written):
    handlers = {"process_transaction": lambda transaction: None}
    if written:
        handlers["handle_transaction_success"] = lambda transaction, result: None
    task = task_of(flavour, ConsumerMixin, AsyncConsumerMixin, **handlers)
    task.connector = MemoryConnector("orders")
    task.connector.dispatch(orders(3))
    task.telemetry = TelemetryOptions(meter_provider=seen.options().meter_provider)
    run(task.consume_transactions, policy())
    counted = {step: count for (step,), count in seen.metric(names.ATTEMPTS).items() if step != "fetch"}
    assert counted == ({"process": 3, "success": 3} if written else {"process": 3})


@pytest.mark.spec("CNN-03")
def test_what_a_handler_dispatches_carries_the_trace_on_to_its_consumer(flavour, seen):
    invoices = MemoryConnector("invoices")

    def invoice(transaction):
        invoices.dispatch([Transaction(f"invoice-{transaction.id}", source="invoices")])

    consume(flavour, seen, orders(1, trace=CARRIER), process=invoice)
    consume(flavour, seen, [], connector=invoices)
    first, second = seen.named("start_processing")
    assert first.context.trace_id == second.context.trace_id
    assert second.parent.span_id in {span.context.span_id for span in seen.named("process.attempt")}
