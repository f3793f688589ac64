"""What is kept and shown of an error of user code: where it was raised, and what the exception handler raised."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

from ergon_framework import BusinessError, ConsumerPolicy, MemoryConnector, Transaction, consumer
from ergon_framework.cli.logs import Structured
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.telemetry.options import TelemetryOptions

ONCE = ConsumerPolicy.load({"steps": {step: {"retry": {"max_attempts": 1}} for step in ("process", "exception")}})


class Order(BaseModel):
    total: int
    lines: list[int] = []


def price(order):
    return order["totl"]  # the bug


def line_of(function, text):
    """``file:line`` of the line of *function* that holds *text*."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + index for index, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{number}"


class Watched:
    """One run of a task over one order: its dead letter, its log and its spans."""

    def __init__(self, flavour, process, exception=None, *, payload=None, **options):
        self.exporter = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.queue = MemoryConnector("orders")
        self.queue.dispatch([Transaction("order-1", {"total": 20} if payload is None else payload)])
        self.text, self.json = io.StringIO(), io.StringIO()
        self.records = []
        self._run(self._task(flavour, process, exception, TelemetryOptions(tracer_provider=tracers, **options)))

    def _task(self, flavour, process, exception, options):
        if flavour == "sync":

            @consumer(self.queue, policy=ONCE)
            def charge(order):
                process(order)

        else:

            @consumer(self.queue, policy=ONCE)
            async def charge(order):
                process(order)

        if exception is not None and flavour == "sync":
            charge.on_failure(exception)
        elif exception is not None:

            @charge.on_failure
            async def failed(order, error):
                exception(order, error)

        charge.telemetry = options
        return charge

    def _run(self, task):
        log = logging.getLogger("ergon_framework")
        handlers = [logging.StreamHandler(self.text), logging.StreamHandler(self.json)]
        handlers[1].setFormatter(Structured())
        keep = logging.Handler()
        keep.emit = self.records.append
        for handler in (*handlers, keep):
            log.addHandler(handler)
        try:
            ran = task.run()
            self.report = asyncio.run(ran) if inspect.iscoroutine(ran) else ran
        finally:
            for handler in (*handlers, keep):
                log.removeHandler(handler)

    @property
    def failure(self):
        (letter,) = self.queue.dead_letters
        return letter.failure

    @property
    def record(self):
        (record,) = [record for record in self.records if record.getMessage().startswith("transaction failed")]
        return record

    def stacks(self, name):
        """The stack traces of the exceptions that spans called *name* have recorded."""
        spans = [span for span in self.exporter.get_finished_spans() if span.name == name]
        events = [event for span in spans for event in span.events if event.name == "exception"]
        return [event.attributes.get("exception.stacktrace") for event in events]


@pytest.fixture(params=["sync", "async"])
def flavour(request):
    return request.param


@pytest.mark.spec("DX-04")
def test_an_error_of_a_handler_is_shown_with_file_and_line(flavour):
    seen = Watched(flavour, price)
    place = f"{line_of(price, 'the bug')} in price"
    assert place in seen.failure.traceback
    assert 'return order["totl"]' in seen.failure.traceback
    assert seen.failure.traceback.endswith("KeyError: 'totl'")
    assert place in seen.text.getvalue()
    assert place in json.loads(seen.json.getvalue())["traceback"]
    assert isinstance(seen.record.exc_info[1], KeyError)
    assert [place in stack for stack in seen.stacks("process.attempt")] == [True]
    assert [place in stack for stack in seen.stacks("start_processing")] == [True]


@pytest.mark.spec("DX-04")
def test_frames_above_the_users_function_are_left_out(flavour):
    seen = Watched(flavour, price)
    assert "ergon_framework" not in seen.failure.traceback
    assert seen.failure.traceback.startswith(str(inspect.getsourcefile(price)))


