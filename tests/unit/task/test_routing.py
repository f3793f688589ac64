"""Routers: several handlers on one queue, chosen by the type of the transaction."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from ergon_framework import (
    Ack,
    AsyncConsumerMixin,
    AsyncMiddleware,
    AsyncTask,
    BusinessError,
    ConfigurationError,
    ConsumerMixin,
    ConsumerPolicy,
    MemoryConnector,
    Middleware,
    Pause,
    RawPayload,
    Router,
    Task,
    Transaction,
    TransactionException,
    router,
)
from ergon_framework.cli.app import app
from ergon_framework.runner.loading import is_consumer, load_tasks
from ergon_framework.testing.harness import TaskHarness
from ergon_framework.worker.report import OutcomeKind, StopReason


@dataclass
class Order:
    number: int


@dataclass
class Cancellation:
    reason: str


@pytest.fixture(params=["threads", "asyncio"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def queue() -> MemoryConnector:
    return MemoryConnector("events")


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
    async_variant.__doc__ = fn.__doc__
    return async_variant


def dispatch(queue: MemoryConnector, payload: Any, **fields: Any) -> None:
    queue.dispatch([queue.transaction(payload, **fields)])


def add_handlers(variant: str, events: Router, seen: list[Any]) -> tuple[Any, Any]:
    def created(order: Order) -> str:
        """Book an order."""
        seen.append(order)
        return "booked"

    def cancelled(cancellation: Cancellation, transaction: Transaction) -> None:
        seen.append((cancellation, transaction.type))

    return (
        events.on("order.created")(to_variant(variant, created)),
        events.on("order.cancelled")(to_variant(variant, cancelled)),
    )


@pytest.mark.spec("CON-01")
def test_the_type_of_a_transaction_chooses_the_handler_and_the_payload_type(
    queue: MemoryConnector, variant: str
) -> None:
    seen: list[Any] = []
    events = router(queue, concurrency=1)
    add_handlers(variant, events, seen)
    dispatch(queue, {"number": 1}, type="order.created")
    dispatch(queue, {"reason": "late"}, type="order.cancelled")
    report = run_task(events)
    assert seen == [Order(1), (Cancellation("late"), "order.cancelled")]
    assert (report.counts[OutcomeKind.SUCCEEDED], queue.depth().ready) == (2, 0)


@pytest.mark.spec("CON-30")
@pytest.mark.parametrize("on_business", ["dead_letter", "ack"])
@pytest.mark.parametrize("unknown_type", ["order.changed", ""])
def test_an_unknown_type_is_dead_lettered_at_once_and_its_failure_names_the_known_ones(
    queue: MemoryConnector, variant: str, unknown_type: str, on_business: str
) -> None:
    seen: list[Any] = []
    events = router(queue, policy=ConsumerPolicy.load({"steps": {"settle": {"on_business": on_business}}}))
    created, cancelled = add_handlers(variant, events, seen)

    def note(transaction: Transaction) -> None:
        seen.append(transaction.id)

    created.on_failure(to_variant(variant, note))
    cancelled.on_success(to_variant(variant, note))
    dispatch(queue, {"number": 1}, type=unknown_type, id="strange")
    report = run_task(events)
    [record] = queue.dead_letters
    assert (record.id, record.reason, record.failure.attempts, seen) == ("strange", "unknown_type", 1, [])
    assert record.failure.error_message == (
        f"the queue 'events' has no handler for type {unknown_type!r}; it has handlers for: "
        "order.cancelled, order.created"
    )
    assert report.counts[OutcomeKind.FAILED] == 1


def test_the_failure_of_a_long_unknown_type_still_names_the_known_ones(queue: MemoryConnector, variant: str) -> None:
    def handle(order: Order) -> None: ...

    known = ["", *(f"order.{number:0>20}" for number in range(10))]
    events = router(queue)
    for each in known:
        events.on(each)(to_variant(variant, handle))
    dispatch(queue, 1, type="x" * 256)
    run_task(events)
    message = queue.dead_letters[0].failure.error_message
    assert message.endswith(f"'; it has handlers for: '', {', '.join(known[1:])}")


def test_transactions_without_a_type_can_have_a_handler(queue: MemoryConnector, variant: str) -> None:
    seen: list[Any] = []
    events = router(queue)

    def handle(order: Any) -> None:
        seen.append(order)

    events.on("", payload=Order)(to_variant(variant, handle))
    dispatch(queue, {"number": 1}, type="")
    run_task(events)
    assert (seen, queue.dead_letters) == ([Order(1)], [])


def test_each_handler_has_its_own_success_and_failure_handlers(queue: MemoryConnector, variant: str) -> None:
    seen: list[Any] = []

    def created(order: Order) -> str:
        return "booked"

    def cancelled(cancellation: Cancellation) -> None:
        raise BusinessError("too late", code="too_late")

    def note(order: Order, result: str) -> None:
        seen.append((order, result))

    def keep(cancellation: Cancellation, error: TransactionException) -> Ack:
        seen.append((cancellation, error.code))
        return Ack()

    events = router(queue, concurrency=1)
    first = events.on("order.created")(to_variant(variant, created))
    second = events.on("order.cancelled")(to_variant(variant, cancelled))
    assert first.on_success(to_variant(variant, note)) is not None
    second.on_failure(to_variant(variant, keep))
    dispatch(queue, {"number": 1}, type="order.created")
    dispatch(queue, {"reason": "late"}, type="order.cancelled")
    dispatch(queue, {"number": 2}, type="order.created")
    run_task(events)
    assert seen == [(Order(1), "booked"), (Cancellation("late"), "too_late"), (Order(2), "booked")]
    assert queue.dead_letters == []


def test_the_handlers_of_a_handler_have_its_variant(queue: MemoryConnector, variant: str) -> None:
    other, expected = ("asyncio", "def") if variant == "threads" else ("threads", "async def")
    created, _ = add_handlers(variant, router(queue), [])

    def note(result: str) -> None: ...

    with pytest.raises(ConfigurationError, match=f"note must be declared with {expected}, as created is"):
        created.on_success(to_variant(other, note))


@pytest.mark.spec("CON-30")
def test_a_payload_that_does_not_fit_the_type_of_its_handler_is_undecodable(
    queue: MemoryConnector, variant: str
) -> None:
    seen: list[Any] = []
    events = router(queue, concurrency=1)
    _, cancelled = add_handlers(variant, events, seen)

    def keep(payload: RawPayload) -> None:
        seen.append(payload)

    cancelled.on_failure(to_variant(variant, keep))
    dispatch(queue, {"number": "one"}, type="order.created", id="a")
    dispatch(queue, {"number": 1}, type="order.cancelled", id="b")
    run_task(events)
    assert [(record.id, record.reason) for record in queue.dead_letters] == [
        ("a", "undecodable"),
        ("b", "invalid_payload"),
    ]
    assert seen == [{"number": 1}]


def test_a_handler_can_still_be_called_and_has_the_names_of_its_function(queue: MemoryConnector, variant: str) -> None:
    created, _ = add_handlers(variant, router(queue), [])
    result = created(Order(1))
    assert (asyncio.run(result) if asyncio.iscoroutine(result) else result) == "booked"
    assert (created.type, created.__doc__, created.__module__) == ("order.created", "Book an order.", __name__)


# -- sending ----------------------------------------------------------------------------------------


def test_a_handler_sends_transactions_of_its_type(queue: MemoryConnector, variant: str) -> None:
    events = router(queue)
    created, cancelled = add_handlers(variant, events, [])
    if variant == "threads":
        created.send(Order(1), id="order-1", key="k")
        cancelled.send_many([Cancellation("a"), Cancellation("b")])
    else:

        async def send() -> None:
            await created.send_async(Order(1), id="order-1", key="k")
            await cancelled.send_many_async([Cancellation("a"), Cancellation("b")])

        asyncio.run(send())
    transactions = [delivery.transaction for delivery in queue.fetch_transactions(9)]
    assert [(t.type, t.payload, t.source) for t in transactions] == [
        ("order.created", {"number": 1}, "events"),
        ("order.cancelled", {"reason": "a"}, "events"),
        ("order.cancelled", {"reason": "b"}, "events"),
    ]
    assert (transactions[0].id, transactions[0].key) == ("order-1", "k")


def test_one_attempt_can_send_one_transaction_of_each_type_and_many_of_each(
    queue: MemoryConnector, variant: str
) -> None:
    other = router(MemoryConnector("other"))
    created, cancelled = add_handlers(variant, other, [])
    events = router(queue, retries=0)

    def split(order: Order) -> None:
        created.send(order)
        cancelled.send(Cancellation("x"))
        created.send_many([order])
        cancelled.send_many([Cancellation("x")])

    async def split_async(order: Order) -> None:
        await created.send_async(order)
        await cancelled.send_async(Cancellation("x"))
        await created.send_many_async([order])
        await cancelled.send_many_async([Cancellation("x")])

    events.on("split")(split if variant == "threads" else split_async)
    dispatch(queue, {"number": 1}, type="split")
    assert run_task(events).counts[OutcomeKind.SUCCEEDED] == 1
    transactions = [delivery.transaction for delivery in other.connector.fetch_transactions(9)]
    assert len({transaction.id for transaction in transactions}) == 4
    assert [t.type for t in transactions] == ["order.created", "order.cancelled"] * 2


# -- options ----------------------------------------------------------------------------------------


def test_the_options_of_a_consumer_apply_to_all_handlers(queue: MemoryConnector, variant: str) -> None:
    class Dependency:
        def gate(self) -> Pause | None:
            return None

    dependency = Dependency()

    def gate() -> Pause | None:
        return None

    events = router(
        queue,
        retries=4,
        timeout=30,
        backoff=2,
        concurrency=20,
        max_deliveries=7,
        name="billing",
        uses=[dependency],
        gates=[gate],
        isolated=True,
    )
    add_handlers(variant, events, [])
    retry, loop = events.policy.steps.process.retry, events.policy.loop
    assert (retry.max_attempts, retry.timeout, loop.concurrency.value, loop.max_deliveries) == (5, 30, 20, 7)
    assert (events.name, events.isolated, list(events.gates)) == ("billing", True, [gate, dependency.gate])


def test_a_router_has_the_name_of_its_queue_and_the_module_that_declares_it(queue: MemoryConnector) -> None:
    events = router(queue)
    assert (events.name, events.__module__) == ("events", __name__)


def test_handlers_take_services_of_the_task_and_of_its_lifespan(queue: MemoryConnector, variant: str) -> None:
    seen: list[Any] = []

    @contextmanager
    def open_client() -> Iterator[dict[str, Any]]:
        yield {"client": "client"}

    @asynccontextmanager
    async def open_client_async() -> Any:
        yield {"client": "client"}

    def created(order: Order, client: str, ledger: list[Any]) -> None:
        ledger.append(client)

    lifespan = open_client if variant == "threads" else open_client_async
    events = router(queue, services={"ledger": seen}, lifespan=lifespan)
    events.on("order.created")(to_variant(variant, created))
    dispatch(queue, {"number": 1}, type="order.created")
    run_task(events)
    assert (seen, events.service_names) == (["client"], {"client", "ledger"})


def test_a_missing_service_of_any_handler_is_an_error_at_the_start(queue: MemoryConnector, variant: str) -> None:
    @contextmanager
    def open_nothing() -> Iterator[None]:
        yield

    @asynccontextmanager
    async def open_nothing_async() -> Any:
        yield

    def changed(order: Order, client: str) -> None: ...

    events = router(queue, lifespan=open_nothing if variant == "threads" else open_nothing_async)
    add_handlers(variant, events, [])
    events.on("order.changed")(to_variant(variant, changed))
    with pytest.raises(ConfigurationError, match="events has no service 'client'"):
        run_task(events)


def test_middleware_surrounds_the_transactions_of_every_type(queue: MemoryConnector, variant: str) -> None:
    seen: list[Any] = []

    class Recorder(Middleware):
        @contextmanager
        def transaction(self, context: Any) -> Iterator[None]:
            seen.append(context.transaction.type)
            yield

    class AsyncRecorder(AsyncMiddleware):
        @asynccontextmanager
        async def transaction(self, context: Any) -> Any:
            seen.append(context.transaction.type)
            yield

    events = router(queue, concurrency=1, middleware=[Recorder() if variant == "threads" else AsyncRecorder()])  # type: ignore[arg-type]
    add_handlers(variant, events, [])
    dispatch(queue, {"number": 1}, type="order.created")
    dispatch(queue, {"reason": "late"}, type="order.cancelled")
    run_task(events)
    assert seen == ["order.created", "order.cancelled"]


def test_middleware_of_the_other_variant_is_rejected_at_the_first_handler(queue: MemoryConnector, variant: str) -> None:
    class Idle(Middleware): ...

    class AsyncIdle(AsyncMiddleware): ...

    events = router(queue, middleware=[AsyncIdle()] if variant == "threads" else [Idle()])
    with pytest.raises(ConfigurationError, match="and events is not; derive it from"):
        add_handlers(variant, events, [])


# -- declaration ------------------------------------------------------------------------------------


def test_a_second_handler_for_one_type_is_rejected(queue: MemoryConnector, variant: str) -> None:
    events = router(queue)
    add_handlers(variant, events, [])

    def twice(order: Order) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"events has two handlers for type 'order.created', created and twice; remove one"
    ):
        events.on("order.created")(to_variant(variant, twice))


def test_handlers_of_both_variants_are_rejected_with_the_remedy(queue: MemoryConnector, variant: str) -> None:
    other, expected = ("asyncio", "def") if variant == "threads" else ("threads", "async def")
    events = router(queue)
    add_handlers(variant, events, [])

    def changed(order: Order) -> None: ...

    with pytest.raises(
        ConfigurationError,
        match=f"changed must be declared with {expected}, as created of the same router is; or give it a router",
    ):
        events.on("order.changed")(to_variant(other, changed))


def test_a_rejected_first_handler_decides_nothing(queue: MemoryConnector, variant: str) -> None:
    events = router(queue)

    def broken(order: Order, nonsense: int) -> None: ...

    with pytest.raises(ConfigurationError, match="parameter 'nonsense' of broken"):
        events.on("order.created")(to_variant("asyncio" if variant == "threads" else "threads", broken))
    created, _ = add_handlers(variant, events, [])
    assert created.type == "order.created"
    assert isinstance(events, Task if variant == "threads" else AsyncTask)


def test_a_decorator_without_a_type_is_rejected_with_the_remedy(queue: MemoryConnector) -> None:
    def created(order: Order) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"of events must be a str, not the function created; write @router.on"
    ):
        router(queue).on(created)  # type: ignore[arg-type]


def test_only_functions_can_be_handlers(queue: MemoryConnector) -> None:
    with pytest.raises(ConfigurationError, match="only functions can be decorated, not the class Order"):
        router(queue).on("order")(Order)


def test_a_router_needs_a_connector_and_known_options(queue: MemoryConnector) -> None:
    with pytest.raises(ConfigurationError, match=r"router needs a connector, such as queue\(name\), not 'events'"):
        router("events")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="router has no option 'retires'; did you mean 'retries'"):
        router(queue, retires=5)  # type: ignore[call-arg]


def test_a_router_without_handlers_is_refused_at_its_start(queue: MemoryConnector) -> None:
    events = router(queue)
    dispatch(queue, 1, type="order.created")
    for start in (events.run, events.consume_transactions, TaskHarness(events).run):
        with pytest.raises(ConfigurationError, match=r"events has no handler; declare one with @router.on\(type\)"):
            start()
    assert (queue.depth().ready, queue.dead_letters) == (1, [])


# -- tools ------------------------------------------------------------------------------------------


def test_the_harness_runs_a_router(queue: MemoryConnector, variant: str) -> None:
    seen: list[Any] = []
    events = router(queue, services={"ledger": None})
    created, _ = add_handlers(variant, events, seen)

    def split(order: Order, ledger: list[Any]) -> None:
        ledger.append(order)
        created.send(order)

    async def split_async(order: Order, ledger: list[Any]) -> None:
        ledger.append(order)
        await created.send_async(order)

    events.on("split")(split if variant == "threads" else split_async)
    ledger: list[Any] = []
    harness = TaskHarness(events, ledger=ledger)
    harness.send(Transaction({"number": 1}, id="1", type="split"), Transaction({}, id="2", type="unknown"))
    result = harness.run()
    assert (ledger, seen) == ([Order(1)], [Order(1)])
    assert [(record.id, record.reason) for record in result.dead_letters] == [("2", "unknown_type")]
    assert queue.depth().ready == 0, "handlers send to the queue of the harness"


def test_the_payload_of_a_corrected_transaction_is_read_as_its_handler_declares(
    queue: MemoryConnector, variant: str
) -> None:
    events: Any = router(queue)
    add_handlers(variant, events, [])
    assert events.read_payload(Transaction({"number": 1}, id="1", type="order.created")) == Order(1)
    for type_, payload, message in [
        ("order.cancelled", {"number": 1}, "payload is invalid: reason"),
        ("order.changed", {}, "has no handler for type 'order.changed'"),
    ]:
        with pytest.raises(TransactionException, match=message):
            events.read_payload(Transaction(payload, id="1", type=type_))


def test_a_router_is_a_consumer_from_its_declaration_on(queue: MemoryConnector, variant: str) -> None:
    events = router(queue)
    assert is_consumer(events)
    created, _ = add_handlers(variant, events, [])
    assert is_consumer(events)
    assert isinstance(events, ConsumerMixin if variant == "threads" else AsyncConsumerMixin)
    assert not is_consumer(created)


PROGRAM = """
from ergon_framework import MemoryConnector, router

events = router(MemoryConnector("events"), retries=5)

@events.on("order.created")
{definition} created(number: int) -> None:
    print("created", number, flush=True)

created.send(7)
"""


@pytest.fixture
def program(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, variant: str) -> Iterator[None]:
    definition = "def" if variant == "threads" else "async def"
    (tmp_path / "routedapp.py").write_text(PROGRAM.format(definition=definition), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("routedapp", None)


def test_the_command_line_runs_and_explains_a_router(program: None) -> None:
    [events] = load_tasks(["routedapp"])
    assert run_task(events).stop_reason is StopReason.EMPTY
    for arguments, text in [
        (["policy", "explain", "routedapp:events"], "max handler calls:     6"),
        (["doctor", "routedapp:events"], "events"),
        (["run", "routedapp:created"], "is a handler of the router 'events'; name the router"),
    ]:
        assert text in CliRunner().invoke(app, arguments).output
