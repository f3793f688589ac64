"""A released outcome says whether its call had begun, and why the loop gave it back: DX-02, PRO-18."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ergon_framework import LoopTimeout, MemoryConnector, Transaction, consumer
from ergon_framework.cli.summary import told
from ergon_framework.runner.process import Ended
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.report import Kind
from ergon_framework.testing.simulation import Simulation
from tests.twins.producing import FLAVOURS, Hang, Run, many, quick
from tests.twins.world import policy, takes

pytestmark = [pytest.mark.spec("DX-02", "PRO-18"), pytest.mark.parametrize("flavour", FLAVOURS)]


def facts(report: Any) -> list[tuple[str, bool, str | None, int]]:
    return [(one.kind.value, one.started, one.reason, one.attempts) for one in report.outcomes]


def test_after_a_stop_the_running_call_has_started_and_the_waiting_one_has_not(flavour):
    def produce(*_):
        made.task.stop()
        return Hang(stubborn=True, then="sent", late="sent")

    made = Run(flavour, many(2), quick(concurrency=1, drain_timeout=0.05), produce=produce)
    made.go()

    # Looked at after the body has returned, having sent.
    assert not made.report.outcomes[0].still_running
    assert facts(made.report) == [("released", True, "stop", 0), ("released", False, "stop", 0)]
    assert made.report.released_started == 1


def test_after_the_loop_timeout_the_reason_is_timeout(flavour):
    made = Run(
        flavour,
        many(3),
        quick(concurrency=1, timeout=0.05),
        produce=lambda *_: Hang(stubborn=True, then="sent", late="sent"),
    ).go()

    assert isinstance(made.raised, LoopTimeout)
    assert facts(made.report) == [("released", True, "timeout", 0), *[("released", False, "timeout", 0)] * 2]
    assert "3 were released, of which 1 had started" in str(made.raised)


def test_what_was_sent_and_waits_in_its_success_handler_has_started(flavour):
    def success(*_):
        made.task.stop()
        return Hang(stubborn=True)

    made = Run(flavour, many(1), quick(drain_timeout=0.05), produce=lambda *_: "sent", success=success)
    made.go()

    outcome = made.report.outcomes[0]
    assert facts(made.report) == [("released", True, "stop", 0)]
    assert (outcome.processed, outcome.result) == (True, "sent")


def test_what_waits_for_its_next_attempt_has_started(flavour):
    def produce(*_):
        made.task.stop()
        raise ValueError("down")

    made = Run(flavour, many(1), quick(produce={"backoff": 30.0}, drain_timeout=0.05), produce=produce)
    made.go()

    assert facts(made.report) == [("released", True, "stop", 0)]


def test_what_the_limit_left_has_not_started(flavour):
    made = Run(flavour, many(2), quick(limit=1)).go()

    assert facts(made.report) == [("succeeded", True, None, 1), ("released", False, "limit", 0)]


def test_a_failed_transaction_has_started(flavour):
    made = Run(flavour, many(1), quick(produce={"max_attempts": 1}), produce=lambda *_: 1 // 0).go()

    assert facts(made.report) == [("failed", True, None, 1)]


def test_the_log_shows_it(flavour, caplog):
    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        Run(
            flavour,
            many(1),
            quick(timeout=0.05),
            produce=lambda *_: Hang(stubborn=True),
        ).go()

    [record] = [one for one in caplog.records if one.message.startswith("transaction released")]
    assert (record.transaction_id, record.started, record.reason) == ("t0", True, "timeout")


def test_a_consumer_whose_loop_timeout_is_over_says_so_too(flavour, build, caplog):
    world = build().offer("a")
    world.bodies["process"] = takes(world.signal())
    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        world.run(policy(concurrency=1, timeout=0.1))

    outcome = world.outcome("a")
    assert (outcome.kind, outcome.started, outcome.reason) == (Kind.RELEASED, True, "timeout")
    assert world.report.released_started == 1
    assert told("charge", Ended(world.report))["released_started"] == 1
    [record] = [one for one in caplog.records if one.message.startswith("transaction released")]
    assert (record.started, record.reason) == (True, "timeout")


def test_a_delivery_that_waits_beside_the_slots_has_not_started(flavour):
    simulation = Simulation()
    queue = MemoryConnector("orders", clock=simulation.clock)
    queue.dispatch([Transaction(name, {}, key="one customer") for name in ("a", "b")])
    outcomes: list[Any] = []

    def body(payload: Any) -> None:
        simulation.takes(5.0)

    async def body_async(payload: Any) -> None:
        await simulation.sleep(5.0)

    task = consumer(queue)(body if flavour == "threads" else body_async)
    rules = ConsumerPolicy.load({"loop": {"timeout": 1.0}})
    with pytest.raises(LoopTimeout):
        simulation.consume(task, rules, on_outcome=outcomes.append)

    seen = {one.transaction.id: (one.kind.value, one.started, one.reason) for one in outcomes}
    assert seen == {"a": ("released", True, "timeout"), "b": ("released", False, "timeout")}
