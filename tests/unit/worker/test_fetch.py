"""The fetch script, answered by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import AwaitExit, Call, Err, Expired, Interrupted, Ok, Sleep
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, FetchException, FetchTimeoutException
from ergon_framework.worker.fetch import Fetcher
from ergon_framework.worker.policies import RetryPolicy
from ergon_framework.worker.report import StopReason


class FetchHarness:
    """A fetcher, the clock it looks at, and its script."""

    def __init__(self, *, deadline: float = 100.0, patient: bool = False, **retry: Any) -> None:
        self.now = 0.0
        retry_options = {"max_attempts": 2, "timeout": 30.0, "backoff": 1.0, "cap": 0.0} | retry
        fetcher = Fetcher(
            abs,
            RetryPolicy(**retry_options),
            clock=Clock(monotonic=lambda: self.now, random=lambda: 0.5),
            deadline=deadline,
            retries_lost_connections=patient,
            release=lambda delivery, reason: None,
        )
        self.script = fetcher.run(7, None)
        self.effect: Any = next(self.script)
        self.result: Any = None

    def answer(self, answer: Any) -> FetchHarness:
        try:
            self.effect = self.script.send(answer)
        except StopIteration as stop:
            self.effect, self.result = None, stop.value
        return self


def test_the_deliveries_of_the_connector_are_copied_to_a_list() -> None:
    deliveries = (Delivery(Transaction(id="a"), 1), Delivery(Transaction(id="b"), 2))
    harness = FetchHarness()
    assert (harness.effect.args, harness.effect.until) == ((7,), 30.0)
    assert harness.answer(Ok(deliveries)).result == list(deliveries)


@pytest.mark.spec("CON-36")
def test_a_stop_before_the_call_ends_the_loop() -> None:
    assert FetchHarness().answer(Interrupted()).result is StopReason.STOP


@pytest.mark.spec("CON-36")
def test_a_stop_during_the_call_interrupts_it_and_does_not_wait() -> None:
    harness = FetchHarness()
    harness.now = 3.0
    call = harness.effect
    harness.answer(Interrupted(call))
    assert isinstance(harness.effect, AwaitExit)
    assert (harness.effect.call, harness.effect.until) == (call, 3.0)
    assert harness.answer(False).result is StopReason.STOP


@pytest.mark.spec("CON-12", "CON-19")
def test_the_loop_timeout_ends_a_call_without_a_grace_period() -> None:
    harness = FetchHarness(deadline=10.0)
    call = harness.effect
    assert call.until == 10.0
    harness.now = 10.0
    harness.answer(Expired(call))
    assert harness.effect.until == 10.0
    assert harness.answer(False).result is StopReason.TIMEOUT


@pytest.mark.spec("CON-08")
def test_a_timeout_is_retried_after_the_call_has_exited_and_then_raised() -> None:
    harness = FetchHarness()
    for turn in range(2):
        call = harness.effect
        assert isinstance(call, Call)
        harness.now = call.until
        harness.answer(Expired(call))
        assert harness.effect.until == harness.now + 5.0
        harness.answer(True)
        if turn == 0:
            assert isinstance(harness.effect, Sleep)
            assert harness.effect.until == harness.now + 1.0
            harness.now += 1.0
            harness.answer(None)
    assert isinstance(harness.result, FetchTimeoutException)


@pytest.mark.spec("CON-08")
def test_a_call_that_does_not_exit_ends_the_fetch_immediately() -> None:
    harness = FetchHarness(max_attempts=9)
    call = harness.effect
    harness.now = call.until
    assert isinstance(harness.answer(Expired(call)).answer(False).result, FetchTimeoutException)


@pytest.mark.spec("CON-36")
def test_a_stop_during_the_grace_period_or_the_wait_ends_the_loop() -> None:
    harness = FetchHarness()
    harness.now = harness.effect.until
    assert harness.answer(Expired(harness.effect)).answer(Interrupted()).result is StopReason.STOP
    assert FetchHarness().answer(Err(OSError())).answer(Interrupted()).result is StopReason.STOP


@pytest.mark.spec("CON-12", "CON-19")
def test_a_wait_is_bounded_by_the_loop_timeout() -> None:
    harness = FetchHarness(deadline=10.0, backoff=60.0)
    harness.answer(Err(OSError()))
    assert harness.effect.until == 10.0
    harness.now = 10.0
    assert harness.answer(None).result is StopReason.TIMEOUT


@pytest.mark.spec("CON-08")
@pytest.mark.parametrize("error", [BusinessError("no"), ConfigurationError("no such queue")])
def test_permanent_errors_are_not_retried(error: Exception) -> None:
    result = FetchHarness(max_attempts=9).answer(Err(error)).result
    assert isinstance(result, FetchException)
    assert result.__cause__ is error


@pytest.mark.spec("CON-08", "CON-44")
def test_the_retry_after_of_an_error_is_the_minimum_wait() -> None:
    error = ConnectionLostError("busy", retry_after=20.0)
    assert FetchHarness().answer(Err(error)).effect.until == 20.0


@pytest.mark.spec("CON-08")
def test_a_patient_loop_retries_a_lost_connection_without_limit_with_growing_waits() -> None:
    harness = FetchHarness(patient=True, deadline=1e9, multiplier=2.0)
    waits = []
    for _ in range(5):
        harness.answer(Err(ConnectionLostError("down")))
        waits.append(harness.effect.until - harness.now)
        harness.now = harness.effect.until
        harness.answer(None)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert harness.answer(Ok([])).result == []


@pytest.mark.spec("CON-08")
def test_an_impatient_loop_counts_a_lost_connection_as_an_attempt() -> None:
    harness = FetchHarness()
    harness.answer(Err(ConnectionLostError("down"))).answer(None)
    assert isinstance(harness.answer(Err(ConnectionLostError("down"))).result, FetchException)


@pytest.mark.spec("CON-12")
def test_a_fetch_without_its_own_timeout_has_the_loop_timeout() -> None:
    assert FetchHarness(timeout=None, deadline=55.0).effect.until == 55.0
