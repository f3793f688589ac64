"""Which limit a timeout was, in code and message, for consumers and producers."""

from __future__ import annotations

import pytest

from ergon_framework.task.report import Kind
from tests.twins.producing import FLAVOURS, Hang, many, quick, run
from tests.twins.world import policy, takes


@pytest.mark.spec("DX-11")
@pytest.mark.parametrize("step", ["process", "success"])
def test_a_step_timeout_names_the_step_and_its_key(build, step):
    world = build(**{step: takes(0.2)}).offer("a")
    world.run(policy(**{step: {"timeout": 0.05, "max_attempts": 1}}))
    (letter,) = world.queue.dead_letters
    assert world.outcome().error.code == letter.reason == letter.failure.reason_code == "step_timeout"
    assert letter.failure.error_message == f"{step} did not finish within 0.05 s (steps.{step}.retry.timeout)"


@pytest.mark.spec("DX-11")
def test_a_lifecycle_timeout_names_the_transaction_and_its_key(build):
    world = build(process=takes(0.2)).offer("a")
    world.run(policy(transaction_timeout=0.05, process={"timeout": 5.0, "max_attempts": 3}))
    (letter,) = world.queue.dead_letters
    assert world.outcome().error.code == letter.reason == "lifecycle_timeout"
    expected = "process did not finish within the 0.05 s of its transaction (loop.transaction_timeout)"
    assert letter.failure.error_message == expected


@pytest.mark.spec("DX-11")
def test_the_timeout_of_an_exception_handler_is_told_apart(build):
    world = build(process=takes(0.2), exception=takes(0.2)).offer("a")
    rules = {"transaction_timeout": 0.05, "exception": {"timeout": 0.03, "max_attempts": 1}}
    world.run(policy(process={"timeout": 5.0, "max_attempts": 1}, **rules))
    outcome = world.outcome()
    assert outcome.kind is Kind.HANDLER_FAILED
    assert (outcome.error.code, outcome.handler_error.code) == ("lifecycle_timeout", "step_timeout")


@pytest.mark.spec("DX-11")
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("scope", ["step", "lifecycle"])
def test_the_timeouts_of_a_producer_are_told_apart(flavour, scope):
    rules = {"produce": {"timeout": 0.03 if scope == "step" else 5.0, "max_attempts": 1}}
    more = {} if scope == "step" else {"transaction_timeout": 0.03}
    made = run(flavour, many(1), quick(**rules, **more), produce=lambda *_: Hang())
    (outcome,) = made.report.outcomes
    assert outcome.error.code == f"{scope}_timeout"
    key = "steps.produce.retry.timeout" if scope == "step" else "loop.transaction_timeout"
    assert str(outcome.error).endswith(f"({key})")
