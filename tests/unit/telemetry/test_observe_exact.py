"""What is told of a loop becomes numbers, spans and log events, each of them exactly once."""

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

from ergon_framework.connectors.base import Delivery, Later, MissingKeyError, SettleResult
from ergon_framework.engine.attempts import Note
from ergon_framework.engine.effects import Call
from ergon_framework.task import observe
from ergon_framework.task.exceptions import BusinessError, FetchException, TransactionException
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.observe import observing, observing_produce, safely
from ergon_framework.task.report import End, Kind, Outcome
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.telemetry.names import Field, listed
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.transaction import Transaction

NOW = 1_000_000.0
ELSEWHERE = "0af7651916cd43dd8448eb211c80319c"
CARRIER = {"traceparent": f"00-{ELSEWHERE}-b7ad6b7169203331-01"}
SHARED = {"ergon.task": "Orders", "ergon.concurrency": 2, "ergon.batch.size": 5}
LOOP = {"concurrency": {"value": 2}, "batch": {"size": 5}}


class Clocks:
    """Stands where the observer reads the time."""

    def __init__(self):
        self.wall = NOW
        self.seconds = 50.0

    def time(self):
        return self.wall

    def perf_counter(self):
        return self.seconds

    def monotonic(self):
        return self.seconds


class Asked(ParentBased):
    """Remembers the names of the spans that it was asked about."""

    def __init__(self, root):
        super().__init__(root)
        self.names = []

    def should_sample(self, parent_context, trace_id, name, *args, **more):
        self.names.append(name)
        return super().should_sample(parent_context, trace_id, name, *args, **more)


class Orders:
    """A task, as far as an observer knows one."""


class Seen:
    """A loop that is observed, and what there is to see of it."""

    def __init__(self, *, sampler=ALWAYS_ON, spans=True, streaming=False, produce=False, fenced=None, **options):
        self._exporter = InMemorySpanExporter()
        tracers = TracerProvider(sampler=sampler)
        tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._meters = MeterProvider(shutdown_on_exit=False)
        more = {"tracer_provider": tracers if spans else trace.NoOpTracerProvider()} | options
        task = Orders()
        task.telemetry = TelemetryOptions(meter_provider=self._meters, **more)
        if produce:
            self.observer = observing_produce(task, ProducerPolicy.load({"loop": LOOP}), fenced=fenced)
        else:
            rules = ConsumerPolicy.load({"loop": LOOP | {"streaming": streaming}})
            self.observer = observing(task, rules, fenced=fenced)
        self.observer.began(lambda: (3, 2, 1))

    def metric(self, metric):
        """The values of *metric* by its attributes after the task, which is always the same."""
        found = registry_of(self._meters).read(metric)
        assert {labels["ergon.task"] for labels, _ in found} <= {"Orders"}
        return {tuple(labels.get(name) for name in metric.attributes[1:]): value for labels, value in found}

    @property
    def spans(self):
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def fetch(self, *transactions):
        """One fetch of one attempt that brings *transactions*."""
        self.observer.batch(5)
        self.observer.fetching().attempt(0)
        self.observer.fetched([Delivery(each, each.id) for each in transactions], None)


@pytest.fixture
def clocks(monkeypatch):
    found = Clocks()
    monkeypatch.setattr(observe, "time", found)
    return found


@pytest.fixture(autouse=True)
def _heard(caplog):
    caplog.set_level(logging.DEBUG, "ergon_framework")


def events(caplog):
    """Every record of the loop: its level, its event and its fields."""
    fields = [name for name in listed(Field) if name != Field.EVENT]
    return [
        (record.levelname, record.event, {name: vars(record)[name] for name in fields if name in vars(record)})
        for record in caplog.records
        if record.name == "ergon_framework.task"
    ]


def complaints(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]


def outcome(kind, *, transaction=None, **more):
    made = Outcome(transaction or Transaction("a", source="orders"), kind)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def note(step, error):
    return Note(step, 0, error, at=0.0)


def with_cause(error, cause):
    error.__cause__ = cause
    return error


def span_in(context):
    return context.run(trace.get_current_span)


# -- the loop -------------------------------------------------------------------------------------


def test_a_loop_shows_its_slots_and_its_late_bodies_from_its_beginning_on():
    seen = Seen(fenced=lambda: 4)
    assert seen.metric(names.SLOTS) == {("running",): 3, ("abandoned",): 2, ("held",): 1}
    assert seen.metric(names.FENCED) == {(): 4}
    produced = Seen(produce=True, fenced=lambda: 5)
    assert produced.metric(names.FENCED) == {(): 5}


