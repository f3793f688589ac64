"""Conformance suite of executors, for every executor in any language: requests, invalid input and exit.

An executor is a process that reads one request per line of JSON from stdin, runs the handler that the request names,
and writes one outcome per line to stdout. ``run_suite(command)`` starts the executor again for each check and returns
the results. The executor must have the handlers that ``HANDLERS`` lists. Ids such as EXE-02 name the requirements in
docs/spec. ``ask`` sends a request for one of these handlers and waits for its outcome, ``enqueue`` queues requests for
the next wait, and ``check_echo`` shows that the executor still works.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.executors import json_lines
from ergon_framework.executors.protocol import ErrorType, ExecutionOutcome
from ergon_framework.testing.conformance.check import CheckFailed, CheckOutcome, expect
from ergon_framework.testing.conformance.executor.process import (
    HANDLERS,
    ExecutorCheck,
    ExecutorUnderTest,
    executor_check,
    json_equal,
)

#: Lines that name no job. The last one contains an unmatched brace and is not UTF-8.
INVALID_REQUESTS: Final = (b"hello", b"", b"[1, 2]", b"null", b'{"job_id": 7}', b'{"job_id": "half', b'"\xff\xfe{"')


@executor_check("EXE-02")
def another_version_is_answered_with_unsupported_version(executor: ExecutorUnderTest) -> None:
    _expect_error(executor.ask("conformance.echo", 1, protocol_version="2"), ErrorType.UNSUPPORTED_VERSION)
    executor.check_echo()


@executor_check("EXE-09")
def an_unknown_handler_is_answered_with_handler_not_found(executor: ExecutorUnderTest) -> None:
    for name in ("conformance.there_is_no_such_handler", "toString", "__init__"):
        _expect_error(executor.ask(name), ErrorType.HANDLER_NOT_FOUND)
    executor.check_echo()


@executor_check("EXE-02")
def a_bad_request_that_names_its_job_is_answered_with_bad_request(executor: ExecutorUnderTest) -> None:
    for changes in ({"args": "none"}, {"kwargs": [1]}, {"function_name": 7}, {"context": None}):
        request: dict[str, Any] = executor.make_request("conformance.echo") | changes
        executor.enqueue(request)
        _expect_error(executor.wait_for_outcome(request), ErrorType.BAD_REQUEST)
    executor.check_echo()


def _expect_error(outcome: ExecutionOutcome, error_type: ErrorType) -> None:
    expect(outcome.status == "error", f"the status is {outcome.status}, not error")
    expect(outcome.error_type == error_type, f"error_type is {outcome.error_type!r}, not {error_type.value!r}")


@executor_check("EXE-02")
def a_line_that_is_not_a_request_is_not_answered(executor: ExecutorUnderTest) -> None:
    requests = [executor.make_request("conformance.echo", number) for number in range(2)]
    executor.enqueue(requests[0])
    executor.wait_for_outcome(requests[0])
    lines_before = len(executor.unexpected_lines)
    executor.enqueue(*(line + b"\n" for line in INVALID_REQUESTS), requests[1])
    executor.wait_for_outcome(requests[1])
    executor.close()
    answered_ids = {outcome.job_id for outcome in executor.collect_outcomes()} - {
        request["job_id"] for request in requests
    }
    expect(not answered_ids and len(executor.unexpected_lines) == lines_before, "a line that names no job was answered")


@executor_check("EXE-01", "EXE-16")
def it_says_nothing_by_itself(executor: ExecutorUnderTest) -> None:
    executor.check_echo()
    executor.close()
    executor.collect_outcomes()
    _expect_clean_stdout(executor, 0)


@executor_check("EXE-16")
def what_handlers_print_stays_off_stdout(executor: ExecutorUnderTest) -> None:
    _expect_print_off_stdout(executor, "conformance.print")


@executor_check("EXE-16")
def what_children_print_stays_off_stdout(executor: ExecutorUnderTest) -> None:
    _expect_print_off_stdout(executor, "conformance.child")


def _expect_print_off_stdout(executor: ExecutorUnderTest, handler: str) -> None:
    executor.check_echo()
    lines_before = len(executor.unexpected_lines)
    for is_forged in (False, True):
        request = executor.make_request(handler, "")
        forgery = {"job_id": request["job_id"], "status": "success", "result": "forged"}
        # The printed text may look like an outcome of the same job.
        request["args"] = [json.dumps(forgery) if is_forged else "printed by a handler"]
        executor.enqueue(request)
        outcome = executor.wait_for_outcome(request)
        expect(outcome.result != "forged", "printed text was taken for the outcome")
        expect(outcome.status == "success", f"{handler} ended with {outcome.status}: {outcome.error_message}")
    executor.check_echo()
    _expect_clean_stdout(executor, lines_before)


def _expect_clean_stdout(executor: ExecutorUnderTest, lines_before: int) -> None:
    new_lines = executor.unexpected_lines[lines_before:]
    expect(
        not new_lines,
        f"{len(new_lines)} lines on stdout are not outcomes" + (f": {new_lines[0].message}" if new_lines else ""),
    )
    expect(not executor.has_partial_line, "stdout ended in the middle of a line")


MEBIBYTE: Final = 1024 * 1024
#: Nesting depth of the deepest allowed value: a request adds two levels to reach the limit of 64.
MAX_VALUE_DEPTH: Final = 62
#: Characters of one to four bytes, characters that some readers treat as line ends, and all that JSON must escape.
UNICODE: Final = 'naïve — 日本語 😀 e\u0301 \u2028\u2029\x85\ufeff "\\/\b\f\n\r\t\x00\x1f\x7f'
NUMBERS: Final = [0, -1, 2**53 - 1, -(2**53) + 1, 0.1, -2.5, 1e300, 1e-300, 5e-324]
TRACE: Final = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
}


@executor_check("EXE-01", "EXE-04", "EXE-15")
def an_answer_names_its_job(executor: ExecutorUnderTest) -> None:
    for job_id in ("4c7e1d0a-9f0e-4a8e-8f3a-0d3a4f3f6f00", "job/ü 😀 #1", "x" * 500):
        executor.check_echo(job_id=job_id)


@executor_check("EXE-01")
def requests_are_answered_one_after_the_other(executor: ExecutorUnderTest) -> None:
    for number in range(20):
        executor.check_echo({"number": number})


@executor_check("EXE-01", "EXE-10")
def two_requests_may_come_before_the_first_answer(executor: ExecutorUnderTest) -> None:
    requests = [executor.make_request("conformance.echo", name) for name in ("first", "second")]
    executor.enqueue(*requests)
    for request in requests:
        outcome = executor.wait_for_outcome(request)
        expect(json_equal(outcome.result, request["args"][0]), f"job {outcome.job_id} has the result of another")


@executor_check("EXE-10", "EXE-17")
def each_request_is_answered_once(executor: ExecutorUnderTest) -> None:
    requests = [executor.make_request("conformance.echo", number) for number in range(5)]
    requests.append(executor.make_request("conformance.fail", "once"))
    for request in requests:
        executor.enqueue(request)
        executor.wait_for_outcome(request)
    executor.close()
    answered_ids = [outcome.job_id for outcome in executor.collect_outcomes()]
    expect(
        sorted(answered_ids) == sorted(request["job_id"] for request in requests),
        f"{len(requests)} requests, and {len(answered_ids)} answers",
    )


@executor_check("EXE-02")
def arguments_come_by_place_and_by_name(executor: ExecutorUnderTest) -> None:
    executor.check_echo("by place")
    outcome = executor.ask("conformance.echo", kwargs={"value": "by name"})
    expect(outcome.status == "success" and outcome.result == "by name", "a keyword argument did not reach the handler")


@executor_check("EXE-01")
def text_in_any_script_arrives_unchanged(executor: ExecutorUnderTest) -> None:
    executor.check_echo({UNICODE: UNICODE})
    # Also without escapes: the framework's own writer escapes characters that end lines elsewhere.
    request = executor.make_request("conformance.echo", UNICODE)
    executor.enqueue(json.dumps(request, ensure_ascii=False).encode() + b"\n")
    expect(json_equal(executor.wait_for_outcome(request).result, UNICODE), "unescaped text was returned changed")


@executor_check("EXE-01")
def numbers_arrive_unchanged(executor: ExecutorUnderTest) -> None:
    executor.check_echo([*NUMBERS, True, False, None, "1", {"1": 1}, []])


@executor_check("EXE-25")
def a_mebibyte_goes_both_ways(executor: ExecutorUnderTest) -> None:
    executor.check_echo("x" * MEBIBYTE)
    executor.check_echo([{"key": "value", "n": number} for number in range(MEBIBYTE // 24)])


@executor_check("EXE-25")
def deep_values_go_both_ways(executor: ExecutorUnderTest) -> None:
    value: Any = []
    for level in range(1, MAX_VALUE_DEPTH):
        value = [value] if level % 2 else {"deeper": value}
    executor.check_echo(value)


@executor_check("EXE-02")
def unknown_fields_are_ignored(executor: ExecutorUnderTest) -> None:
    executor.check_echo(later={"fields": ["of", "a", "later", "version"]}, context={"shard": 7, "x": None})


@executor_check("EXE-03")
def optional_fields_may_be_absent_or_null(executor: ExecutorUnderTest) -> None:
    executor.check_echo()
    executor.check_echo(context={"deadline": None, "trace_context": None, "worker_id": None})


@executor_check("EXE-03")
def the_context_reaches_the_handler(executor: ExecutorUnderTest) -> None:
    fields = {"attempt": 3, "queue_name": "orders", "worker_id": "worker-7"}
    handler_context = _fetch_context(executor, **fields)
    for name, value in fields.items():
        expect(json_equal(handler_context.get(name), value), f"context.{name} did not reach the handler")


@executor_check("EXE-03", "EXE-07")
def the_deadline_reaches_the_handler(executor: ExecutorUnderTest) -> None:
    deadline = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    received_text = _fetch_context(executor, deadline=deadline.isoformat().replace("+00:00", "Z")).get("deadline")
    try:
        received = datetime.fromisoformat(str(received_text))
    except ValueError:
        received = None
    expect(received is not None and received.tzinfo is not None, "context.deadline did not reach the handler as a time")
    expect(received == deadline, "the handler received another deadline than was sent")


@executor_check("EXE-03", "EXE-14")
def the_trace_context_reaches_the_handler(executor: ExecutorUnderTest) -> None:
    received = _fetch_context(executor, trace_context=TRACE).get("trace_context")
    expect(json_equal(received, TRACE), "context.trace_context did not reach the handler as it was sent")


def _fetch_context(executor: ExecutorUnderTest, **fields: Any) -> dict[str, Any]:
    outcome = executor.ask("conformance.context", context=fields)
    expect(isinstance(outcome.result, dict), f"conformance.context ended with {outcome.status} and returned no object")
    handler_context: dict[str, Any] = outcome.result
    return handler_context


@executor_check("EXE-08", "EXE-24")
def an_error_says_what_went_wrong(executor: ExecutorUnderTest) -> None:
    outcome = executor.ask("conformance.fail", "no such order")
    expect(outcome.status == "error", f"a handler that fails ended with {outcome.status}")
    expect("no such order" in (outcome.error_message or ""), "error_message does not contain the handler's message")
    expect(outcome.error_type, "error_type is empty")
    executor.check_echo()


@executor_check("EXE-06")
def a_retry_says_when(executor: ExecutorUnderTest) -> None:
    outcome = executor.ask("conformance.retry", 7.5)
    expect(outcome.status == "retry", f"a handler that requests a retry ended with {outcome.status}")
    expect(outcome.retry_after_seconds == 7.5, f"retry_after_seconds is {outcome.retry_after_seconds}, not 7.5")
    executor.check_echo()


#: Seconds after which the executor is assumed to run the handler of a request that was sent.
REQUEST_START_SECONDS: Final = 0.3


@executor_check("EXE-01")
def a_closed_stdin_ends_it(executor: ExecutorUnderTest) -> None:
    executor.check_echo()
    executor.close()
    code = executor.exit_code()
    expect(code is not None, f"it still runs {executor.timeout:g} s after its stdin was closed")
    expect(code == 0, f"it ended with exit code {code}")


@executor_check("EXE-17")
def what_came_before_the_end_is_answered(executor: ExecutorUnderTest) -> None:
    requests = [executor.make_request("conformance.echo", number) for number in range(3)]
    executor.enqueue(*requests)
    executor.close()
    for request in requests:
        executor.wait_for_outcome(request)


@executor_check("EXE-02")
def half_a_line_is_not_answered(executor: ExecutorUnderTest) -> None:
    request = executor.make_request("conformance.echo", "half")
    # Everything but the line feed: without it the executor cannot know whether the line is complete.
    executor.enqueue(json_lines.format_line(request)[:-1])
    executor.close()
    executor.collect_outcomes(within=min(executor.timeout, 2.0))
    expect(
        all(outcome.job_id != request["job_id"] for outcome in executor.collect_outcomes(within=0)),
        "half a line was answered",
    )


@executor_check("EXE-19")
def a_crash_leaves_no_half_answer(executor: ExecutorUnderTest) -> None:
    executor.check_echo("x" * 200_000)
    lines_before = len(executor.unexpected_lines)
    request = executor.make_request("conformance.crash")
    executor.enqueue(request)
    expect(executor.exit_code() is not None, "conformance.crash did not end the process")
    expect(
        not executor.has_partial_line and len(executor.unexpected_lines) == lines_before,
        "the crash left something on stdout",
    )
    expect(
        all(outcome.job_id != request["job_id"] for outcome in executor.collect_outcomes()),
        "the job that crashed was answered",
    )


@executor_check("EXE-18")
def a_signal_ends_it_when_idle(executor: ExecutorUnderTest) -> None:
    executor.check_echo()
    executor.send_signal(signal.SIGTERM)
    _expect_exit(executor)


@executor_check("EXE-18")
def a_signal_ends_it_when_busy(executor: ExecutorUnderTest) -> None:
    executor.check_echo()
    lines_before = len(executor.unexpected_lines)
    request = executor.make_request("conformance.sleep", 600)
    executor.enqueue(request)
    executor.collect_outcomes(within=REQUEST_START_SECONDS)
    executor.send_signal(signal.SIGTERM)
    _expect_exit(executor)
    expect(
        not executor.has_partial_line and len(executor.unexpected_lines) == lines_before,
        "the signal left half a line on stdout",
    )
    outcomes = [outcome for outcome in executor.collect_outcomes() if outcome.job_id == request["job_id"]]
    expect(all(outcome.status != "success" for outcome in outcomes), "a job that was ended by a signal is a success")


def _expect_exit(executor: ExecutorUnderTest) -> None:
    started_at = time.monotonic()
    expect(executor.exit_code() is not None, f"it still runs {time.monotonic() - started_at:.1f} s after SIGTERM")


__all__ = [
    "ANSWER_TIMEOUT_SECONDS",
    "CHECKS",
    "HANDLERS",
    "ExecutorCheck",
    "ExecutorCheckResult",
    "ExecutorUnderTest",
    "executor_check",
    "expect",
    "report",
    "run_suite",
]

#: Every check, in the order of execution.
CHECKS: Final[tuple[ExecutorCheck, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, ExecutorCheck)
)
#: Seconds that an executor has for each answer, its start included.
ANSWER_TIMEOUT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class ExecutorCheckResult:
    """The result of one check, with the reason."""

    check: str
    ids: tuple[str, ...]
    result: CheckOutcome
    reason: str = ""
    seconds: float = 0.0


def run_suite(
    command: Sequence[str],
    *,
    timeout: float = ANSWER_TIMEOUT_SECONDS,
    only: Collection[str] | None = None,
    on_check_end: Callable[[ExecutorCheckResult], None] | None = None,
) -> list[ExecutorCheckResult]:
    """Run all checks, or only the checks with these names, on the executor that *command* starts."""
    unknown = set(only or ()) - {each.name for each in CHECKS}
    if unknown:
        raise ValueError(f"there is no check called {min(unknown)!r}; CHECKS lists them")
    results = []
    for each in CHECKS:
        if only is None or each.name in only:
            results.append(run_check(each, command, timeout=timeout))
            if on_check_end is not None:
                on_check_end(results[-1])
    return results


def run_check(
    check: ExecutorCheck, command: Sequence[str], *, timeout: float = ANSWER_TIMEOUT_SECONDS
) -> ExecutorCheckResult:
    """Run one check."""
    started_at = time.monotonic()
    try:
        with ExecutorUnderTest(command, timeout=timeout) as executor:
            check.run(executor)
    except CheckFailed as failed:
        return ExecutorCheckResult(
            check.name, check.ids, CheckOutcome.FAILED, error_message(failed), time.monotonic() - started_at
        )
    except OSError as error:
        raise ConfigurationError(f"{command[0]!r} cannot be started: {error.strerror}") from error
    return ExecutorCheckResult(check.name, check.ids, CheckOutcome.PASSED, seconds=time.monotonic() - started_at)


def report(command: Sequence[str], results: Sequence[ExecutorCheckResult]) -> dict[str, Any]:
    """Return the results as plain data, for the JSON output of ``ergon executor check``."""
    failed = [each for each in results if each.result is CheckOutcome.FAILED]
    return {
        "command": list(command),
        "passed": len(results) - len(failed),
        "failed": len(failed),
        "checks": [
            {
                "check": each.check,
                "requirements": list(each.ids),
                "result": each.result.value,
                "reason": each.reason,
                "seconds": round(each.seconds, 3),
            }
            for each in results
        ],
    }
