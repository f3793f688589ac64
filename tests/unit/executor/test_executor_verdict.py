"""What the orchestrator does about an outcome, and where it sends a job: decisions, held against the document."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.errors import Category
from ergon_framework.executor import verdict
from ergon_framework.executor.protocol import BadLine, ErrorType, ExecutionOutcome, Reason, Status
from ergon_framework.executor.routing import NoRoute, Route, route
from ergon_framework.executor.verdict import Again, Bury, Complete, judge
from ergon_framework.task.mixins.policies import RetryPolicy

POLICY = RetryPolicy(max_attempts=3, backoff=2, multiplier=3, cap=60)
KNOWN = ["python", "rust"]


def outcome(status, **fields):
    return ExecutionOutcome(job_id="a", status=status, **fields)


def judged(status, *, attempt_number=1, **fields):
    return judge(outcome(status, **fields), attempt_number=attempt_number, policy=POLICY)


@pytest.mark.spec("EXE-05")
@pytest.mark.parametrize("attempt_number", [1, 3, 99])
def test_a_success_is_complete_whatever_attempt_it_was(attempt_number):
    got = judged(Status.SUCCESS, result={"ok": True}, error_type="handler_not_found", attempt_number=attempt_number)
    assert got == Complete({"ok": True})


@pytest.mark.spec("EXE-07", "EXE-08", "EXE-11")
@pytest.mark.parametrize("status", [Status.RETRY, Status.TIMEOUT, Status.ERROR])
def test_whatever_did_not_succeed_is_tried_by_policy_and_then_buried(status):
    got = [judged(status, error_message="no", attempt_number=number) for number in (1, 2, 3, 4)]
    assert [type(each) for each in got] == [Again, Again, Bury, Bury]
    assert [each.delay for each in got[:2]] == [2.0, 6.0]
    assert [each.blame.message for each in got] == ["no"] * 4
    assert not got[2].fatal


@pytest.mark.spec("EXE-06")
@pytest.mark.parametrize(
    "asked, delay",
    [(5, 5.0), (0, 0.0), (-3, 0.0), (1e300, 86_400.0), (math.nan, 0.0), (math.inf, 86_400.0), (None, 2.0)],
)
def test_a_requested_delay_is_clamped(asked, delay):
    asking = outcome(Status.RETRY).model_copy(update={"retry_after_seconds": asked})
    assert judge(asking, attempt_number=1, policy=POLICY).delay == delay


@pytest.mark.spec("EXE-06")
def test_policy_may_allow_less_than_is_asked_for():
    got = judge(outcome(Status.RETRY, retry_after_seconds=50), attempt_number=1, policy=POLICY, longest_delay=10)
    assert got.delay == 10


@pytest.mark.spec("EXE-06")
@pytest.mark.parametrize("status", [Status.TIMEOUT, Status.ERROR])
def test_only_a_retry_may_ask_for_a_delay(status):
    assert judged(status, retry_after_seconds=50).delay == 2.0


@pytest.mark.spec("DX-34", "EXE-09")
@pytest.mark.parametrize("status", [Status.ERROR, Status.RETRY, Status.TIMEOUT])
def test_a_handler_that_does_not_exist_is_buried_at_once_whatever_the_status(status):
    got = judged(status, error_type="handler_not_found", error_message="no 'f'")
    assert (got.fatal, got.blame.code, got.blame.message) == (True, "handler_not_found", "no 'f'")


@pytest.mark.spec("DX-34", "EXE-09")
@pytest.mark.parametrize("status", [Status.ERROR, Status.RETRY, Status.TIMEOUT])
@pytest.mark.parametrize(
    "kind",
    [
        *sorted(kind.value for kind in ErrorType if kind is not ErrorType.HANDLER_NOT_FOUND),
        *("killed", "ValueError", "HANDLER_NOT_FOUND", None),
    ],
)
def test_no_other_error_is_fatal(status, kind):
    got = judged(status, error_type=kind)
    assert (type(got), got.blame.final) == (Again, False)
    assert got.blame.category is (Category.TIMEOUT if status is Status.TIMEOUT else Category.SYSTEM)
    assert isinstance(judged(status, error_type=kind, attempt_number=3), Bury)


@pytest.mark.spec("DX-34")
def test_the_table_of_the_specification_names_one_fatal_error_type():
    text = (Path(__file__).parents[3] / "docs" / "spec" / "executor.md").read_text(encoding="utf-8")
    table = text.split("## What the orchestrator does")[1]
    fatal = [line for line in table.splitlines() if line.startswith("|") and line.count("| dead letter") == 2]
    assert [re.findall("`([a-z_]+)`", line)[-1] for line in fatal] == ["handler_not_found"]
    assert "invalid_argument" not in table


@pytest.mark.spec("EXE-07")
def test_a_timeout_is_told_as_one():
    assert judged(Status.TIMEOUT).blame.category is Category.TIMEOUT
    assert judged(Status.ERROR).blame.category is Category.SYSTEM


def test_type_and_traceback_are_kept():
    blame = judged(Status.ERROR, error_type="ValueError", error_traceback="Traceback …").blame
    assert (blame.code, blame.error_type, blame.traceback) == ("executor_error", "ValueError", "Traceback …")


@pytest.mark.parametrize(
    "made, code",
    [
        (verdict.timed_out("a", after=2.5), "hard_timeout"),
        (verdict.died("a", how="SIGKILL"), "executor_died"),
        (verdict.unreadable("a", BadLine(Reason.NOT_JSON, "no JSON", 7)), "bad_outcome"),
    ],
)
def test_what_executors_do_not_report_is_judged_like_what_they_do(made, code):
    got = judge(made, attempt_number=1, policy=POLICY)
    assert (type(got), got.blame.code, made.job_id) == (Again, code, "a")
    assert isinstance(judge(made, attempt_number=3, policy=POLICY), Bury)


def test_a_kill_is_no_outcome_that_an_executor_could_claim_for_itself():
    made = verdict.killed("a")
    assert (made.job_id, made.status, made.error_type) == ("a", Status.ERROR, "killed")


def test_attempts_count_from_one():
    with pytest.raises(ValueError, match="from 1"):
        judge(outcome(Status.ERROR), attempt_number=0, policy=POLICY)


def test_dice_move_a_delay_of_the_policy():
    policy = POLICY.model_copy(update={"jitter": 0.5})
    assert judge(outcome(Status.ERROR), attempt_number=1, policy=policy, dice=lambda: 0.0).delay == 1.0


@pytest.mark.spec("EXE-06", "EXE-08")
@given(st.floats(), st.integers(1, 50), st.integers(1, 10))
def test_no_job_is_tried_for_ever_and_no_delay_is_without_bound(asked, attempt_number, attempts):
    asking = outcome(Status.RETRY).model_copy(update={"retry_after_seconds": asked})
    got = judge(asking, attempt_number=attempt_number, policy=RetryPolicy(max_attempts=attempts))
    assert isinstance(got, Bury) == (attempt_number >= attempts)
    if isinstance(got, Again):
        assert 0 <= got.delay <= 86_400


# -- routing --------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-13")
@pytest.mark.parametrize(
    "name, found",
    [
        ("rust#send_email", Route("rust", "send_email")),
        ("send_email", Route("python", "send_email")),
        ("rust#a#b", Route("rust", "a#b")),
        ("rust##b", Route("rust", "#b")),
    ],
)
def test_what_precedes_the_first_mark_selects_the_executor(name, found):
    assert route(name, default="python", executors=KNOWN) == found


@pytest.mark.spec("EXE-13")
@pytest.mark.parametrize(
    "name, default, told",
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
def test_what_nobody_can_take_says_so(name, default, told):
    got = route(name, default=default, executors=KNOWN)
    assert isinstance(got, NoRoute)
    assert told in got.message