@pytest.mark.parametrize(
    "task, name", [(Orders(), "Orders"), (type("Bills", (), {"name": "bills-nightly"})(), "bills-nightly")]
)
def test_a_loop_is_called_by_its_task_s_name_or_else_by_its_class(caplog, task, name):
    observing(task, ConsumerPolicy()).over(End.EMPTY)
    assert events(caplog) == [("INFO", "loop ended", {"task": name, "end": "empty"})]


def test_the_end_of_a_loop_closes_its_root_its_gauges_and_its_memory(caplog):
    seen = Seen()
    seen.fetch()
    made = outcome(Kind.SUCCEEDED)
    seen.observer.begin(made.transaction, None).ended(made)
    assert seen.observer.trace_id(made) == f"{seen.spans['start_processing'].context.trace_id:032x}"
    seen.observer.over(End.LIMIT)
    assert dict(seen.spans["consume_transactions"].attributes) == SHARED | {"ergon.end": "limit"}
    assert seen.metric(names.SLOTS) == {}
    assert seen.metric(names.FETCHES) == {(): 1}
    assert seen.observer.trace_id(made) is None
    assert events(caplog) == [("INFO", "loop ended", {"task": "Orders", "end": "limit"})]


@pytest.mark.spec("CON-47")
def test_a_pause_is_shown_until_it_is_over(caplog):
    seen = Seen()
    seen.observer.paused("r" * 101)
    assert seen.metric(names.PAUSED) == {("r" * 100,): 1}
    seen.observer.paused(None)
    assert seen.metric(names.PAUSED) == {}
    assert events(caplog) == [
        ("WARNING", "loop paused", {"task": "Orders", "reason": "r" * 100}),
        ("INFO", "loop resumed", {"task": "Orders"}),
    ]


def test_the_reason_of_a_pause_passes_the_hook(caplog):
    seen = Seen()
    seen.observer.paused("password=pw")
    assert seen.metric(names.PAUSED) == {("password=[hidden]",): 1}
    assert events(caplog) == [("WARNING", "loop paused", {"task": "Orders", "reason": "password=[hidden]"})]


@pytest.mark.spec("CON-20")
def test_every_breach_is_counted_and_the_first_is_told(caplog):
    seen = Seen()
    for got in (7, 8, 9):
        seen.observer.breach(5, got)
    assert seen.metric(names.BREACHES) == {(): 3}
    assert events(caplog) == [("WARNING", "contract breach", {"task": "Orders", "asked": 5, "got": 7})]


# -- fetches --------------------------------------------------------------------------------------


def test_a_fetch_is_counted_with_its_time_and_its_attempts(clocks):
    seen = Seen()
    seen.observer.batch(5)
    fetching = seen.observer.fetching()
    for number in range(3):
        fetching.attempt(number)
    clocks.seconds += 0.75
    seen.observer.fetched([Delivery(Transaction("a"), 1)], None)
    assert seen.metric(names.STEPS) == {("fetch",): 1}
    assert seen.metric(names.STEP_SECONDS) == {("fetch",): 0.75}
    buckets = seen.metric(names.STEP_BUCKETS)
    assert (buckets["fetch", "0.5"], buckets["fetch", "1"]) == (0, 1)
    assert seen.metric(names.ATTEMPTS) == {("fetch",): 3}
    assert seen.metric(names.RETRIES) == {("fetch",): 2}
    assert (seen.metric(names.FETCHES), seen.metric(names.EMPTY_FETCHES)) == ({(): 1}, {})
    assert seen.metric(names.FAILED_FETCHES) == {}


@pytest.mark.parametrize("made, retries", [(1, {}), (2, {("fetch",): 1})])
def test_only_what_follows_the_first_attempt_at_a_fetch_is_a_retry(made, retries):
    seen = Seen(spans=False)
    fetching = seen.observer.fetching()
    for number in range(made):
        assert fetching.attempt(number) is None
        fetching.attempted(number, None)
    seen.observer.fetched([], None)
    assert seen.metric(names.RETRIES) == retries
    assert seen.metric(names.EMPTY_FETCHES) == {(): 1}


def test_a_fetch_is_a_span_that_says_what_it_brought_and_its_body_runs_in_its_attempt(caplog):
    seen = Seen()
    seen.observer.batch(5)
    fetching = seen.observer.fetching()
    body = fetching.attempt(0)
    assert span_in(body).name == "fetch_transactions.attempt"
    fetching.attempted(0, None)
    seen.observer.fetched([Delivery(Transaction("a"), 1), Delivery(Transaction("b"), 2)], None)
    fetch, attempt = seen.spans["fetch_transactions"], seen.spans["fetch_transactions.attempt"]
    assert dict(fetch.attributes) == {"ergon.batch.fetched": 2}
    assert attempt.parent.span_id == fetch.context.span_id
    assert (attempt.attributes["ergon.attempt"], "ergon.transaction.id" in attempt.attributes) == (0, False)
    assert fetch.status.status_code is StatusCode.UNSET
    assert complaints(caplog) == []


