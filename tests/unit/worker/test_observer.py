"""The events of a loop become numbers, spans and log events, each of them exactly once."""

from __future__ import annotations

import logging

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import StatusCode

from ergon_framework.connectors.base import Defer, Delivery, MissingKeyError, SettleResult
from ergon_framework.engine.effects import Call
from ergon_framework.engine.retry import FailedAttempt
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.telemetry.names import Field, values_of
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.transaction import Transaction
from ergon_framework.worker import telemetry
from ergon_framework.worker.exceptions import BusinessError, FetchException, TransactionException
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.worker.report import Outcome, OutcomeKind, StopReason
from ergon_framework.worker.telemetry import consumer_observer, log_exceptions, producer_observer

WALL_TIME = 1_000_000.0
REMOTE_TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CARRIER = {"traceparent": f"00-{REMOTE_TRACE_ID}-b7ad6b7169203331-01"}
SHARED = {"ergon.task": "Orders", "ergon.concurrency": 2, "ergon.batch.size": 5}
LOOP = {"concurrency": {"value": 2}, "batch": {"size": 5}}


class FakeTime:
    """A fake for the clocks that the observer reads."""

    def __init__(self):
        self.wall = WALL_TIME
        self.seconds = 50.0

    def time(self):
        return self.wall

    def perf_counter(self):
        return self.seconds

    def monotonic(self):
        return self.seconds


class RecordingSampler(ParentBased):
    """A sampler that records the names of the spans that it decides on."""

    def __init__(self, root):
        super().__init__(root)
        self.names = []

    def should_sample(self, parent_context, trace_id, name, *args, **more):
        self.names.append(name)
        return super().should_sample(parent_context, trace_id, name, *args, **more)


class Orders:
    """A task with the attributes that an observer uses."""


class LoopHarness:
    """An observed loop with its metrics and spans."""

    def __init__(self, *, sampler=ALWAYS_ON, spans=True, streaming=False, produce=False, late_results=None, **options):
        self._exporter = InMemorySpanExporter()
        tracers = TracerProvider(sampler=sampler)
        tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._meters = MeterProvider(shutdown_on_exit=False)
        telemetry_options = {"tracer_provider": tracers if spans else trace.NoOpTracerProvider()} | options
        task = Orders()
        task.telemetry = TelemetryOptions(meter_provider=self._meters, **telemetry_options)
        if produce:
            self.observer = producer_observer(task, ProducerPolicy.load({"loop": LOOP}), late_results=late_results)
        else:
            rules = ConsumerPolicy.load({"loop": LOOP | {"streaming": streaming}})
            self.observer = consumer_observer(task, rules, late_results=late_results)
        self.observer.on_loop_start(lambda: (3, 2, 1))

    def metric(self, metric):
        """Return the values of *metric* by its attributes after the task, which is always the same."""
        values = get_registry(self._meters).read(metric)
        assert {labels["ergon.task"] for labels, _ in values} <= {"Orders"}
        return {tuple(labels.get(name) for name in metric.attributes[1:]): value for labels, value in values}

    @property
    def spans(self):
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def fetch(self, *transactions):
        """Record a fetch of one attempt that returns *transactions*."""
        self.observer.on_batch(5)
        self.observer.on_fetch_start().on_attempt_start(0)
        self.observer.on_fetch_end([Delivery(each, each.id) for each in transactions], None)


@pytest.fixture
def fake_time(monkeypatch):
    replacement = FakeTime()
    monkeypatch.setattr(telemetry, "time", replacement)
    return replacement


@pytest.fixture(autouse=True)
def _debug_logs(caplog):
    caplog.set_level(logging.DEBUG, "ergon_framework")


def collect_events(caplog):
    """Return every record of the loop: its level, its event and its fields."""
    fields = [name for name in values_of(Field) if name != Field.EVENT]
    return [
        (record.levelname, record.event, {name: vars(record)[name] for name in fields if name in vars(record)})
        for record in caplog.records
        if record.name == "ergon_framework.task"
    ]


def collect_warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]


def make_outcome(kind, *, transaction=None, **attributes):
    result = Outcome(transaction or Transaction(id="a", source="orders"), kind)
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


def make_failed_attempt(step, error):
    return FailedAttempt(step, 0, error, occurred_at=0.0)


def with_cause(error, cause):
    error.__cause__ = cause
    return error


