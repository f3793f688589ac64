"""The script behind execute, answered by hand: interruptions, and books that do not answer."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.engine.effects import NEVER, Call, Sleep
from ergon_framework.engine.outcome import Err, Expired, NotBegunError, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.providers.books import Account, Admitted, Busy, Concluded
from ergon_framework.providers.calling import Means, execution
from ergon_framework.providers.circuit_breaker import Pass
from ergon_framework.providers.errors import (
    ProviderDependencyError,
    ProviderError,
    ProviderInternalError,
    ProviderTimeoutError,
    ReasonCode,
)
from ergon_framework.providers.execution import ProviderExecutionContext, Request
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy


class Seen:
    """A watch that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.failed: list[BaseException] = []

    def attempt(self, number: int) -> None: ...

    def attempted(self, row: Any, error: Any) -> None:
        self.rows.append(row)

    def breaker(self, state: Any) -> None: ...

    def books_failed(self, error: BaseException) -> None:
        self.failed.append(error)

    def succeeded(self, result: Any) -> None: ...

    def failed(self, error: Any) -> None: ...


class World:
    """One call, the clock it looks at, and what it last asked for or came to."""

    def __init__(self, *, waits: bool = False) -> None:
        self.now, self.effect, self.result = 0.0, None, None
        self.watch, self.rows = Seen(), []
        senses = Senses(clock=lambda: self.now, wall=lambda: 1_000.0 + self.now, dice=lambda: 0.5)
        means = Means(
            policy=ProviderPolicy(timeout=10.0, retry=RetryPolicy(base_delay_seconds=1.0, jitter_ratio=0.0)),
            admit=self.admit,
            conclude=self.conclude,
            record=self.rows.append,
            body=self.body,
            senses=senses,
            watch=self.watch,
            waits=waits,
        )
        request = Request(
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
        self.script = execution(request, means)
        self.answer(None)

    def admit(self, asked: Any) -> None: ...

    def conclude(self, admitted: Any, concluded: Any) -> None: ...

    def body(self, context: Any) -> None: ...

    def answer(self, answer: Any) -> World:
        try:
            self.effect = self.script.send(answer)
        except StopIteration as stop:
            self.effect, self.result = None, stop.value
        return self

    def admitted(self) -> World:
        assert self.effect.fn == self.admit
        return self.answer(Ok(Admitted(self.effect.args[0], Pass(0))))

    @property
    def concluded(self) -> Concluded:
        assert self.effect.fn == self.conclude
        found: Concluded = self.effect.args[1]
        return found


def test_what_is_asked_of_the_books() -> None:
    asked = World().effect.args[0]
    assert (asked.account, asked.tenant_id) == (Account("acme", "payments", "charging"), "acme")
    assert (asked.idempotency_key, asked.fingerprint, asked.owner, asked.attempt_number) == ("k1", "f", "me", 1)
    assert (asked.lease, asked.now, asked.doubt) == (15.0, 1_000.0, False)


@pytest.mark.parametrize("waits, until", [(False, NEVER), (True, 10.0)])
def test_books_that_may_wait_are_visited_within_the_budget(waits: bool, until: float) -> None:
    world = World(waits=waits)
    assert world.effect.until == until
    world.admitted()
    assert (world.effect.fn, world.effect.until) == (world.body, 9.95), "something is left for the books"
    world.answer(Ok({}))
    assert world.effect.until == until


def test_books_that_do_not_answer_let_nothing_through() -> None:
    world = World(waits=True)
    world.answer(Expired(world.effect))
    error = world.result.error
    assert (type(error), error.code, error.final, world.rows) == (ProviderInternalError, "books_unavailable", False, [])


@pytest.mark.spec("PRV-19")
@pytest.mark.parametrize("gone", ["silent", "refused"])
def test_books_that_are_lost_between_two_attempts_are_no_reason_to_give_up_for_good(gone: str) -> None:
    world = World(waits=True).admitted().answer(Err(ProviderDependencyError("down"))).answer(Ok(None))
    world.now = world.effect.until
    world.answer(None)
    assert world.effect.fn == world.admit, "the second attempt is asked for"
    world.answer(Expired(world.effect) if gone == "silent" else Err(OSError("database gone")))
    world.answer(Ok(None))
    error = world.result.error
    assert (error.code, error.final, error.later) == ("books_unavailable", False, False)


def test_what_a_call_came_to_stands_though_the_books_do_not_answer() -> None:
    world = World(waits=True).admitted().answer(Ok({"id": 1}))
    world.answer(Expired(world.effect))
    assert world.result.value.value == {"id": 1}
    assert [type(error) for error in world.watch.failed] == [TimeoutError]


@pytest.mark.parametrize("answer", [Stopped(), Err(KeyboardInterrupt()), Err(SystemExit(3))])
def test_a_call_in_the_middle_of_which_somebody_is_called_away_is_in_doubt(answer: Any) -> None:
    world = World().admitted().answer(answer)
    assert (world.concluded.last, world.concluded.doubt) == (True, True)
    assert (world.concluded.error, world.concluded.kept) == (None, None)
    world.answer(Ok(None))
    assert isinstance(world.result, Err)
    if isinstance(answer, Err):
        assert world.result.error is answer.error, "it is passed on as it is"
    (row,) = world.rows
    assert (row.reason_code, row.attempt_number) == (ReasonCode.INTERNAL_ERROR, 1)


def test_a_wait_that_is_interrupted_ends_the_call_and_gives_its_key_back() -> None:
    world = World().admitted().answer(Err(ProviderDependencyError("down")))
    assert (world.concluded.last, world.concluded.doubt) == (False, True)
    world.answer(Ok(None))
    assert isinstance(world.effect, Sleep)
    world.answer(Stopped())
    assert (world.concluded.last, world.concluded.doubt, world.concluded.error) == (True, True, None)
    world.answer(Ok(None))
    assert isinstance(world.result.error, ProviderTimeoutError)


def test_no_time_after_a_wait_gives_the_key_back() -> None:
    world = World().admitted().answer(Err(ProviderDependencyError("down"))).answer(Ok(None))
    world.now = 9.96  # the machine slept
    world.answer(None)
    assert world.concluded.last
    world.answer(Ok(None))
    error = world.result.error
    assert (type(error), error.sent, error.final) == (ProviderTimeoutError, False, True)


def test_a_key_that_somebody_holds_is_asked_for_again_more_and_more_seldom() -> None:
    world, waits = World(), []
    for _ in range(7):
        world.answer(Ok(Busy(1_025.0)))
        waits.append(round(world.effect.until - world.now, 6))
        world.now = world.effect.until
        world.answer(None)
    assert waits == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    world.answer(Ok(Busy(1_025.0))).answer(Stopped())
    assert (world.result.error.code, world.result.error.later) == ("in_flight", True)


def test_a_body_for_which_no_thread_was_free_was_never_sent() -> None:
    world = World().admitted().answer(Err(NotBegunError("no")))
    error = world.concluded.error
    assert isinstance(error, ProviderError)
    assert (type(error), error.sent, error.fault) == (ProviderTimeoutError, False, False)


def test_an_admission_that_is_interrupted_by_an_exit_is_passed_on() -> None:
    exit_ = SystemExit(1)
    world = World().answer(Err(exit_))
    assert world.result.error is exit_


def test_the_body_is_one_call_in_the_end() -> None:
    world = World().admitted()
    assert isinstance(world.effect, Call)
    (context,) = world.effect.args
    assert (context.timeout, context.attempt_number) == (9.95, 1)
