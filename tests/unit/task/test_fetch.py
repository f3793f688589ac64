"""The fetch script, answered by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import Call, Gone, Sleep
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.task.exceptions import BusinessError, FetchException, FetchTimeoutException
from ergon_framework.task.fetch import Fetcher
from ergon_framework.task.mixins.policies import RetryPolicy
from ergon_framework.task.report import End
from ergon_framework.transaction import Transaction


class World:
    """A fetcher, the clock it looks at, and its script."""

    def __init__(self, *, deadline: float = 100.0, patient: bool = False, **retry: Any) -> None:
        self.now = 0.0
        rules = {"max_attempts": 2, "timeout": 30.0, "backoff": 1.0, "cap": 0.0} | retry
        fetcher = Fetcher(
            abs,
            RetryPolicy(**rules),
            senses=Senses(clock=lambda: self.now, dice=lambda: 0.5),
            deadline=deadline,
            patient=patient,
            give_back=lambda delivery, reason: None,
        )
        self.script = fetcher.run(7, None)
        self.effect: Any = next(self.script)
        self.result: Any = None

    def answer(self, answer: Any) -> World:
        try:
            self.effect = self.script.send(answer)
        except StopIteration as stop:
            self.effect, self.result = None, stop.value
        return self


def test_what_the_connector_returns_is_a_list_of_its_own() -> None:
    given = (Delivery(Transaction("a"), 1), Delivery(Transaction("b"), 2))
    world = World()
    assert (world.effect.args, world.effect.until) == ((7,), 30.0)
    assert world.answer(Ok(given)).result == list(given)


@pytest.mark.spec("CON-36")
def test_a_stop_before_the_call_was_made_ends_the_loop() -> None:
    assert World().answer(Stopped()).result is End.STOP


@pytest.mark.spec("CON-36")
def test_a_stop_within_the_call_asks_it_to_leave_and_does_not_wait() -> None:
    world = World()
    world.now = 3.0
    call = world.effect
    world.answer(Stopped(call))
    assert isinstance(world.effect, Gone)
    assert (world.effect.body, world.effect.until) == (call, 3.0)
    assert world.answer(False).result is End.STOP


@pytest.mark.spec("CON-12", "CON-19")
def test_the_loops_own_time_ends_a_call_without_a_grace() -> None:
    world = World(deadline=10.0)
    call = world.effect
    assert call.until == 10.0
    world.now = 10.0
    world.answer(Expired(call))
    assert world.effect.until == 10.0
    assert world.answer(False).result is End.TIMEOUT


@pytest.mark.spec("CON-08")
def test_a_timeout_is_retried_once_the_body_has_left_and_then_raised() -> None:
    world = World()
    for turn in range(2):
        call = world.effect
        assert isinstance(call, Call)
        world.now = call.until
        world.answer(Expired(call))
        assert world.effect.until == world.now + 5.0
        world.answer(True)
        if turn == 0:
            assert isinstance(world.effect, Sleep)
            assert world.effect.until == world.now + 1.0
            world.now += 1.0
            world.answer(None)
    assert isinstance(world.result, FetchTimeoutException)


@pytest.mark.spec("CON-08")
def test_a_body_that_does_not_leave_is_the_end_at_once() -> None:
    world = World(max_attempts=9)
    call = world.effect
    world.now = call.until
    assert isinstance(world.answer(Expired(call)).answer(False).result, FetchTimeoutException)


@pytest.mark.spec("CON-36")
def test_a_stop_during_the_grace_or_the_wait_ends_the_loop() -> None:
    world = World()
    world.now = world.effect.until
    assert world.answer(Expired(world.effect)).answer(Stopped()).result is End.STOP
    assert World().answer(Err(OSError())).answer(Stopped()).result is End.STOP


@pytest.mark.spec("CON-12", "CON-19")
def test_a_wait_is_cut_by_the_loops_own_time() -> None:
    world = World(deadline=10.0, backoff=60.0)
    world.answer(Err(OSError()))
    assert world.effect.until == 10.0
    world.now = 10.0
    assert world.answer(None).result is End.TIMEOUT


@pytest.mark.spec("CON-08")
@pytest.mark.parametrize("error", [BusinessError("no"), ConfigurationError("no such queue")])
def test_what_cannot_get_better_is_not_tried_again(error: Exception) -> None:
    result = World(max_attempts=9).answer(Err(error)).result
    assert isinstance(result, FetchException)
    assert result.__cause__ is error


@pytest.mark.spec("CON-08", "CON-44")
def test_a_verdicts_delay_is_the_least_that_is_waited() -> None:
    error = ConnectionLost("busy", retry_after=20.0)
    assert World().answer(Err(error)).effect.until == 20.0


@pytest.mark.spec("CON-08")
def test_a_patient_loop_spends_no_budget_on_a_lost_connection_but_waits_longer_and_longer() -> None:
    world = World(patient=True, deadline=1e9, multiplier=2.0)
    waits = []
    for _ in range(5):
        world.answer(Err(ConnectionLost("down")))
        waits.append(world.effect.until - world.now)
        world.now = world.effect.until
        world.answer(None)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert world.answer(Ok([])).result == []


@pytest.mark.spec("CON-08")
def test_an_impatient_one_spends_its_budget_on_it() -> None:
    world = World()
    world.answer(Err(ConnectionLost("down"))).answer(None)
    assert isinstance(world.answer(Err(ConnectionLost("down"))).result, FetchException)


@pytest.mark.spec("CON-12")
def test_without_a_timeout_of_its_own_a_fetch_has_the_loops_time() -> None:
    assert World(timeout=None, deadline=55.0).effect.until == 55.0
