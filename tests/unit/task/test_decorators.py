"""The everyday form: one declaration, both variants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from ergon_framework import (
    Ack,
    AsyncConsumerMixin,
    AsyncTask,
    BusinessError,
    ConfigurationError,
    ConsumerMixin,
    ConsumerPolicy,
    DeadLetter,
    MemoryConnector,
    Pause,
    ProducerMixin,
    ProducerPolicy,
    RawPayload,
    Task,
    Transaction,
    TransactionException,
    consumer,
    producer,
)
from ergon_framework.worker.report import OutcomeKind


class OrderPayload(BaseModel):
    id: str
    total: int


@pytest.fixture(params=["threads", "asyncio"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_queue(*totals: int) -> MemoryConnector:
    connector = MemoryConnector("orders")
    connector.dispatch([Transaction({"id": str(total), "total": total}, id=str(total)) for total in totals])
    return connector


def run_task(task: Any, *args: Any, **kwargs: Any) -> Any:
    result = task.run(*args, **kwargs)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def to_variant(variant: str, fn: Any) -> Any:
    """*fn* as a sync or as an async function with the same parameters."""
    if variant == "threads":
        return fn

    async def async_variant(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    async_variant.__wrapped__ = fn  # type: ignore[attr-defined]
    async_variant.__name__ = fn.__name__
    async_variant.__annotations__ = fn.__annotations__
    return async_variant


@pytest.mark.spec("CON-01", "CON-40")
def test_a_function_consumes_typed_payloads_with_injected_services(variant: str) -> None:
    seen: list[Any] = []

    def charge(order: OrderPayload, transaction: Transaction, ledger: list[Any]) -> None:
        ledger.append((order.total, transaction.id))

    connector = make_queue(1, 2)
    task = consumer(connector, payload=OrderPayload, services={"ledger": seen})(to_variant(variant, charge))
    report = run_task(task)
    assert sorted(seen) == [(1, "1"), (2, "2")]
    assert report.counts[OutcomeKind.SUCCEEDED] == 2
    assert (task.name, connector.depth().ready) == ("charge", 0)


def test_a_settlement_that_the_function_returns_is_applied(variant: str) -> None:
    def reject(order: Any) -> Any:
        return DeadLetter("too late") if order["total"] == 1 else None

    connector = make_queue(1, 2)
    run_task(consumer(connector)(to_variant(variant, reject)))
    assert [record.reason for record in connector.dead_letters] == ["too late"]


def test_handlers_of_a_function_task_are_declared_with_it(variant: str) -> None:
    seen: list[Any] = []

    def charge(order: OrderPayload) -> str:
        if order.total > 100:
            raise BusinessError("declined", code="declined")
        return "paid"

    def record_payment(order: OrderPayload, result: str) -> None:
        seen.append((order.total, result))

    def record_failure(order: OrderPayload, error: Exception) -> Ack:
        seen.append((order.total, str(error)))
        return Ack()

    connector = make_queue(1, 200)
    task = consumer(connector, payload=OrderPayload)(to_variant(variant, charge))
    task.on_success(to_variant(variant, record_payment))
    task.on_failure(to_variant(variant, record_failure))
    report = run_task(task)
    assert sorted(seen) == [(1, "paid"), (200, "declined")]
    assert report.counts[OutcomeKind.FAILED] == 1
    assert connector.dead_letters == [], "the handler asked for an ack"


def test_without_handlers_a_failure_is_dead_lettered(variant: str) -> None:
    def charge(order: OrderPayload) -> None:
        raise BusinessError("declined", code="declined")

    connector = make_queue(1)
    run_task(consumer(connector, payload=OrderPayload, name="charging")(to_variant(variant, charge)))
    (record,) = connector.dead_letters
    assert (record.reason, record.failure.task_name) == ("declined", "charging")


def test_the_function_itself_can_still_be_called(variant: str) -> None:
    def positive(number: int) -> int:
        return abs(number)

    task = consumer(make_queue())(to_variant(variant, positive))
    result = task(-3)
    assert (asyncio.run(result) if asyncio.iscoroutine(result) else result) == 3


@pytest.mark.spec("CON-40")
def test_values_of_the_lifespan_are_services_while_the_task_runs(variant: str) -> None:
    events: list[str] = []

    @contextmanager
    def sync_lifespan() -> Iterator[dict[str, Any]]:
        events.append("open")
        yield {"pool": "P"}
        events.append("closed")

    @asynccontextmanager
    async def async_lifespan() -> AsyncIterator[dict[str, Any]]:
        with sync_lifespan() as services:
            yield services

    def use(order: Any, pool: str) -> None:
        events.append(pool)

    lifespan: Any = sync_lifespan if variant == "threads" else async_lifespan
    task = consumer(make_queue(1), lifespan=lifespan)(to_variant(variant, use))
    run_task(task)
    assert events == ["open", "P", "closed"]
    assert "pool" not in task.services


@pytest.mark.spec("CON-40")
def test_a_missing_service_is_an_error_before_anything_is_fetched(variant: str) -> None:
    def use(order: Any, pool: str) -> None: ...

    connector = make_queue(1)
    with pytest.raises(ConfigurationError, match=r"'pool' of use is bound neither .*; did you mean 'pol'\?"):
        consumer(connector, services={"pol": "typo"})(to_variant(variant, use))

    @contextmanager
    def lifespan() -> Iterator[dict[str, Any]]:
        yield {"pol": "typo"}

    @asynccontextmanager
    async def async_lifespan() -> AsyncIterator[dict[str, Any]]:
        yield {"pol": "typo"}

    chosen: Any = lifespan if variant == "threads" else async_lifespan
    task = consumer(connector, lifespan=chosen)(to_variant(variant, use))
    with pytest.raises(ConfigurationError, match=r"no service 'pool'; did you mean 'pol'\?"):
        run_task(task)
    assert connector.depth().ready == 1


@pytest.mark.spec("CON-47")
def test_a_dependency_can_pause_the_task(variant: str) -> None:
    class Provider:
        gate_calls = 0

        def gate(self) -> Pause | None:
            self.gate_calls += 1
            return Pause("breaker open", 0.01) if self.gate_calls < 3 else None

    provider, connector = Provider(), make_queue(1)
    report = run_task(consumer(connector, uses=[provider])(to_variant(variant, lambda order: None)))
    assert provider.gate_calls >= 3
    assert report.counts[OutcomeKind.SUCCEEDED] == 1


def test_the_policy_of_the_decorator_applies_unless_run_gets_one(variant: str) -> None:
    connector = make_queue(1, 2, 3)
    policy = ConsumerPolicy.load({"loop": {"limit": 1}})
    task = consumer(connector, policy=policy)(to_variant(variant, lambda order: None))
    assert run_task(task).started == 1
    assert run_task(task, ConsumerPolicy()).started == 2


@pytest.mark.spec("PRO-20")
def test_a_producer_function_dispatches_the_transaction_it_returns(variant: str) -> None:
    seen: list[Any] = []

    def invoice(order: OrderPayload) -> Any:
        if order.total == 2:
            return "nothing to send"
        if order.total == 3:
            raise BusinessError("no")
        return Transaction({"amount": order.total}, id=f"invoice-{order.id}")

    out = MemoryConnector("invoices")
    task = producer(out, payload=OrderPayload)(to_variant(variant, invoice))
    task.on_success(to_variant(variant, lambda order, result: seen.append(result)))
    task.on_failure(to_variant(variant, lambda order, error: seen.append(str(error))))
    transactions = [Transaction({"id": str(total), "total": total}, id=str(total)) for total in (1, 2, 3)]
    report = task.produce_transactions(transactions)
    report = asyncio.run(report) if asyncio.iscoroutine(report) else report
    assert [outcome.kind for outcome in report.outcomes] == [
        OutcomeKind.SUCCEEDED,
        OutcomeKind.SUCCEEDED,
        OutcomeKind.FAILED,
    ]
    assert out.depth().ready == 1
    assert {str(getattr(item, "transaction_id", item)) for item in seen} == {"invoice-1", "nothing to send", "no"}


def test_a_producer_function_without_handlers_and_with_a_lifespan(variant: str) -> None:
    @contextmanager
    def sync_lifespan() -> Iterator[dict[str, Any]]:
        yield {"rate": 2}

    @asynccontextmanager
    async def async_lifespan() -> AsyncIterator[dict[str, Any]]:
        yield {"rate": 2}

    def double(amount: int, rate: int) -> int:
        if amount == 0:
            raise ValueError("zero")
        return amount * rate

    lifespan: Any = sync_lifespan if variant == "threads" else async_lifespan
    task = producer(MemoryConnector("out"), lifespan=lifespan)(to_variant(variant, double))
    transactions = [Transaction(4, id="a"), Transaction(0, id="b")]

    async def main() -> Any:
        async with task.open():
            return await task.produce_transactions(transactions, _make_single_attempt_policy())

    if variant == "threads":
        with task.open():
            report = task.produce_transactions(transactions, _make_single_attempt_policy())
    else:
        report = asyncio.run(main())
    assert [(o.kind, o.result) for o in report.outcomes] == [(OutcomeKind.SUCCEEDED, 8), (OutcomeKind.FAILED, None)]
    plain = producer(MemoryConnector("out"))(to_variant(variant, lambda amount: amount))
    assert plain.lifespan() is not None


def _make_single_attempt_policy() -> Any:
    return ProducerPolicy.load({"steps": {"produce": {"retry": {"max_attempts": 1}}}})


class Handler:
    """A class that might be decorated by mistake."""


def yields(order: Any) -> Any:
    yield order


async def yields_async(order: Any) -> Any:
    yield order


@pytest.mark.parametrize(
    "target, message",
    [
        ("text", "not str"),
        (Handler, "not the class Handler"),
        (yields, "yields is a generator function"),
        (yields_async, "yields_async is a generator function"),
    ],
)
@pytest.mark.parametrize("decorator", [consumer, producer])
def test_a_target_that_would_run_nothing_is_rejected_at_its_declaration(
    decorator: Any, target: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        decorator(make_queue())(target)


def test_a_handler_has_the_variant_of_its_task(variant: str) -> None:
    def note(order: Any, error: Any) -> None: ...

    async def note_async(order: Any, error: Any) -> None: ...

    task = consumer(make_queue(), name="charge")(to_variant(variant, lambda order: None))
    other, expected = (note_async, "def") if variant == "threads" else (note, "async def")
    for declare in (task.on_success, task.on_failure):
        with pytest.raises(ConfigurationError, match=f"must be declared with {expected}, as charge is"):
            declare(other)


@pytest.mark.spec("CON-28")
def test_an_object_that_is_called_asynchronously_is_an_async_task() -> None:
    seen: list[Any] = []

    class Charging:
        async def __call__(self, order: Any) -> None:
            seen.append(order["total"])

    task = consumer(make_queue(7))(Charging())
    run_task(task)
    assert (seen, task.name) == ([7], "Charging")


def test_a_partial_function_is_a_function() -> None:
    seen: list[Any] = []

    def charge(order: Any, transaction: Transaction, rate: int) -> None:
        seen.append((order["total"] * rate, transaction.id))

    task = consumer(make_queue(7))(partial(charge, rate=3))
    run_task(task)
    assert (seen, task.name) == ([(21, "7")], "charge")


@pytest.mark.spec("CON-30")
def test_work_that_never_started_is_not_a_success(variant: str) -> None:
    async def later() -> None: ...

    def steps() -> Any:
        yield

    for start_work in (later, steps, lambda: yields_async(None)):
        if variant == "asyncio" and start_work is later:
            continue  # there it is awaited, and so is begun
        connector = make_queue(1)
        policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}})
        task = consumer(connector, policy=policy)(to_variant(variant, lambda order, made=start_work: made()))
        assert run_task(task).counts[OutcomeKind.FAILED] == 1
        assert "and none of it has run" in connector.dead_letters[0].failure.error_message


@pytest.mark.spec("CON-30")
def test_an_async_handler_of_a_sync_class_is_rejected() -> None:
    class Wrong(ConsumerMixin, ProducerMixin, Task):
        async def process_transaction(self, transaction: Transaction) -> None: ...

        async def handle_produce_exception(self, transaction: Transaction, exc: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="process_transaction is async, but its task runs on threads"):
        Wrong(make_queue(1)).run()
    with pytest.raises(ConfigurationError, match="handle_produce_exception is async"):
        Wrong(make_queue(1)).produce_transactions([])


@pytest.mark.spec("CON-30")
@pytest.mark.parametrize("has_handler", [True, False])
def test_an_invalid_payload_is_dead_lettered_as_undecodable(variant: str, has_handler: bool) -> None:
    def charge(order: OrderPayload) -> None: ...

    def record_failure(order: OrderPayload, error: TransactionException) -> None:
        raise AssertionError("a handler without the raw payload must not be called")

    connector = MemoryConnector("orders")
    connector.dispatch([Transaction({"total": "many"}, id="1")])
    policy = ConsumerPolicy.load({"steps": {"settle": {"on_business": "ack"}}})
    task = consumer(connector, policy=policy)(to_variant(variant, charge))
    if has_handler:
        task.on_failure(to_variant(variant, record_failure))
    assert run_task(task).counts[OutcomeKind.FAILED] == 1
    (letter,) = connector.dead_letters
    assert (letter.reason, letter.payload, letter.failure.attempts) == ("undecodable", {"total": "many"}, 1)
    assert "id: Field required; total: Input should be a valid integer" in letter.failure.error_message


@pytest.mark.spec("CON-30")
def test_a_failure_handler_can_take_the_raw_payload(variant: str) -> None:
    seen: list[Any] = []

    def charge(order: OrderPayload) -> None:
        raise BusinessError("declined", code="declined")

    def record_failure(raw: RawPayload, error: TransactionException, order: OrderPayload | None) -> Ack:
        seen.append((raw, error.code, order))
        return Ack()

    connector = MemoryConnector("orders")
    valid = {"id": "2", "total": 2}
    connector.dispatch([Transaction({"total": "many"}, id="1"), Transaction(valid, id="2")])
    task = consumer(connector)(to_variant(variant, charge))
    task.on_failure(to_variant(variant, record_failure))
    assert run_task(task).counts[OutcomeKind.FAILED] == 2
    assert connector.dead_letters == []
    assert sorted(seen, key=str) == [
        (valid, "declined", OrderPayload(id="2", total=2)),
        ({"total": "many"}, "invalid_payload", None),
    ]


@pytest.mark.spec("DX-18")
@pytest.mark.parametrize("decorator", [consumer, producer])
def test_a_misspelt_option_is_rejected_with_the_nearest_one(decorator: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"has no option 'paylod'; did you mean 'payload'\?"):
        decorator(make_queue(), paylod=OrderPayload)
    with pytest.raises(ConfigurationError, match="has no option 'zzz'; its options are: retries, timeout"):
        decorator(make_queue(), zzz=1)
    with pytest.raises(ConfigurationError, match=r"Charge has no option 'polcy'; did you mean 'policy'\?"):
        Charge(make_queue(), polcy=ConsumerPolicy())  # type: ignore[call-arg]


def test_a_parameter_called_transaction_needs_no_annotation(variant: str) -> None:
    seen: list[str] = []

    def charge(order, transaction):  # type: ignore[no-untyped-def]
        seen.append(transaction.id)

    run_task(consumer(make_queue(5))(to_variant(variant, charge)))
    assert seen == ["5"]


@pytest.mark.spec("PRO-20")
def test_a_producer_that_returns_none_has_failed(variant: str) -> None:
    task = producer(MemoryConnector("out"))(to_variant(variant, lambda order: None))
    report = task.produce_transactions([Transaction(id="1")])
    report = asyncio.run(report) if asyncio.iscoroutine(report) else report
    assert (report.outcomes[0].kind, report.outcomes[0].error.code) == (OutcomeKind.FAILED, "nothing_produced")


@pytest.mark.parametrize("policy", [{"loop": {}}, 5])
def test_a_policy_must_be_a_policy_object(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"pass a ConsumerPolicy, built from a mapping"):
        consumer(make_queue(), policy=policy)(lambda order: None)


def test_a_connector_must_be_a_connector_object() -> None:
    with pytest.raises(ConfigurationError, match=r"connector of .* is invalid: it is a str"):
        consumer("amqp://broker")(lambda order: None)  # type: ignore[arg-type]


@pytest.mark.spec("CON-30")
def test_a_dead_letter_that_a_handler_requested_names_its_decision(variant: str) -> None:
    connector = make_queue(1)
    run_task(consumer(connector)(to_variant(variant, lambda order: DeadLetter("too late"))))
    failure = connector.dead_letters[0].failure
    assert (failure.reason_code, failure.error_type, failure.error_message) == ("too late", "DeadLetter", "too late")
    assert (failure.category, failure.deliveries) == ("BUSINESS", 1)


# -- classes ------------------------------------------------------------------------------------


class Charge(ConsumerMixin, ProducerMixin, Task):
    """The document's form."""

    def process_transaction(self, transaction: Transaction) -> Any:
        return self.services.ledger.append(transaction.id)


