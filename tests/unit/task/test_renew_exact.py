"""The renewing script, answered by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import Call, Gone, Sleep
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.task.renew import renew
from ergon_framework.transaction import Transaction


class World:
    """Three claims, of which the second does not end by itself, and the script that renews them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lost: list[list[Any]] = []
        self.deliveries = [
            Delivery(Transaction(name), name, lease_until=until)
            for name, until in (("a", 130.0), ("b", None), ("c", 130.0))
        ]
        self.claims = {each.receipt: each for each in self.deliveries}
        self.script = renew(abs, self.claims, lease=30.0, senses=Senses(clock=lambda: self.now), lost=self.lost.append)
        self.effect: Any = next(self.script)
        self.over = False

    def on(self, answer: Any, *, at: float | None = None) -> World:
        self.now = self.now if at is None else at
        try:
            self.effect = self.script.send(answer)
        except StopIteration:
            self.effect, self.over = None, True
        return self

    def called(self) -> World:
        """At the first turn, a second late."""
        return self.on(None, at=111.0)

    @property
    def sleeps(self) -> float | None:
        return self.effect.until if isinstance(self.effect, Sleep) else None

    @property
    def leases(self) -> list[float | None]:
        return [each.lease_until for each in self.deliveries]


def test_claims_that_end_by_themselves_are_renewed_three_times_per_lease() -> None:
    world = World()
    assert world.sleeps == 110.0
    call = world.called().effect
    assert isinstance(call, Call)
    a, _, c = world.deliveries
    assert (call.step, call.fn, call.args, call.until) == ("extend", abs, ([a, c],), 121.0)
    world.on(Ok([141.0, 142.0]), at=112.0)
    assert world.sleeps == 121.0, "a turn after the last one began"
    assert world.leases == [141.0, None, 142.0]
    assert world.lost == []


def test_only_claims_that_are_gone_are_lost_and_the_others_are_renewed() -> None:
    world = World().called().on(Ok([None, 142.0]))
    assert world.lost == [["a"]]
    assert world.leases == [130.0, None, 142.0]
    assert world.sleeps == 121.0


def test_an_answer_that_is_too_short_says_nothing_about_the_rest() -> None:
    world = World().called().on(Ok([141.0]))
    assert (world.leases, world.lost, world.sleeps) == ([141.0, None, 130.0], [], 121.0)


def test_without_claims_nobody_is_called_but_the_next_turn_comes() -> None:
    world = World()
    held = dict(world.claims)
    world.claims.clear()
    assert world.called().sleeps == 121.0
    world.claims.update(held)
    assert isinstance(world.on(None, at=121.0).effect, Call)


@pytest.mark.parametrize("answer", [Err(OSError("down")), Ok(None)])
def test_a_call_that_fails_is_made_again_at_the_next_turn(answer: Any) -> None:
    world = World().called().on(answer)
    assert (world.sleeps, world.lost, world.leases) == (121.0, [], [130.0, None, 130.0])
    assert isinstance(world.on(None, at=121.0).effect, Call)


def test_a_call_that_hangs_is_asked_to_leave_and_not_waited_for() -> None:
    world = World().called()
    call = world.effect
    world.on(Expired(call), at=121.0)
    assert isinstance(world.effect, Gone)
    assert (world.effect.body, world.effect.until) == (call, 121.0)
    assert world.on(False).sleeps == 121.0


def test_an_interrupted_call_is_asked_to_leave_and_is_the_last() -> None:
    world = World().called()
    call = world.effect
    world.on(Stopped(call), at=113.0)
    assert isinstance(world.effect, Gone)
    assert (world.effect.body, world.effect.until) == (call, 113.0)
    assert world.on(False).over


@pytest.mark.parametrize("called", [False, True])
def test_an_interrupt_without_a_body_ends_it_at_once(called: bool) -> None:
    world = World()
    assert (world.called() if called else world).on(Stopped()).over
