"""The doors of the engine, one at a time: what each handler is given and gives back, and what a door wires up."""

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
from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.engine.effects import Call
from ergon_framework.engine.outcome import Ok
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.task.base import AsyncTask, Services, Task
from ergon_framework.task.exceptions import BusinessError, TransactionException
from ergon_framework.task.functions import Function, Payload, check_function, is_async, name_of, refuse_async
from ergon_framework.task.gates import Pause
from ergon_framework.task.mixins import utils
from ergon_framework.task.mixins.consumer import _Ears
from ergon_framework.task.mixins.policies import Policy, RetryPolicy
from ergon_framework.task.report import End, Outcome
from ergon_framework.task.watch import Onlooker

TX = Transaction("7", {"id": "7"})


def now(value: Any) -> Any:
    """What a call of either flavour gives."""
    if not inspect.iscoroutine(value):
        return value
    with pytest.raises(StopIteration) as stop:
        value.send(None)
    return stop.value.value


class Line(MemoryConnector):
    """A queue that knows whether it is open, and who listens."""

    def __init__(self) -> None:
        super().__init__("line")
        self.told: list[str] = []
        self.ears: list[Any] = []

    def open(self) -> None:
        self.told.append("open")
        super().open()

    def close(self) -> None:
        self.told.append("close")
        super().close()

    async def open_async(self) -> None:
        self.told.append("open")

    async def close_async(self) -> None:
        self.told.append("close")

    def listen(self, listener: Any) -> Any:
        self.ears.append(listener)
        return lambda: self.told.append("unlisten")


# -- functions with decorators --------------------------------------------------------------------


def plain(order: Any) -> Any:
    """What it does."""
    return order


async def asynchronous(order: Any) -> Any:
    return order


def handler(order: Any, what: Any, db: str) -> tuple[Any, Any, str]:
    return order, what, db


async def handler_async(order: Any, what: Any, db: str) -> tuple[Any, Any, str]:
    return order, what, db


FORMS = [
    (made, fn, handles)
    for made in (consumer, producer)
    for fn, handles in ((plain, handler), (asynchronous, handler_async))
]


def methods(task: Any) -> tuple[Any, Any, Any]:
    if isinstance(task, ConsumerMixin | AsyncConsumerMixin):
        return task.process_transaction, task.handle_transaction_success, task.handle_transaction_exception
    return task.produce_transaction, task.handle_produce_success, task.handle_produce_exception


@pytest.mark.parametrize("made, fn, handles", FORMS)
def test_handlers_of_a_function_get_payload_result_and_services_and_give_back_what_they_return(
    made: Any, fn: Any, handles: Any
) -> None:
    task = made(Line(), db="D")(fn)
    assert task.on_success(handles) is handles
    assert task.on_failure(handles) is handles
    work, success, failure = methods(task)
    error = BusinessError("no")
    assert now(work(TX)) == TX.payload
    assert now(success(TX, "result")) == (TX.payload, "result", "D")
    assert now(failure(TX, error)) == (TX.payload, error, "D")


@pytest.mark.parametrize("made, fn, handles", FORMS)
def test_without_handlers_there_is_nothing_to_call(made: Any, fn: Any, handles: Any) -> None:
    task = made(Line(), db="D")(fn)
    _, success, failure = methods(task)
    assert now(success(TX, "result")) is None
    assert now(failure(TX, BusinessError("no"))) is None
    course = "_process_course" if isinstance(task, ConsumerMixin | AsyncConsumerMixin) else "_produce_course"
    policy = ConsumerPolicy() if course == "_process_course" else ProducerPolicy()
    assert getattr(task, course)(policy, Senses()).plain is True
    task.on_success(handles)
    assert getattr(task, course)(policy, Senses()).plain is False


def test_a_function_task_is_called_and_documented_as_its_function() -> None:
    task = consumer(Line())(plain)
    assert (task.__doc__, task.name, task({"a": 1})) == ("What it does.", "plain", {"a": 1})


