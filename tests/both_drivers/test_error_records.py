"""What is recorded of an error of user code: where it was raised, and what the exception handler raised."""

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
from ergon_framework.cli.output import JsonFormatter
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.worker.exceptions import TransactionException

ONE_ATTEMPT_POLICY = ConsumerPolicy.load(
    {"steps": {step: {"retry": {"max_attempts": 1}} for step in ("process", "exception")}}
)


class Order(BaseModel):
    total: int
    lines: list[int] = []


def price(order):
    return order["totl"]  # the bug


def find_line(function, text):
    """Return ``file:line`` of the line of *function* that contains *text*."""
    lines, first_line = inspect.getsourcelines(function)
    (number,) = [first_line + index for index, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{number}"


class TaskRun:
    """One run of a task over one order: its dead letter, its log and its spans."""

    def __init__(self, variant, process, exception=None, *, payload=None, **options):
        self.exporter = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.queue = MemoryConnector("orders")
        self.queue.dispatch([Transaction({"total": 20} if payload is None else payload, id="order-1")])
        self.text, self.json = io.StringIO(), io.StringIO()
        self.records = []
        self._run(self._create_task(variant, process, exception, TelemetryOptions(tracer_provider=tracers, **options)))

    def _create_task(self, variant, process, exception, options):
        if variant == "sync":

            @consumer(self.queue, policy=ONE_ATTEMPT_POLICY)
            def charge(order):
                process(order)

        else:

            @consumer(self.queue, policy=ONE_ATTEMPT_POLICY)
            async def charge(order):
                process(order)

        if exception is not None and variant == "sync":
            charge.on_failure(exception)
        elif exception is not None:

            @charge.on_failure
            async def on_failure(order, error):
                exception(order, error)

        charge.telemetry = options
        return charge

    def _run(self, task):
        logger = logging.getLogger("ergon_framework")
        handlers = [logging.StreamHandler(self.text), logging.StreamHandler(self.json)]
        handlers[1].setFormatter(JsonFormatter())
        record_handler = logging.Handler()
        record_handler.emit = self.records.append
        for handler in (*handlers, record_handler):
            logger.addHandler(handler)
        try:
            result = task.run()
            self.report = asyncio.run(result) if inspect.iscoroutine(result) else result
        finally:
            for handler in (*handlers, record_handler):
                logger.removeHandler(handler)

    @property
    def failure(self):
        (dead_letter,) = self.queue.dead_letters
        return dead_letter.failure

    @property
    def record(self):
        (record,) = [record for record in self.records if record.getMessage().startswith("transaction failed")]
        return record

    def list_stack_traces(self, name):
        """Return the stack traces of the exceptions recorded by spans called *name*."""
        spans = [span for span in self.exporter.get_finished_spans() if span.name == name]
        events = [event for span in spans for event in span.events if event.name == "exception"]
        return [event.attributes.get("exception.stacktrace") for event in events]


@pytest.fixture(params=["sync", "async"])
def variant(request):
    return request.param


@pytest.mark.spec("DX-04")
def test_an_error_of_a_handler_is_recorded_with_file_and_line(variant):
    task_run = TaskRun(variant, price)
    location = f"{find_line(price, 'the bug')} in price"
    assert location in task_run.failure.traceback
    assert 'return order["totl"]' in task_run.failure.traceback
    assert task_run.failure.traceback.endswith("KeyError: 'totl'")
    assert location in task_run.text.getvalue()
    assert location in json.loads(task_run.json.getvalue())["traceback"]
    assert isinstance(task_run.record.exc_info[1], KeyError)
    assert [location in stack for stack in task_run.list_stack_traces("process.attempt")] == [True]
    assert [location in stack for stack in task_run.list_stack_traces("start_processing")] == [True]


@pytest.mark.spec("DX-04")
def test_framework_frames_are_left_out_of_the_traceback(variant):
    task_run = TaskRun(variant, price)
    assert "ergon_framework" not in task_run.failure.traceback
    assert task_run.failure.traceback.startswith(str(inspect.getsourcefile(price)))


@pytest.mark.spec("DX-04")
def test_the_traceback_includes_the_chain_of_causes(variant):
    def fetch(order):
        try:
            return price(order)
        except KeyError as error:
            raise ConnectionError("no price") from error

    traceback = TaskRun(variant, fetch).failure.traceback
    first, second = traceback.split("caused by:")
    assert find_line(fetch, "raise ConnectionError") in first
    assert first.rstrip().endswith("ConnectionError: no price")
    assert find_line(price, "the bug") in second


@pytest.mark.spec("DX-04")
def test_a_traceback_is_bounded_and_has_no_values_or_secrets(variant):
    def deep(order, depth=200):
        card = "4111-1111"
        if depth:
            return deep(order, depth - 1)
        password = "hunter2"
        raise ValueError(f"{'x' * 2000} password={password}", card)

    traceback = TaskRun(variant, deep).failure.traceback
    assert sum(" in deep" in line for line in traceback.splitlines()) <= 20
    assert len(traceback.encode()) <= 8192
    assert find_line(deep, "raise ValueError") in traceback
    assert "frames omitted" in traceback
    assert "hunter2" not in traceback


@pytest.mark.spec("DX-04")
def test_record_tracebacks_false_turns_tracebacks_off(variant):
    task_run = TaskRun(variant, price, record_tracebacks=False)
    assert task_run.failure.traceback is None
    assert task_run.failure.error_message == "KeyError: 'totl'"
    assert not task_run.record.exc_info
    assert task_run.record.exc_text is None
    assert "the bug" not in task_run.text.getvalue() + task_run.json.getvalue()
    assert task_run.list_stack_traces("process.attempt") == [None]


@pytest.mark.spec("DX-04")
def test_a_business_failure_has_its_location_in_the_record_and_no_traceback_in_the_log(variant):
    def decline(order):
        raise BusinessError("declined", code="declined")

    task_run = TaskRun(variant, decline)
    assert find_line(decline, "raise BusinessError") in task_run.failure.traceback
    assert not task_run.record.exc_info


@pytest.mark.spec("DX-04")
def test_a_retried_attempt_formats_no_traceback(variant, monkeypatch):
    source_reads = []
    monkeypatch.setattr("linecache.getline", lambda *given: source_reads.append(given) or "")
    queue, attempts = MemoryConnector("orders"), []
    queue.dispatch([Transaction({}, id="order-1")])
    policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.001}}}})

    def work(order):
        attempts.append(order)
        if len(attempts) < 3:
            raise OSError("not yet")

    if variant == "sync":
        consumer(queue, policy=policy)(work).run()
    else:

        @consumer(queue, policy=policy)
        async def charge(order):
            work(order)

        asyncio.run(charge.run())
    assert (len(attempts), source_reads) == (3, [])


