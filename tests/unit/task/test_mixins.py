"""The entry points of the engine: what each passes to a handler and returns, and what each connects."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from ergon_framework import (
    AsyncConsumerMixin,
    AsyncProducerMixin,
    ConsumerMixin,
    ConsumerPolicy,
    MemoryConnector,
    ProducerMixin,
    ProducerPolicy,
    Transaction,
    consumer,
    producer,
)
from ergon_framework.clock import Clock
from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.engine.effects import Call, Ok
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.gates import Pause
from ergon_framework.task import context
from ergon_framework.task.base import AsyncTask, Services, Task
from ergon_framework.task.consumer import _ConnectorListener
from ergon_framework.task.handler import (
    reject_async_handlers,
    validate_handler,
)
from ergon_framework.task.payload import PayloadReader
from ergon_framework.task.signature import callable_name, is_async
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.exceptions import BusinessError, TransactionException
from ergon_framework.worker.policies import Policy, RetryPolicy
from ergon_framework.worker.report import Outcome, StopReason

TRANSACTION = Transaction({"id": "7"}, id="7")


def get_result(value: Any) -> Any:
    """What a call of either flavour gives."""
    if not inspect.iscoroutine(value):
        return value
    with pytest.raises(StopIteration) as stop:
        value.send(None)
    return stop.value.value


class RecordingQueue(MemoryConnector):
    """A queue that knows whether it is open, and who listens."""

    def __init__(self) -> None:
        super().__init__("line")
        self.events: list[str] = []
        self.listeners: list[Any] = []

    def open(self) -> None:
        self.events.append("open")
        super().open()

    def close(self) -> None:
        self.events.append("close")
        super().close()

    async def open_async(self) -> None:
        self.events.append("open")

    async def close_async(self) -> None:
        self.events.append("close")

    def listen(self, listener: Any) -> Any:
        self.listeners.append(listener)
        return lambda: self.events.append("unlisten")


# -- functions with decorators --------------------------------------------------------------------


def plain(order: Any) -> Any:
    """What it does."""
    return order


async def asynchronous(order: Any) -> Any:
    return order


def note_result(order: Any, result: Any, db: str) -> tuple[Any, Any, str]:
    return order, result, db


def note_error(order: Any, error: Any, db: str) -> tuple[Any, Any, str]:
    return order, error, db


async def note_result_async(order: Any, result: Any, db: str) -> tuple[Any, Any, str]:
    return order, result, db


async def note_error_async(order: Any, error: Any, db: str) -> tuple[Any, Any, str]:
    return order, error, db


HANDLER_CASES = [
    (made, fn, *handlers)
    for made in (consumer, producer)
    for fn, *handlers in ((plain, note_result, note_error), (asynchronous, note_result_async, note_error_async))
]


def get_methods(task: Any) -> tuple[Any, Any, Any]:
    if isinstance(task, ConsumerMixin | AsyncConsumerMixin):
        return task.process_transaction, task.handle_transaction_success, task.handle_transaction_exception
    return task.produce_transaction, task.handle_produce_success, task.handle_produce_exception


@pytest.mark.parametrize("decorate, fn, on_success, on_failure", HANDLER_CASES)
def test_handlers_get_payload_result_and_services_and_their_return_value_is_used(
    decorate: Any, fn: Any, on_success: Any, on_failure: Any
) -> None:
    task = decorate(RecordingQueue(), services={"db": "D"})(fn)
    assert task.on_success(on_success) is on_success
    assert task.on_failure(on_failure) is on_failure
    work, success, failure = get_methods(task)
    error = BusinessError("no")
    assert get_result(work(TRANSACTION)) == TRANSACTION.payload
    assert get_result(success(TRANSACTION, "result")) == (TRANSACTION.payload, "result", "D")
    assert get_result(failure(TRANSACTION, error)) == (TRANSACTION.payload, error, "D")


@pytest.mark.parametrize("decorate, fn, on_success, _on_failure", HANDLER_CASES)
def test_without_handlers_there_is_nothing_to_call(decorate: Any, fn: Any, on_success: Any, _on_failure: Any) -> None:
    task = decorate(RecordingQueue(), services={"db": "D"})(fn)
    _, success, failure = get_methods(task)
    assert get_result(success(TRANSACTION, "result")) is None
    assert get_result(failure(TRANSACTION, BusinessError("no"))) is None
    method_name = (
        "_create_process_spec" if isinstance(task, ConsumerMixin | AsyncConsumerMixin) else "_create_produce_spec"
    )
    policy = ConsumerPolicy() if method_name == "_create_process_spec" else ProducerPolicy()
    assert getattr(task, method_name)(policy, Clock()).skips_success is True
    task.on_success(on_success)
    assert getattr(task, method_name)(policy, Clock()).skips_success is False


def test_a_function_task_has_the_name_and_docstring_of_its_function() -> None:
    task = consumer(RecordingQueue())(plain)
    assert (task.__doc__, task.name, task({"a": 1})) == ("What it does.", "plain", {"a": 1})


def test_a_producer_keeps_its_policy() -> None:
    policy = ProducerPolicy()
    assert producer(RecordingQueue(), policy=policy)(plain).policy is policy


def test_a_handler_must_have_the_variant_of_its_task() -> None:
    with pytest.raises(ConfigurationError, match="note_result_async must be declared with def, as plain is"):
        consumer(RecordingQueue())(plain).on_success(note_result_async)
    with pytest.raises(ConfigurationError, match="note_error must be declared with async def, as asynchronous is"):
        consumer(RecordingQueue())(asynchronous).on_failure(note_error)
    with pytest.raises(ConfigurationError, match="generator is a generator function"):
        consumer(RecordingQueue())(plain).on_success(generator)


@pytest.mark.parametrize("fn", [plain, asynchronous])
def test_a_producer_that_returns_none_fails_permanently(fn: Any) -> None:
    task = producer(RecordingQueue())(fn)
    with pytest.raises(TransactionException) as caught:
        get_result(task.produce_transaction(Transaction(id="1")))
    assert (caught.value.category, caught.value.code) == (Category.BUSINESS, "nothing_produced")


@pytest.mark.parametrize("fn", [plain, asynchronous])
def test_a_transaction_that_a_producer_returns_is_dispatched_and_confirmed(fn: Any) -> None:
    queue = RecordingQueue()
    task = producer(queue)(fn)
    confirmation = get_result(task.produce_transaction(Transaction(Transaction(id="made"), id="1")))
    assert confirmation.transaction_id == "made"
    assert queue.depth().ready == 1


# -- functions ------------------------------------------------------------------------------------


class Order(BaseModel):
    id: int
    total: int


def test_every_error_of_a_payload_is_reported_with_its_field() -> None:
    with pytest.raises(TransactionException) as caught:
        PayloadReader(Order).read(Transaction({"id": "x", "total": "y"}, id="1"))
    assert str(caught.value) == (
        "payload is invalid: id: Input should be a valid integer, unable to parse string as an integer; "
        "total: Input should be a valid integer, unable to parse string as an integer"
    )


class Callable:
    def __call__(self, order: Any) -> Any:
        return order


class AsyncCallable:
    async def __call__(self, order: Any) -> Any:
        return order


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> Any:
    yield 1


def test_a_function_that_would_run_nothing_is_rejected() -> None:
    for valid in (plain, asynchronous, Callable(), AsyncCallable()):
        validate_handler(valid)
    for invalid, message in (
        (Order, "not the class Order"),
        (3, "not int"),
        (generator, "generator is a generator function"),
        (async_generator, "async_generator is a generator function"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            validate_handler(invalid)


def test_callable_objects_are_recognized_as_async() -> None:
    assert [is_async(each) for each in (plain, asynchronous, Callable(), AsyncCallable(), 3)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    reject_async_handlers(plain, Callable())
    with pytest.raises(ConfigurationError, match="asynchronous is async"):
        reject_async_handlers(plain, asynchronous)


def test_everything_callable_has_a_name() -> None:
    assert [callable_name(each) for each in (plain, partial(plain), Callable())] == ["plain", "plain", "Callable"]

    def wrapped() -> None: ...

    wrapped.func = plain  # type: ignore[attr-defined]
    assert callable_name(wrapped) == "wrapped", "its own name comes first"


# -- tasks ----------------------------------------------------------------------------------------


class LifespanConsumer(ConsumerMixin, Task):
    policy = ConsumerPolicy.load({"loop": {"limit": 3}})
    gates = (lambda: None,)

    @contextmanager
    def lifespan(self) -> Iterator[Mapping[str, Any]]:
        yield {"db": self.connector.events.copy()}

    def process_transaction(self, transaction: Transaction) -> Any:
        return self.services.db


class AsyncLifespanConsumer(AsyncConsumerMixin, AsyncTask):
    policy, gates = LifespanConsumer.policy, LifespanConsumer.gates

    @asynccontextmanager
    async def lifespan(self) -> Any:
        yield {"db": self.connector.events.copy()}

    async def process_transaction(self, transaction: Transaction) -> Any:
        return self.services.db


@pytest.mark.parametrize("kind", [LifespanConsumer, AsyncLifespanConsumer])
def test_a_task_uses_the_attributes_of_its_class_unless_they_are_overridden(kind: Any) -> None:
    task = kind(RecordingQueue())
    assert (task.policy, task.gates) == (LifespanConsumer.policy, LifespanConsumer.gates)
    other = ConsumerPolicy()
    task = kind(RecordingQueue(), policy=other, gates=())
    assert (task.policy, task.gates) == (other, ())


def test_a_task_may_have_no_policy_but_not_an_invalid_one() -> None:
    class Bare(Task): ...

    assert Bare(RecordingQueue()).policy is None
    with pytest.raises(ConfigurationError, match="is a dict; pass a ConsumerPolicy or ProducerPolicy, built"):
        Bare(RecordingQueue(), policy={})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="connector of Bare is invalid: it is a str"):
        Bare("queue")  # type: ignore[arg-type]


class SyncOnlyConnector(Connector):
    name, capabilities = "sync", None  # type: ignore[assignment]
    fetch_transactions = settle = dispatch = None  # type: ignore[assignment]


class AsyncOnlyConnector(AsyncConnector):
    name, capabilities = "async", None  # type: ignore[assignment]
    fetch_transactions_async = settle_async = dispatch_async = None  # type: ignore[assignment]


@pytest.mark.parametrize("connector", [SyncOnlyConnector(), AsyncOnlyConnector()])
@pytest.mark.parametrize("kind", [LifespanConsumer, AsyncLifespanConsumer])
def test_a_task_takes_a_connector_of_either_variant(kind: Any, connector: Any) -> None:
    assert kind(connector).connector is connector


def test_an_open_task_has_its_services_and_its_connector_open() -> None:
    task = LifespanConsumer(RecordingQueue(), services={"own": "O"})
    before = task.services
    with task.open():
        assert task.connector.events == ["open"]
        assert dict(task.services) == {"own": "O", "db": []}
    assert task.connector.events == ["open", "close"]
    assert task.services is before


def test_an_open_async_task_has_its_services_and_its_connector_open() -> None:
    task = AsyncLifespanConsumer(RecordingQueue(), services={"own": "O"})
    before = task.services

    async def main() -> None:
        async with task.open():
            assert task.connector.events == ["open"]
            assert dict(task.services) == {"own": "O", "db": []}

    asyncio.run(main())
    assert task.connector.events == ["open", "close"]
    assert task.services is before


def test_the_error_for_a_missing_service_names_its_owner() -> None:
    with pytest.raises(ConfigurationError, match=r"mail has no service 'dbb'; did you mean 'db'\?"):
        Services({"db": 1}, owner="mail")["dbb"]
    with pytest.raises(ConfigurationError, match=r"mail has no service 'x'; available: none"):
        _ = Services({}, owner="mail").x


# -- mixins ---------------------------------------------------------------------------------------


class PlainProducer(ProducerMixin):
    def __init__(self) -> None:
        self.connector = RecordingQueue()


class AsyncPlainProducer(AsyncProducerMixin):
    def __init__(self) -> None:
        self.connector = RecordingQueue()


class HandlerProducer(PlainProducer):
    def handle_produce_success(self, transaction: Transaction, result: Any) -> Any: ...


class HandlerConsumer(LifespanConsumer):
    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any: ...


def make_retry_settings(*steps: str) -> dict[str, Any]:
    return {step: {"retry": {"max_attempts": number}} for number, step in enumerate(steps, 4)}


@pytest.mark.parametrize(
    "kind, skips_success", [(LifespanConsumer, True), (AsyncLifespanConsumer, True), (HandlerConsumer, False)]
)
def test_the_lifecycle_of_a_consumer_has_its_methods_and_policy(kind: Any, skips_success: bool) -> None:
    task, clock = kind(RecordingQueue()), Clock()
    policy = ConsumerPolicy.load(
        {
            "loop": {"transaction_timeout": 9.0},
            "steps": make_retry_settings("process", "success", "exception"),
        }
    )
    spec = task._create_process_spec(policy, clock)
    steps = (spec.process, spec.success, spec.exception)
    assert [step.name for step in steps] == ["process", "success", "exception"]
    assert [step.retry.max_attempts for step in steps] == [4, 5, 6]
    assert [step.defers for step in steps] == [True, False, False]
    assert (spec.timeout, spec.clock, spec.skips_success) == (9.0, clock, skips_success)
    assert tuple(step.fn for step in steps) == get_methods(task)


@pytest.mark.parametrize(
    "kind, skips_success", [(PlainProducer, True), (AsyncPlainProducer, True), (HandlerProducer, False)]
)
def test_the_lifecycle_of_a_producer_has_its_methods_and_policy(kind: Any, skips_success: bool) -> None:
    task, clock = kind(), Clock()
    policy = ProducerPolicy.load(
        {
            "loop": {"transaction_timeout": 9.0},
            "steps": make_retry_settings("produce", "success", "exception"),
        }
    )
    spec = task._create_produce_spec(policy, clock)
    steps = (spec.process, spec.success, spec.exception)
    assert [step.name for step in steps] == ["produce", "success", "exception"]
    assert [step.retry.max_attempts for step in steps] == [4, 5, 6]
    assert [step.defers for step in steps] == [False, False, False]
    assert (spec.timeout, spec.clock, spec.skips_success) == (9.0, clock, skips_success)
    assert tuple(step.fn for step in steps) == get_methods(task)


@pytest.mark.parametrize("kind", [PlainProducer, AsyncPlainProducer])
def test_by_default_a_producer_dispatches_its_transaction(kind: Any) -> None:
    task = kind()
    assert get_result(task.produce_transaction(TRANSACTION)).transaction_id == "7"
    assert task.connector.depth().ready == 1


class LifecycleObserver(LoopObserver):
    """Records the one lifecycle that it sees begin."""

    recording = True

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_step_start(self, step: Any) -> None:
        self.events.append(step.name)

    def on_step_end(self, ended: Any) -> None: ...

    def on_end(self, outcome: Outcome) -> None:
        self.events.append(outcome)


SINGLE_LIFECYCLES = [
    (
        LifespanConsumer(RecordingQueue())._start_processing,
        LifespanConsumer(RecordingQueue())._create_process_spec(ConsumerPolicy(), Clock()),
        "process",
    ),
    (PlainProducer()._start_producing, PlainProducer()._create_produce_spec(ProducerPolicy(), Clock()), "produce"),
]


@pytest.mark.parametrize("start, spec, step", SINGLE_LIFECYCLES)
def test_one_transaction_can_run_its_lifecycle_outside_any_loop(start: Any, spec: Any, step: str) -> None:
    script = start(spec, TRANSACTION)
    call = next(script)
    assert isinstance(call, Call)
    assert (call.step, call.args) == (step, (TRANSACTION,))
    with pytest.raises(StopIteration) as stop:
        script.send(Ok("made"))
    assert stop.value.value.result == "made"


@pytest.mark.parametrize("start, spec, step", SINGLE_LIFECYCLES)
def test_an_observer_records_a_lifecycle_outside_any_loop(start: Any, spec: Any, step: str) -> None:
    observer = LifecycleObserver()
    script = start(spec, TRANSACTION, observer)
    next(script)
    assert script.send(Ok("made")).step == "success"
    with pytest.raises(StopIteration) as stop:
        script.send(Ok(None))
    assert observer.events == [step, "success", stop.value.value]


def run_consumer(task: Any, **more: Any) -> Any:
    report = task.consume_transactions(**more)
    return asyncio.run(report) if inspect.iscoroutine(report) else report


@pytest.mark.parametrize("kind", [LifespanConsumer, AsyncLifespanConsumer])
def test_a_loop_listens_to_its_connector_while_it_runs(kind: Any) -> None:
    task = kind(RecordingQueue(), services={"db": "D"})
    outcomes: list[Outcome] = []
    task.connector.dispatch([TRANSACTION])
    seen: list[Any] = []

    def gate() -> Pause | None:
        seen.append((task.live, list(task.connector.events)))
        return None

    report = run_consumer(task, gates=[gate], on_outcome=outcomes.append)
    assert report.stop_reason is StopReason.EMPTY
    assert [outcome.result for outcome in outcomes] == ["D"]
    assert set(map(str, seen)) == {"(True, [])"}
    assert task.connector.events == ["unlisten"]


@pytest.mark.parametrize("kind", [LifespanConsumer, AsyncLifespanConsumer])
def test_a_stop_from_within_ends_the_loop(kind: Any) -> None:
    task = kind(RecordingQueue(), services={"db": "D"})
    task.connector.dispatch([TRANSACTION])

    def gate() -> Pause | None:
        task.stop()
        return None

    assert run_consumer(task, gates=[gate]).stop_reason is StopReason.STOP


class RecordingLoop:
    """A loop that writes down what it hears, and the driver that would take it there."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put_from_any_thread(self, mailbox: Any, item: Any) -> None: ...

    def wake(self, signal: Any) -> None:
        self.events.append(signal)

    def mark_lost(self, receipts: Any, signal: Any) -> None:
        self.events.append((receipts, signal))


