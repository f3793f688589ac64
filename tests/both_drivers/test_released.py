"""A released outcome says whether its call had started, and why the loop released it: DX-02, PRO-18."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ergon_framework import LoopTimeout, MemoryConnector, Transaction, consumer
from ergon_framework.cli.summary import report_data
from ergon_framework.runner.task_runner import TaskResult
from ergon_framework.testing.simulation import Simulation
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.report import OutcomeKind
from tests.both_drivers.harness import make_policy, wait_then_return
from tests.both_drivers.producer_harness import VARIANTS, Hang, ProduceRun, make_producer_policy, make_transactions

pytestmark = [pytest.mark.spec("DX-02", "PRO-18"), pytest.mark.parametrize("variant", VARIANTS)]


def list_outcomes(report: Any) -> list[tuple[str, bool, str | None, int]]:
    return [(outcome.kind.value, outcome.started, outcome.reason, outcome.attempts) for outcome in report.outcomes]


def test_after_a_stop_the_running_call_has_started_and_the_waiting_one_has_not(variant):
    def produce(*_):
        result.task.stop()
        return Hang(stubborn=True, then="sent", late="sent")

    result = ProduceRun(
        variant, make_transactions(2), make_producer_policy(concurrency=1, drain_timeout=0.05), produce=produce
    )
    result.execute()

    # Checked after the handler has returned, having sent.
    assert not result.report.outcomes[0].still_running
    assert list_outcomes(result.report) == [("released", True, "stop", 0), ("released", False, "stop", 0)]
    assert result.report.released_started == 1


def test_after_the_loop_timeout_the_reason_is_timeout(variant):
    result = ProduceRun(
        variant,
        make_transactions(3),
        make_producer_policy(concurrency=1, timeout=0.05),
        produce=lambda *_: Hang(stubborn=True, then="sent", late="sent"),
    ).execute()

    assert isinstance(result.raised, LoopTimeout)
    assert list_outcomes(result.report) == [("released", True, "timeout", 0), *[("released", False, "timeout", 0)] * 2]
    assert "3 were released, of which 1 had started" in str(result.raised)


def test_a_sent_transaction_in_its_success_handler_has_started(variant):
    def success(*_):
        result.task.stop()
        return Hang(stubborn=True)

    result = ProduceRun(
        variant,
        make_transactions(1),
        make_producer_policy(drain_timeout=0.05),
        produce=lambda *_: "sent",
        success=success,
    )
    result.execute()

    outcome = result.report.outcomes[0]
    assert list_outcomes(result.report) == [("released", True, "stop", 0)]
    assert (outcome.processed, outcome.result) == (True, "sent")


def test_a_transaction_waiting_for_its_next_attempt_has_started(variant):
    def produce(*_):
        result.task.stop()
        raise ValueError("down")

    result = ProduceRun(
        variant,
        make_transactions(1),
        make_producer_policy(produce={"backoff": 30.0}, drain_timeout=0.05),
        produce=produce,
    )
    result.execute()

    assert list_outcomes(result.report) == [("released", True, "stop", 0)]


def test_a_transaction_beyond_the_limit_has_not_started(variant):
    result = ProduceRun(variant, make_transactions(2), make_producer_policy(limit=1)).execute()

    assert list_outcomes(result.report) == [("succeeded", True, None, 1), ("released", False, "limit", 0)]


def test_a_failed_transaction_has_started(variant):
    result = ProduceRun(
        variant, make_transactions(1), make_producer_policy(produce={"max_attempts": 1}), produce=lambda *_: 1 // 0
    ).execute()

    assert list_outcomes(result.report) == [("failed", True, None, 1)]


def test_the_log_shows_start_and_reason(variant, caplog):
    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        ProduceRun(
            variant,
            make_transactions(1),
            make_producer_policy(timeout=0.05),
            produce=lambda *_: Hang(stubborn=True),
        ).execute()

    [record] = [log_record for log_record in caplog.records if log_record.message.startswith("transaction released")]
    assert (record.transaction_id, record.started, record.reason) == ("t0", True, "timeout")


def test_a_consumer_reports_timeout_as_the_reason_after_its_loop_timeout(variant, build, caplog):
    world = build().offer("a")
    world.bodies["process"] = wait_then_return(world.signal())
    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        world.run(make_policy(concurrency=1, timeout=0.1))

    outcome = world.outcome("a")
    assert (outcome.kind, outcome.started, outcome.reason) == (OutcomeKind.RELEASED, True, "timeout")
    assert world.report.released_started == 1
    assert report_data(TaskResult("charge", world.report))["released_started"] == 1
    [record] = [log_record for log_record in caplog.records if log_record.message.startswith("transaction released")]
    assert (record.started, record.reason) == (True, "timeout")


def test_a_delivery_in_the_backlog_has_not_started(variant):
    simulation = Simulation()
    queue = MemoryConnector("orders", clock=simulation.monotonic)
    queue.dispatch([Transaction({}, id=name, key="one customer") for name in ("a", "b")])
    outcomes: list[Any] = []

    def body(payload: Any) -> None:
        simulation.busy_for(5.0)

    async def body_async(payload: Any) -> None:
        await simulation.sleep(5.0)

    task = consumer(queue)(body if variant == "threads" else body_async)
    loop_policy = ConsumerPolicy.load({"loop": {"timeout": 1.0}})
    with pytest.raises(LoopTimeout):
        simulation.consume(task, loop_policy, on_outcome=outcomes.append)

    outcomes_by_id = {
        outcome.transaction.id: (outcome.kind.value, outcome.started, outcome.reason) for outcome in outcomes
    }
    assert outcomes_by_id == {"a": ("released", True, "timeout"), "b": ("released", False, "timeout")}
