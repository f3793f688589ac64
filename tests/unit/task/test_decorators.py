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
    Task,
    Transaction,
    TransactionException,
    consumer,
    producer,
)
from ergon_framework.task.report import Kind


class Order(BaseModel):
    id: str
    total: int


@pytest.fixture(params=["threads", "asyncio"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def orders(*totals: int) -> MemoryConnector:
    connector = MemoryConnector("orders")
    connector.dispatch([Transaction(str(total), {"id": str(total), "total": total}) for total in totals])
    return connector


def ran(task: Any, *args: Any, **kwargs: Any) -> Any:
    result = task.run(*args, **kwargs)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def declared(flavour: str, fn: Any) -> Any:
    """*fn* as a sync or as an async function with the same parameters."""
    if flavour == "threads":
        return fn

    async def twin(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    twin.__wrapped__ = fn  # type: ignore[attr-defined]
    twin.__name__ = fn.__name__
    twin.__annotations__ = fn.__annotations__
    return twin


@pytest.mark.spec("CON-01", "CON-40")
def test_a_function_consumes_typed_payloads_with_injected_services(flavour: str) -> None:
    seen: list[Any] = []

    def charge(order: Order, transaction: Transaction, ledger: list[Any]) -> None:
        ledger.append((order.total, transaction.id))

    connector = orders(1, 2)
    task = consumer(connector, payload=Order, ledger=seen)(declared(flavour, charge))
    report = ran(task)
    assert sorted(seen) == [(1, "1"), (2, "2")]
    assert report.counts[Kind.SUCCEEDED] == 2
    assert (task.name, connector.depth().ready) == ("charge", 0)


def test_a_settlement_that_the_function_returns_is_what_becomes_of_it(flavour: str) -> None:
    def reject(order: Any) -> Any:
        return DeadLetter("too late") if order["total"] == 1 else None

    connector = orders(1, 2)
    ran(consumer(connector)(declared(flavour, reject)))
    assert [record.reason for record in connector.dead_letters] == ["too late"]


def test_handlers_of_a_function_task_are_declared_with_it(flavour: str) -> None:
    seen: list[Any] = []

    def charge(order: Order) -> str:
        if order.total > 100:
            raise BusinessError("declined", code="declined")
        return "paid"

    def paid(order: Order, result: str) -> None:
        seen.append((order.total, result))

    def failed(order: Order, error: Exception) -> Ack:
        seen.append((order.total, str(error)))
        return Ack()

    connector = orders(1, 200)
    task = consumer(connector, payload=Order)(declared(flavour, charge))
    task.on_success(declared(flavour, paid))
    task.on_failure(declared(flavour, failed))
    report = ran(task)
    assert sorted(seen) == [(1, "paid"), (200, "declined")]
    assert report.counts[Kind.FAILED] == 1
    assert connector.dead_letters == [], "the handler asked for an ack"


def test_without_handlers_a_failure_is_dead_lettered(flavour: str) -> None:
    def charge(order: Order) -> None:
        raise BusinessError("declined", code="declined")

    connector = orders(1)
    ran(consumer(connector, payload=Order, name="charging")(declared(flavour, charge)))
    (record,) = connector.dead_letters
    assert (record.reason, record.failure.task_name) == ("declined", "charging")


def test_the_function_itself_can_still_be_called(flavour: str) -> None:
    def positive(number: int) -> int:
        return abs(number)

    task = consumer(orders())(declared(flavour, positive))
    result = task(-3)
    assert (asyncio.run(result) if asyncio.iscoroutine(result) else result) == 3


@pytest.mark.spec("CON-40")
def test_what_the_lifespan_yields_is_a_service_while_the_task_runs(flavour: str) -> None:
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

    lifespan: Any = sync_lifespan if flavour == "threads" else async_lifespan
    task = consumer(orders(1), lifespan=lifespan)(declared(flavour, use))
    ran(task)
    assert events == ["open", "P", "closed"]
    assert "pool" not in task.services


@pytest.mark.spec("CON-40")
def test_a_missing_service_is_an_error_before_anything_is_fetched(flavour: str) -> None:
    def use(order: Any, pool: str) -> None: ...

    connector = orders(1)
    task = consumer(connector, pol="typo")(declared(flavour, use))
    with pytest.raises(ConfigurationError, match=r"no service 'pool'; did you mean 'pol'\?"):
        ran(task)
    assert connector.depth().ready == 1


@pytest.mark.spec("CON-47")
def test_what_a_task_uses_can_hold_it_back(flavour: str) -> None:
    class Provider:
        asked = 0

        def gate(self) -> Pause | None:
            self.asked += 1
            return Pause("breaker open", 0.01) if self.asked < 3 else None

    provider, connector = Provider(), orders(1)
    report = ran(consumer(connector, uses=[provider])(declared(flavour, lambda order: None)))
    assert provider.asked >= 3
    assert report.counts[Kind.SUCCEEDED] == 1


def test_the_policy_is_the_decorators_unless_run_is_given_one(flavour: str) -> None:
    connector = orders(1, 2, 3)
    policy = ConsumerPolicy.load({"loop": {"limit": 1}})
    task = consumer(connector, policy=policy)(declared(flavour, lambda order: None))
    assert ran(task).started == 1
    assert ran(task, ConsumerPolicy()).started == 2


@pytest.mark.spec("PRO-20")
def test_a_producer_function_dispatches_the_transaction_it_returns(flavour: str) -> None:
    seen: list[Any] = []

    def invoice(order: Order) -> Any:
        if order.total == 2:
            return "nothing to send"
        if order.total == 3:
            raise BusinessError("no")
        return Transaction(f"invoice-{order.id}", {"amount": order.total})

    out = MemoryConnector("invoices")
    task = producer(out, payload=Order)(declared(flavour, invoice))
    task.on_success(declared(flavour, lambda order, result: seen.append(result)))
    task.on_failure(declared(flavour, lambda order, error: seen.append(str(error))))
    given = [Transaction(str(total), {"id": str(total), "total": total}) for total in (1, 2, 3)]
    report = task.produce_transactions(given)
    report = asyncio.run(report) if asyncio.iscoroutine(report) else report
    assert [outcome.kind for outcome in report.outcomes] == [Kind.SUCCEEDED, Kind.SUCCEEDED, Kind.FAILED]
    assert out.depth().ready == 1
    assert {str(getattr(item, "transaction_id", item)) for item in seen} == {"invoice-1", "nothing to send", "no"}


def test_a_producer_function_without_handlers_and_with_a_lifespan(flavour: str) -> None:
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

    lifespan: Any = sync_lifespan if flavour == "threads" else async_lifespan
    task = producer(MemoryConnector("out"), lifespan=lifespan)(declared(flavour, double))
    given = [Transaction("a", 4), Transaction("b", 0)]

    async def main() -> Any:
        async with task.opened():
            return await task.produce_transactions(given, _once())

    if flavour == "threads":
        with task.opened():
            report = task.produce_transactions(given, _once())
    else:
        report = asyncio.run(main())
    assert [(o.kind, o.result) for o in report.outcomes] == [(Kind.SUCCEEDED, 8), (Kind.FAILED, None)]
    plain = producer(MemoryConnector("out"))(declared(flavour, lambda amount: amount))
    assert plain.lifespan() is not None


def _once() -> Any:
    return ProducerPolicy.load({"steps": {"produce": {"retry": {"max_attempts": 1}}}})


class Handler:
    """What somebody might decorate by mistake."""


def yields(order: Any) -> Any:
    yield order


async def yields_async(order: Any) -> Any:
    yield order


@pytest.mark.parametrize(
    "thing, message",
    [
        ("text", "not str"),
        (Handler, "not the class Handler"),
        (yields, "yields yields, so calling it would run nothing"),
        (yields_async, "yields_async yields"),
    ],
)
@pytest.mark.parametrize("decorator", [consumer, producer])
def test_what_would_run_nothing_is_refused_when_it_is_declared(decorator: Any, thing: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        decorator(orders())(thing)


def test_a_handler_is_of_its_tasks_flavour(flavour: str) -> None:
    def note(order: Any, error: Any) -> None: ...

    async def note_async(order: Any, error: Any) -> None: ...

    task = consumer(orders(), name="charge")(declared(flavour, lambda order: None))
    other, wanted = (note_async, "def") if flavour == "threads" else (note, "async def")
    for declare in (task.on_success, task.on_failure):
        with pytest.raises(ConfigurationError, match=f"must be declared with {wanted}, as charge is"):
            declare(other)


@pytest.mark.spec("CON-28")
def test_an_object_that_is_called_asynchronously_is_an_async_task() -> None:
    seen: list[Any] = []

    class Charging:
        async def __call__(self, order: Any) -> None:
            seen.append(order["total"])

    task = consumer(orders(7))(Charging())
    ran(task)
    assert (seen, task.name) == ([7], "Charging")


def test_a_partial_function_is_a_function() -> None:
    seen: list[Any] = []

    def charge(order: Any, transaction: Transaction, rate: int) -> None:
        seen.append((order["total"] * rate, transaction.id))

    task = consumer(orders(7))(partial(charge, rate=3))
    ran(task)
    assert (seen, task.name) == ([(21, "7")], "charge")


@pytest.mark.spec("CON-30")
def test_work_that_was_never_begun_is_no_success(flavour: str) -> None:
    async def later() -> None: ...

    def steps() -> Any:
        yield

    for unbegun in (later, steps, lambda: yields_async(None)):
        if flavour == "asyncio" and unbegun is later:
            continue  # there it is awaited, and so is begun
        connector = orders(1)
        policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}})
        task = consumer(connector, policy=policy)(declared(flavour, lambda order, made=unbegun: made()))
        assert ran(task).counts[Kind.FAILED] == 1
        assert "nothing of it has run" in connector.dead_letters[0].failure.error_message


@pytest.mark.spec("CON-30")
def test_an_async_handler_of_a_sync_class_is_refused() -> None:
    class Wrong(ConsumerMixin, ProducerMixin, Task):
        async def process_transaction(self, transaction: Transaction) -> None: ...

        async def handle_produce_exception(self, transaction: Transaction, exc: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="process_transaction is async, but its task runs on threads"):
        Wrong(orders(1)).run()
    with pytest.raises(ConfigurationError, match="handle_produce_exception is async"):
        Wrong(orders(1)).produce_transactions([])


def test_a_payload_that_does_not_fit_reaches_the_failure_handler_as_it_came(flavour: str) -> None:
    seen: list[Any] = []

    def charge(order: Order) -> None: ...

    def failed(order: Any, error: Any) -> None:
        seen.append((order, error.code))

    connector = MemoryConnector("orders")
    connector.dispatch([Transaction("1", {"total": "many"})])
    task = consumer(connector, payload=Order)(declared(flavour, charge))
    task.on_failure(declared(flavour, failed))
    assert ran(task).counts[Kind.FAILED] == 1
    assert seen == [({"total": "many"}, "invalid_payload")]


def test_a_parameter_called_transaction_needs_no_annotation(flavour: str) -> None:
    seen: list[str] = []

    def charge(order, transaction):  # type: ignore[no-untyped-def]
        seen.append(transaction.id)

    ran(consumer(orders(5))(declared(flavour, charge)))
    assert seen == ["5"]


@pytest.mark.spec("PRO-20")
def test_a_producer_that_returns_nothing_has_produced_nothing(flavour: str) -> None:
    task = producer(MemoryConnector("out"))(declared(flavour, lambda order: None))
    report = task.produce_transactions([Transaction("1")])
    report = asyncio.run(report) if asyncio.iscoroutine(report) else report
    assert (report.outcomes[0].kind, report.outcomes[0].error.code) == (Kind.FAILED, "nothing_produced")


@pytest.mark.parametrize("policy", [{"loop": {}}, 5])
def test_a_policy_is_a_policy(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"pass a ConsumerPolicy, built from a mapping"):
        consumer(orders(), policy=policy)(lambda order: None)


def test_a_connector_is_a_connector() -> None:
    with pytest.raises(ConfigurationError, match="was given a str as its connector"):
        consumer("amqp://broker")(lambda order: None)  # type: ignore[arg-type]


@pytest.mark.spec("CON-30")
def test_a_dead_letter_that_a_handler_asked_for_says_that_it_was_its_decision(flavour: str) -> None:
    connector = orders(1)
    ran(consumer(connector)(declared(flavour, lambda order: DeadLetter("too late"))))
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
def test_a_class_with_mixins_is_the_same_thing(flavour: str) -> None:
    ledger: list[str] = []
    kind = Charge if flavour == "threads" else AsyncCharge
    connector = orders(1, 2)
    task = kind(connector, ledger=ledger, gates=[lambda: None], policy=ConsumerPolicy())
    report = ran(task)
    assert sorted(ledger) == ["1", "2"]
    assert report.counts[Kind.SUCCEEDED] == 2
    assert task.name == kind.__name__
    assert repr(task.services) == "Services(ledger)"
    assert (list(task.services), len(task.services)) == (["ledger"], 1)


def test_a_task_needs_a_connector_and_may_have_it_on_its_class() -> None:
    with pytest.raises(ConfigurationError, match="Charge has no connector"):
        Charge()
    given = orders(1)

    class Bound(Charge):
        connector = given

    assert Bound().connector is given


@pytest.mark.spec("CON-40")
def test_services_are_read_only_names_and_an_unknown_one_names_the_known() -> None:
    task = Charge(orders(), ledger=[])
    with pytest.raises(ConfigurationError, match="did you mean 'ledger'"):
        _ = task.services.leger
    with pytest.raises(ConfigurationError, match="there are: ledger"):
        _ = task.services["zzz"]
    with pytest.raises(AttributeError):
        _ = task.services._private
    with pytest.raises(ConfigurationError, match="there are: none"):
        _ = Charge(orders()).services.anything


def test_a_payload_is_read_as_the_type_that_the_task_declares():
    @consumer(MemoryConnector("orders"), payload=Order)
    def task(order):
        pass

    assert task.read_payload(Transaction("one", {"id": "a", "total": 7})) == Order(id="a", total=7)
    with pytest.raises(TransactionException, match="total: Field required"):
        task.read_payload(Transaction("one", {"id": "a"}))


@pytest.mark.spec("DX-09")
def test_a_business_failure_inside_a_task_group_is_not_retried() -> None:
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("a", {"item": "lamp"})])
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
    (dead,) = queue.dead_letters
    assert (dead.reason, dead.failure.category, dead.failure.attempts) == ("sold_out", "BUSINESS", 1)
    assert "BusinessError: lamp is sold out" in dead.failure.error_message
