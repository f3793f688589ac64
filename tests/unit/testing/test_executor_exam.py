"""The exam of executors, as a program uses it; all of its questions are asked by `make exam`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.errors import ConfigurationError
from ergon_framework.testing.conformance.executor import HANDLERS, QUESTIONS, report, take

ROOT = Path(__file__).parents[3]
REFERENCE = [sys.executable, str(ROOT / "reference" / "python" / "stdio_executor.py")]
BROKEN = [sys.executable, "-S", str(ROOT / "tests" / "conformance" / "broken_executor.py")]
ONLY = ["an_answer_names_its_job", "a_retry_says_when"]


@pytest.mark.spec("EXE-15")
def test_the_reference_passes_and_one_that_is_broken_fails_what_it_breaks():
    assert [mark.result.value for mark in take(REFERENCE, only=ONLY)] == ["passed", "passed"]
    marks = take([*BROKEN, "RetriesWithoutDelay"], only=ONLY)
    assert [(mark.question, mark.result.value) for mark in marks] == [
        ("an_answer_names_its_job", "passed"),
        ("a_retry_says_when", "failed"),
    ]
    found = report(BROKEN, marks)
    assert (found["passed"], found["failed"]) == (1, 1)
    assert found["marks"][1]["reason"] == "retry_after_seconds is None, not 7.5"


def test_silence_and_an_early_end_are_failures_with_the_last_words():
    (mute,) = take([sys.executable, "-S", "-c", "import time; time.sleep(60)"], only=ONLY[1:], patience=0.3)
    assert "not within 0.3 s" in mute.reason
    (gone,) = take([sys.executable, "-S", "-c", "raise SystemExit('no such handlers')"], only=ONLY[1:], patience=10)
    assert gone.reason.endswith("it ended; its last words: no such handlers")


def test_what_cannot_be_asked_says_so():
    with pytest.raises(ConfigurationError, match="cannot be started: No such file"):
        take(["./there-is-no-such-program"], only=ONLY)
    with pytest.raises(ValueError, match="no question called 'a_retry'"):
        take(REFERENCE, only=["a_retry"])


def test_the_command_tells_people_and_programs():
    told = CliRunner().invoke(app, ["executor", "check", "--only", ONLY[1], "--", *BROKEN, "RetriesWithoutDelay"])
    assert told.exit_code == 1
    assert told.stdout.splitlines() == [
        "FAILED  a retry says when: retry_after_seconds is None, not 7.5  [EXE-06]",
        f"0 passed, 1 failed, of {len(QUESTIONS)} questions",
    ]
    told = CliRunner().invoke(app, ["executor", "check", "--json", "--only", ONLY[1], "--", *REFERENCE])
    assert (told.exit_code, json.loads(told.stdout)["passed"]) == (0, 1)
    told = CliRunner().invoke(app, ["executor", "check", "--only", "nothing", "--", *REFERENCE])
    assert told.exit_code == 2


def test_an_executor_without_the_handlers_of_the_exam_is_told_that_it_needs_them():
    program = """
import json, sys
for line in sys.stdin:
    job_id = json.loads(line)["job_id"]
    told = {"job_id": job_id, "status": "error", "error_type": "handler_not_found", "error_message": "there is none"}
    print(json.dumps(told), flush=True)
"""
    told = CliRunner().invoke(app, ["executor", "check", "--only", ONLY[0], "--", sys.executable, "-S", "-c", program])
    assert told.exit_code == 1
    assert "the exam needs handlers of its own, exam.echo" in told.stderr


def test_the_document_lists_the_handlers_as_they_are():
    text = (ROOT / "docs" / "executors.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(exam\.\w+)` \| (.*) \|$", text, re.MULTILINE)) == HANDLERS