@pytest.mark.spec("DX-04")
def test_a_deferred_transaction_records_no_exception(variant):
    def defer(order):
        raise TransactionException("not yet", not_attempted=True, retry_after=60.0)

    task_run = TaskRun(variant, defer)
    assert task_run.list_stack_traces("start_processing") == []
    assert [record.exc_info for record in task_run.records if record.exc_info] == []


def compensate(order, error):
    raise RuntimeError("no refund was booked")


@pytest.mark.spec("DX-03", "CON-25")
def test_the_error_of_an_exception_handler_is_recorded_in_addition_to_the_first(variant):
    task_run = TaskRun(variant, price, compensate)
    first, second = f"{find_line(price, 'the bug')} in price", f"{find_line(compensate, 'raise')} in compensate"
    handler = task_run.failure.handler_error
    assert (handler.error_type, handler.error_message) == ("RuntimeError", "RuntimeError: no refund was booked")
    assert (handler.category, handler.code) == ("SYSTEM", None)
    assert second in handler.traceback
    assert first in task_run.failure.traceback
    assert (task_run.failure.error_type, task_run.failure.step) == ("KeyError", "process")
    for log in (task_run.text.getvalue(), task_run.json.getvalue()):
        assert first in log
        assert second in log
    assert (task_run.record.error, task_run.record.step) == ("KeyError: 'totl'", "process")
    assert (task_run.record.handler_error, task_run.record.handler_error_type) == (
        "RuntimeError: no refund was booked",
        "RuntimeError",
    )
    assert isinstance(task_run.record.exc_info[1], RuntimeError)
    assert [
        location in stack
        for location, stack in zip((first, second), task_run.list_stack_traces("start_processing"), strict=True)
    ] == [
        True,
        True,
    ]
    assert [second in stack for stack in task_run.list_stack_traces("handle_exception.attempt")] == [True]


