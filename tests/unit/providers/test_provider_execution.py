"""The script behind execute, answered by hand: interruptions, and provider state that does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.engine.effects import NEVER, Call, Err, Expired, Interrupted, NotStartedError, Ok, Sleep
from ergon_framework.providers.circuit_breaker import Permit
from ergon_framework.providers.errors import (
    ProviderDependencyError,
    ProviderError,
    ProviderInternalError,
    ProviderTimeoutError,
    ReasonCode,
)
from ergon_framework.providers.execution import CallDependencies, execute_call
from ergon_framework.providers.models import ProviderExecutionContext, ProviderRequest
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.state import AdmittedAttempt, AttemptResult, KeyInFlight, ProviderScope


class RecordingObserver:
    """An observer that records its calls."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.state_errors: list[BaseException] = []

    def on_attempt_start(self, number: int) -> None: ...

    def on_attempt_end(self, row: Any, error: Any) -> None:
        self.rows.append(row)

    def on_breaker_change(self, state: Any) -> None: ...

    def on_state_error(self, error: BaseException) -> None:
        self.state_errors.append(error)

    def on_success(self, result: Any) -> None: ...

    def on_failure(self, error: Any) -> None: ...


class CallHarness:
    """One call with its clock, its last effect and its result."""

    def __init__(self, *, waits: bool = False) -> None:
        self.now, self.effect, self.result = 0.0, None, None
        self.watch, self.rows = RecordingObserver(), []
        senses = Clock(monotonic=lambda: self.now, wall=lambda: 1_000.0 + self.now, random=lambda: 0.5)
        means = CallDependencies(
            policy=ProviderPolicy(timeout=10.0, retry=RetryPolicy(base_delay_seconds=1.0, jitter_ratio=0.0)),
            admit=self.admit,
            complete=self.conclude,
            record=self.rows.append,
            execute_attempt=self.body,
            clock=senses,
            observer=self.watch,
            may_block=waits,
        )
        request = ProviderRequest(
            provider_name="payments",
            capability="charging",
            tenant_id="acme",
            campaign_id=None,
            operation="charge",
            payload={},
            correlation_id="c1",
            idempotency_key="k1",
            fingerprint="f",
            owner="me",
            context=ProviderExecutionContext(),
        )
        self.script = execute_call(request, means)
        self.answer(None)

    def admit(self, request: Any) -> None: ...

    def conclude(self, admitted: Any, concluded: Any) -> None: ...

    def body(self, context: Any) -> None: ...

    def answer(self, answer: Any) -> CallHarness:
        try:
            self.effect = self.script.send(answer)
        except StopIteration as stop:
            self.effect, self.result = None, stop.value
        return self

    def grant_admission(self) -> CallHarness:
        assert self.effect.fn == self.admit
        return self.answer(Ok(AdmittedAttempt(self.effect.args[0], Permit(0))))

    @property
    def conclusion(self) -> AttemptResult:
        assert self.effect.fn == self.conclude
        result: AttemptResult = self.effect.args[1]
        return result


def test_the_admission_request_has_the_fields_of_the_call() -> None:
    request = CallHarness().effect.args[0]
    assert (request.scope, request.tenant_id) == (ProviderScope("acme", "payments", "charging"), "acme")
    assert (request.idempotency_key, request.fingerprint, request.owner, request.attempt_number) == ("k1", "f", "me", 1)
    assert (request.lease, request.now, request.outcome_unknown) == (15.0, 1_000.0, False)


@pytest.mark.parametrize("waits, until", [(False, NEVER), (True, 10.0)])
def test_blocking_provider_state_is_called_within_the_budget(waits: bool, until: float) -> None:
    harness = CallHarness(waits=waits)
    assert harness.effect.until == until
    harness.grant_admission()
    assert (harness.effect.fn, harness.effect.until) == (harness.body, 9.95), "time is reserved for the provider state"
    harness.answer(Ok({}))
    assert harness.effect.until == until


def test_provider_state_that_does_not_answer_admits_no_call() -> None:
    harness = CallHarness(waits=True)
    harness.answer(Expired(harness.effect))
    error = harness.result.error
    assert (type(error), error.code, error.final, harness.rows) == (
        ProviderInternalError,
        "provider_state_unavailable",
        False,
        [],
    )