def test_a_producer_keeps_its_policy() -> None:
    policy = ProducerPolicy()
    assert producer(Line(), policy=policy)(plain).policy is policy


def test_a_handler_must_be_of_its_tasks_flavour() -> None:
    with pytest.raises(ConfigurationError, match="handler_async must be declared with def, as plain is"):
        consumer(Line())(plain).on_success(handler_async)
    with pytest.raises(ConfigurationError, match="handler must be declared with async def, as asynchronous is"):
        consumer(Line())(asynchronous).on_failure(handler)
    with pytest.raises(ConfigurationError, match="generator yields"):
        consumer(Line())(plain).on_success(generator)


@pytest.mark.parametrize("fn", [plain, asynchronous])
def test_a_producer_that_returns_nothing_has_failed_for_good(fn: Any) -> None:
    task = producer(Line())(fn)
    with pytest.raises(TransactionException) as caught:
        now(task.produce_transaction(Transaction("1", None)))
    assert (caught.value.category, caught.value.code) == (Category.BUSINESS, "nothing_produced")


@pytest.mark.parametrize("fn", [plain, asynchronous])
def test_a_transaction_that_a_producer_returns_is_dispatched_and_confirmed(fn: Any) -> None:
    line = Line()
    task = producer(line)(fn)
    confirmed = now(task.produce_transaction(Transaction("1", Transaction("made"))))
    assert confirmed.transaction_id == "made"
    assert line.depth().ready == 1


# -- functions ------------------------------------------------------------------------------------


class Order(BaseModel):
    id: int
    total: int


def test_every_fault_of_a_payload_is_told_with_its_place() -> None:
    with pytest.raises(TransactionException) as caught:
        Payload(Order).read(Transaction("1", {"id": "x", "total": "y"}))
    assert str(caught.value) == (
        "the payload does not fit: id: Input should be a valid integer, unable to parse string as an integer; "
        "total: Input should be a valid integer, unable to parse string as an integer"
    )


def test_a_handler_gets_a_payload_that_does_not_fit_as_it_came() -> None:
    wrong = Transaction("1", "no order")
    assert Function(lambda order, error: (order, error), Payload(Order), positional=2).call(wrong, {}, "e") == (
        "no order",
        "e",
    )
    with pytest.raises(TransactionException):
        Function(lambda order: order, Payload(Order)).call(wrong, {})


def test_a_parameter_called_transaction_gets_it_unless_it_asks_for_something_else() -> None:
    def other(order: Any, transaction: str) -> str:
        return transaction

    assert Function(lambda transaction: transaction, Payload()).call(TX, {}) is TX
    assert Function(other, Payload()).call(TX, {"transaction": "service"}) == "service"


def by_position(order: Any, /) -> Any:
    return order


def test_a_parameter_that_has_no_name_for_others_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="by_position takes order by position only"):
        Function(by_position, Payload())


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


