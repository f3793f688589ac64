"""The conformance suite of executors, used by a program; a make target runs all of its checks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.errors import ConfigurationError
from ergon_framework.testing.conformance.check import CheckFailed
from ergon_framework.testing.conformance.executor.process import ExecutorUnderTest
from ergon_framework.testing.conformance.executor.suite import CHECKS, HANDLERS, report, run_suite

ROOT = Path(__file__).parents[3]
REFERENCE = [sys.executable, str(ROOT / "reference" / "python" / "stdio_executor.py")]
BROKEN = [sys.executable, "-S", str(ROOT / "tests" / "conformance" / "broken_executor.py")]
CHECK_NAMES = ["an_answer_names_its_job", "a_retry_says_when"]


@pytest.mark.spec("EXE-15")
def test_the_reference_passes_and_a_broken_executor_fails_the_check_it_breaks():
    assert [check_result.result.value for check_result in run_suite(REFERENCE, only=CHECK_NAMES)] == [
        "passed",
        "passed",
    ]
    results = run_suite([*BROKEN, "RetriesWithoutDelay"], only=CHECK_NAMES)
    assert [(check_result.check, check_result.result.value) for check_result in results] == [
        ("an_answer_names_its_job", "passed"),
        ("a_retry_says_when", "failed"),
    ]
    summary = report(BROKEN, results)
    assert (summary["passed"], summary["failed"]) == (1, 1)
    assert summary["checks"][1]["reason"] == "retry_after_seconds is None, not 7.5"


def test_no_response_and_an_early_exit_are_failures_with_the_final_output():
    (silent,) = run_suite(
        [sys.executable, "-S", "-c", "import time; time.sleep(60)"], only=CHECK_NAMES[1:], timeout=0.3
    )
    assert "timed out after 0.3 s" in silent.reason
    (exited,) = run_suite(
        [sys.executable, "-S", "-c", "raise SystemExit('no such handlers')"], only=CHECK_NAMES[1:], timeout=10
    )
    assert exited.reason.endswith("its stdout was closed; last output on stderr: no such handlers")


def test_a_failure_names_the_time_that_the_check_waited():
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with ExecutorUnderTest(command, timeout=60) as executor:
        request = executor.make_request("conformance.echo", 1)
        executor.enqueue(request)
        with pytest.raises(CheckFailed, match=r"timed out after 0\.1 s"):
            executor.wait_for_outcome(request, within=0.1)


def test_a_process_that_only_closes_its_stdout_is_not_reported_as_ended():
    command = [sys.executable, "-S", "-c", "import os, time; os.close(1); time.sleep(60)"]
    with (
        ExecutorUnderTest(command, timeout=60) as executor,
        pytest.raises(CheckFailed, match=r"its stdout was closed$"),
    ):
        executor.ask("conformance.echo", 1)


def test_an_executor_that_cannot_start_and_an_unknown_check_are_errors():
    with pytest.raises(ConfigurationError, match="cannot be started: No such file"):
        run_suite(["./there-is-no-such-program"], only=CHECK_NAMES)
    with pytest.raises(ValueError, match="no check called 'a_retry'"):
        run_suite(REFERENCE, only=["a_retry"])


def test_the_command_prints_text_and_json():
    output = CliRunner().invoke(
        app, ["executor", "check", "--only", CHECK_NAMES[1], "--", *BROKEN, "RetriesWithoutDelay"]
    )
    assert output.exit_code == 1
    assert output.stdout.splitlines() == [
        "FAILED  a retry says when: retry_after_seconds is None, not 7.5  [EXE-06]",
        f"0 passed, 1 failed, of {len(CHECKS)} checks",
    ]
    output = CliRunner().invoke(app, ["executor", "check", "--json", "--only", CHECK_NAMES[1], "--", *REFERENCE])
    assert (output.exit_code, json.loads(output.stdout)["passed"]) == (0, 1)
    output = CliRunner().invoke(app, ["executor", "check", "--only", "nothing", "--", *REFERENCE])
    assert output.exit_code == 2


def test_an_executor_without_the_conformance_handlers_is_reported():
    program = """
import json, sys
for line in sys.stdin:
    job_id = json.loads(line)["job_id"]
    told = {"job_id": job_id, "status": "error", "error_type": "handler_not_found", "error_message": "there is none"}
    print(json.dumps(told), flush=True)
"""
    output = CliRunner().invoke(
        app, ["executor", "check", "--only", CHECK_NAMES[0], "--", sys.executable, "-S", "-c", program]
    )
    assert output.exit_code == 1
    assert "the conformance suite needs the test handlers conformance.echo" in output.stderr


def test_the_document_lists_the_conformance_handlers():
    text = (ROOT / "docs" / "executors.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(conformance\.\w+)` \| (.*) \|$", text, re.MULTILINE)) == HANDLERS
