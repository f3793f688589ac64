"""Five kinds of executors pass the conformance suite, and each broken one fails exactly the checks it breaks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ergon_framework.testing.conformance.check import CheckOutcome
from ergon_framework.testing.conformance.executor.suite import CHECKS, run_check
from tests.conformance import broken_executor

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "executors"
BROKEN_EXECUTOR = Path(broken_executor.__file__)

#: Broken executor -> the checks that it must fail, and no others.
EXPECTED_FAILURES = {
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
    "DiesOfGarbage": {"a_line_that_is_not_a_request_is_not_answered"},
    "AnswersGarbage": {"a_line_that_is_not_a_request_is_not_answered"},
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


def find_failures(command, *, answer_timeout):
    # Checks wait much and work little, and each has a separate process.
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda each: run_check(each, command, timeout=answer_timeout), CHECKS))
    return {
        check_result.check: check_result.reason
        for check_result in results
        if check_result.result is CheckOutcome.FAILED
    }


@pytest.mark.spec("EXE-15")
@pytest.mark.parametrize("name", EXPECTED_FAILURES)
def test_a_broken_executor_fails_exactly_the_checks_it_breaks(name):
    assert (
        set(find_failures([sys.executable, "-S", str(BROKEN_EXECUTOR), name], answer_timeout=2.0))
        == EXPECTED_FAILURES[name]
    )


def test_every_check_fails_for_a_broken_executor():
    assert set().union(*EXPECTED_FAILURES.values()) == {each.name for each in CHECKS}
    class_names = {name for name, value in vars(broken_executor).items() if isinstance(value, type)}
    assert class_names == set(EXPECTED_FAILURES)


def build_go(folder):
    go = shutil.which("go")
    assert go, "Go is missing; run tools/install-languages"
    go_environment = {"GOCACHE": str(folder / "cache"), "GOFLAGS": "-mod=mod", "GOPROXY": "off"}
    subprocess.run(
        [go, "build", "-o", folder / "executor", "."], cwd=EXAMPLES / "go", check=True, env=os.environ | go_environment
    )
    return [str(folder / "executor")]


def build_rust(folder, *options):
    cargo = shutil.which("cargo")
    assert cargo, "Rust is missing; run tools/install-languages"
    # A copy keeps lock files and build results out of the repository.
    ignore_build_files = shutil.ignore_patterns("target", "Cargo.lock")
    shutil.copytree(ROOT / "reference" / "rust", folder / "rust", ignore=ignore_build_files)
    crate = folder / "rust" / "rrq-executor"
    subprocess.run([cargo, "build", "--quiet", "--example", "stdio_executor", *options], cwd=crate, check=True)
    return [str(crate / "target" / "debug" / "examples" / "stdio_executor")]


def make_node_command(_):
    assert shutil.which("node"), "Node is missing; run tools/install-languages"
    return ["node", str(EXAMPLES / "node" / "executor.mjs")]


def make_runtime_command(_):
    program = "import sys; sys.path.insert(0, sys.argv[1]); from ergon_framework.cli.main import main; "
    program += "sys.argv[1:] = ['executor', 'run', '--handlers', 'handlers:registry']; main()"
    return [sys.executable, "-c", program, str(EXAMPLES / "python")]


def make_reference_command(_):
    return [sys.executable, str(ROOT / "reference" / "python" / "stdio_executor.py")]


@pytest.mark.spec("DX-38", "EXE-15", "EXE-25")
@pytest.mark.parametrize(
    "make_command",
    [make_runtime_command, make_reference_command, make_node_command, build_go, build_rust],
    ids=lambda make: make.__name__,
)
def test_a_bundled_executor_passes(make_command, tmp_path):
    assert find_failures(make_command(tmp_path), answer_timeout=30.0) == {}


def test_the_reference_executor_is_short_and_has_no_dependencies():
    text = (ROOT / "reference" / "python" / "stdio_executor.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    modules = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert modules <= set(sys.stdlib_module_names)