@pytest.mark.spec("PRV-19")
@pytest.mark.parametrize("failure", ["silent", "refused"])
def test_provider_state_lost_between_two_attempts_is_not_a_final_error(failure: str) -> None:
    harness = CallHarness(waits=True).grant_admission().answer(Err(ProviderDependencyError("down"))).answer(Ok(None))
    harness.now = harness.effect.until
    harness.answer(None)
    assert harness.effect.fn == harness.admit, "the second attempt is asked for"
    harness.answer(Expired(harness.effect) if failure == "silent" else Err(OSError("database gone")))
    harness.answer(Ok(None))
    error = harness.result.error
    assert (error.code, error.final, error.not_attempted) == ("provider_state_unavailable", False, False)


def test_the_result_of_a_call_stands_although_provider_state_does_not_answer() -> None:
    harness = CallHarness(waits=True).grant_admission().answer(Ok({"id": 1}))
    harness.answer(Expired(harness.effect))
    assert harness.result.value.value == {"id": 1}
    assert [type(error) for error in harness.watch.state_errors] == [TimeoutError]


@pytest.mark.parametrize("answer", [Interrupted(), Err(KeyboardInterrupt()), Err(SystemExit(3))])
def test_an_interrupted_call_has_an_unknown_outcome(answer: Any) -> None:
    harness = CallHarness().grant_admission().answer(answer)
    assert (harness.conclusion.is_last, harness.conclusion.outcome_unknown) == (True, True)
    assert (harness.conclusion.error, harness.conclusion.stored_result) == (None, None)
    harness.answer(Ok(None))
    assert isinstance(harness.result, Err)
    if isinstance(answer, Err):
        assert harness.result.error is answer.error, "it is passed on as it is"
    (row,) = harness.rows
    assert (row.reason_code, row.attempt_number) == (ReasonCode.INTERNAL_ERROR, 1)


def test_an_interrupted_wait_ends_the_call_and_releases_its_key() -> None:
    harness = CallHarness().grant_admission().answer(Err(ProviderDependencyError("down")))
    assert (harness.conclusion.is_last, harness.conclusion.outcome_unknown) == (False, True)
    harness.answer(Ok(None))
    assert isinstance(harness.effect, Sleep)
    harness.answer(Interrupted())
    assert (harness.conclusion.is_last, harness.conclusion.outcome_unknown, harness.conclusion.error) == (
        True,
        True,
        None,
    )
    harness.answer(Ok(None))
    assert isinstance(harness.result.error, ProviderTimeoutError)


def test_an_exhausted_budget_after_a_wait_releases_the_key() -> None:
    harness = CallHarness().grant_admission().answer(Err(ProviderDependencyError("down"))).answer(Ok(None))
    harness.now = 9.96  # the machine was suspended
    harness.answer(None)
    assert harness.conclusion.is_last
    harness.answer(Ok(None))
    error = harness.result.error
    assert (type(error), error.sent, error.final) == (ProviderTimeoutError, False, True)


def test_a_claimed_key_is_polled_with_growing_delays() -> None:
    harness, delays = CallHarness(), []
    for _ in range(7):
        harness.answer(Ok(KeyInFlight(1_025.0)))
        delays.append(round(harness.effect.until - harness.now, 6))
        harness.now = harness.effect.until
        harness.answer(None)
    assert delays == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    harness.answer(Ok(KeyInFlight(1_025.0))).answer(Interrupted())
    assert (harness.result.error.code, harness.result.error.not_attempted) == ("in_flight", True)


def test_a_call_without_a_free_thread_was_never_sent() -> None:
    harness = CallHarness().grant_admission().answer(Err(NotStartedError("no")))
    error = harness.conclusion.error
    assert isinstance(error, ProviderError)
    assert (type(error), error.sent, error.fault) == (ProviderTimeoutError, False, False)


def test_an_admission_that_is_interrupted_by_an_exit_is_passed_on() -> None:
    exit_ = SystemExit(1)
    harness = CallHarness().answer(Err(exit_))
    assert harness.result.error is exit_


def test_a_provider_call_is_one_effect() -> None:
    harness = CallHarness().grant_admission()
    assert isinstance(harness.effect, Call)
    (context,) = harness.effect.args
    assert (context.timeout, context.attempt_number) == (9.95, 1)