def get_span(context):
    return context.run(trace.get_current_span)


# -- the loop -------------------------------------------------------------------------------------


def test_a_loop_reports_its_slots_and_late_results_from_its_start():
    harness = LoopHarness(late_results=lambda: 4)
    assert harness.metric(names.SLOTS) == {("running",): 3, ("abandoned",): 2, ("waiting",): 1}
    assert harness.metric(names.LATE_RESULTS) == {(): 4}
    producer = LoopHarness(produce=True, late_results=lambda: 5)
    assert producer.metric(names.LATE_RESULTS) == {(): 5}


@pytest.mark.parametrize(
    "task, name", [(Orders(), "Orders"), (type("Bills", (), {"name": "bills-nightly"})(), "bills-nightly")]
)
def test_a_loop_has_the_name_of_its_task_or_else_of_its_class(caplog, task, name):
    consumer_observer(task, ConsumerPolicy()).on_loop_end(StopReason.EMPTY)
    assert collect_events(caplog) == [("INFO", "loop ended", {"task": name, "stop_reason": "empty"})]


def test_the_end_of_a_loop_ends_its_root_span_and_removes_its_gauges(caplog):
    harness = LoopHarness()
    harness.fetch()
    result = make_outcome(OutcomeKind.SUCCEEDED)
    harness.observer.on_transaction_start(result.transaction, None).on_end(result)
    assert harness.observer.trace_id(result) == f"{harness.spans['start_processing'].context.trace_id:032x}"
    harness.observer.on_loop_end(StopReason.LIMIT)
    assert dict(harness.spans["consume_transactions"].attributes) == SHARED | {"ergon.stop_reason": "limit"}
    assert harness.metric(names.SLOTS) == {}
    assert harness.metric(names.FETCHES) == {(): 1}
    assert harness.observer.trace_id(result) is None
    assert collect_events(caplog) == [("INFO", "loop ended", {"task": "Orders", "stop_reason": "limit"})]


@pytest.mark.spec("CON-47")
def test_a_pause_is_reported_until_it_ends(caplog):
    harness = LoopHarness()
    harness.observer.on_pause("r" * 101)
    assert harness.metric(names.PAUSED) == {("r" * 100,): 1}
    harness.observer.on_pause(None)
    assert harness.metric(names.PAUSED) == {}
    assert collect_events(caplog) == [
        ("WARNING", "loop paused", {"task": "Orders", "reason": "r" * 100}),
        ("INFO", "loop resumed", {"task": "Orders"}),
    ]


def test_the_reason_of_a_pause_is_redacted(caplog):
    harness = LoopHarness()
    harness.observer.on_pause("password=pw")
    assert harness.metric(names.PAUSED) == {("password=[hidden]",): 1}
    assert collect_events(caplog) == [("WARNING", "loop paused", {"task": "Orders", "reason": "password=[hidden]"})]


@pytest.mark.spec("CON-20")
def test_every_contract_breach_is_counted_and_the_first_is_logged(caplog):
    harness = LoopHarness()
    for got in (7, 8, 9):
        harness.observer.on_oversized_batch(5, got)
    assert harness.metric(names.OVERSIZED_FETCHES) == {(): 3}
    assert collect_events(caplog) == [("WARNING", "fetch oversized", {"task": "Orders", "requested": 5, "returned": 7})]


# -- fetches --------------------------------------------------------------------------------------


def test_a_fetch_is_counted_with_its_time_and_its_attempts(fake_time):
    harness = LoopHarness()
    harness.observer.on_batch(5)
    fetching = harness.observer.on_fetch_start()
    for number in range(3):
        fetching.on_attempt_start(number)
    fake_time.seconds += 0.75
    harness.observer.on_fetch_end([Delivery(Transaction(id="a"), 1)], None)
    assert harness.metric(names.STEPS) == {("fetch",): 1}
    assert harness.metric(names.STEP_SECONDS) == {("fetch",): 0.75}
    buckets = harness.metric(names.STEP_BUCKETS)
    assert (buckets["fetch", "0.5"], buckets["fetch", "1"]) == (0, 1)
    assert harness.metric(names.ATTEMPTS) == {("fetch",): 3}
    assert harness.metric(names.RETRIES) == {("fetch",): 2}
    assert (harness.metric(names.FETCHES), harness.metric(names.EMPTY_FETCHES)) == ({(): 1}, {})
    assert harness.metric(names.FAILED_FETCHES) == {}


