"""What both variants report: spans, metrics and log events, and no payload."""

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
from ergon_framework.errors import ConnectionLostError
from ergon_framework.gates import Pause
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.telemetry import context, names
from ergon_framework.telemetry.logs import TransactionFilter
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, FetchException, TransactionException
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from tests.log_events import get_event, list_events

CANARY = "canary-7391"
ELSEWHERE = "0af7651916cd43dd8448eb211c80319c"
CARRIER = {"traceparent": f"00-{ELSEWHERE}-b7ad6b7169203331-01", "baggage": "customer=7"}
UNSAMPLED = {"traceparent": f"00-{ELSEWHERE}-b7ad6b7169203331-00"}
marker = contextvars.ContextVar("marker", default="clean")


class RecordedTelemetry:
    """Telemetry providers of one test, and what they have recorded."""

    def __init__(self, sampler=ALWAYS_ON):
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(sampler=sampler)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def options(self, **options):
        return TelemetryOptions(tracer_provider=self.tracers, meter_provider=self.meters, **options)

    @property
    def spans(self):
        return self.exporter.get_finished_spans()

    def list_spans(self, name):
        return [span for span in self.spans if span.name == name]

    def get_span(self, name):
        (span,) = self.list_spans(name)
        return span

    def list_span_paths(self):
        """Return every span as its path of names from the root, sorted."""
        spans_by_id = {span.context.span_id: span for span in self.spans}

        def path(span):
            parent = spans_by_id.get(span.parent.span_id) if span.parent else None
            return (*path(parent), span.name) if parent else (span.name,)

        return sorted(path(span) for span in self.spans)

    def get_values(self, metric):
        """Return the values of *metric* by its attributes after the task."""
        data = self.reader.get_metrics_data()
        points = [
            point
            for resource in (data.resource_metrics if data else ())
            for scoped in resource.scope_metrics
            for candidate in scoped.metrics
            if candidate.name == metric.name
            for point in candidate.data.data_points
        ]
        return {tuple(point.attributes.get(name) for name in metric.attributes[1:]): point.value for point in points}


@pytest.fixture
def telemetry():
    return RecordedTelemetry()


@pytest.fixture(params=["sync", "async"])
def variant(request):
    return request.param


@pytest.fixture
def log_records():
    """The log records of the engine, as (message, fields)."""
    records = []

    class ListHandler(logging.Handler):
        def emit(self, record):
            records.append(record)

    handler = ListHandler()
    logger = logging.getLogger("ergon_framework")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(before)


def to_async_method(fn):
    async def coroutine(self, *args):
        return fn(*args)

    return coroutine


def to_method(fn):
    def method(self, *args):
        return fn(*args)

    return method


def create_task(variant, sync, aio, **handlers):
    """Return a task whose handlers are plain functions, in either variant."""
    base, to_handler = (sync, to_method) if variant == "sync" else (aio, to_async_method)
    return type("Orders", (base,), {name: to_handler(fn) for name, fn in handlers.items()})()


def run_to_end(call, *args, **options):
    result = call(*args, **options)
    return asyncio.run(await_result(result)) if asyncio.iscoroutine(result) else result


async def await_result(coroutine):
    return await coroutine


def make_policy(**step_options):
    retry = {"max_attempts": 2, "backoff": 0, "timeout": 5}
    steps = {name: {"retry": retry} for name in ("fetch", "process", "success", "exception")}
    loop = {"concurrency": {"value": 2}, "batch": {"size": 5}} | step_options.pop("loop", {})
    return ConsumerPolicy.load({"loop": loop, "steps": steps | step_options})


def consume(variant, telemetry, transactions, *, loop_policy=None, connector=None, gates=(), options=None, **handlers):
    connector = connector or MemoryConnector("orders")
    connector.dispatch(transactions)
    by_method = {
        "process_transaction": handlers.get("process", lambda transaction: None),
        "handle_transaction_success": handlers.get("success", lambda transaction, result: None),
        "handle_transaction_exception": handlers.get("exception", lambda transaction, exc: None),
    }
    task = create_task(variant, ConsumerMixin, AsyncConsumerMixin, **by_method)
    task.connector = connector
    if telemetry is not None:
        task.telemetry = options or telemetry.options()
    with contextlib.suppress(FetchException):
        run_to_end(task.consume_transactions, loop_policy or make_policy(), gates=gates)
    return connector


