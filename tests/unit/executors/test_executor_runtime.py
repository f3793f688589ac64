"""The Python runtime, asked line by line: whatever a handler does, one outcome follows."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import json
import math
import threading
import uuid
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import AfterValidator, BaseModel, Field

from ergon_framework import scope
from ergon_framework.errors import Category, ConfigurationError, ErgonError
from ergon_framework.executors import metrics
from ergon_framework.executors.json_lines import MAX_LINE_BYTES, LineSplitter, OverlongLine
from ergon_framework.executors.protocol import MAX_TRACEBACK_BYTES, ExecutionOutcome, read_outcome
from ergon_framework.executors.registry import HandlerRegistry, Retry
from ergon_framework.executors.runtime import Runtime, current_job
from ergon_framework.telemetry.context import inject_carrier
from ergon_framework.telemetry.spans import Tracing
from ergon_framework.transaction import Transaction
from tests.log_events import get_event
from tests.unit.executors.messages import build_request, encode_request


def make_runtime(*functions, **named_functions):
    registry = HandlerRegistry()
    for function in functions:
        registry.handler(function)
    for name, function in named_functions.items():
        registry.handler(name)(function)
    return Runtime(registry)


def run_handler(function, *args, **fields):
    """What becomes of a request to *function*; it is named for what it does."""
    runtime = make_runtime(handler=function)
    try:
        return read_outcome(runtime.reply(encode_request("handler", *args, **fields)))
    finally:
        runtime.close()


def get_status(outcome):
    return outcome.status.value, outcome.error_type


# -- handlers -------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    return a + b


async def add_async(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


class Adder:
    def __call__(self, a: int, b: int) -> int:
        return a + b

    def add(self, a: int, b: int) -> int:
        return a + b


@functools.wraps(add)
def decorated_add(*args, **kwargs):
    return add(*args, **kwargs)


def returns_a_coroutine(a: int, b: int):
    return add_async(a, b)


@pytest.mark.spec("EXE-24")
@pytest.mark.parametrize(
    "function", [add, add_async, returns_a_coroutine, functools.partial(add), Adder(), Adder().add, decorated_add]
)
def test_sync_and_async_handlers_both_work(function):
    assert run_handler(function, 1, 2).result == 3
    assert run_handler(function, kwargs={"a": 1, "b": 2}).result == 3
    assert run_handler(function, 1, "x").error_message.startswith("handler: b: Input should be a valid integer")


@pytest.mark.spec("EXE-24")
@pytest.mark.parametrize("variant", ["sync", "async"])
@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyError("k"), RecursionError("deep"), SystemExit(3), GeneratorExit()]
)
def test_any_exception_of_a_handler_is_its_outcome(variant, error):
    def fails():
        raise error

    async def fails_async():
        raise error

    outcome = run_handler(fails if variant == "sync" else fails_async)
    assert get_status(outcome) == ("error", type(error).__name__)
    assert outcome.error_message == str(error)
    assert "in fails" in outcome.error_traceback
    assert "executor/runtime.py" not in outcome.error_traceback


class Invoice(BaseModel):
    total: int


@pytest.mark.spec("DX-18")
def test_a_validation_error_of_a_handler_shows_no_value():
    def validates(total: str):
        Invoice.model_validate({"total": total})

    outcome = run_handler(validates, "secret-value")
    assert outcome.error_message == "1 validation error for Invoice: total: int_parsing"
    assert "in validates" in outcome.error_traceback
    assert "secret-value" not in outcome.error_traceback


@pytest.mark.spec("DX-18")
def test_a_validator_of_an_argument_shows_no_value():
    def refuse(value):
        raise ValueError(f"{value} is not a code")

    def takes(code: Annotated[str, AfterValidator(refuse)]): ...

    takes.__annotations__ = {"code": Annotated[str, AfterValidator(refuse)]}
    assert run_handler(takes, "secret-value").error_message == "handler: code: value_error"


@pytest.mark.spec("EXE-24")
def test_a_cancellation_raised_by_the_handler_is_an_error():
    async def gives_up():
        raise asyncio.CancelledError

    assert get_status(run_handler(gives_up)) == ("error", "CancelledError")


@pytest.mark.spec("EXE-25")
def test_a_long_traceback_keeps_its_end():
    def climbs(n: int):
        if n:
            climbs(n - 1)
        raise ValueError("x" * 50_000 + "the end")

    outcome = run_handler(climbs, 100)
    assert len(outcome.error_traceback.encode()) <= MAX_TRACEBACK_BYTES
    assert outcome.error_traceback.endswith("the end\n")
    assert len(outcome.error_message) == 4096


def test_an_error_whose_str_raises_is_reported():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def fails():
        raise Mute

    assert get_status(run_handler(fails))[1].endswith("Mute")


@pytest.mark.spec("EXE-09")
def test_an_exception_class_cannot_pose_as_a_protocol_error_type():
    exception_type = type("handler_not_found", (Exception,), {})

    def fails():
        raise exception_type

    assert run_handler(fails).error_type.endswith(".handler_not_found")
    assert run_handler(fails).error_type != "handler_not_found"


@pytest.mark.spec("EXE-06")
@pytest.mark.parametrize("after", [None, 0, 7.5])
def test_a_handler_may_raise_or_return_retry(after):
    def raises():
        raise Retry("busy", after=after)

    async def returns():
        return Retry("busy", after=after)

    for function in (raises, returns):
        outcome = run_handler(function)
        assert (outcome.status.value, outcome.error_message, outcome.retry_after_seconds) == ("retry", "busy", after)


@pytest.mark.parametrize("after", [-1, math.nan, math.inf])
def test_a_retry_without_bound_cannot_be_made(after):
    with pytest.raises(ValueError, match="retry_after"):
        Retry(after=after)


@pytest.mark.spec("EXE-06")
def test_a_framework_error_with_retry_after_is_a_retry_unless_it_is_final():
    def fails(final: bool):
        raise ErgonError("later", retry_after=9, final=final)

    def declines():
        raise ErgonError("declined", retry_after=9, category=Category.BUSINESS)

    assert run_handler(fails, False).retry_after_seconds == 9
    assert get_status(run_handler(fails, True)) == ("error", "ErgonError")
    assert get_status(run_handler(declines)) == ("error", "ErgonError")


# -- names and versions ---------------------------------------------------------------------------


@pytest.mark.spec("EXE-09")
def test_an_unknown_handler_is_named_with_the_nearest_one():
    outcome = read_outcome(make_runtime(add).reply(encode_request("ad", 1, 2)))
    assert get_status(outcome) == ("error", "handler_not_found")
    assert "did you mean 'add'?" in outcome.error_message


@pytest.mark.spec("EXE-02")
@pytest.mark.parametrize(
    "data, error_type",
    [
        (encode_request("add", 1, 2, protocol_version="2"), "unsupported_version"),
        (encode_request("add", 1, 2, args="none"), "bad_request"),
        (b'{"job_id": "job-1"}', "bad_request"),
        (encode_request("add").replace(b"[]", b"[NaN]"), "bad_request"),
        (encode_request("add").replace(b"[]", b"[" * 70 + b"]" * 70), "bad_request"),
    ],
)
def test_an_invalid_request_with_a_job_id_is_answered(data, error_type):
    outcome = read_outcome(make_runtime(add).reply(data))
    assert (outcome.job_id, *get_status(outcome)) == ("job-1", "error", error_type)


@pytest.mark.spec("EXE-02")
@pytest.mark.parametrize(
    "data", [b"", b"hello\n", b'{"job_id": 7}', b'{"job_id": "a', OverlongLine(MAX_LINE_BYTES + 1)]
)
def test_an_invalid_request_without_a_job_id_is_logged_and_not_answered(data, caplog):
    assert make_runtime(add).reply(data) is None
    (record,) = caplog.records
    assert get_event(record) == "executor line rejected"
    assert record.bytes == (data.size if isinstance(data, OverlongLine) else len(data))


def test_many_rejected_lines_produce_few_log_events_with_their_count(caplog):
    runtime = make_runtime(add)
    for _ in range(2_500):
        assert runtime.reply(b"") is None
    assert len(caplog.records) == 12
    assert caplog.records[-1].error.endswith("; 2000 lines rejected so far")


# -- typed parameters -----------------------------------------------------------------------------


class Order(BaseModel):
    id: str
    total: Annotated[int, Field(gt=0)]


def charge(order: Order, at: dt.datetime, *, currency: Literal["EUR", "USD"] = "EUR") -> str:
    return f"{order.id} {order.total} {currency} {at:%Y}"


SECRET = "hunter2"


def test_arguments_are_converted_to_their_annotations():
    assert run_handler(charge, {"id": "o", "total": 5}, "2026-01-01T00:00:00Z").result == "o 5 EUR 2026"


@pytest.mark.parametrize(
    "args, kwargs, parameter",
    [
        ([{"id": SECRET, "total": -1}, "2026-01-01T00:00:00Z"], {}, "order.total"),
        ([{"id": "o", "total": SECRET}, "2026-01-01T00:00:00Z"], {}, "order.total"),
        ([{"id": "o", "total": 1}, SECRET], {}, "at"),
        ([{"id": "o", "total": 1}], {}, "at"),
        ([{"id": "o", "total": 1}], {"at": SECRET}, "at"),
        ([{"id": "o", "total": 1}, "2026-01-01T00:00:00Z"], {"currency": SECRET}, "currency"),
        ([{"id": "o", "total": 1}, "2026-01-01T00:00:00Z"], {"colour": SECRET}, "colour"),
    ],
)
def test_an_argument_that_does_not_fit_names_its_parameter_and_no_value(args, kwargs, parameter, caplog):
    outcome = run_handler(charge, *args, kwargs=kwargs)
    assert get_status(outcome) == ("error", "invalid_argument")
    assert f"handler: {parameter}: " in outcome.error_message
    assert SECRET not in outcome.error_message
    assert outcome.error_traceback is None
    assert caplog.records == []


def test_a_validation_error_inside_a_handler_is_not_an_invalid_argument():
    def validates():
        Order.model_validate({})

    assert get_status(run_handler(validates)) == ("error", "ValidationError")


def test_annotations_may_name_later_definitions():
    assert run_handler(use_later_class, {"x": 1}).result == 1


def use_later_class(later: Later) -> int:
    return later.x


class Later(BaseModel):
    x: int


def test_unusable_annotations_are_reported_at_startup():
    def broken(x: Missing):  # noqa: F821 - the point
        ...

    with pytest.raises(ConfigurationError, match=r"'handler' cannot be used.*Missing"):
        run_handler(broken)


@pytest.mark.parametrize(
    "register, message",
    [
        (lambda registry: registry.handler(lambda: 1), "no name"),
        (lambda registry: registry.handler("")(add), "1 to 1024"),
        (lambda registry: registry.handler("x")(7), "is not a function"),
        (lambda registry: [registry.handler(add), registry.handler(add)], "already a handler 'add'"),
    ],
)
def test_a_handler_needs_its_own_name(register, message):
    with pytest.raises(ConfigurationError, match=message):
        register(HandlerRegistry())


# -- results --------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    at: dt.date


@pytest.mark.parametrize(
    "value, expected",
    [
        (Order(id="o", total=1), {"id": "o", "total": 1}),
        (Point(1, dt.date(2026, 1, 2)), {"x": 1, "at": "2026-01-02"}),
        ([dt.datetime(2026, 1, 2, tzinfo=dt.UTC)], ["2026-01-02T00:00:00Z"]),
        ({"id": uuid.UUID(int=1)}, {"id": "00000000-0000-0000-0000-000000000001"}),
        ((decimal.Decimal("1.10"), Colour.RED, {1}), ["1.10", "red", [1]]),
        ({1: "a"}, {"1": "a"}),
        (None, None),
    ],
)
def test_common_values_are_results(value, expected):
    outcome = run_handler(lambda: value)
    assert (outcome.status.value, outcome.result) == ("success", expected)


def circle():
    value = []
    value.append(value)
    return value


def nest_lists(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


class Explodes(dict):
    def items(self):
        raise SystemExit

    def __len__(self):
        return 1


@pytest.mark.spec("EXE-17")
@pytest.mark.parametrize(
    "value",
    [
        object(),
        math.nan,
        {"deep": [math.inf]},
        "\ud800",
        b"bytes",
        threading.Lock(),
        nest_lists(64),
        nest_lists(50_000),
        circle(),
        "x" * MAX_LINE_BYTES,
        10**5000,
        {(1, 2): 3},
        (n for n in range(3)),
        Explodes(x=1),
        Order,
        Order.model_construct(id=object()),
        Point(math.nan, object()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_result_that_cannot_be_sent_is_an_error_outcome(value):
    outcome = run_handler(lambda: value)
    assert get_status(outcome) == ("error", "invalid_result")
    assert len(outcome.error_message) < 500


class Table(BaseModel):
    rows: dict[Any, Any]


@dataclasses.dataclass
class Rows:
    rows: dict[Any, Any]


class Named(enum.Enum):
    ROWS = Rows({7: "a", "7": "b"})


@pytest.mark.spec("EXE-17", "EXE-25")
@pytest.mark.parametrize(
    "value, key",
    [
        ({1: "a", "1": "b"}, "1"),
        ({"rows": [0, ({"x": {None: "a", "null": "b"}},)]}, "null"),
        ({True: "a", "true": "b"}, "true"),
        ({1.5: "a", "1.5": "b"}, "1.5"),
        (Table(rows={1: "a", "1": "b"}), "1"),
        (Rows({1: "a", "1": "b"}), "1"),
        ([Named.ROWS], "7"),
    ],
)
def test_a_result_with_two_keys_of_the_same_text_names_the_key(value, key):
    outcome = run_handler(lambda: value)
    assert get_status(outcome) == ("error", "invalid_result")
    assert outcome.error_message == f"the result cannot be sent: two keys of one object are both written as {key!r}"


@pytest.mark.spec("EXE-17")
def test_an_async_generator_is_no_result():
    async def many():
        yield 1

    assert get_status(run_handler(many)) == ("error", "invalid_result")


@pytest.mark.spec("EXE-17", "EXE-25")
def test_the_deepest_and_longest_results_that_fit_are_sent():
    assert run_handler(lambda: nest_lists(63)).result == nest_lists(63)
    assert len(run_handler(lambda: "x" * (MAX_LINE_BYTES - 500)).result) == MAX_LINE_BYTES - 500


unusual_values = st.one_of(
    st.none(), st.floats(), st.binary(max_size=3), st.complex_numbers(), st.text(), st.just(object()), st.integers()
)
nested_values = st.recursive(
    unusual_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.spec("EXE-17")
@settings(max_examples=40, deadline=None)
@given(nested_values)
def test_any_return_value_gives_exactly_one_line(value):
    reply = make_runtime(handler=lambda: value).reply(encode_request("handler"))
    assert reply.count(b"\n") == 1
    assert reply.endswith(b"\n")
    # Keys that are text already and keys that become the same text are the only doubt that a reader may have.
    outcome = read_outcome(reply)
    assert isinstance(outcome, ExecutionOutcome) or outcome.reason.value == "repeated_key"
    assert outcome.job_id == "job-1"


# -- scope, deadline, trace -----------------------------------------------------------------------


def read_scope():
    here = scope.current()
    return [here.transaction_id, here.attempt, here.step, here.transaction.source, here.derive("charge")]


@pytest.mark.parametrize("variant", ["sync", "async"])
def test_a_handler_has_the_scope_of_its_job(variant):
    async def read_scope_async():
        return read_scope()

    context = {"attempt": 3, "queue_name": "orders"}
    outcome = run_handler(read_scope if variant == "sync" else read_scope_async, context=context)
    assert outcome.result == [
        "job-1",
        2,
        "process",
        "orders",
        Transaction(id="job-1", source="orders").derive("charge"),
    ]
    assert scope.current() is None


@pytest.mark.spec("EXE-03")
def test_a_handler_may_ask_for_the_context_of_its_job():
    context = {"attempt": 3, "worker_id": "w-1", "queue_name": "orders"}
    outcome = run_handler(lambda: current_job().model_dump(include=set(context)), context=context)
    assert outcome.result == context
    assert current_job() is None


def format_deadline(seconds):
    return (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


@pytest.mark.spec("EXE-03")
def test_the_deadline_is_in_the_scope():
    def remaining():
        return scope.current().remaining()

    assert 50 < run_handler(remaining, context={"deadline": format_deadline(60)}).result <= 60
    assert run_handler(remaining).result is None


@pytest.mark.spec("EXE-07")
def test_an_async_handler_is_cancelled_at_its_deadline():
    ended = []

    async def hangs():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    assert run_handler(hangs, context={"deadline": format_deadline(0.05)}).status.value == "timeout"
    assert ended == ["cancelled"]


@pytest.mark.spec("EXE-07")
def test_a_job_after_its_deadline_does_not_run():
    ran = []
    outcome = run_handler(lambda: ran.append(1), context={"deadline": format_deadline(-1)})
    assert (outcome.status.value, ran) == ("timeout", [])


def test_a_timeout_error_raised_by_the_handler_is_an_error():
    async def raises():
        raise TimeoutError

    assert get_status(run_handler(raises, context={"deadline": format_deadline(60)})) == ("error", "TimeoutError")


def test_no_scope_leaks_into_the_next_job():
    runtime = make_runtime(seen=lambda: scope.current().transaction_id, fails=lambda: 1 / 0)
    for job in ("a", "b"):
        runtime.reply(encode_request("fails", job_id=job))
        assert read_outcome(runtime.reply(encode_request("seen", job_id=job))).result == job
    assert scope.current() is None


def test_async_handlers_share_one_event_loop():
    loops = []

    async def remembers():
        loops.append(asyncio.get_running_loop())

    runtime = make_runtime(remembers)
    runtime.reply(encode_request("remembers"))
    runtime.reply(encode_request("remembers"))
    runtime.close()
    assert loops[0] is loops[1]
    assert loops[0].is_closed()


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(metrics, "create_tracing", lambda _: Tracing(provider.get_tracer("test")))
    return exporter


@pytest.mark.spec("EXE-14")
@pytest.mark.parametrize("variant", ["sync", "async"])
def test_the_trace_of_the_request_is_continued(variant, spans):
    def current():
        span_context = trace.get_current_span().get_span_context()
        return [f"{span_context.trace_id:032x}", f"{span_context.span_id:016x}", baggage.get_baggage("tenant")]

    async def current_async():
        return current()

    carrier = {"traceparent": PARENT, "baggage": "tenant=acme"}
    outcome = run_handler(
        current if variant == "sync" else current_async, context={"trace_context": carrier, "attempt": 2}
    )
    (span,) = spans.get_finished_spans()
    assert span.name == "rrq.executor"
    assert (span.context.trace_id, span.parent.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert outcome.result == [f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", "acme"]
    assert dict(span.attributes) == {
        "ergon.transaction.id": "job-1",
        "ergon.executor.handler": "handler",
        "ergon.executor.queue": "default",
        "ergon.attempt": 1,
        "ergon.outcome": "success",
    }


@pytest.mark.spec("EXE-14", "RUN-04")
@pytest.mark.parametrize("variant", ["sync", "async"])
def test_without_tracing_the_trace_of_the_request_is_passed_on(variant, monkeypatch):
    monkeypatch.setattr(metrics, "create_tracing", lambda _: None)

    async def outbound_async():
        return inject_carrier()

    handler = inject_carrier if variant == "sync" else outbound_async
    carrier = {"traceparent": PARENT, "baggage": "tenant=acme"}
    runtime = make_runtime(handler=handler)
    outcomes = [
        read_outcome(runtime.reply(encode_request("handler", context={"trace_context": each})))
        for each in (carrier, None)
    ]
    runtime.close()
    # What came with one job is not left behind for the next.
    assert [one.result for one in outcomes] == [carrier, {}]


@pytest.mark.spec("EXE-14")
def test_a_failure_is_recorded_in_its_span_without_its_message(spans):
    def fails():
        raise ValueError(SECRET)

    run_handler(fails)
    run_handler(object)
    first, second = spans.get_finished_spans()
    assert (first.status.is_ok, first.attributes["ergon.code"]) == (False, "ValueError")
    assert first.parent is None
    assert SECRET not in first.to_json()
    assert second.attributes["ergon.code"] == "invalid_result"


def test_failing_telemetry_fails_no_job(monkeypatch):
    class Broken:
        def transaction(self, *_):
            raise RuntimeError

    monkeypatch.setattr(metrics, "create_tracing", lambda _: Broken())
    assert run_handler(add, 1, 2).result == 3


# -- the stream -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=12).filter(lambda data: b"\n" not in data), max_size=8), st.data())
def test_lines_are_complete_for_every_chunking(lines, data):
    stream = b"".join(line + b"\n" for line in lines) + b"partial"
    splitter, received = LineSplitter(max_bytes=10), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += splitter.feed(stream[:size])
        stream = stream[size:]
    assert received == [line if len(line) <= 10 else OverlongLine(len(line)) for line in lines]


@pytest.mark.spec("EXE-25")
def test_at_most_one_line_is_buffered():
    splitter = LineSplitter(max_bytes=100)
    for _ in range(1000):
        assert list(splitter.feed(b"x" * 50)) == []
        assert len(splitter._buffer) <= 100
    assert list(splitter.feed(b"\nshort\n")) == [OverlongLine(50_000), b"short"]


def test_a_stop_cancels_the_running_handler_and_sends_its_outcome():
    started, stopped = threading.Event(), []

    async def hangs():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(scope.current().cancelled)

    runtime = make_runtime(hangs)
    threading.Thread(target=lambda: started.wait(10) and runtime.stop("SIGTERM"), daemon=True).start()
    outcome = read_outcome(runtime.reply(encode_request("hangs")))
    runtime.close()
    assert get_status(outcome) == ("error", "terminated")
    assert stopped == [True]


def test_a_sync_handler_sees_the_stop_and_its_result_counts():
    def looks():
        runtime.stop("SIGTERM")
        return scope.current().cancelled

    runtime = make_runtime(looks)
    assert read_outcome(runtime.reply(encode_request("looks"))).result is True


def test_the_request_builders_agree():
    assert json.loads(encode_request("f", 1)) == build_request("f", 1)
