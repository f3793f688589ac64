"""Executors of five kinds pass the exam, and each one that is broken in one way fails the questions of that way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ergon_framework.testing.conformance.check import Result
from ergon_framework.testing.conformance.executor import QUESTIONS, mark
from tests.conformance import broken_executor

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "executors"
BROKEN = Path(broken_executor.__file__)

#: What is broken -> the questions that it must fail, all of them and no others.
FAILS = {
    "Sound": set(),
    "NamesTheJobInAscii": {"an_answer_names_its_job"},
    "TiresAfterTen": {"requests_are_answered_one_after_the_other"},
    "SwapsResults": {"two_requests_may_come_before_the_first_answer"},
    "AnswersTwice": {"each_request_is_answered_once"},
    "ForgetsKeywords": {"arguments_come_by_place_and_by_name"},
    "SpeaksLatin": {"text_in_any_script_arrives_unchanged"},
    "EndsLinesInTheMiddle": {"text_in_any_script_arrives_unchanged"},
    "RoundsNumbers": {"numbers_arrive_unchanged"},
    "ReadsShortLines": {"a_mebibyte_goes_both_ways"},
    "ReadsShallowValues": {"deep_values_go_both_ways"},
    "KnowsEveryField": {"unknown_fields_are_ignored"},
    "NeedsEveryField": {"optional_fields_may_be_absent_or_null"},
    "CountsNoAttempts": {"the_context_reaches_the_handler"},
    "ForgetsTheDeadline": {"the_deadline_reaches_the_handler"},
    "StartsItsOwnTrace": {"the_trace_context_reaches_the_handler"},
    "CallsErrorsSuccess": {"an_error_says_what_went_wrong"},
    "SwallowsMessages": {"an_error_says_what_went_wrong"},
    "DiesOfErrors": {"an_error_says_what_went_wrong"},
    "RetriesWithoutDelay": {"a_retry_says_when"},
    "SpeaksEveryVersion": {"another_version_is_answered_with_unsupported_version"},
    "IsSilentAboutVersions": {"another_version_is_answered_with_unsupported_version"},
    "CallsWhatIsNotThere": {"an_unknown_handler_is_answered_with_handler_not_found"},
    "CallsWhatIsPrivate": {"an_unknown_handler_is_answered_with_handler_not_found"},
    "IsSilentAboutBadRequests": {"a_bad_request_that_names_its_job_is_answered_with_bad_request"},
    "DiesOfGarbage": {"a_line_that_is_no_request_is_not_answered"},
    "AnswersGarbage": {"a_line_that_is_no_request_is_not_answered"},
    "GreetsItsCaller": {"it_says_nothing_by_itself"},
    "PrintsToStdout": {"what_handlers_print_stays_off_stdout"},
    "LetsChildrenPrint": {"what_children_print_stays_off_stdout"},
    "StaysWithoutInput": {"a_closed_stdin_ends_it"},
    "EndsBadly": {"a_closed_stdin_ends_it"},
    "LosesTheLastOnes": {"what_came_before_the_end_is_answered"},
    "AnswersHalfLines": {"half_a_line_is_not_answered"},
    "CrashesInTheMiddleOfALine": {"a_crash_leaves_no_half_answer"},
    "AnswersBeforeItCrashes": {"a_crash_leaves_no_half_answer"},
    "IgnoresSignals": {"a_signal_ends_it_when_idle", "a_signal_ends_it_when_busy"},
    "IgnoresSignalsAtWork": {"a_signal_ends_it_when_busy"},
    "SucceedsAtSignals": {"a_signal_ends_it_when_busy"},
}


def failed(command, *, patience):
    # Questions wait much and work little, and each has a process of its own.
    with ThreadPoolExecutor(4) as threads:
        marks = list(threads.map(lambda each: mark(each, command, patience=patience), QUESTIONS))
    return {got.question: got.reason for got in marks if got.result is Result.FAILED}


@pytest.mark.spec("EXE-15")
@pytest.mark.parametrize("name", FAILS)
def test_a_broken_executor_fails_what_it_breaks(name):
    assert set(failed([sys.executable, "-S", str(BROKEN), name], patience=2.0)) == FAILS[name]


def test_every_question_is_failed_by_somebody():
    assert set().union(*FAILS.values()) == {each.name for each in QUESTIONS}
    variants = {name for name, value in vars(broken_executor).items() if isinstance(value, type)}
    assert variants == set(FAILS)


def built_go(folder):
    go = shutil.which("go")
    assert go, "Go is missing; run tools/install-languages"
    cache = {"GOCACHE": str(folder / "cache"), "GOFLAGS": "-mod=mod", "GOPROXY": "off"}
    subprocess.run(
        [go, "build", "-o", folder / "executor", "."], cwd=EXAMPLES / "go", check=True, env=os.environ | cache
    )
    return [str(folder / "executor")]


def built_rust(folder, *options):
    cargo = shutil.which("cargo")
    assert cargo, "Rust is missing; run tools/install-languages"
    # A copy, so that no lock file and nothing that is built gets into the repository.
    ignored = shutil.ignore_patterns("target", "Cargo.lock")
    shutil.copytree(ROOT / "reference" / "rust", folder / "rust", ignore=ignored)
    crate = folder / "rust" / "rrq-executor"
    subprocess.run([cargo, "build", "--quiet", "--example", "stdio_executor", *options], cwd=crate, check=True)
    return [str(crate / "target" / "debug" / "examples" / "stdio_executor")]


def node(_):
    assert shutil.which("node"), "Node is missing; run tools/install-languages"
    return ["node", str(EXAMPLES / "node" / "executor.mjs")]


def runtime(_):
    program = "import sys; sys.path.insert(0, sys.argv[1]); from ergon_framework.cli.main import main; "
    program += "sys.argv[1:] = ['executor', 'run', '--handlers', 'handlers:registry']; main()"
    return [sys.executable, "-c", program, str(EXAMPLES / "python")]


def reference(_):
    return [sys.executable, str(ROOT / "reference" / "python" / "stdio_executor.py")]


@pytest.mark.spec("DX-38", "EXE-15", "EXE-25")
@pytest.mark.parametrize("make", [runtime, reference, node, built_go, built_rust], ids=lambda make: make.__name__)
def test_an_executor_of_ours_passes(make, tmp_path):
    assert failed(make(tmp_path), patience=30.0) == {}


def test_the_reference_is_short_and_needs_nothing():
    text = (ROOT / "reference" / "python" / "stdio_executor.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    imported = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= set(sys.stdlib_module_names)
