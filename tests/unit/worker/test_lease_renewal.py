"""The script that renews leases; the test sends the result of every effect."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import AwaitExit, Call, Err, Expired, Interrupted, Ok, Sleep
from ergon_framework.transaction import Transaction
from ergon_framework.worker.settle import renew_leases


class RenewHarness:
    """Three claims, of which the second does not end by itself, and the script that renews them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lost: list[list[Any]] = []
        self.deliveries = [
            Delivery(Transaction(id=name), name, lease_until=until)
            for name, until in (("a", 130.0), ("b", None), ("c", 130.0))
        ]
        self.claims = {each.receipt: each for each in self.deliveries}
        self.script = renew_leases(
            abs, self.claims, lease=30.0, clock=Clock(monotonic=lambda: self.now), on_lost=self.lost.append
        )
        self.effect: Any = next(self.script)
        self.is_over = False

    def answer(self, answer: Any, *, at: float | None = None) -> RenewHarness:
        self.now = self.now if at is None else at
        try:
            self.effect = self.script.send(answer)
        except StopIteration:
            self.effect, self.is_over = None, True
        return self

    def start_call(self) -> RenewHarness:
        """At the first turn, a second late."""
        return self.answer(None, at=111.0)

    @property
    def sleep_until(self) -> float | None:
        return self.effect.until if isinstance(self.effect, Sleep) else None

    @property
    def leases(self) -> list[float | None]:
        return [each.lease_until for each in self.deliveries]


def test_claims_with_a_lease_are_renewed_three_times_per_lease() -> None:
    harness = RenewHarness()
    assert harness.sleep_until == 110.0
    call = harness.start_call().effect
    assert isinstance(call, Call)
    a, _, c = harness.deliveries
    assert (call.step, call.fn, call.args, call.until) == ("extend", abs, ([a, c],), 121.0)
    harness.answer(Ok([141.0, 142.0]), at=112.0)
    assert harness.sleep_until == 121.0, "a turn after the last one began"
    assert harness.leases == [141.0, None, 142.0]
    assert harness.lost == []


def test_only_claims_that_no_longer_exist_are_lost_and_the_others_are_renewed() -> None:
    harness = RenewHarness().start_call().answer(Ok([None, 142.0]))
    assert harness.lost == [["a"]]
    assert harness.leases == [130.0, None, 142.0]
    assert harness.sleep_until == 121.0


def test_claims_that_a_short_answer_omits_stay_unchanged() -> None:
    harness = RenewHarness().start_call().answer(Ok([141.0]))
    assert (harness.leases, harness.lost, harness.sleep_until) == ([141.0, None, 130.0], [], 121.0)


def test_without_claims_there_is_no_call_before_the_next_interval() -> None:
    harness = RenewHarness()
    claims = dict(harness.claims)
    harness.claims.clear()
    assert harness.start_call().sleep_until == 121.0
    harness.claims.update(claims)
    assert isinstance(harness.answer(None, at=121.0).effect, Call)


@pytest.mark.parametrize("answer", [Err(OSError("down")), Ok(None)])
def test_a_failed_call_is_retried_at_the_next_interval(answer: Any) -> None:
    harness = RenewHarness().start_call().answer(answer)
    assert (harness.sleep_until, harness.lost, harness.leases) == (121.0, [], [130.0, None, 130.0])
    assert isinstance(harness.answer(None, at=121.0).effect, Call)


def test_a_hanging_call_is_interrupted_and_not_awaited() -> None:
    harness = RenewHarness().start_call()
    call = harness.effect
    harness.answer(Expired(call), at=121.0)
    assert isinstance(harness.effect, AwaitExit)
    assert (harness.effect.call, harness.effect.until) == (call, 121.0)
    assert harness.answer(False).sleep_until == 121.0


def test_an_interrupted_call_is_the_last() -> None:
    harness = RenewHarness().start_call()
    call = harness.effect
    harness.answer(Interrupted(call), at=113.0)
    assert isinstance(harness.effect, AwaitExit)
    assert (harness.effect.call, harness.effect.until) == (call, 113.0)
    assert harness.answer(False).is_over


@pytest.mark.parametrize("has_call", [False, True])
def test_an_interrupt_without_an_abandoned_call_ends_the_renewal_immediately(has_call: bool) -> None:
    harness = RenewHarness()
    assert (harness.start_call() if has_call else harness).answer(Interrupted()).is_over
