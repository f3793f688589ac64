"""Gates: whoever may hold a loop back before it fetches."""

from __future__ import annotations

import pytest

from ergon_framework.task.exceptions import LoopTimeout
from ergon_framework.task.gates import Pause
from ergon_framework.task.report import End
from tests.twins.world import policy, takes


class Barrier:
    """A gate that is closed until somebody opens it, and counts how often it was asked."""

    def __init__(self, because="the disk is full", seconds=0.01):
        self.pause = Pause(because, seconds)
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return self.pause


@pytest.mark.spec("CON-47")
def test_nothing_is_fetched_while_a_gate_says_pause(build):
    gate = Barrier()
    world = build().offer("a").start(policy(), gates=[gate])
    world.until(lambda: gate.asked >= 5)
    assert world.fetches == []
    gate.pause = None
    assert world.finish().kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-47")
def test_every_gate_has_to_be_open(build):
    first, second = Barrier(), Barrier()
    first.pause = None
    world = build().offer("a").start(policy(), gates=[first, second])
    world.until(lambda: second.asked >= 3)
    assert world.fetches == []
    second.pause = None
    assert world.finish().kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-47")
def test_the_gates_are_asked_before_every_fetch(build):
    gate = Barrier()
    gate.pause = None
    asked = []
    world = build(fetches=lambda fetch: asked.append(gate.asked)).offer(*"abcd")
    world.run(policy(concurrency=1, batch=1), gates=[gate])
    assert len(asked) == len(set(asked)) >= 5


@pytest.mark.spec("CON-47")
def test_work_in_flight_goes_on_while_a_gate_is_closed(build):
    gate = Barrier()
    gate.pause = None
    world = build()
    go = world.signal()
    world.bodies["process"] = takes(go)
    world.offer("a").start(policy(streaming=True), gates=[gate])
    world.until(lambda: world.of("process"))
    gate.pause = Pause("maintenance", 10.0)
    go.set()
    world.until(lambda: world.kinds() == {"a": "succeeded"})


@pytest.mark.spec("CON-47")
def test_the_reason_of_a_pause_is_told_and_taken_back(build):
    told = []
    gate = Barrier("the breaker is open")
    world = build().offer("a")
    own = world.task._consume_transactions

    def spied(*args, **kwargs):
        consumption = own(*args, **kwargs)
        told.append(consumption.report)
        return consumption

    world.task._consume_transactions = spied
    world.start(policy(), gates=[gate])
    world.until(lambda: gate.asked >= 3)
    assert told[0].paused == "the breaker is open"
    gate.pause = None
    assert world.finish().report.paused is None


@pytest.mark.spec("CON-47")
def test_a_gate_that_breaks_holds_the_loop_and_does_not_end_it(build):
    asked = []

    def gate():
        asked.append(1)
        raise OSError("cannot ask")

    world = build().offer("a").start(policy(streaming=True), gates=[gate])
    world.until(lambda: asked)
    world.never(lambda: world.fetches or world.ended)
    assert world.stop().finish().error is None


@pytest.mark.spec("CON-47", "CON-36")
@pytest.mark.parametrize("by", ["stop", "timeout"])
def test_a_paused_loop_can_be_ended(build, by):
    gate = Barrier(seconds=30.0)
    world = build().offer("a").start(policy(timeout=0.2 if by == "timeout" else None), gates=[gate])
    world.until(lambda: gate.asked)
    if by == "stop":
        world.stop()
    world.finish(1.5)
    assert world.fetches == []
    assert world.report.end is (End.STOP if by == "stop" else End.TIMEOUT)
    assert isinstance(world.error, LoopTimeout) is (by == "timeout")