@pytest.mark.spec("DX-04")
def test_the_chain_of_causes_is_shown(flavour):
    def fetch(order):
        try:
            return price(order)
        except KeyError as error:
            raise ConnectionError("no price") from error

    traceback = Watched(flavour, fetch).failure.traceback
    first, second = traceback.split("caused by:")
    assert line_of(fetch, "raise ConnectionError") in first
    assert first.rstrip().endswith("ConnectionError: no price")
    assert line_of(price, "the bug") in second


@pytest.mark.spec("DX-04")
def test_a_traceback_is_bounded_and_holds_no_values_and_no_secrets(flavour):
    def deep(order, depth=200):
        card = "4111-1111"
        if depth:
            return deep(order, depth - 1)
        password = "hunter2"
        raise ValueError(f"{'x' * 2000} password={password}", card)

    traceback = Watched(flavour, deep).failure.traceback
    assert sum(" in deep" in line for line in traceback.splitlines()) <= 20
    assert len(traceback.encode()) <= 8192
    assert line_of(deep, "raise ValueError") in traceback
    assert "frames left out" in traceback
    assert "hunter2" not in traceback


@pytest.mark.spec("DX-04")
def test_one_option_turns_tracebacks_off(flavour):
    seen = Watched(flavour, price, record_tracebacks=False)
    assert seen.failure.traceback is None
    assert seen.failure.error_message == "KeyError: 'totl'"
    assert not seen.record.exc_info
    assert seen.record.exc_text is None
    assert "the bug" not in seen.text.getvalue() + seen.json.getvalue()
    assert seen.stacks("process.attempt") == [None]


@pytest.mark.spec("DX-04")
def test_a_business_failure_keeps_its_place_and_makes_no_traceback_in_the_log(flavour):
    def decline(order):
        raise BusinessError("declined", code="declined")

    seen = Watched(flavour, decline)
    assert line_of(decline, "raise BusinessError") in seen.failure.traceback
    assert not seen.record.exc_info


@pytest.mark.spec("DX-04")
def test_a_retried_attempt_formats_nothing(flavour, monkeypatch):
    read = []
    monkeypatch.setattr("linecache.getline", lambda *given: read.append(given) or "")
    queue, tries = MemoryConnector("orders"), []
    queue.dispatch([Transaction("order-1", {})])
    policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.001}}}})

    def work(order):
        tries.append(order)
        if len(tries) < 3:
            raise OSError("not yet")

    if flavour == "sync":
        consumer(queue, policy=policy)(work).run()
    else:

        @consumer(queue, policy=policy)
        async def charge(order):
            work(order)

        asyncio.run(charge.run())
    assert (len(tries), read) == (3, [])


@pytest.mark.spec("DX-04")
def test_a_deferred_transaction_records_no_exception(flavour):
    def defer(order):
        raise TransactionException("not yet", later=True, retry_after=60.0)

    seen = Watched(flavour, defer)
    assert seen.stacks("start_processing") == []
    assert [record.exc_info for record in seen.records if record.exc_info] == []


def compensate(order, error):
    raise RuntimeError("no refund was booked")


@pytest.mark.spec("DX-03", "CON-25")
def test_the_error_of_an_exception_handler_is_shown_beside_the_first(flavour):
    seen = Watched(flavour, price, compensate)
    first, second = f"{line_of(price, 'the bug')} in price", f"{line_of(compensate, 'raise')} in compensate"
    handler = seen.failure.handler_error
    assert (handler.error_type, handler.error_message) == ("RuntimeError", "RuntimeError: no refund was booked")
    assert (handler.category, handler.code) == ("SYSTEM", None)
    assert second in handler.traceback
    assert first in seen.failure.traceback
    assert (seen.failure.error_type, seen.failure.step) == ("KeyError", "process")
    for log in (seen.text.getvalue(), seen.json.getvalue()):
        assert first in log
        assert second in log
    assert (seen.record.error, seen.record.step) == ("KeyError: 'totl'", "process")
    assert (seen.record.handler_error, seen.record.handler_error_type) == (
        "RuntimeError: no refund was booked",
        "RuntimeError",
    )
    assert isinstance(seen.record.exc_info[1], RuntimeError)
    assert [place in stack for place, stack in zip((first, second), seen.stacks("start_processing"), strict=True)] == [
        True,
        True,
    ]
    assert [second in stack for stack in seen.stacks("handle_exception.attempt")] == [True]