@pytest.mark.spec("DX-03")
def test_with_tracebacks_off_the_task_and_exception_handler_errors_are_recorded(variant):
    task_run = TaskRun(variant, price, compensate, record_tracebacks=False)
    assert task_run.failure.handler_error.error_message == "RuntimeError: no refund was booked"
    assert task_run.failure.handler_error.traceback is None
    assert task_run.record.handler_error == "RuntimeError: no refund was booked"


# -- validation errors ----------------------------------------------------------------------------

SECRET = "secret-total-4711"


def validate(order):
    Order.model_validate(order)


def validate_and_wrap(order):
    try:
        validate(order)
    except ValueError as error:
        raise RuntimeError(f"cannot read the order: {error}") from error


@pytest.mark.spec("DX-18", "CON-27")
@pytest.mark.parametrize("process", [validate, validate_and_wrap])
@pytest.mark.parametrize("step", ["process", "exception"])
def test_a_validation_error_shows_location_and_type_but_no_value(variant, process, step):
    payload = {"total": SECRET, "lines": [1, SECRET]}

    def handler(order, error):
        process(payload)

    task_run = TaskRun(variant, process, payload=payload) if step == "process" else TaskRun(variant, price, handler)
    outputs = [
        task_run.failure.model_dump_json(),
        task_run.text.getvalue(),
        task_run.json.getvalue(),
        repr(list(task_run.report.failures)),
    ]
    outputs += [span.to_json() for span in task_run.exporter.get_finished_spans()]
    outputs += [logging.Formatter().formatException(task_run.record.exc_info)]
    assert [SECRET in text for text in outputs] == [False] * len(outputs)
    message = task_run.failure.error_message if step == "process" else task_run.failure.handler_error.error_message
    assert "2 validation errors for Order: total: int_parsing; lines.1: int_parsing" in message
    assert find_line(validate, "model_validate") in task_run.text.getvalue()


@pytest.mark.spec("DX-18")
def test_a_validation_error_shows_the_value_if_payloads_may_be_recorded(variant):
    task_run = TaskRun(variant, validate, payload={"total": SECRET}, record_payloads=True)
    assert SECRET in task_run.failure.error_message
    assert SECRET in task_run.failure.traceback
    assert SECRET in task_run.record.error
    assert SECRET in task_run.text.getvalue()


@pytest.mark.spec("DX-18")
def test_a_class_task_hides_the_values_of_validation_errors(variant):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction({"total": SECRET}, id="order-1")])

    class Charge(ConsumerMixin):
        connector = queue

        def process_transaction(self, transaction):
            validate(transaction.payload)

    class ChargeAsync(AsyncConsumerMixin):
        connector = queue

        async def process_transaction(self, transaction):
            validate(transaction.payload)

    if variant == "sync":
        Charge().consume_transactions(ONE_ATTEMPT_POLICY)
    else:
        asyncio.run(ChargeAsync().consume_transactions(ONE_ATTEMPT_POLICY))
    (dead_letter,) = queue.dead_letters
    assert SECRET not in dead_letter.failure.model_dump_json()
    assert "total: int_parsing" in dead_letter.failure.error_message


@pytest.mark.spec("DX-04")
@pytest.mark.parametrize("variant", ["sync", "async"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"attempts_made": "many"},
        {"attempts_made": -1},
        {"details": "the address"},
        {"details": {"detail": "the address"}},
    ],
    ids=["text", "negative", "no mapping", "no such field"],
)
def test_an_error_with_a_framework_attribute_of_another_type_is_recorded(variant, attributes):
    def process(order):
        error = BusinessError("no such order")
        error.__dict__.update(attributes)
        raise error

    failure = TaskRun(variant, process).failure
    assert (failure.category, failure.attempts, failure.error_message, failure.detail) == (
        "BUSINESS",
        1,
        "no such order",
        {},
    )