def test_a_failed_fetch_is_blamed_on_its_error(caplog):
    seen = Seen()
    seen.observer.batch(5)
    seen.observer.fetching().attempt(0)
    seen.observer.fetched(None, with_cause(FetchException("no answer"), OSError("no route")))
    assert dict(seen.spans["fetch_transactions"].attributes) == {
        "ergon.exception.type": "OSError",
        "ergon.exception.message": "no answer",
        "ergon.category": "SYSTEM",
        "ergon.code": "fetch",
    }
    assert seen.spans["fetch_transactions"].status.description == "no answer"
    told = {"task": "Orders", "error": "no answer", "error_type": "OSError", "category": "SYSTEM", "code": "fetch"}
    assert events(caplog) == [("ERROR", "fetch failed", told)]
    assert (seen.metric(names.FAILED_FETCHES), seen.metric(names.FETCHES)) == ({(): 1}, {})


def test_an_error_without_a_verdict_is_told_without_one(caplog):
    seen = Seen(spans=False)
    seen.observer.fetching().attempt(0)
    seen.observer.fetched(None, OSError("no route"))
    told = {"task": "Orders", "error": "no route", "error_type": "OSError"}
    assert events(caplog) == [("ERROR", "fetch failed", told)]


def test_a_fetch_in_which_the_loop_ended_is_neither_answered_nor_failed(caplog):
    seen = Seen(streaming=True)
    seen.observer.batch(5)
    seen.observer.fetching().attempt(0)
    seen.observer.fetched(None, None)
    for metric in (names.FETCHES, names.EMPTY_FETCHES, names.FAILED_FETCHES):
        assert seen.metric(metric) == {}
    assert seen.metric(names.ATTEMPTS) == {("fetch",): 1}
    fetch = seen.spans["fetch_transactions"]
    assert dict(fetch.attributes) == {}
    assert seen.spans["consume_transactions"].attributes["ergon.batch.fetched"] == 0
    assert events(caplog) == []
    assert complaints(caplog) == []


def test_a_fetch_that_nobody_sees_runs_in_the_trace_of_its_root():
    sampler = Asked(ALWAYS_OFF)
    seen = Seen(sampler=sampler)
    seen.observer.batch(5)
    fetching = seen.observer.fetching()
    body = fetching.attempt(0)
    fetching.attempted(0, OSError("no route"))
    seen.observer.fetched([], None)
    assert sampler.names == ["consume_transactions"]
    found = span_in(body).get_span_context()
    assert (found.is_valid, found.trace_flags.sampled) == (True, False)


def test_a_fetch_whose_own_span_was_dropped_runs_in_the_trace_and_has_no_attempts():
    class Dropping(Asked):
        def should_sample(self, parent_context, trace_id, name, *args, **more):
            sampler = ALWAYS_OFF if name == "fetch_transactions" else ALWAYS_ON
            self.names.append(name)
            return sampler.should_sample(parent_context, trace_id, name, *args, **more)

    sampler = Dropping(ALWAYS_ON)
    seen = Seen(sampler=sampler)
    seen.observer.batch(5)
    body = seen.observer.fetching().attempt(0)
    seen.observer.fetched([], None)
    assert sampler.names == ["consume_transactions", "fetch_transactions"]
    assert not span_in(body).get_span_context().trace_flags.sampled


@pytest.mark.parametrize(
    "born, age",
    [
        ([NOW - 5, NOW - 9, None, NOW - 2], {(): 9.0}),
        ([NOW + 5], {(): 0.0}),
        ([NOW - 0.5], {(): 0.5}),
        ([None], {}),
        ([], {}),
    ],
    ids=["oldest", "from the future", "young", "unknown", "empty"],
)
def test_the_age_of_a_queue_is_that_of_the_oldest_that_was_fetched(clocks, born, age):
    assert clocks.time() == NOW
    seen = Seen()
    seen.fetch(*(Transaction(f"t{number}", created_at=made) for number, made in enumerate(born)))
    assert seen.metric(names.QUEUE_AGE) == age


# -- a transaction begins -------------------------------------------------------------------------