@pytest.mark.parametrize("attempts, retries", [(1, {}), (2, {("fetch",): 1})])
def test_only_what_follows_the_first_attempt_at_a_fetch_is_a_retry(attempts, retries):
    harness = LoopHarness(spans=False)
    fetching = harness.observer.on_fetch_start()
    for number in range(attempts):
        assert fetching.on_attempt_start(number) is None
        fetching.on_attempt_end(number, None)
    harness.observer.on_fetch_end([], None)
    assert harness.metric(names.RETRIES) == retries
    assert harness.metric(names.EMPTY_FETCHES) == {(): 1}


def test_a_fetch_span_has_its_number_of_deliveries_and_an_attempt_span(caplog):
    harness = LoopHarness()
    harness.observer.on_batch(5)
    fetching = harness.observer.on_fetch_start()
    context = fetching.on_attempt_start(0)
    assert get_span(context).name == "fetch_transactions.attempt"
    fetching.on_attempt_end(0, None)
    harness.observer.on_fetch_end([Delivery(Transaction(id="a"), 1), Delivery(Transaction(id="b"), 2)], None)
    fetch, attempt = harness.spans["fetch_transactions"], harness.spans["fetch_transactions.attempt"]
    assert dict(fetch.attributes) == {"ergon.batch.fetched": 2}
    assert attempt.parent.span_id == fetch.context.span_id
    assert (attempt.attributes["ergon.attempt"], "ergon.transaction.id" in attempt.attributes) == (0, False)
    assert fetch.status.status_code is StatusCode.UNSET
    assert collect_warnings(caplog) == []


def test_a_failed_fetch_is_reported_with_its_error(caplog):
    harness = LoopHarness()
    harness.observer.on_batch(5)
    harness.observer.on_fetch_start().on_attempt_start(0)
    harness.observer.on_fetch_end(None, with_cause(FetchException("no answer"), OSError("no route")))
    assert dict(harness.spans["fetch_transactions"].attributes) == {
        "ergon.exception.type": "OSError",
        "ergon.exception.message": "no answer",
        "ergon.category": "SYSTEM",
        "ergon.code": "fetch",
    }
    assert harness.spans["fetch_transactions"].status.description == "no answer"
    expected = {"task": "Orders", "error": "no answer", "error_type": "OSError", "category": "SYSTEM", "code": "fetch"}
    assert collect_events(caplog) == [("ERROR", "fetch failed", expected)]
    assert (harness.metric(names.FAILED_FETCHES), harness.metric(names.FETCHES)) == ({(): 1}, {})


def test_an_error_without_a_category_is_logged_without_one(caplog):
    harness = LoopHarness(spans=False)
    harness.observer.on_fetch_start().on_attempt_start(0)
    harness.observer.on_fetch_end(None, OSError("no route"))
    expected = {"task": "Orders", "error": "no route", "error_type": "OSError"}
    assert collect_events(caplog) == [("ERROR", "fetch failed", expected)]


def test_a_fetch_interrupted_by_the_end_of_the_loop_is_not_counted(caplog):
    harness = LoopHarness(streaming=True)
    harness.observer.on_batch(5)
    harness.observer.on_fetch_start().on_attempt_start(0)
    harness.observer.on_fetch_end(None, None)
    for metric in (names.FETCHES, names.EMPTY_FETCHES, names.FAILED_FETCHES):
        assert harness.metric(metric) == {}
    assert harness.metric(names.ATTEMPTS) == {("fetch",): 1}
    fetch = harness.spans["fetch_transactions"]
    assert dict(fetch.attributes) == {}
    assert harness.spans["consume_transactions"].attributes["ergon.batch.fetched"] == 0
    assert collect_events(caplog) == []
    assert collect_warnings(caplog) == []


def test_an_unsampled_fetch_runs_in_the_trace_of_its_root():
    sampler = RecordingSampler(ALWAYS_OFF)
    harness = LoopHarness(sampler=sampler)
    harness.observer.on_batch(5)
    fetching = harness.observer.on_fetch_start()
    context = fetching.on_attempt_start(0)
    fetching.on_attempt_end(0, OSError("no route"))
    harness.observer.on_fetch_end([], None)
    assert sampler.names == ["consume_transactions"]
    span_context = get_span(context).get_span_context()
    assert (span_context.is_valid, span_context.trace_flags.sampled) == (True, False)