@pytest.mark.spec("DX-03")
def test_without_tracebacks_both_errors_are_told(flavour):
    seen = Watched(flavour, price, compensate, record_tracebacks=False)
    assert seen.failure.handler_error.error_message == "RuntimeError: no refund was booked"
    assert seen.failure.handler_error.traceback is None
    assert seen.record.handler_error == "RuntimeError: no refund was booked"


# -- validation errors ----------------------------------------------------------------------------

SECRET = "secret-total-4711"


def validate(order):
    Order.model_validate(order)


def validate_below(order):
    try:
        validate(order)
    except ValueError as error:
        raise RuntimeError(f"cannot read the order: {error}") from error


@pytest.mark.spec("DX-18", "CON-27")
@pytest.mark.parametrize("process", [validate, validate_below])
@pytest.mark.parametrize("step", ["process", "exception"])
def test_a_validation_error_shows_location_and_type_but_no_value(flavour, process, step):
    bad = {"total": SECRET, "lines": [1, SECRET]}

    def handler(order, error):
        process(bad)

    seen = Watched(flavour, process, payload=bad) if step == "process" else Watched(flavour, price, handler)
    shown = [
        seen.failure.model_dump_json(),
        seen.text.getvalue(),
        seen.json.getvalue(),
        repr(list(seen.report.failures)),
    ]
    shown += [span.to_json() for span in seen.exporter.get_finished_spans()]
    shown += [logging.Formatter().formatException(seen.record.exc_info)]
    assert [SECRET in text for text in shown] == [False] * len(shown)
    message = seen.failure.error_message if step == "process" else seen.failure.handler_error.error_message
    assert "2 validation errors for Order: total: int_parsing; lines.1: int_parsing" in message
    assert line_of(validate, "model_validate") in seen.text.getvalue()


@pytest.mark.spec("DX-18")
def test_a_validation_error_shows_the_value_where_payloads_may_be_recorded(flavour):
    seen = Watched(flavour, validate, payload={"total": SECRET}, record_payloads=True)
    assert SECRET in seen.failure.error_message
    assert SECRET in seen.failure.traceback
    assert SECRET in seen.record.error
    assert SECRET in seen.text.getvalue()


@pytest.mark.spec("DX-18")
def test_a_class_task_hides_the_values_of_validation_errors(flavour):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("order-1", {"total": SECRET})])

    class Charge(ConsumerMixin):
        connector = queue

        def process_transaction(self, transaction):
            validate(transaction.payload)

    class ChargeAsync(AsyncConsumerMixin):
        connector = queue

        async def process_transaction(self, transaction):
            validate(transaction.payload)

    if flavour == "sync":
        Charge().consume_transactions(ONCE)
    else:
        asyncio.run(ChargeAsync().consume_transactions(ONCE))
    (letter,) = queue.dead_letters
    assert SECRET not in letter.failure.model_dump_json()
    assert "total: int_parsing" in letter.failure.error_message


@pytest.mark.spec("DX-04")
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize(
    "own",
    [
        {"attempts_made": "many"},
        {"attempts_made": -1},
        {"particulars": "the address"},
        {"particulars": {"detail": "the address"}},
    ],
    ids=["text", "negative", "no mapping", "no such field"],
)
def test_an_error_that_uses_a_name_of_ours_for_something_else_is_recorded(flavour, own):
    def process(order):
        error = BusinessError("no such order")
        error.__dict__.update(own)
        raise error

    failure = Watched(flavour, process).failure
    assert (failure.category, failure.attempts, failure.error_message, failure.detail) == (
        "BUSINESS",
        1,
        "no such order",
        {},
    )