def test_a_transaction_s_span_carries_its_id_and_nothing_of_its_payload():
    seen = Seen()
    seen.fetch()
    made = outcome(Kind.SUCCEEDED, transaction=Transaction("a", {"customer": 7}), attempts=1)
    seen.observer.begin(made.transaction, None).ended(made)
    told = {"ergon.transaction.id": "a", "ergon.outcome": "succeeded", "ergon.attempts": 1}
    assert dict(seen.spans["start_processing"].attributes) == {"ergon.task": "Orders"} | told


def test_a_consumed_transaction_continues_its_trace_and_a_produced_one_belongs_to_its_call():
    for produce, name in ((False, "start_processing"), (True, "start_producing")):
        seen = Seen(produce=produce)
        seen.observer.batch(1)
        made = outcome(Kind.SUCCEEDED, transaction=Transaction("a", trace=CARRIER))
        seen.observer.begin(made.transaction, None).ended(made)
        assert (f"{seen.spans[name].context.trace_id:032x}" == ELSEWHERE) is not produce


def test_without_tracing_nobody_watches_a_transaction():
    seen = Seen(spans=False)
    made = outcome(Kind.SUCCEEDED)
    assert seen.observer.begin(made.transaction, None) is None
    assert seen.observer.trace_id(made) is None


def test_below_a_root_that_nobody_sees_one_watch_serves_all_and_no_span_is_asked_for():
    sampler = Asked(ALWAYS_OFF)
    seen = Seen(sampler=sampler, streaming=True)
    first, second, third = (Transaction(name) for name in "abc")
    seen.fetch(first, second)
    watch = seen.observer.begin(first, None)
    assert watch.recording is False
    assert seen.observer.begin(second, None) is watch
    seen.fetch(third)
    other = seen.observer.begin(third, None)
    assert other is not watch
    assert seen.observer.begin(third, None) is other
    assert seen.observer.begin(first, None).node is watch.node
    assert sampler.names == ["consume_transactions"] * 2
    found = span_in(watch.attempt(0)).get_span_context()
    assert found == watch.node.span.get_span_context() != span_in(other.attempt(0)).get_span_context()


def test_what_nobody_sees_is_found_in_its_trace_all_the_same():
    seen = Seen(sampler=ParentBased(ALWAYS_OFF))
    seen.observer.batch(5)
    made = outcome(Kind.FAILED, error=BusinessError("no"))
    watch = seen.observer.begin(made.transaction, None)
    watch.ended(made)
    assert seen.observer.trace_id(made) == f"{watch.node.span.get_span_context().trace_id:032x}"
    assert seen.observer.trace_id(outcome(Kind.FAILED)) is None


# -- a transaction ends ---------------------------------------------------------------------------


def test_settlements_are_counted_by_their_results():
    seen = Seen()
    seen.observer.settled([SettleResult.SETTLED, SettleResult.LOST, SettleResult.SETTLED, SettleResult.FAILED], 0.25)
    seen.observer.settled([SettleResult.SETTLED], 0.5)
    assert seen.metric(names.SETTLED) == {("settled",): 3, ("lost",): 1, ("failed",): 1}
    assert seen.metric(names.STEPS) == {("settle",): 2}
    assert seen.metric(names.STEP_SECONDS) == {("settle",): 0.75}


@pytest.mark.spec("CON-30")
@pytest.mark.parametrize("spans", [True, False])
def test_a_refusal_is_counted_told_and_ends_its_batch(caplog, spans):
    seen = Seen(streaming=True, spans=spans)
    transaction = Transaction("a", source="orders")
    seen.fetch(transaction)
    assert "consume_transactions" not in seen.spans
    seen.observer.refused(Delivery(transaction, "a", deliveries=6), "max_deliveries")
    assert ("consume_transactions" in seen.spans) is spans
    assert seen.metric(names.REFUSED) == {("max_deliveries",): 1}
    told = {
        "task": "Orders",
        "transaction_id": "a",
        "source": "orders",
        "correlation_id": "a",
        "reason": "max_deliveries",
        "deliveries": 6,
    }
    assert events(caplog) == [("WARNING", "transaction refused", told)]


@pytest.mark.spec("CON-17")
def test_the_end_of_the_last_transaction_ends_its_batch():
    seen = Seen(streaming=True)
    made = [outcome(Kind.SUCCEEDED, transaction=Transaction(name)) for name in "ab"]
    seen.fetch(*(each.transaction for each in made))
    seen.observer.ended(made[0])
    assert "consume_transactions" not in seen.spans
    seen.observer.ended(made[1])
    assert seen.spans["consume_transactions"].attributes["ergon.batch.fetched"] == 2