def test_a_fetch_whose_own_span_was_dropped_runs_in_the_trace_and_has_no_attempts():
    class DroppingSampler(RecordingSampler):
        def should_sample(self, parent_context, trace_id, name, *args, **more):
            sampler = ALWAYS_OFF if name == "fetch_transactions" else ALWAYS_ON
            self.names.append(name)
            return sampler.should_sample(parent_context, trace_id, name, *args, **more)

    sampler = DroppingSampler(ALWAYS_ON)
    harness = LoopHarness(sampler=sampler)
    harness.observer.on_batch(5)
    context = harness.observer.on_fetch_start().on_attempt_start(0)
    harness.observer.on_fetch_end([], None)
    assert sampler.names == ["consume_transactions", "fetch_transactions"]
    assert not get_span(context).get_span_context().trace_flags.sampled


@pytest.mark.parametrize(
    "creation_times, age",
    [
        ([WALL_TIME - 5, WALL_TIME - 9, None, WALL_TIME - 2], {(): 9.0}),
        ([WALL_TIME + 5], {(): 0.0}),
        ([WALL_TIME - 0.5], {(): 0.5}),
        ([None], {}),
        ([], {}),
    ],
    ids=["oldest", "from the future", "young", "unknown", "empty"],
)
def test_the_age_of_a_queue_is_that_of_its_oldest_fetched_transaction(fake_time, creation_times, age):
    assert fake_time.time() == WALL_TIME
    harness = LoopHarness()
    harness.fetch(
        *(Transaction(id=f"t{number}", created_at=created_at) for number, created_at in enumerate(creation_times))
    )
    assert harness.metric(names.QUEUE_AGE) == age


# -- a transaction begins -------------------------------------------------------------------------


def test_a_transaction_span_has_its_id_and_no_payload():
    harness = LoopHarness()
    harness.fetch()
    result = make_outcome(OutcomeKind.SUCCEEDED, transaction=Transaction({"customer": 7}, id="a"), attempts=1)
    harness.observer.on_transaction_start(result.transaction, None).on_end(result)
    expected = {"ergon.transaction.id": "a", "ergon.outcome": "succeeded", "ergon.attempts": 1}
    assert dict(harness.spans["start_processing"].attributes) == {"ergon.task": "Orders"} | expected


def test_a_consumed_transaction_continues_its_trace_and_a_produced_one_belongs_to_its_call():
    for produce, name in ((False, "start_processing"), (True, "start_producing")):
        harness = LoopHarness(produce=produce)
        harness.observer.on_batch(1)
        result = make_outcome(OutcomeKind.SUCCEEDED, transaction=Transaction(id="a", trace=CARRIER))
        harness.observer.on_transaction_start(result.transaction, None).on_end(result)
        assert (f"{harness.spans[name].context.trace_id:032x}" == REMOTE_TRACE_ID) is not produce


def test_without_tracing_a_transaction_has_no_observer():
    harness = LoopHarness(spans=False)
    result = make_outcome(OutcomeKind.SUCCEEDED)
    assert harness.observer.on_transaction_start(result.transaction, None) is None
    assert harness.observer.trace_id(result) is None


def test_transactions_of_an_unsampled_root_share_one_observer_and_start_no_span():
    sampler = RecordingSampler(ALWAYS_OFF)
    harness = LoopHarness(sampler=sampler, streaming=True)
    first, second, third = (Transaction(id=name) for name in "abc")
    harness.fetch(first, second)
    observer = harness.observer.on_transaction_start(first, None)
    assert observer.recording is False
    assert harness.observer.on_transaction_start(second, None) is observer
    harness.fetch(third)
    other_observer = harness.observer.on_transaction_start(third, None)
    assert other_observer is not observer
    assert harness.observer.on_transaction_start(third, None) is other_observer
    assert harness.observer.on_transaction_start(first, None).node is observer.node
    assert sampler.names == ["consume_transactions"] * 2
    span_context = get_span(observer.on_attempt_start(0)).get_span_context()
    assert (
        span_context
        == observer.node.span.get_span_context()
        != get_span(other_observer.on_attempt_start(0)).get_span_context()
    )