def test_what_would_run_nothing_is_refused() -> None:
    for fine in (plain, asynchronous, Callable(), AsyncCallable()):
        check_function(fine)
    for wrong, told in (
        (Order, "not the class Order"),
        (3, "not int"),
        (generator, "generator yields"),
        (async_generator, "async_generator yields"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            check_function(wrong)


def test_whether_something_is_async_is_seen_through_objects() -> None:
    assert [is_async(each) for each in (plain, asynchronous, Callable(), AsyncCallable(), 3)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    refuse_async(plain, Callable())
    with pytest.raises(ConfigurationError, match="asynchronous is async"):
        refuse_async(plain, asynchronous)


def test_everything_callable_has_a_name() -> None:
    assert [name_of(each) for each in (plain, partial(plain), Callable())] == ["plain", "plain", "Callable"]

    def wrapped() -> None: ...

    wrapped.func = plain  # type: ignore[attr-defined]
    assert name_of(wrapped) == "wrapped", "its own name comes first"


# -- tasks ----------------------------------------------------------------------------------------


class Work(ConsumerMixin, Task):
    policy = ConsumerPolicy.load({"loop": {"limit": 3}})
    gates = (lambda: None,)

    @contextmanager
    def lifespan(self) -> Iterator[Mapping[str, Any]]:
        yield {"db": self.connector.told.copy()}

    def process_transaction(self, transaction: Transaction) -> Any:
        return self.services.db


class AsyncWork(AsyncConsumerMixin, AsyncTask):
    policy, gates = Work.policy, Work.gates

    @asynccontextmanager
    async def lifespan(self) -> Any:
        yield {"db": self.connector.told.copy()}

    async def process_transaction(self, transaction: Transaction) -> Any:
        return self.services.db


@pytest.mark.parametrize("kind", [Work, AsyncWork])
def test_a_task_keeps_what_its_class_says_unless_it_is_given_something_else(kind: Any) -> None:
    task = kind(Line())
    assert (task.policy, task.gates) == (Work.policy, Work.gates)
    other = ConsumerPolicy()
    task = kind(Line(), policy=other, gates=())
    assert (task.policy, task.gates) == (other, ())


def test_a_task_without_a_policy_or_with_something_else_for_one() -> None:
    class Bare(Task): ...

    assert Bare(Line()).policy is None
    with pytest.raises(ConfigurationError, match="is a dict; pass a ConsumerPolicy or ProducerPolicy, built"):
        Bare(Line(), policy={})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Bare was given a str as its connector"):
        Bare("queue")  # type: ignore[arg-type]


class OnlySync(Connector):
    name, capabilities = "sync", None  # type: ignore[assignment]
    fetch_transactions = settle = dispatch = None  # type: ignore[assignment]


class OnlyAsync(AsyncConnector):
    name, capabilities = "async", None  # type: ignore[assignment]
    fetch_transactions_async = settle_async = dispatch_async = None  # type: ignore[assignment]


@pytest.mark.parametrize("connector", [OnlySync(), OnlyAsync()])
@pytest.mark.parametrize("kind", [Work, AsyncWork])
def test_a_task_takes_a_connector_of_either_flavour(kind: Any, connector: Any) -> None:
    assert kind(connector).connector is connector


def test_an_open_task_has_its_services_and_its_connector_open() -> None:
    task = Work(Line(), own="O")
    before = task.services
    with task.opened():
        assert task.connector.told == ["open"]
        assert dict(task.services) == {"own": "O", "db": []}
    assert task.connector.told == ["open", "close"]
    assert task.services is before


def test_an_open_async_task_has_its_services_and_its_connector_open() -> None:
    task = AsyncWork(Line(), own="O")
    before = task.services

    async def main() -> None:
        async with task.opened():
            assert task.connector.told == ["open"]
            assert dict(task.services) == {"own": "O", "db": []}

    asyncio.run(main())
    assert task.connector.told == ["open", "close"]
    assert task.services is before


def test_a_service_that_is_missing_is_told_with_its_owner() -> None:
    with pytest.raises(ConfigurationError, match=r"mail has no service 'dbb'; did you mean 'db'\?"):
        Services({"db": 1}, owner="mail")["dbb"]
    with pytest.raises(ConfigurationError, match=r"mail has no service 'x'; there are: none"):
        _ = Services({}, owner="mail").x


# -- mixins ---------------------------------------------------------------------------------------


class Making(ProducerMixin):
    def __init__(self) -> None:
        self.connector = Line()


class AsyncMaking(AsyncProducerMixin):
    def __init__(self) -> None:
        self.connector = Line()


class Handled(Making):
    def handle_produce_success(self, transaction: Transaction, result: Any) -> Any: ...


class HandledWork(Work):
    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any: ...


def tries(*steps: str) -> dict[str, Any]:
    return {step: {"retry": {"max_attempts": number}} for number, step in enumerate(steps, 4)}


@pytest.mark.parametrize("kind, plainly", [(Work, True), (AsyncWork, True), (HandledWork, False)])
def test_a_consumers_course_is_made_of_its_methods_and_policy(kind: Any, plainly: bool) -> None:
    task, senses = kind(Line()), Senses()
    policy = ConsumerPolicy.load(
        {
            "loop": {"transaction_timeout": 9.0},
            "steps": tries("process", "success", "exception"),
        }
    )
    course = task._process_course(policy, senses)
    steps = (course.process, course.success, course.exception)
    assert [step.name for step in steps] == ["process", "success", "exception"]
    assert [step.retry.max_attempts for step in steps] == [4, 5, 6]
    assert [step.defers for step in steps] == [True, False, False]
    assert (course.timeout, course.senses, course.plain) == (9.0, senses, plainly)
    assert tuple(step.fn for step in steps) == methods(task)


@pytest.mark.parametrize("kind, plainly", [(Making, True), (AsyncMaking, True), (Handled, False)])
def test_a_producers_course_is_made_of_its_methods_and_policy(kind: Any, plainly: bool) -> None:
    task, senses = kind(), Senses()
    policy = ProducerPolicy.load(
        {
            "loop": {"transaction_timeout": 9.0},
            "steps": tries("produce", "success", "exception"),
        }
    )
    course = task._produce_course(policy, senses)
    steps = (course.process, course.success, course.exception)
    assert [step.name for step in steps] == ["produce", "success", "exception"]
    assert [step.retry.max_attempts for step in steps] == [4, 5, 6]
    assert [step.defers for step in steps] == [False, False, False]
    assert (course.timeout, course.senses, course.plain) == (9.0, senses, plainly)
    assert tuple(step.fn for step in steps) == methods(task)


@pytest.mark.parametrize("kind", [Making, AsyncMaking])
def test_by_default_a_producer_dispatches_what_it_is_given(kind: Any) -> None:
    task = kind()
    assert now(task.produce_transaction(TX)).transaction_id == "7"
    assert task.connector.depth().ready == 1


class Looking(Onlooker):
    """Records the one lifecycle that it sees begin."""

    recording = True

    def __init__(self) -> None:
        self.told: list[Any] = []

    def step(self, step: Any) -> None:
        self.told.append(step.name)

    def stepped(self, ended: Any) -> None: ...

    def ended(self, outcome: Outcome) -> None:
        self.told.append(outcome)


ALONE = [
    (Work(Line())._start_processing, Work(Line())._process_course(ConsumerPolicy(), Senses()), "process"),
    (Making()._start_producing, Making()._produce_course(ProducerPolicy(), Senses()), "produce"),
]


@pytest.mark.parametrize("start, course, step", ALONE)
def test_one_transaction_can_be_taken_through_its_lifecycle_outside_any_loop(
    start: Any, course: Any, step: str
) -> None:
    script = start(course, TX)
    call = next(script)
    assert isinstance(call, Call)
    assert (call.step, call.args) == (step, (TX,))
    with pytest.raises(StopIteration) as stop:
        script.send(Ok("made"))
    assert stop.value.value.result == "made"


@pytest.mark.parametrize("start, course, step", ALONE)
def test_it_is_recorded_where_somebody_looks_on(start: Any, course: Any, step: str) -> None:
    watch = Looking()
    script = start(course, TX, watch)
    next(script)
    assert script.send(Ok("made")).step == "success"
    with pytest.raises(StopIteration) as stop:
        script.send(Ok(None))
    assert watch.told == [step, "success", stop.value.value]


def consumed(task: Any, **more: Any) -> Any:
    report = task.consume_transactions(**more)
    return asyncio.run(report) if inspect.iscoroutine(report) else report


@pytest.mark.parametrize("kind", [Work, AsyncWork])
def test_a_loop_listens_to_its_connector_for_as_long_as_it_runs(kind: Any) -> None:
    task = kind(Line(), db="D")
    outcomes: list[Outcome] = []
    task.connector.dispatch([TX])
    seen: list[Any] = []

    def gate() -> Pause | None:
        seen.append((task.live, list(task.connector.told)))
        return None

    report = consumed(task, gates=[gate], on_outcome=outcomes.append)
    assert report.end is End.EMPTY
    assert [outcome.result for outcome in outcomes] == ["D"]
    assert set(map(str, seen)) == {"(True, [])"}
    assert task.connector.told == ["unlisten"]


@pytest.mark.parametrize("kind", [Work, AsyncWork])
def test_a_stop_from_within_ends_the_loop(kind: Any) -> None:
    task = kind(Line(), db="D")
    task.connector.dispatch([TX])

    def gate() -> Pause | None:
        task.stop()
        return None

    assert consumed(task, gates=[gate]).end is End.STOP


class Hearing:
    """A loop that writes down what it hears, and the driver that would take it there."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def signal(self, mailbox: Any, item: Any) -> None: ...

    def wake(self, signal: Any) -> None:
        self.told.append(signal)

    def lose(self, receipts: Any, signal: Any) -> None:
        self.told.append((receipts, signal))


def test_what_the_connector_says_reaches_the_loop_through_the_driver() -> None:
    loop: Any = Hearing()
    driver: Any = Hearing()
    ears = _Ears(driver, loop)
    ears.wake()
    ears.lost(["a"])
    assert loop.told == [driver.signal, (["a"], driver.signal)]


@pytest.mark.parametrize("kind", [Work, AsyncWork])
def test_nobody_is_told_of_outcomes_who_did_not_ask(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    task = kind(Line(), db="D")
    task.connector.dispatch([TX])
    assert consumed(task).finished == 1
    assert caplog.records == []
    assert isinstance(task.connector.ears[0], _Ears)


class Leased(Line):
    """A queue whose claims end soon, and cannot be renewed unless it says so."""

    renewable = True

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, renewable=self.renewable, lease=12.0)


@pytest.mark.parametrize("kind", [Work, AsyncWork])
@pytest.mark.parametrize("renewable, lease", [(True, 12.0), (False, None)])
def test_claims_are_renewed_where_the_broker_can(
    kind: Any, renewable: bool, lease: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = kind(Leased(), db="D")
    task.connector.renewable = renewable
    leases: list[Any] = []
    make = task._consume_transactions

    def noting(policy: Any, driver: Any, broker: Any, **more: Any) -> Any:
        leases.append(broker.lease)
        return make(policy, driver, broker, **more)

    monkeypatch.setattr(task, "_consume_transactions", noting)
    consumed(task)
    assert leases == [lease]


@pytest.mark.parametrize("made", [Making, AsyncMaking])
def test_a_producer_that_is_not_running_is_live_and_has_nothing_to_stop(made: Any) -> None:
    task = made()
    task.stop()
    assert task.live is True


class Stopping(Making):
    def produce_transaction(self, transaction: Transaction) -> Any:
        self.stop()


class AsyncStopping(AsyncMaking):
    async def produce_transaction(self, transaction: Transaction) -> Any:
        self.stop()


@pytest.mark.parametrize("kind", [Stopping, AsyncStopping])
def test_a_producer_can_be_stopped_from_within(kind: Any) -> None:
    policy = ProducerPolicy.load({"loop": {"concurrency": {"value": 1}}})
    report = kind().produce_transactions([TX, Transaction("8")], policy)
    report = asyncio.run(report) if inspect.iscoroutine(report) else report
    assert report.end is End.STOP


# -- helpers and policies -------------------------------------------------------------------------


def test_without_a_limit_the_helper_calls_on_the_callers_own_thread() -> None:
    assert utils.run_with_timeout(threading.current_thread, None) is threading.current_thread()
    assert utils.run_with_timeout(threading.current_thread, 5.0).name.startswith("ergon-timeout")


def test_a_default_that_breaks_its_own_rule_is_found() -> None:
    class Wrong(Policy):
        retry: RetryPolicy = 3  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match="retry"):
        Wrong.load({})


@pytest.mark.parametrize("value, told", [(None, ", not None"), (-1.5, ", not -1.5"), (-1, ", not -1"), ("x", "")])
def test_numbers_and_nothing_are_repeated_in_a_message_and_text_is_not(value: Any, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RetryPolicy.load({"backoff": value})
    message = str(caught.value)
    assert message.endswith(told) if told else "not" not in message.rpartition(": ")[2]
