"""Which limit a timeout exceeded, in code and message, for consumers and producers."""

from __future__ import annotations

import pytest

from ergon_framework.worker.report import OutcomeKind
from tests.both_drivers.harness import make_policy, wait_then_return
from tests.both_drivers.producer_harness import VARIANTS, Hang, make_producer_policy, make_transactions, run


@pytest.mark.spec("DX-11")
@pytest.mark.parametrize("step", ["process", "success"])
def test_a_step_timeout_names_the_step_and_its_key(build, step):
    world = build(**{step: wait_then_return(0.2)}).offer("a")
    world.run(make_policy(**{step: {"timeout": 0.05, "max_attempts": 1}}))
    (dead_letter,) = world.queue.dead_letters
    assert world.outcome().error.code == dead_letter.reason == dead_letter.failure.reason_code == "step_timeout"
    assert dead_letter.failure.error_message == f"{step} did not finish within 0.05 s (steps.{step}.retry.timeout)"


@pytest.mark.spec("DX-11")
def test_a_lifecycle_timeout_names_the_transaction_and_its_key(build):
    world = build(process=wait_then_return(0.2)).offer("a")
    world.run(make_policy(transaction_timeout=0.05, process={"timeout": 5.0, "max_attempts": 3}))
    (dead_letter,) = world.queue.dead_letters
    assert world.outcome().error.code == dead_letter.reason == "lifecycle_timeout"
    expected = "process did not finish within the 0.05 s of its transaction (loop.transaction_timeout)"
    assert dead_letter.failure.error_message == expected


@pytest.mark.spec("DX-11")
def test_the_timeout_of_an_exception_handler_has_its_own_code(build):
    world = build(process=wait_then_return(0.2), exception=wait_then_return(0.2)).offer("a")
    retries = {"transaction_timeout": 0.05, "exception": {"timeout": 0.03, "max_attempts": 1}}
    world.run(make_policy(process={"timeout": 5.0, "max_attempts": 1}, **retries))
    outcome = world.outcome()
    assert outcome.kind is OutcomeKind.EXCEPTION_HANDLER_FAILED
    assert (outcome.error.code, outcome.handler_error.code) == ("lifecycle_timeout", "step_timeout")


@pytest.mark.spec("DX-11")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scope", ["step", "lifecycle"])
def test_the_timeouts_of_a_producer_have_different_codes(variant, scope):
    retries = {"produce": {"timeout": 0.03 if scope == "step" else 5.0, "max_attempts": 1}}
    loop_options = {} if scope == "step" else {"transaction_timeout": 0.03}
    result = run(
        variant, make_transactions(1), make_producer_policy(**retries, **loop_options), produce=lambda *_: Hang()
    )
    (outcome,) = result.report.outcomes
    assert outcome.error.code == f"{scope}_timeout"
    key = "steps.produce.retry.timeout" if scope == "step" else "loop.transaction_timeout"
    assert str(outcome.error).endswith(f"({key})")