def test_an_unsampled_transaction_has_a_trace_id():
    harness = LoopHarness(sampler=ParentBased(ALWAYS_OFF))
    harness.observer.on_batch(5)
    result = make_outcome(OutcomeKind.FAILED, error=BusinessError("no"))
    observer = harness.observer.on_transaction_start(result.transaction, None)
    observer.on_end(result)
    assert harness.observer.trace_id(result) == f"{observer.node.span.get_span_context().trace_id:032x}"
    assert harness.observer.trace_id(make_outcome(OutcomeKind.FAILED)) is None


# -- a transaction ends ---------------------------------------------------------------------------


def test_settlements_are_counted_by_result():
    harness = LoopHarness()
    harness.observer.on_settled(
        [SettleResult.SETTLED, SettleResult.LOST, SettleResult.SETTLED, SettleResult.FAILED], 0.25
    )
    harness.observer.on_settled([SettleResult.SETTLED], 0.5)
    assert harness.metric(names.SETTLED) == {("settled",): 3, ("lost",): 1, ("failed",): 1}
    assert harness.metric(names.STEPS) == {("settle",): 2}
    assert harness.metric(names.STEP_SECONDS) == {("settle",): 0.75}


@pytest.mark.spec("CON-30")
@pytest.mark.parametrize("spans", [True, False])
def test_a_refused_delivery_is_counted_and_logged_and_ends_its_batch(caplog, spans):
    harness = LoopHarness(streaming=True, spans=spans)
    transaction = Transaction(id="a", source="orders")
    harness.fetch(transaction)
    assert "consume_transactions" not in harness.spans
    harness.observer.on_rejected(Delivery(transaction, "a", deliveries=6), "max_deliveries")
    assert ("consume_transactions" in harness.spans) is spans
    assert harness.metric(names.REJECTED_DELIVERIES) == {("max_deliveries",): 1}
    expected = {
        "task": "Orders",
        "transaction_id": "a",
        "source": "orders",
        "correlation_id": "a",
        "reason": "max_deliveries",
        "deliveries": 6,
    }
    assert collect_events(caplog) == [("WARNING", "transaction rejected", expected)]


@pytest.mark.spec("CON-17")
def test_the_end_of_the_last_transaction_ends_its_batch():
    harness = LoopHarness(streaming=True)
    results = [make_outcome(OutcomeKind.SUCCEEDED, transaction=Transaction(id=name)) for name in "ab"]
    harness.fetch(*(each.transaction for each in results))
    harness.observer.on_transaction_end(results[0])
    assert "consume_transactions" not in harness.spans
    harness.observer.on_transaction_end(results[1])
    assert harness.spans["consume_transactions"].attributes["ergon.batch.fetched"] == 2


@pytest.mark.parametrize(
    "kind, level, event",
    [
        (OutcomeKind.FAILED, "WARNING", "transaction failed"),
        (OutcomeKind.EXCEPTION_HANDLER_FAILED, "ERROR", "transaction failed"),
        (OutcomeKind.DEFERRED, "INFO", "transaction deferred"),
        (OutcomeKind.RELEASED, "INFO", "transaction released"),
    ],
)
def test_each_outcome_except_success_is_logged_at_its_level(caplog, kind, level, event):
    harness = LoopHarness(spans=False)
    harness.observer.on_transaction_end(make_outcome(kind, attempts=2))
    expected = {"task": "Orders", "transaction_id": "a", "source": "orders", "correlation_id": "a"}
    expected |= {"outcome": kind.value, "attempts": 2}
    if kind is OutcomeKind.RELEASED:
        expected["started"] = False
    assert collect_events(caplog) == [(level, event, expected)]
    assert harness.metric(names.TRANSACTIONS) == {(kind.value, None): 1}


def test_a_success_is_counted_and_not_logged(caplog):
    harness = LoopHarness()
    harness.observer.on_transaction_end(make_outcome(OutcomeKind.SUCCEEDED, durations={"process": 0.5}))
    assert harness.metric(names.TRANSACTIONS) == {("succeeded", None): 1}
    assert collect_events(caplog) == []