def test_connector_notifications_reach_the_loop_through_the_driver() -> None:
    loop: Any = RecordingLoop()
    driver: Any = RecordingLoop()
    listener = _ConnectorListener(driver, loop)
    listener.wake()
    listener.on_lost(["a"])
    assert loop.events == [driver.put_from_any_thread, (["a"], driver.put_from_any_thread)]


@pytest.mark.parametrize("kind", [LifespanConsumer, AsyncLifespanConsumer])
def test_a_loop_without_an_outcome_callback_logs_nothing(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    task = kind(RecordingQueue(), services={"db": "D"})
    task.connector.dispatch([TRANSACTION])
    assert run_consumer(task).finished == 1
    assert caplog.records == []
    assert isinstance(task.connector.listeners[0], _ConnectorListener)


class LeasedQueue(RecordingQueue):
    """A queue whose claims end soon, and cannot be renewed unless it says so."""

    renewable = True

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, renewable=self.renewable, lease=12.0)


@pytest.mark.parametrize("kind", [LifespanConsumer, AsyncLifespanConsumer])
@pytest.mark.parametrize("renewable, lease", [(True, 12.0), (False, None)])
def test_claims_are_renewed_if_the_broker_can(
    kind: Any, renewable: bool, lease: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = kind(LeasedQueue(), services={"db": "D"})
    task.connector.renewable = renewable
    leases: list[Any] = []
    consume_transactions = task._consume_transactions

    def record_lease(policy: Any, driver: Any, broker: Any, **more: Any) -> Any:
        leases.append(broker.lease)
        return consume_transactions(policy, driver, broker, **more)

    monkeypatch.setattr(task, "_consume_transactions", record_lease)
    run_consumer(task)
    assert leases == [lease]


@pytest.mark.parametrize("kind", [PlainProducer, AsyncPlainProducer])
def test_a_producer_that_is_not_running_is_live_and_has_nothing_to_stop(kind: Any) -> None:
    task = kind()
    task.stop()
    assert task.live is True


class SelfStoppingProducer(PlainProducer):
    def produce_transaction(self, transaction: Transaction) -> Any:
        self.stop()


class AsyncSelfStoppingProducer(AsyncPlainProducer):
    async def produce_transaction(self, transaction: Transaction) -> Any:
        self.stop()


@pytest.mark.parametrize("kind", [SelfStoppingProducer, AsyncSelfStoppingProducer])
def test_a_producer_can_be_stopped_from_within(kind: Any) -> None:
    policy = ProducerPolicy.load({"loop": {"concurrency": {"value": 1}}})
    report = kind().produce_transactions([TRANSACTION, Transaction(id="8")], policy)
    report = asyncio.run(report) if inspect.iscoroutine(report) else report
    assert report.stop_reason is StopReason.STOP


# -- helpers and policies -------------------------------------------------------------------------


def test_without_a_timeout_the_helper_calls_on_the_calling_thread() -> None:
    assert context.run_with_timeout(threading.current_thread, None) is threading.current_thread()
    assert context.run_with_timeout(threading.current_thread, 5.0).name.startswith("ergon-timeout")


def test_an_invalid_default_of_a_policy_is_rejected() -> None:
    class InvalidPolicy(Policy):
        retry: RetryPolicy = 3  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match="retry"):
        InvalidPolicy.load({})


@pytest.mark.parametrize(
    "value, expected_end", [(None, ", not None"), (-1.5, ", not -1.5"), (-1, ", not -1"), ("x", "")]
)
def test_error_messages_repeat_numbers_and_none_but_not_text(value: Any, expected_end: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RetryPolicy.load({"backoff": value})
    message = str(caught.value)
    assert message.endswith(expected_end) if expected_end else "not" not in message.rpartition(": ")[2]
