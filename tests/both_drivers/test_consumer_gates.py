"""Gates: functions that may pause a loop before it fetches."""

from __future__ import annotations

import pytest

from ergon_framework.gates import Pause
from ergon_framework.worker.exceptions import LoopTimeout
from ergon_framework.worker.report import StopReason
from tests.both_drivers.harness import make_policy, wait_then_return


class ControlledGate:
    """A gate that is closed until the test opens it, and counts its calls."""

    def __init__(self, reason="the disk is full", seconds=0.01):
        self.pause = Pause(reason, seconds)
        self.call_count = 0

    def __call__(self):
        self.call_count += 1
        return self.pause


@pytest.mark.spec("CON-47")
def test_nothing_is_fetched_while_a_gate_returns_a_pause(build):
    gate = ControlledGate()
    world = build().offer("a").start(make_policy(), gates=[gate])
    world.until(lambda: gate.call_count >= 5)
    assert world.fetches == []
    gate.pause = None
    assert world.finish().kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-47")
def test_every_gate_has_to_be_open(build):
    first, second = ControlledGate(), ControlledGate()
    first.pause = None
    world = build().offer("a").start(make_policy(), gates=[first, second])
    world.until(lambda: second.call_count >= 3)
    assert world.fetches == []
    second.pause = None
    assert world.finish().kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-47")
def test_gates_are_called_before_every_fetch(build):
    gate = ControlledGate()
    gate.pause = None
    call_counts = []
    world = build(fetches=lambda fetch: call_counts.append(gate.call_count)).offer(*"abcd")
    world.run(make_policy(concurrency=1, batch=1), gates=[gate])
    assert len(call_counts) == len(set(call_counts)) >= 5


@pytest.mark.spec("CON-47")
def test_work_in_flight_continues_while_a_gate_is_closed(build):
    gate = ControlledGate()
    gate.pause = None
    world = build()
    go = world.signal()
    world.bodies["process"] = wait_then_return(go)
    world.offer("a").start(make_policy(streaming=True), gates=[gate])
    world.until(lambda: world.of("process"))
    gate.pause = Pause("maintenance", 10.0)
    go.set()
    world.until(lambda: world.kinds() == {"a": "succeeded"})


@pytest.mark.spec("CON-47")
def test_the_report_shows_the_reason_of_a_pause_until_it_ends(build):
    reports = []
    gate = ControlledGate("the breaker is open")
    world = build().offer("a")
    original = world.task._consume_transactions

    def record_report(*args, **kwargs):
        consumption = original(*args, **kwargs)
        reports.append(consumption.report)
        return consumption

    world.task._consume_transactions = record_report
    world.start(make_policy(), gates=[gate])
    world.until(lambda: gate.call_count >= 3)
    assert reports[0].paused == "the breaker is open"
    gate.pause = None
    assert world.finish().report.paused is None


@pytest.mark.spec("CON-47")
def test_a_gate_that_raises_pauses_the_loop_and_does_not_end_it(build):
    calls = []

    def gate():
        calls.append(1)
        raise OSError("cannot ask")

    world = build().offer("a").start(make_policy(streaming=True), gates=[gate])
    world.until(lambda: calls)
    world.never(lambda: world.fetches or world.ended)
    assert world.stop().finish().error is None


@pytest.mark.spec("CON-47", "CON-36")
@pytest.mark.parametrize("cause", ["stop", "timeout"])
def test_a_paused_loop_can_be_ended(build, cause):
    gate = ControlledGate(seconds=30.0)
    world = build().offer("a").start(make_policy(timeout=0.2 if cause == "timeout" else None), gates=[gate])
    world.until(lambda: gate.call_count)
    if cause == "stop":
        world.stop()
    world.finish(1.5)
    assert world.fetches == []
    assert world.report.stop_reason is (StopReason.STOP if cause == "stop" else StopReason.TIMEOUT)
    assert isinstance(world.error, LoopTimeout) is (cause == "timeout")