def produce(variant, telemetry, transactions, *, options=None, **handlers):
    by_method = {
        "produce_transaction": handlers.get("produce", lambda transaction: "sent"),
        "handle_produce_success": handlers.get("success", lambda transaction, result: None),
        "handle_produce_exception": handlers.get("exception", lambda transaction, exc: None),
    }
    task = create_task(variant, ProducerMixin, AsyncProducerMixin, **by_method)
    task.connector = MemoryConnector("orders")
    task.telemetry = options or telemetry.options()
    retry = {"max_attempts": 2, "backoff": 0, "timeout": 5}
    steps = {name: {"retry": retry} for name in ("produce", "success", "exception")}
    loop = {"concurrency": {"value": 2}, "batch": {"size": 2}}
    run_to_end(task.produce_transactions, transactions, ProducerPolicy.load({"loop": loop, "steps": steps}))


def make_orders(count, **fields):
    return [Transaction({"secret": CANARY}, id=f"order-{number}", source="orders", **fields) for number in range(count)]


def fail_first(error=None):
    """Return a handler that fails once per transaction."""
    attempts = Counter()
    error = error or RuntimeError("not yet")

    def handler(transaction, *_):
        attempts[transaction.id] += 1
        if attempts[transaction.id] == 1:
            raise error

    return handler


def fail_always(error):
    def handler(*_):
        raise error

    return handler


# -- the tree -------------------------------------------------------------------------------------


