"""SimpleConnector: one method makes a working connector, on threads and on asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from ergon_framework import (
    ConfigurationError,
    ConnectionLostError,
    ConsumerPolicy,
    DeadLetter,
    Defer,
    FetchException,
    SimpleConnector,
    Transaction,
    consumer,
)
from ergon_framework.connectors.base import Release, SettleResult
from ergon_framework.failure import Attempt, Deferral
from tests.log_events import get_event


class BatchConnector(SimpleConnector):
    """Hands out what it was given, in order."""

    def __init__(self, *batches: Any) -> None:
        super().__init__("numbers")
        self.batches = list(batches)
        self.fetch_calls: list[Any] = []

    def fetch(self, batch_size: int, **extra: Any) -> Iterable[Transaction]:
        self.fetch_calls.append((batch_size, extra))
        batch = self.batches.pop(0) if self.batches else []
        if isinstance(batch, Exception):
            raise batch
        return batch


def transactions(*names: str) -> list[Transaction]:
    return [Transaction({"name": name}, id=name) for name in names]


@pytest.fixture(params=["threads", "asyncio"])
def run(request: pytest.FixtureRequest) -> Any:
    """Consumes with a function of either variant, and the default policy unless there is one."""

    def consume(connector: SimpleConnector, function: Any, policy: ConsumerPolicy | None = None) -> Any:
        options = {} if policy is None else {"policy": policy}
        if request.param == "threads":

            @consumer(connector, **options)
            def handle(payload: Any) -> Any:
                return function(payload)

            return handle.run()

        @consumer(connector, **options)
        async def handle_async(payload: Any) -> Any:
            return function(payload)

        return asyncio.run(handle_async.run())

    return consume


@pytest.mark.spec("DX-08")
def test_a_connector_of_one_method_is_consumed_until_it_is_empty(run: Any) -> None:
    handled: list[str] = []
    source = BatchConnector(transactions("a", "b"), transactions("c"))
    report = run(source, lambda payload: handled.append(payload["name"]))
    assert sorted(handled) == ["a", "b", "c"]
    assert report.settled == {"settled": 3}


@pytest.mark.spec("DX-08")
def test_the_extra_options_of_the_policy_are_passed_to_fetch(run: Any) -> None:
    source = BatchConnector()
    run(source, None, ConsumerPolicy.load({"steps": {"fetch": {"extra": {"region": "north"}}}}))
    assert source.fetch_calls == [(10, {"region": "north"})]


@pytest.mark.spec("DX-08")
def test_a_failed_transaction_is_retried_and_then_logged(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[str] = []

    def fail(payload: Any) -> None:
        attempts.append(payload["name"])
        raise OSError("down")

    policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 2, "backoff": 0.0}}}})
    report = run(BatchConnector(transactions("a")), fail, policy)
    assert (attempts, report.finished) == (["a", "a"], 1)
    (record,) = [record for record in caplog.records if get_event(record) == "dead letter discarded"]
    assert (record.levelno, record.queue, record.transaction_id, record.reason) == (  # type: ignore[attr-defined]
        logging.WARNING,
        "numbers",
        "a",
        "system",
    )


@pytest.mark.spec("DX-08")
@pytest.mark.parametrize("junk", [{"name": "x"}, "text", None])
def test_anything_but_transactions_is_an_error_and_nothing_is_lost(run: Any, junk: Any) -> None:
    source = BatchConnector([*transactions("a"), junk])
    with pytest.raises(FetchException, match=rf"item 2 of 2 is a {type(junk).__name__}; expected Delivery.*SimpleConn"):
        run(source, lambda payload: None)
    assert [delivery.transaction.id for delivery in source.fetch_transactions(10)] == ["a"]


@pytest.mark.spec("DX-08")
@pytest.mark.parametrize("value", [None, 7, "text", {"name": "x"}])
def test_a_fetch_that_does_not_return_a_sequence_is_an_error(run: Any, value: Any) -> None:
    policy = ConsumerPolicy.load({"steps": {"fetch": {"retry": {"max_attempts": 1}}}})
    with pytest.raises(FetchException, match=f"must return a sequence of deliveries, not {type(value).__name__}"):
        run(BatchConnector(value), lambda payload: None, policy)


def test_an_error_in_fetch_is_raised_unchanged() -> None:
    with pytest.raises(ConnectionLostError, match="down"):
        BatchConnector(ConnectionLostError("down")).fetch_transactions(1)


def test_a_generator_is_read_up_to_the_batch_size() -> None:
    class Endless(SimpleConnector):
        read = 0

        def fetch(self, batch_size: int, **extra: Any) -> Iterator[Transaction]:
            while True:
                self.read += 1
                yield Transaction(id=str(self.read))

    source = Endless("endless")
    assert [delivery.transaction.id for delivery in source.fetch_transactions(3)] == ["1", "2", "3"]
    assert source.read == 3


def test_the_queue_is_the_source_of_a_transaction_that_has_none() -> None:
    source = BatchConnector([Transaction(id="a"), Transaction(id="b", source="elsewhere")])
    assert [each.transaction.source for each in source.fetch_transactions(2)] == ["numbers", "elsewhere"]


def test_released_and_deferred_transactions_are_redelivered_before_new_ones() -> None:
    source = BatchConnector(transactions("a", "b", "c"), transactions("d"))
    first, second, third = source.fetch_transactions(3)
    history = (Attempt(attempt=0, category="SYSTEM"),)
    deferral = Deferral(count=1, since=1.0, at=1.0, until=3601.0)
    later = Defer(0.0, attempts=2, history=history, deferral=deferral)
    settlings = [(first, Release()), (second, Defer(3600.0)), (third, later)]
    assert source.settle(settlings) == [SettleResult.SETTLED] * 3
    (again,) = source.fetch_transactions(1)
    assert (again.transaction, again.deliveries) == (first.transaction, 1)
    assert again.receipt != first.receipt
    (deferred,) = source.fetch_transactions(5)
    assert (deferred.transaction.id, deferred.transaction.attempts, deferred.deliveries) == ("c", 2, 1)
    assert (deferred.transaction.history, deferred.transaction.deferral) == (history, deferral)
    assert [each.transaction.id for each in source.fetch_transactions(5)] == ["d"], "b waits for an hour"


def test_a_delivery_is_settled_once() -> None:
    source = BatchConnector(transactions("a"))
    (delivery,) = source.fetch_transactions(1)
    assert source.settle([(delivery, DeadLetter("odd")), (delivery, Release())]) == [
        SettleResult.SETTLED,
        SettleResult.LOST,
    ]
    assert source.fetch_transactions(1) == []


def test_capabilities_are_minimal_and_dispatch_is_rejected() -> None:
    source = BatchConnector()
    assert source.name == "numbers"
    assert (source.capabilities.durable, source.capabilities.dead_letters, source.depth()) == (False, False, None)
    with pytest.raises(ConfigurationError, match="'numbers' is read-only; implement dispatch"):
        source.dispatch(transactions("a"))
