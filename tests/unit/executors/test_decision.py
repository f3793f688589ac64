"""What the orchestrator does about an outcome, and where it sends a job: decisions, held against the document."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.errors import Category
from ergon_framework.executors import decision as verdict
from ergon_framework.executors.decision import Complete, Fail, Retry, Route, UnroutableJob, decide, route_job
from ergon_framework.executors.protocol import ErrorType, ExecutionOutcome, InvalidMessage, LineErrorReason, Status
from ergon_framework.worker.policies import RetryPolicy

POLICY = RetryPolicy(max_attempts=3, backoff=2, multiplier=3, cap=60)
EXECUTORS = ["python", "rust"]


def make_outcome(status, **fields):
    return ExecutionOutcome(job_id="a", status=status, **fields)


def decide_for_status(status, *, attempt_number=1, **fields):
    return decide(make_outcome(status, **fields), attempt_number=attempt_number, policy=POLICY)


@pytest.mark.spec("EXE-05")
@pytest.mark.parametrize("attempt_number", [1, 3, 99])
def test_a_success_is_complete_on_every_attempt(attempt_number):
    decision = decide_for_status(
        Status.SUCCESS, result={"ok": True}, error_type="handler_not_found", attempt_number=attempt_number
    )
    assert decision == Complete({"ok": True})


@pytest.mark.spec("EXE-07", "EXE-08", "EXE-11")
@pytest.mark.parametrize("status", [Status.RETRY, Status.TIMEOUT, Status.ERROR])
def test_a_failure_is_retried_by_policy_and_then_dead_lettered(status):
    decision = [decide_for_status(status, error_message="no", attempt_number=number) for number in (1, 2, 3, 4)]
    assert [type(each) for each in decision] == [Retry, Retry, Fail, Fail]
    assert [each.delay for each in decision[:2]] == [2.0, 6.0]
    assert [each.cause.message for each in decision] == ["no"] * 4
    assert not decision[2].fatal


@pytest.mark.spec("EXE-06")
@pytest.mark.parametrize(
    "requested_delay, delay",
    [(5, 5.0), (0, 0.0), (-3, 0.0), (1e300, 86_400.0), (math.nan, 0.0), (math.inf, 86_400.0), (None, 2.0)],
)
def test_a_requested_delay_is_clamped(requested_delay, delay):
    retry_outcome = make_outcome(Status.RETRY).model_copy(update={"retry_after_seconds": requested_delay})
    assert decide(retry_outcome, attempt_number=1, policy=POLICY).delay == delay


@pytest.mark.spec("EXE-06")
def test_a_policy_may_allow_less_than_the_requested_delay():
    decision = decide(make_outcome(Status.RETRY, retry_after_seconds=50), attempt_number=1, policy=POLICY, max_delay=10)
    assert decision.delay == 10


@pytest.mark.spec("EXE-06")
@pytest.mark.parametrize("status", [Status.TIMEOUT, Status.ERROR])
def test_only_a_retry_may_request_a_delay(status):
    assert decide_for_status(status, retry_after_seconds=50).delay == 2.0


@pytest.mark.spec("DX-34", "EXE-09")
@pytest.mark.parametrize("status", [Status.ERROR, Status.RETRY, Status.TIMEOUT])
def test_a_missing_handler_is_dead_lettered_immediately_for_every_status(status):
    decision = decide_for_status(status, error_type="handler_not_found", error_message="no 'f'")
    assert (decision.fatal, decision.cause.code, decision.cause.message) == (True, "handler_not_found", "no 'f'")


@pytest.mark.spec("DX-34", "EXE-09")
@pytest.mark.parametrize("status", [Status.ERROR, Status.RETRY, Status.TIMEOUT])
@pytest.mark.parametrize(
    "error_type",
    [
        *sorted(kind.value for kind in ErrorType if kind is not ErrorType.HANDLER_NOT_FOUND),
        *("killed", "ValueError", "HANDLER_NOT_FOUND", None),
    ],
)
def test_no_other_error_is_fatal(status, error_type):
    decision = decide_for_status(status, error_type=error_type)
    assert (type(decision), decision.cause.final) == (Retry, False)
    assert decision.cause.category is (Category.TIMEOUT if status is Status.TIMEOUT else Category.SYSTEM)
    assert isinstance(decide_for_status(status, error_type=error_type, attempt_number=3), Fail)


@pytest.mark.spec("DX-34")
def test_the_table_of_the_specification_names_one_fatal_error_type():
    text = (Path(__file__).parents[3] / "docs" / "spec" / "executor.md").read_text(encoding="utf-8")
    table = text.split("## Outcome handling")[1]
    fatal = [line for line in table.splitlines() if line.startswith("|") and line.count("| dead letter") == 2]
    assert [re.findall("`([a-z_]+)`", line)[-1] for line in fatal] == ["handler_not_found"]
    assert "invalid_argument" not in table


@pytest.mark.spec("EXE-07")
def test_a_timeout_has_its_own_category():
    assert decide_for_status(Status.TIMEOUT).cause.category is Category.TIMEOUT
    assert decide_for_status(Status.ERROR).cause.category is Category.SYSTEM


def test_type_and_traceback_are_kept():
    blame = decide_for_status(Status.ERROR, error_type="ValueError", error_traceback="Traceback …").cause
    assert (blame.code, blame.error_type, blame.traceback) == ("executor_error", "ValueError", "Traceback …")


@pytest.mark.parametrize(
    "execution_outcome, code",
    [
        (verdict.job_timed_out("a", after=2.5), "hard_timeout"),
        (verdict.executor_died("a", exit_description="SIGKILL"), "executor_died"),
        (verdict.invalid_outcome("a", InvalidMessage(LineErrorReason.NOT_JSON, "no JSON", 7)), "bad_outcome"),
    ],
)
def test_outcomes_made_by_the_pool_are_classified_like_reported_outcomes(execution_outcome, code):
    decision = decide(execution_outcome, attempt_number=1, policy=POLICY)
    assert (type(decision), decision.cause.code, execution_outcome.job_id) == (Retry, code, "a")
    assert isinstance(decide(execution_outcome, attempt_number=3, policy=POLICY), Fail)


def test_a_kill_has_an_outcome_that_no_executor_can_report():
    execution_outcome = verdict.job_killed("a")
    assert (execution_outcome.job_id, execution_outcome.status, execution_outcome.error_type) == (
        "a",
        Status.ERROR,
        "killed",
    )


def test_attempts_count_from_one():
    with pytest.raises(ValueError, match="attempt_number must be >= 1, got"):
        decide(make_outcome(Status.ERROR), attempt_number=0, policy=POLICY)


def test_the_random_source_jitters_a_delay_of_the_policy():
    policy = POLICY.model_copy(update={"jitter": 0.5})
    assert decide(make_outcome(Status.ERROR), attempt_number=1, policy=policy, random_source=lambda: 0.0).delay == 1.0


@pytest.mark.spec("EXE-06", "EXE-08")
@given(st.floats(), st.integers(1, 50), st.integers(1, 10))
def test_attempts_and_delays_are_bounded(requested_delay, attempt_number, attempts):
    retry_outcome = make_outcome(Status.RETRY).model_copy(update={"retry_after_seconds": requested_delay})
    decision = decide(retry_outcome, attempt_number=attempt_number, policy=RetryPolicy(max_attempts=attempts))
    assert isinstance(decision, Fail) == (attempt_number >= attempts)
    if isinstance(decision, Retry):
        assert 0 <= decision.delay <= 86_400


# -- routing --------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-13")
@pytest.mark.parametrize(
    "name, expected",
    [
        ("rust#send_email", Route("rust", "send_email")),
        ("send_email", Route("python", "send_email")),
        ("rust#a#b", Route("rust", "a#b")),
        ("rust##b", Route("rust", "#b")),
    ],
)
def test_the_prefix_before_the_first_hash_selects_the_executor(name, expected):
    assert route_job(name, default="python", executors=EXECUTORS) == expected


@pytest.mark.spec("EXE-13")
@pytest.mark.parametrize(
    "name, default, message",
    [
        ("go#x", "python", "the executor 'go', which does not exist; known: python, rust"),
        ("Rust#x", "python", "'Rust'"),
        ("#x", "python", "the executor ''"),
        ("x", "go", "the executor 'go'"),
        ("x", None, "no default is configured"),
        ("rust#", "python", "names no handler"),
        ("", "python", "1 to 1024 characters"),
        ("x" * 1025, "python", "not 1025"),
    ],
)
def test_a_name_without_a_route_has_a_reason(name, default, message):
    decision = route_job(name, default=default, executors=EXECUTORS)
    assert isinstance(decision, UnroutableJob)
    assert message in decision.message