@pytest.mark.spec("CON-16", "CON-17")
def test_a_consumed_transaction_is_a_subtree_with_a_span_for_every_attempt(variant, telemetry):
    consume(variant, telemetry, make_orders(1), process=fail_first())
    root, start = "consume_transactions", "start_processing"
    assert telemetry.list_span_paths() == [
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
def test_a_failure_shows_the_exception_handler_and_its_attempts(variant, telemetry):
    consume(
        variant,
        telemetry,
        make_orders(1),
        process=fail_always(BusinessError("no such customer")),
        exception=fail_first(),
    )
    paths = [path[2:] for path in telemetry.list_span_paths() if path[1:2] == ("start_processing",)]
    assert paths == [
        (),
        ("handle_exception",),
        ("handle_exception", "handle_exception.attempt"),
        ("handle_exception", "handle_exception.attempt"),
        ("process",),
        ("process", "process.attempt"),
    ]


@pytest.mark.spec("PRO-10", "PRO-11")
def test_produced_transactions_are_subtrees_of_one_trace(variant, telemetry):
    produce(variant, telemetry, make_orders(3), produce=fail_first())
    root, start = "produce_transactions", "start_producing"
    assert Counter(telemetry.list_span_paths()) == {
        (root,): 1,
        (root, start): 3,
        (root, start, "produce"): 3,
        (root, start, "produce", "produce.attempt"): 6,
        (root, start, "handle_produce_success"): 3,
        (root, start, "handle_produce_success", "handle_produce_success.attempt"): 3,
    }
    assert len({span.context.trace_id for span in telemetry.spans}) == 1


@pytest.mark.spec("PRO-10")
def test_a_failed_production_shows_the_exception_handler(variant, telemetry):
    produce(variant, telemetry, make_orders(1), produce=fail_always(BusinessError("no")), exception=fail_first())
    handler_path = ("produce_transactions", "start_producing", "handle_produce_exception")
    assert [path for path in telemetry.list_span_paths() if path[:3] == handler_path] == [
        handler_path,
        (*handler_path, "handle_produce_exception.attempt"),
        (*handler_path, "handle_produce_exception.attempt"),
    ]


@pytest.mark.spec("CON-17")
def test_an_inbound_trace_is_continued_and_linked_to_the_loop(variant, telemetry):
    consume(variant, telemetry, make_orders(1, trace=CARRIER))
    root, start = telemetry.get_span("consume_transactions"), telemetry.get_span("start_processing")
    assert f"{start.context.trace_id:032x}" == ELSEWHERE != f"{root.context.trace_id:032x}"
    assert f"{start.parent.span_id:016x}" == "b7ad6b7169203331"
    assert [link.context.span_id for link in start.links] == [root.context.span_id]
    assert telemetry.get_span("process").context.trace_id == start.context.trace_id


@pytest.mark.spec("CON-17")
def test_without_a_valid_carrier_a_transaction_span_is_a_child_of_the_loop(variant, telemetry):
    consume(variant, telemetry, make_orders(1, trace={"traceparent": "nonsense"}))
    start = telemetry.get_span("start_processing")
    assert start.parent.span_id == telemetry.get_span("consume_transactions").context.span_id
    assert start.links == ()
    assert start.kind is SpanKind.CONSUMER


@pytest.mark.spec("CON-17")
def test_a_streaming_loop_has_a_root_for_each_batch(variant, telemetry):
    loop_policy = make_policy(loop={"streaming": True, "limit": 4, "concurrency": {"value": 2}, "batch": {"size": 2}})
    consume(variant, telemetry, make_orders(4), loop_policy=loop_policy)
    roots = {span.context.span_id: span for span in telemetry.list_spans("consume_transactions")}
    per_root = Counter(span.parent.span_id for span in telemetry.list_spans("start_processing"))
    fetches = Counter(span.parent.span_id for span in telemetry.list_spans("fetch_transactions"))
    assert len(roots) >= 2
    assert sum(per_root.values()) == 4
    assert fetches == dict.fromkeys(roots, 1)
    for span in telemetry.list_spans("start_processing"):
        root = roots[span.parent.span_id]
        assert root.start_time <= span.start_time
        assert span.end_time <= root.end_time
    assert all(root.attributes["ergon.batch.fetched"] == per_root[key] for key, root in roots.items())


@pytest.mark.spec("CON-17")
def test_a_loop_that_does_not_stream_has_one_root(variant, telemetry):
    loop_policy = make_policy(loop={"concurrency": {"value": 1}, "batch": {"size": 1}})
    consume(variant, telemetry, make_orders(3), loop_policy=loop_policy)
    assert telemetry.get_span("consume_transactions").attributes["ergon.stop_reason"] == "empty"
    assert len(telemetry.list_spans("fetch_transactions")) == 4


# -- attributes -----------------------------------------------------------------------------------


@pytest.mark.spec("CON-16", "DX-15")
def test_every_step_span_has_the_transaction_and_its_attempts(variant, telemetry):
    consume(variant, telemetry, make_orders(1), process=fail_first(RuntimeError("down")))
    own_attributes = {"ergon.transaction.id": "order-0"}
    assert telemetry.get_span("process").attributes == own_attributes | {"ergon.attempts": 2}
    assert telemetry.get_span("handle_success").attributes == own_attributes | {"ergon.attempts": 1}


@pytest.mark.spec("CON-16", "DX-15")
def test_every_attempt_span_has_the_documented_attributes(variant, telemetry):
    consume(variant, telemetry, make_orders(1), process=fail_first(RuntimeError("x" * 700)))
    first, second = sorted(telemetry.list_spans("process.attempt"), key=lambda span: span.attributes["ergon.attempt"])
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
def test_a_failed_fetch_is_visible_in_its_attempt_spans(variant, telemetry, log_records):
    class UnreachableQueue(MemoryConnector):
        def fetch_transactions(self, batch_size, **extra):
            raise OSError("no route")

        async def fetch_transactions_async(self, batch_size, **extra):
            raise OSError("no route")

    consume(variant, telemetry, [], connector=UnreachableQueue("orders"))
    attempts = telemetry.list_spans("fetch_transactions.attempt")
    assert [span.attributes["ergon.attempt"] for span in attempts] == [0, 1]
    assert all("no route" in span.attributes["ergon.exception.message"] for span in attempts)
    assert telemetry.get_span("fetch_transactions").status.status_code is StatusCode.ERROR
    assert telemetry.get_values(names.FAILED_FETCHES) == {(): 1}
    assert telemetry.get_values(names.ATTEMPTS) == {("fetch",): 2}
    (record,) = [record for record in log_records if get_event(record) == "fetch failed"]
    assert record.code == "fetch"


def test_a_transaction_span_has_the_outcome(variant, telemetry):
    consume(variant, telemetry, make_orders(1), process=fail_always(TransactionException("down", code="offline")))
    start = telemetry.get_span("start_processing")
    outcome = {
        key: start.attributes[key] for key in ("ergon.outcome", "ergon.attempts", "ergon.category", "ergon.code")
    }
    assert outcome == {
        "ergon.outcome": "failed",
        "ergon.attempts": 2,
        "ergon.category": "SYSTEM",
        "ergon.code": "offline",
    }
    assert start.status.status_code is StatusCode.ERROR


@pytest.mark.spec("PRO-10")
def test_a_producer_shows_type_and_size_of_the_result_and_not_its_value(variant, telemetry):
    produce(variant, telemetry, make_orders(1), produce=lambda transaction: CANARY)
    attributes = telemetry.get_span("produce").attributes
    assert attributes["ergon.result.type"] == "str"
    assert attributes["ergon.result.size"] == len(CANARY)
    assert "ergon.result.value" not in attributes


@pytest.mark.spec("PRO-10")
def test_a_result_that_may_be_recorded_is_redacted(variant, telemetry):
    options = telemetry.options(record_results=True)
    produce(
        variant, telemetry, make_orders(1), options=options, produce=lambda transaction: {"id": 7, "api_key": CANARY}
    )
    assert telemetry.get_span("produce").attributes["ergon.result.value"] == "{'id': 7, 'api_key': [hidden]}"


# -- contexts -------------------------------------------------------------------------------------


@pytest.mark.spec("CON-14", "PRO-21")
@pytest.mark.parametrize("side", [consume, produce])
def test_all_attempts_share_the_trace_context_of_the_transaction(variant, telemetry, side):
    contexts = []

    def body(transaction):
        span = trace.get_current_span()
        contexts.append((span.get_span_context().trace_id, span.parent.span_id))
        if len(contexts) == 1:
            raise RuntimeError("again")

    if side is consume:
        consume(variant, telemetry, make_orders(1), process=body)
    else:
        produce(variant, telemetry, make_orders(1), produce=body)
    assert len(contexts) == 2
    assert len(set(contexts)) == 1


@pytest.mark.spec("CON-14", "CON-18")
def test_spans_of_a_handler_are_children_of_its_attempt_span(variant, telemetry):
    tracer = telemetry.tracers.get_tracer("mine")

    def process(transaction):
        tracer.start_span("query").end()

    consume(variant, telemetry, make_orders(1), process=process)
    assert telemetry.get_span("query").parent.span_id == telemetry.get_span("process.attempt").context.span_id


@pytest.mark.spec("CON-25", "CON-27", "PRO-22")
@pytest.mark.parametrize("side", [consume, produce])
def test_context_and_spans_do_not_leak_between_transactions(variant, telemetry, side):
    found_contexts = []

    def body(transaction):
        found_contexts.append((marker.get(), baggage.get_all()))
        marker.set(transaction.id)
        context.otel_context.attach(baggage.set_baggage("left", transaction.id))

    if side is consume:
        consume(variant, telemetry, make_orders(5), process=body)
    else:
        produce(variant, telemetry, make_orders(5), produce=body)
    assert found_contexts == [("clean", {})] * 5
    by_id = {span.context.span_id: span for span in telemetry.spans}
    for span in telemetry.spans:
        ancestor, transaction_id = span, span.attributes.get("ergon.transaction.id")
        # The span of a step does not name its transaction, so the test looks at its ancestors.
        while transaction_id is not None and (ancestor := ancestor.parent and by_id.get(ancestor.parent.span_id)):
            assert ancestor.attributes.get("ergon.transaction.id") in (None, transaction_id)
        assert span.links == ()


@pytest.mark.spec("CON-25")
def test_baggage_comes_from_the_carrier_only(variant, telemetry):
    baggage_by_id = {}

    def process(transaction):
        baggage_by_id[transaction.id] = dict(baggage.get_all())

    bare = Transaction(id="bare", source="orders", trace={"traceparent": CARRIER["traceparent"]})
    token = context.otel_context.attach(baggage.set_baggage("caller", "me"))
    try:
        consume(variant, telemetry, [*make_orders(1, trace=CARRIER), bare], process=process)
    finally:
        context.otel_context.detach(token)
    assert baggage_by_id == {"order-0": {"customer": "7"}, "bare": {}}


@pytest.mark.spec("CON-17")
def test_a_transaction_sent_by_a_handler_carries_its_trace(variant, telemetry):
    sent = []
    consume(
        variant,
        telemetry,
        make_orders(1),
        process=lambda tx: sent.append(context.with_current_trace(Transaction(id="next"))),
    )
    attempt = telemetry.get_span("process.attempt").context
    assert sent[0].trace["traceparent"].startswith(f"00-{attempt.trace_id:032x}-{attempt.span_id:016x}-")


# -- sampling -------------------------------------------------------------------------------------


def test_a_transaction_that_is_not_sampled_makes_one_span_decision_that_its_handler_inherits(variant):
    sampled_names = []

    class RecordingSampler(ParentBased):
        def should_sample(self, parent_context, trace_id, name, *args, **options):
            sampled_names.append(name)
            return super().should_sample(parent_context, trace_id, name, *args, **options)

    telemetry = RecordedTelemetry(RecordingSampler(ALWAYS_OFF))
    sent = []

    def process(transaction):
        sent.append(context.inject_carrier())
        if len(sent) == 1:
            raise RuntimeError("again")

    consume(variant, telemetry, make_orders(1, trace=UNSAMPLED), process=process)
    assert sampled_names == ["consume_transactions", "start_processing"]
    assert telemetry.spans == ()
    assert len(sent) == 2
    assert all(carrier["traceparent"].startswith(f"00-{ELSEWHERE}-") for carrier in sent)
    assert all(carrier["traceparent"].endswith("-00") for carrier in sent)
    assert telemetry.get_values(names.TRANSACTIONS) == {("succeeded", None): 1}


def test_a_sampled_carrier_is_recorded_in_an_unsampled_loop(variant):
    telemetry = RecordedTelemetry(ParentBased(ALWAYS_OFF))
    consume(variant, telemetry, [*make_orders(1, trace=CARRIER), Transaction(id="other", source="orders")])
    assert {span.name for span in telemetry.spans} == {
        "start_processing",
        "process",
        "process.attempt",
        "handle_success",
        "handle_success.attempt",
    }
    assert len(telemetry.list_spans("start_processing")) == 1


def test_without_an_sdk_nothing_is_attached(variant):
    carriers = []
    consume(variant, None, make_orders(1, trace=CARRIER), process=lambda tx: carriers.append(context.inject_carrier()))
    assert carriers == [{}]


def test_a_failing_sampler_loses_spans_but_no_work(variant, log_records):
    class FailingSampler(ParentBased):
        def should_sample(self, *args, **options):
            raise ZeroDivisionError

    telemetry = RecordedTelemetry(FailingSampler(ALWAYS_ON))
    done = []
    consume(variant, telemetry, make_orders(2), process=lambda tx: done.append(tx.id))
    assert sorted(done) == ["order-0", "order-1"]
    assert "telemetry failed" in list_events(log_records)


# -- what must not be seen ------------------------------------------------------------------------


@pytest.mark.spec("CON-07", "CON-26", "PRO-17")
def test_no_payload_setting_or_credential_is_in_any_span_metric_or_log(variant, telemetry, log_records):
    class TokenQueue(MemoryConnector):
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

    loop_policy = make_policy(fetch={"extra": {"token": CANARY}})
    consume(
        variant, telemetry, make_orders(4), loop_policy=loop_policy, connector=TokenQueue("orders"), process=process
    )
    produce(variant, telemetry, make_orders(2), produce=fail_always(RuntimeError("down")))
    assert len(log_records) >= 6
    assert len(telemetry.spans) > 20
    recorded = [span.to_json() for span in telemetry.spans]
    recorded += [repr(vars(record)) for record in log_records]
    recorded.append(telemetry.reader.get_metrics_data().to_json())
    assert [text for text in recorded if CANARY in text] == []


@pytest.mark.spec("CON-26")
def test_a_recorded_payload_passes_the_redaction_hook(variant, telemetry):
    redacted_keys = []

    def hook(key, value):
        redacted_keys.append(key)
        return "seen by the hook"

    consume(variant, telemetry, make_orders(1), options=telemetry.options(record_payloads=True, redact=hook))
    assert telemetry.get_span("start_processing").attributes["ergon.transaction.payload"] == "seen by the hook"
    assert redacted_keys == ["ergon.transaction.payload"]


# -- metrics --------------------------------------------------------------------------------------


def test_outcomes_attempts_and_fetches_are_counted(variant, telemetry):
    def process(transaction):
        if transaction.id == "order-0":
            raise BusinessError("no")

    flaky = fail_first()
    loop_policy = make_policy(loop={"concurrency": {"value": 5}})
    consume(variant, telemetry, make_orders(3), loop_policy=loop_policy, process=process, success=flaky)
    assert telemetry.get_values(names.TRANSACTIONS) == {("succeeded", None): 2, ("failed", "BUSINESS"): 1}
    assert telemetry.get_values(names.ATTEMPTS) == {("fetch",): 2, ("process",): 3, ("success",): 4, ("exception",): 1}
    assert telemetry.get_values(names.RETRIES) == {("success",): 2}
    assert telemetry.get_values(names.STEPS) == {
        ("fetch",): 2,
        ("process",): 3,
        ("success",): 2,
        ("exception",): 1,
        ("settle",): telemetry.get_values(names.STEPS)["settle",],
    }
    assert telemetry.get_values(names.STEP_BUCKETS)["process", "+Inf"] == 3
    assert telemetry.get_values(names.FETCHES) == {(): 2}
    assert telemetry.get_values(names.EMPTY_FETCHES) == {(): 1}
    assert telemetry.get_values(names.SETTLED) == {("settled",): 3}


def test_the_producer_counts_outcomes_attempts_and_retries(variant, telemetry):
    produce(variant, telemetry, make_orders(3), produce=fail_first())
    assert telemetry.get_values(names.TRANSACTIONS) == {("succeeded", None): 3}
    assert telemetry.get_values(names.ATTEMPTS) == {("produce",): 6, ("success",): 3}
    assert telemetry.get_values(names.RETRIES) == {("produce",): 3}


def test_a_running_loop_shows_its_slots_and_the_age_of_its_queue(variant, telemetry):
    values = {}

    def process(transaction):
        values["slots"] = telemetry.get_values(names.SLOTS)
        values["age"] = telemetry.get_values(names.QUEUE_AGE)
        values["oldest"] = telemetry.get_values(names.QUEUE_AGE_MAX)

    consume(variant, telemetry, make_orders(1, created_at=1.0), process=process)
    assert values["slots"] == {("running",): 1, ("abandoned",): 0, ("waiting",): 0}
    assert values["age"][()] > 1e9
    assert telemetry.get_values(names.SLOTS) == {}


def test_a_second_loop_adds_to_the_counts_of_the_first(variant, telemetry):
    for _ in range(2):
        consume(variant, telemetry, make_orders(2))
    assert telemetry.get_values(names.TRANSACTIONS) == {("succeeded", None): 4}


@pytest.mark.spec("CON-47")
def test_a_pause_is_shown_with_its_reason(variant, telemetry, log_records):
    values = []

    def gate():
        if not values:
            values.append(None)
            return Pause("breaker open", 0.01)
        if len(values) == 1:
            values.append(telemetry.get_values(names.PAUSED))
        return None

    consume(variant, telemetry, make_orders(1), gates=[gate])
    assert values[1] == {("breaker open",): 1}
    assert telemetry.get_values(names.PAUSED) == {}
    assert [event for event in list_events(log_records) if event and "loop" in event] == [
        "loop paused",
        "loop resumed",
        "loop ended",
    ]


@pytest.mark.spec("CON-20")
def test_a_breach_is_counted_each_time_and_logged_once(variant, telemetry, log_records):
    class OverReturningQueue(MemoryConnector):
        def fetch_transactions(self, batch_size, **extra):
            return super().fetch_transactions(batch_size + 1)

        async def fetch_transactions_async(self, batch_size, **extra):
            return await super().fetch_transactions_async(batch_size + 1)

    loop_policy = make_policy(loop={"concurrency": {"value": 1}, "batch": {"size": 1}})
    consume(variant, telemetry, make_orders(4), loop_policy=loop_policy, connector=OverReturningQueue("orders"))
    assert telemetry.get_values(names.OVERSIZED_FETCHES) == {(): 2}
    (record,) = [record for record in log_records if get_event(record) == "fetch oversized"]
    assert (record.requested, record.returned) == (1, 2)


@pytest.mark.spec("CON-30")
def test_a_rejection_has_its_own_metric_and_log_event(variant, telemetry, log_records):
    consume(variant, telemetry, make_orders(1, expires_at=1.0))
    assert telemetry.get_values(names.REJECTED_DELIVERIES) == {("expired",): 1}
    assert telemetry.get_values(names.TRANSACTIONS) == {}
    (record,) = [record for record in log_records if get_event(record) == "transaction rejected"]
    assert (record.transaction_id, record.reason) == ("order-0", "expired")


# -- logs -----------------------------------------------------------------------------------------


def test_a_failure_is_logged_once_with_its_ids(variant, telemetry, log_records):
    consume(variant, telemetry, make_orders(1), process=fail_always(TransactionException("down", code="offline")))
    (record,) = [record for record in log_records if record.levelno >= logging.WARNING]
    start = telemetry.get_span("start_processing").context
    assert get_event(record) == "transaction failed"
    assert record.name.startswith("ergon_framework.")
    assert (record.transaction_id, record.task, record.attempts) == ("order-0", "Orders", 2)
    assert (record.category, record.code, record.error) == ("SYSTEM", "offline", "down")
    assert (record.trace_id, record.span_id) == (f"{start.trace_id:032x}", f"{start.span_id:016x}")


def test_a_deferral_is_logged_with_its_delay(variant, telemetry, log_records):
    consume(variant, telemetry, make_orders(1), process=fail_always(TransactionException("busy", retry_after=3600)))
    (record,) = [record for record in log_records if get_event(record) == "transaction deferred"]
    assert record.delay == 3600
    assert telemetry.get_values(names.TRANSACTIONS) == {("deferred", "SYSTEM"): 1}
    assert telemetry.get_values(names.ATTEMPTS)["process",] == 1
    assert telemetry.get_values(names.RETRY_BACKOFFS) == {}


def test_a_success_is_not_logged(variant, telemetry, log_records):
    consume(variant, telemetry, make_orders(2))
    assert list_events(log_records) == ["loop ended"]


@pytest.mark.spec("DX-12")
def test_a_lost_connection_is_logged_once_until_a_fetch_succeeds(variant, telemetry, log_records):
    class UnreachableQueue(MemoryConnector):
        def __init__(self, name):
            super().__init__(name)
            self.errors = [ConnectionLostError("no route"), ConnectionLostError("refused"), OSError("odd")]

        def raise_next_error(self):
            if self.errors:
                raise self.errors.pop(0)

        def fetch_transactions(self, batch_size, **extra):
            self.raise_next_error()
            return super().fetch_transactions(batch_size)

        async def fetch_transactions_async(self, batch_size, **extra):
            self.raise_next_error()
            return await super().fetch_transactions_async(batch_size)

    loop_policy = make_policy(loop={"streaming": True, "limit": 1}, fetch={"retry": {"backoff": 0.01}})
    connector = UnreachableQueue(f"orders-{variant}")
    consume(variant, telemetry, make_orders(1), loop_policy=loop_policy, connector=connector)
    lost, restored = [record for record in log_records if "connection" in (get_event(record) or "")]
    assert (lost.event, lost.levelname, lost.error) == ("connection lost", "WARNING", "no route")
    assert (restored.event, restored.levelname) == ("connection restored", "INFO")
    assert lost.queue == restored.queue == connector.name
    assert restored.seconds >= 0


@pytest.mark.spec("DX-13", "DX-45")
def test_an_attempt_that_is_retried_is_logged_with_attempt_delay_and_error(variant, telemetry, log_records):
    loop_policy = make_policy(process={"retry": {"max_attempts": 3, "backoff": 0.01, "multiplier": 1}})
    consume(
        variant,
        telemetry,
        make_orders(1),
        loop_policy=loop_policy,
        process=fail_always(RuntimeError("password=pw not yet")),
    )
    retried = [record for record in log_records if get_event(record) == "attempt failed"]
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
    # The last attempt is not retried: only the end of its transaction is logged.
    assert list_events(log_records)[-2:] == ["transaction failed", "loop ended"]
    attempts = telemetry.list_spans("process.attempt")
    assert [span.attributes["ergon.attempt"] for span in attempts] == [0, 1, 2], "spans count from 0"


@pytest.mark.spec("DX-13")
def test_a_deferred_attempt_is_logged(variant, telemetry, log_records):
    consume(variant, telemetry, make_orders(1), process=fail_always(TransactionException("busy", retry_after=3600)))
    assert list_events(log_records) == ["attempt failed", "transaction deferred", "loop ended"]
    assert (log_records[0].attempt, log_records[0].delay) == (1, 3600)


@pytest.mark.spec("DX-13")
def test_failed_attempts_of_handlers_and_producers_are_logged(variant, telemetry, log_records):
    consume(variant, telemetry, make_orders(1), success=fail_first())
    produce(variant, telemetry, make_orders(1), produce=fail_first())
    retried = [record for record in log_records if get_event(record) == "attempt failed"]
    assert [(record.step, record.attempt, record.delay) for record in retried] == [("success", 1, 0), ("produce", 1, 0)]


@pytest.mark.spec("DX-13")
def test_a_failed_fetch_that_is_retried_is_logged(variant, telemetry, log_records):
    class FailingOnceQueue(MemoryConnector):
        remaining_errors = 1

        def raise_first_error(self):
            self.remaining_errors -= 1
            if self.remaining_errors >= 0:
                raise OSError("odd")

        def fetch_transactions(self, batch_size, **extra):
            self.raise_first_error()
            return super().fetch_transactions(batch_size)

        async def fetch_transactions_async(self, batch_size, **extra):
            self.raise_first_error()
            return await super().fetch_transactions_async(batch_size)

    consume(variant, telemetry, make_orders(1), connector=FailingOnceQueue("orders"))
    (record,) = [record for record in log_records if get_event(record) == "attempt failed"]
    assert (record.levelname, record.task, record.step) == ("INFO", "Orders", "fetch")
    assert (record.attempt, record.delay, record.error_type) == (1, 0, "OSError")
    assert not hasattr(record, "transaction_id")


def test_dead_letters_name_the_trace(variant, telemetry):
    connector = consume(variant, telemetry, make_orders(1), process=fail_always(BusinessError("no")))
    (dead_letter,) = connector.dead_letters
    assert dead_letter.trace_id == f"{telemetry.get_span('start_processing').context.trace_id:032x}"


def test_user_logs_get_the_ids_of_their_transaction(variant, telemetry):
    records = []

    def process(transaction):
        record = logging.LogRecord("mine", logging.INFO, __file__, 1, "hello", (), None)
        TransactionFilter().filter(record)
        records.append(record)

    consume(variant, telemetry, make_orders(1), process=process)
    attempt = telemetry.get_span("process.attempt").context
    (record,) = records
    assert (record.transaction_id, record.step, record.attempt) == ("order-0", "process", 1)
    assert (record.trace_id, record.span_id) == (f"{attempt.trace_id:032x}", f"{attempt.span_id:016x}")


@pytest.mark.spec("CON-16")
def test_a_stopped_transaction_is_recorded_as_released_without_an_error(variant, telemetry, log_records):
    def stop_and_fail(transaction):
        tasks[0].stop()
        tasks[0].stop()
        raise OSError("down")

    tasks = []
    loop_policy = {
        "loop": {"streaming": True, "drain_timeout": 0.0},
        "steps": {"process": {"retry": {"backoff": 20.0}}},
    }
    connector = MemoryConnector("orders")
    connector.dispatch(make_orders(1))
    tasks.append(create_task(variant, ConsumerMixin, AsyncConsumerMixin, process_transaction=stop_and_fail))
    tasks[0].connector, tasks[0].telemetry = connector, telemetry.options()
    run_to_end(tasks[0].consume_transactions, ConsumerPolicy.load(loop_policy))
    assert telemetry.get_span("process").attributes["ergon.outcome"] == "stopped"
    attributes = telemetry.get_span("start_processing").attributes
    assert (attributes["ergon.outcome"], attributes["ergon.reason"]) == ("released", "stop")


@pytest.mark.parametrize("is_defined", [True, False])
def test_an_undefined_success_handler_is_neither_called_nor_counted(variant, telemetry, is_defined):
    handlers = {"process_transaction": lambda transaction: None}
    if is_defined:
        handlers["handle_transaction_success"] = lambda transaction, result: None
    task = create_task(variant, ConsumerMixin, AsyncConsumerMixin, **handlers)
    task.connector = MemoryConnector("orders")
    task.connector.dispatch(make_orders(3))
    task.telemetry = TelemetryOptions(meter_provider=telemetry.options().meter_provider)
    run_to_end(task.consume_transactions, make_policy())
    attempts = {step: count for (step,), count in telemetry.get_values(names.ATTEMPTS).items() if step != "fetch"}
    assert attempts == ({"process": 3, "success": 3} if is_defined else {"process": 3})


@pytest.mark.spec("CNN-03")
def test_a_transaction_dispatched_by_a_handler_carries_the_trace_to_its_consumer(variant, telemetry):
    invoices = MemoryConnector("invoices")

    def dispatch_invoice(transaction):
        invoices.dispatch([Transaction(id=f"invoice-{transaction.id}", source="invoices")])

    consume(variant, telemetry, make_orders(1, trace=CARRIER), process=dispatch_invoice)
    consume(variant, telemetry, [], connector=invoices)
    first, second = telemetry.list_spans("start_processing")
    assert first.context.trace_id == second.context.trace_id
    assert second.parent.span_id in {span.context.span_id for span in telemetry.list_spans("process.attempt")}