class AsyncCharge(AsyncConsumerMixin, AsyncTask):
    """The document's form, async."""

    async def process_transaction(self, transaction: Transaction) -> Any:
        return self.services["ledger"].append(transaction.id)


@pytest.mark.spec("CON-40", "CON-42")
def test_a_class_with_mixins_behaves_like_a_function_task(variant: str) -> None:
    ledger: list[str] = []
    kind = Charge if variant == "threads" else AsyncCharge
    connector = make_queue(1, 2)
    task = kind(connector, services={"ledger": ledger}, gates=[lambda: None], policy=ConsumerPolicy())
    report = run_task(task)
    assert sorted(ledger) == ["1", "2"]
    assert report.counts[OutcomeKind.SUCCEEDED] == 2
    assert task.name == kind.__name__
    assert repr(task.services) == "Services(ledger)"
    assert (list(task.services), len(task.services)) == (["ledger"], 1)


def test_a_task_needs_a_connector_and_may_have_it_on_its_class() -> None:
    with pytest.raises(ConfigurationError, match="Charge has no connector"):
        Charge()
    class_connector = make_queue(1)

    class Bound(Charge):
        connector = class_connector

    assert Bound().connector is class_connector


@pytest.mark.spec("CON-40")
def test_the_error_for_an_unknown_service_names_the_known_services() -> None:
    task = Charge(make_queue(), services={"ledger": []})
    with pytest.raises(ConfigurationError, match="did you mean 'ledger'"):
        _ = task.services.leger
    with pytest.raises(ConfigurationError, match="available: ledger"):
        _ = task.services["zzz"]
    with pytest.raises(AttributeError):
        _ = task.services._private
    with pytest.raises(ConfigurationError, match="available: none"):
        _ = Charge(make_queue()).services.anything


def test_a_payload_is_read_as_the_type_that_the_task_declares():
    @consumer(MemoryConnector("orders"), payload=OrderPayload)
    def task(order):
        pass

    assert task.read_payload(Transaction({"id": "a", "total": 7}, id="one")) == OrderPayload(id="a", total=7)
    with pytest.raises(TransactionException, match="total: Field required"):
        task.read_payload(Transaction({"id": "a"}, id="one"))


@pytest.mark.spec("DX-09")
def test_a_business_failure_inside_a_task_group_is_not_retried() -> None:
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction({"item": "lamp"}, id="a")])
    calls: list[str] = []

    async def reserve(item: str) -> None:
        calls.append(item)
        raise BusinessError(f"{item} is sold out", code="sold_out")

    @consumer(queue)
    async def handle(order: dict[str, str]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(reserve(order["item"]))
            group.create_task(asyncio.sleep(60))

    asyncio.run(handle.run())
    assert calls == ["lamp"]
    (dead_letter,) = queue.dead_letters
    assert (dead_letter.reason, dead_letter.failure.category, dead_letter.failure.attempts) == (
        "sold_out",
        "BUSINESS",
        1,
    )
    assert "BusinessError: lamp is sold out" in dead_letter.failure.error_message