def test_the_end_of_a_transaction_is_logged_with_all_its_fields(caplog):
    harness = LoopHarness()
    harness.observer.on_batch(5)
    error = with_cause(TransactionException("token=pw down", code="offline"), OSError("no route"))
    transaction = Transaction(id="a", source="orders", correlation="c-1", tenant="acme")
    result = make_outcome(
        OutcomeKind.EXCEPTION_HANDLER_FAILED,
        transaction=transaction,
        attempts=3,
        error=error,
        reason="stop",
        failed_attempts=[make_failed_attempt("process", error), make_failed_attempt("exception", error)],
        abandoned_calls=(Call("exception", int, ()),),
        settlement=Defer(7.5),
    )
    harness.observer.on_transaction_start(transaction, None).on_end(result)
    harness.observer.on_transaction_end(result)
    start = harness.spans["start_processing"].context
    expected = {
        "task": "Orders",
        "transaction_id": "a",
        "source": "orders",
        "correlation_id": "c-1",
        "tenant_id": "acme",
        "outcome": "handler_failed",
        "attempts": 3,
        "reason": "stop",
        "step": "process",
        "still_running": True,
        "delay": 7.5,
        "trace_id": f"{start.trace_id:032x}",
        "span_id": f"{start.span_id:016x}",
        "error": "token=[hidden] down",
        "error_type": "OSError",
        "category": "SYSTEM",
        "code": "offline",
    }
    assert collect_events(caplog) == [("ERROR", "transaction failed", expected)]
    assert harness.observer.trace_id(result) is None, "what has ended is not remembered"


def test_an_exited_call_is_not_logged_as_still_running(caplog):
    harness = LoopHarness(spans=False)
    call = Call("process", int, ())
    call.exited = True
    harness.observer.on_transaction_end(
        make_outcome(OutcomeKind.FAILED, error=BusinessError("no"), abandoned_calls=(call,))
    )
    ((_, _, fields),) = collect_events(caplog)
    assert "still_running" not in fields
    assert fields["error_type"] == "BusinessError"


def test_a_disabled_log_event_is_not_rendered(caplog):
    caplog.set_level(logging.ERROR, "ergon_framework")
    redacted_names = []
    harness = LoopHarness(spans=False, redact=lambda key, value: redacted_names.append(key))
    harness.observer.on_transaction_end(make_outcome(OutcomeKind.FAILED, error=BusinessError("no")))
    assert redacted_names == []
    harness.observer.on_transaction_end(make_outcome(OutcomeKind.EXCEPTION_HANDLER_FAILED, error=BusinessError("no")))
    assert redacted_names == ["ergon.exception.message"]


# -- callbacks ------------------------------------------------------------------------------------


def test_a_callback_gets_the_outcome_and_its_error_is_logged(caplog):
    outcomes = []
    result = make_outcome(OutcomeKind.SUCCEEDED)
    log_exceptions(outcomes.append)(result)
    assert outcomes == [result]
    assert caplog.records == []
    log_exceptions(lambda _: 1 / 0)(result)
    (record,) = caplog.records
    assert (record.levelname, record.event, record.transaction_id) == ("ERROR", "on_outcome failed", "a")
    assert record.exc_info[0] is ZeroDivisionError


def test_a_callback_cannot_end_the_loop_whatever_it_raises(caplog):
    def raise_interrupt(_):
        raise KeyboardInterrupt

    log_exceptions(raise_interrupt)(make_outcome(OutcomeKind.SUCCEEDED))
    assert [record.exc_info[0] for record in caplog.records] == [KeyboardInterrupt]


@pytest.mark.spec("SEC-26")
def test_at_most_a_hundred_missing_keys_a_minute_are_logged_as_errors(fake_time, caplog):
    harness = LoopHarness()

    def end_with_missing_key(key_id):
        caplog.clear()
        harness.observer.on_transaction_end(
            make_outcome(OutcomeKind.DEFERRED, reason="missing_key", error=MissingKeyError.for_key(key_id))
        )
        [(level, *_)] = collect_events(caplog)
        return level

    assert {end_with_missing_key(f"key-{number}") for number in range(100)} == {"ERROR"}
    assert [end_with_missing_key("key-0"), end_with_missing_key("one-more")] == ["INFO", "INFO"]
    fake_time.seconds += 60.0
    assert [end_with_missing_key("one-more"), end_with_missing_key("key-0"), end_with_missing_key("key-0")] == [
        "ERROR",
        "ERROR",
        "INFO",
    ]
