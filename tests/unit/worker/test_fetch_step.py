"""The script of a fetch; the test sends every result and checks the observer and the counter of each wait."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import AwaitExit, Call, Err, Expired, Interrupted, Ok, Sleep
from ergon_framework.errors import Category, ConnectionLostError, ErgonError
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import FetchException, FetchTimeoutException
from ergon_framework.worker.fetch import Fetcher
from ergon_framework.worker.policies import RetryPolicy
from ergon_framework.worker.report import StopReason


def make_delivery(name: str) -> Delivery:
    return Delivery(Transaction(id=name), name)


class ObservedFetchHarness:
    """A fetcher, its clock, its watch and its script; the clock begins at 40."""

    def __init__(
        self, *, deadline: float = 1e6, patient: bool = False, random_value: float = 0.5, **retry: Any
    ) -> None:
        self.now = 40.0
        self.events: list[Any] = []
        self.released: list[tuple[Any, str]] = []
        self.contexts: list[contextvars.Context] = []
        retry_options = {"max_attempts": 3, "timeout": 30.0, "backoff": 1.0, "multiplier": 2.0, "cap": 0.0} | retry
        self.fetcher = fetcher = Fetcher(
            abs,
            RetryPolicy(**retry_options),
            clock=Clock(monotonic=lambda: self.now, random=lambda: random_value),
            deadline=deadline,
            retries_lost_connections=patient,
            release=lambda delivery, reason: self.released.append((delivery.receipt, reason)),
        )
        self.script = fetcher.run(7, self)
        self.result: Any = None
        self.effect: Any = next(self.script)

    def on_attempt_start(self, number: int) -> contextvars.Context:
        self.events.append(number)
        self.contexts.append(context := contextvars.Context())
        return context

    def on_attempt_end(self, number: int, error: BaseException | None) -> None:
        self.events.append((number, error))

    def answer(self, *answers: Any) -> ObservedFetchHarness:
        for answer in answers:
            try:
                self.effect = self.script.send(answer)
            except StopIteration as stop:
                self.effect, self.result = None, stop.value
        return self

    @property
    def sleep_seconds(self) -> float | None:
        return self.effect.until - self.now if isinstance(self.effect, Sleep) else None


def test_each_fetch_attempt_runs_in_its_observers_context() -> None:
    harness = ObservedFetchHarness()
    call = harness.effect
    assert isinstance(call, Call)
    assert (call.step, call.args, call.until) == ("fetch", (7,), 70.0)
    assert (harness.fetcher.calls, call.fn(-7), harness.fetcher.calls) == (0, 7, 1)
    assert (call.scope, call.context) == (None, harness.contexts[0])
    assert call.on_late_result is not None
    call.on_late_result([make_delivery("a"), "junk", Delivery(Transaction(id="b"), [])])
    call.on_late_result(7)
    assert harness.released == [("a", "late")]


def test_the_observer_gets_the_number_and_the_error_of_every_attempt() -> None:
    error = OSError("no")
    harness = ObservedFetchHarness().answer(Err(error), None, Err(error), None, Ok([fetched := make_delivery("a")]))
    first, second = harness.events[1][1], harness.events[3][1]
    assert harness.events == [0, (0, first), 1, (1, second), 2, (2, None)]
    assert [type(each) for each in (first, second)] == [FetchException] * 2
    assert first.__cause__ is second.__cause__ is error
    assert harness.result == [fetched]


def test_the_observer_gets_no_error_when_the_loop_ends_during_an_attempt() -> None:
    harness = ObservedFetchHarness().answer(Interrupted())
    assert (harness.events, harness.result) == ([0, (0, None)], StopReason.STOP)


def test_the_retry_budget_is_exhausted_only_after_the_last_attempt() -> None:
    harness = ObservedFetchHarness()
    for wait in (1.0, 2.0):
        assert harness.answer(Err(OSError("no"))).sleep_seconds == wait
        harness.answer(None)
    result = harness.answer(Err(OSError("no"))).result
    assert str(result) == "the connector could not be read: OSError: no"


def test_a_result_that_is_not_a_list_is_retried_like_any_failure() -> None:
    harness = ObservedFetchHarness().answer(Ok(None))
    assert harness.sleep_seconds == 1.0
    message = "the connector could not be read: TypeError: a fetch must return a sequence of deliveries, not NoneType"
    assert str(harness.events[-1][1]) == message


@pytest.mark.spec("DX-08")
@pytest.mark.parametrize("value", ["text", b"bytes", 7])
def test_text_is_not_a_sequence_of_deliveries(value: Any) -> None:
    reason = f"TypeError: a fetch must return a sequence of deliveries, not {type(value).__name__}"
    assert str(ObservedFetchHarness().answer(Ok(value)).events[-1][1]) == f"the connector could not be read: {reason}"


INVALID_ITEMS: list[tuple[Any, str, list[str]]] = [
    (
        Transaction(id="x"),
        "a Transaction; expected Delivery(transaction, receipt), or a connector derived from SimpleConnector, whose",
        [],
    ),
    (None, "a NoneType; expected Delivery", []),
    (
        Delivery({"n": 1}, "x"),  # type: ignore[arg-type]
        "a Delivery of a dict; expected Delivery(Transaction(id, payload), receipt)",
        ["x"],
    ),
    (Delivery(Transaction(id="x"), {}), "a Delivery whose receipt is a dict; expected a hashable receipt", []),
    (
        Delivery(Transaction(id="x"), "x", None),  # type: ignore[arg-type]
        "a Delivery whose deliveries is a NoneType; expected a count from 1",
        ["x"],
    ),
]


@pytest.mark.spec("DX-08", "CON-08")
@pytest.mark.parametrize("invalid_item, reason, released", INVALID_ITEMS)
def test_an_invalid_item_ends_the_fetch_and_the_others_are_released(
    invalid_item: Any, reason: str, released: list[str]
) -> None:
    harness = ObservedFetchHarness().answer(Ok([make_delivery("a"), invalid_item, make_delivery("b")]))
    assert isinstance(harness.result, FetchException), "another attempt would only claim more"
    assert (harness.result.final, harness.result.code) == (True, "fetch")
    assert f"TypeError: item 2 of 3 is {reason}" in str(harness.result)
    assert harness.released == [(name, "fetch") for name in ("a", *released, "b")]


def make_invalid_error() -> ErgonError:
    error = ErgonError("no")
    error.final, error.retry_after = True, "soon"  # type: ignore[assignment]
    return error


def test_an_invalid_error_classification_is_ignored() -> None:
    assert ObservedFetchHarness().answer(Err(make_invalid_error())).sleep_seconds == 1.0


def test_lost_connections_and_other_failures_are_counted_separately() -> None:
    harness = ObservedFetchHarness(patient=True)
    down, broken = Err(ConnectionLostError("down")), Err(OSError("no"))
    waits = []
    for answer in (down, down, broken, down, broken):
        waits.append(harness.answer(answer).sleep_seconds)
        harness.answer(None)
    assert waits == [1.0, 2.0, 1.0, 4.0, 2.0]
    assert [event for event in harness.events if isinstance(event, int)] == [0, 0, 0, 1, 1, 2]
    assert isinstance(harness.answer(broken).result, FetchException)


def test_an_impatient_loop_waits_for_a_lost_connection_as_for_any_other_error() -> None:
    harness = ObservedFetchHarness()
    assert harness.answer(Err(ConnectionLostError("down"))).sleep_seconds == 1.0
    assert harness.answer(None, Err(ConnectionLostError("down"))).sleep_seconds == 2.0


@pytest.mark.parametrize("patient", [False, True])
def test_waits_have_the_jitter_of_the_policy(patient: bool) -> None:
    harness = ObservedFetchHarness(patient=patient, random_value=1.0, jitter=0.5)
    assert harness.answer(Err(ConnectionLostError("down"))).sleep_seconds == 1.5


def test_a_retry_after_below_the_backoff_does_not_shorten_the_wait() -> None:
    assert ObservedFetchHarness().answer(Err(ConnectionLostError("busy", retry_after=0.25))).sleep_seconds == 1.0
    assert ObservedFetchHarness().answer(Err(ConnectionLostError("busy", retry_after=3.0))).sleep_seconds == 3.0
    assert ObservedFetchHarness(backoff=0.25).answer(Err(ConnectionLostError("busy"))).sleep_seconds == 0.25


@pytest.mark.parametrize(
    "error, final",
    [
        (ErgonError("no"), False),
        (ErgonError("no", category=Category.TIMEOUT), False),
        (ErgonError("no", category=Category.BUSINESS), True),
        (ErgonError("no", final=True), True),
    ],
)
def test_the_classification_of_an_error_decides_whether_it_is_retried(error: ErgonError, final: bool) -> None:
    harness = ObservedFetchHarness().answer(Err(error))
    assert (harness.result is not None) is final
    assert harness.events[1][1].final is final


def test_a_hanging_call_gets_its_grace_period_before_the_wait_starts() -> None:
    harness = ObservedFetchHarness(exit_grace=4.0)
    call = harness.effect
    harness.now = 70.0
    harness.answer(Expired(call))
    assert isinstance(harness.effect, AwaitExit)
    assert (harness.effect.call, harness.effect.until) == (call, 74.0)
    harness.now = 72.0
    assert harness.answer(True).sleep_seconds == 1.0
    error = harness.events[-1][1]
    assert (type(error), error.final) == (FetchTimeoutException, False)
    assert str(error) == "fetching from the connector timed out after 30.0 s"


def test_a_call_that_does_not_exit_is_the_last() -> None:
    harness = ObservedFetchHarness()
    harness.now = 70.0
    result = harness.answer(Expired(harness.effect), False).result
    assert (type(result), result.final) == (FetchTimeoutException, True)


def test_a_wait_that_ends_before_the_loop_timeout_is_followed_by_a_call() -> None:
    harness = ObservedFetchHarness(deadline=45.0)
    assert harness.answer(Err(OSError())).sleep_seconds == 1.0
    harness.now = 41.0
    call = harness.answer(None).effect
    assert isinstance(call, Call)
    assert call.until == 45.0