@pytest.mark.parametrize(
    "kind, level, event",
    [
        (Kind.FAILED, "WARNING", "transaction failed"),
        (Kind.HANDLER_FAILED, "ERROR", "transaction failed"),
        (Kind.DEFERRED, "INFO", "transaction deferred"),
        (Kind.RELEASED, "INFO", "transaction released"),
    ],
)
def test_each_end_but_success_is_told_as_loudly_as_it_deserves(caplog, kind, level, event):
    seen = Seen(spans=False)
    seen.observer.ended(outcome(kind, attempts=2))
    told = {"task": "Orders", "transaction_id": "a", "source": "orders", "correlation_id": "a"}
    told |= {"outcome": kind.value, "attempts": 2}
    if kind is Kind.RELEASED:
        told["started"] = False
    assert events(caplog) == [(level, event, told)]
    assert seen.metric(names.TRANSACTIONS) == {(kind.value, None): 1}


def test_a_success_is_counted_and_not_told(caplog):
    seen = Seen()
    seen.observer.ended(outcome(Kind.SUCCEEDED, durations={"process": 0.5}))
    assert seen.metric(names.TRANSACTIONS) == {("succeeded", None): 1}
    assert events(caplog) == []


def test_the_end_of_a_transaction_is_told_with_all_that_is_known(caplog):
    seen = Seen()
    seen.observer.batch(5)
    error = with_cause(TransactionException("token=pw down", code="offline"), OSError("no route"))
    transaction = Transaction("a", source="orders", correlation="c-1", tenant="acme")
    made = outcome(
        Kind.HANDLER_FAILED,
        transaction=transaction,
        attempts=3,
        error=error,
        reason="stop",
        notes=[note("process", error), note("exception", error)],
        body=Call("exception", int, ()),
        settlement=Later(7.5),
    )
    seen.observer.begin(transaction, None).ended(made)
    seen.observer.ended(made)
    start = seen.spans["start_processing"].context
    told = {
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
    assert events(caplog) == [("ERROR", "transaction failed", told)]
    assert seen.observer.trace_id(made) is None, "what has ended is not remembered"


def test_a_body_that_has_left_is_not_told_of(caplog):
    seen = Seen(spans=False)
    body = Call("process", int, ())
    body.left = True
    seen.observer.ended(outcome(Kind.FAILED, error=BusinessError("no"), body=body))
    ((_, _, told),) = events(caplog)
    assert "still_running" not in told
    assert told["error_type"] == "BusinessError"


def test_what_nobody_hears_is_not_even_put_into_words(caplog):
    caplog.set_level(logging.ERROR, "ergon_framework")
    asked = []
    seen = Seen(spans=False, redact=lambda key, value: asked.append(key))
    seen.observer.ended(outcome(Kind.FAILED, error=BusinessError("no")))
    assert asked == []
    seen.observer.ended(outcome(Kind.HANDLER_FAILED, error=BusinessError("no")))
    assert asked == ["ergon.exception.message"]


# -- callbacks ------------------------------------------------------------------------------------


def test_a_callback_that_fails_is_logged_and_one_that_works_is_told(caplog):
    told = []
    made = outcome(Kind.SUCCEEDED)
    safely(told.append)(made)
    assert told == [made]
    assert caplog.records == []
    safely(lambda _: 1 / 0)(made)
    (record,) = caplog.records
    assert (record.levelname, record.event, record.transaction_id) == ("ERROR", "on_outcome failed", "a")
    assert record.exc_info[0] is ZeroDivisionError


def test_a_callback_cannot_end_the_loop_whatever_it_raises(caplog):
    def leave(_):
        raise KeyboardInterrupt

    safely(leave)(outcome(Kind.SUCCEEDED))
    assert [record.exc_info[0] for record in caplog.records] == [KeyboardInterrupt]


@pytest.mark.spec("SEC-26")
def test_a_hundred_missing_keys_a_minute_are_errors_and_no_more_are_remembered(clocks, caplog):
    seen = Seen()

    def miss(key_id):
        caplog.clear()
        seen.observer.ended(outcome(Kind.DEFERRED, reason="missing_key", error=MissingKeyError.of(key_id)))
        [(level, *_)] = events(caplog)
        return level

    assert {miss(f"key-{number}") for number in range(100)} == {"ERROR"}
    assert [miss("key-0"), miss("one-more")] == ["INFO", "INFO"]
    clocks.seconds += 60.0
    assert [miss("one-more"), miss("key-0"), miss("key-0")] == ["ERROR", "ERROR", "INFO"]
