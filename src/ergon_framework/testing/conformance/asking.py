"""Checks of executor requests and their outcomes."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ergon_framework.testing.conformance.check import expect
from ergon_framework.testing.conformance.examinee import ExecutorUnderTest, executor_check, json_equal

MEBIBYTE: Final = 1024 * 1024
#: Nesting depth of the deepest allowed value: a request adds two levels to reach the limit of 64.
DEPTH: Final = 62
#: Characters of one to four bytes, characters that some readers treat as line ends, and all that JSON must escape.
UNICODE: Final = 'naïve — 日本語 😀 e\u0301 \u2028\u2029\x85\ufeff "\\/\b\f\n\r\t\x00\x1f\x7f'
NUMBERS: Final = [0, -1, 2**53 - 1, -(2**53) + 1, 0.1, -2.5, 1e300, 1e-300, 5e-324]
TRACE: Final = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
}


@executor_check("EXE-01", "EXE-04", "EXE-15")
def an_answer_names_its_job(examinee: ExecutorUnderTest) -> None:
    for job_id in ("4c7e1d0a-9f0e-4a8e-8f3a-0d3a4f3f6f00", "job/ü 😀 #1", "x" * 500):
        examinee.check_echo(job_id=job_id)


@executor_check("EXE-01")
def requests_are_answered_one_after_the_other(examinee: ExecutorUnderTest) -> None:
    for number in range(20):
        examinee.check_echo({"number": number})


@executor_check("EXE-01", "EXE-10")
def two_requests_may_come_before_the_first_answer(examinee: ExecutorUnderTest) -> None:
    requests = [examinee.request("exam.echo", name) for name in ("first", "second")]
    examinee.send(*requests)
    for request in requests:
        got = examinee.answer(request)
        expect(json_equal(got.result, request["args"][0]), f"job {got.job_id} has the result of another")


@executor_check("EXE-10", "EXE-17")
def each_request_is_answered_once(examinee: ExecutorUnderTest) -> None:
    requests = [examinee.request("exam.echo", number) for number in range(5)]
    requests.append(examinee.request("exam.fail", "once"))
    for request in requests:
        examinee.send(request)
        examinee.answer(request)
    examinee.close()
    answered = [outcome.job_id for outcome in examinee.remaining_output()]
    expect(
        sorted(answered) == sorted(request["job_id"] for request in requests),
        f"{len(requests)} requests, and {len(answered)} answers",
    )


@executor_check("EXE-02")
def arguments_come_by_place_and_by_name(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo("by place")
    got = examinee.ask("exam.echo", kwargs={"value": "by name"})
    expect(got.status == "success" and got.result == "by name", "a keyword argument did not reach the handler")


@executor_check("EXE-01")
def text_in_any_script_arrives_unchanged(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo({UNICODE: UNICODE})
    # Also without escapes: the framework's own writer escapes characters that end lines elsewhere.
    request = examinee.request("exam.echo", UNICODE)
    examinee.send(json.dumps(request, ensure_ascii=False).encode() + b"\n")
    expect(
        json_equal(examinee.answer(request).result, UNICODE), "text that was not escaped came back as something else"
    )


@executor_check("EXE-01")
def numbers_arrive_unchanged(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo([*NUMBERS, True, False, None, "1", {"1": 1}, []])


@executor_check("EXE-25")
def a_mebibyte_goes_both_ways(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo("x" * MEBIBYTE)
    examinee.check_echo([{"key": "value", "n": number} for number in range(MEBIBYTE // 24)])


@executor_check("EXE-25")
def deep_values_go_both_ways(examinee: ExecutorUnderTest) -> None:
    value: Any = []
    for level in range(1, DEPTH):
        value = [value] if level % 2 else {"deeper": value}
    examinee.check_echo(value)


@executor_check("EXE-02")
def unknown_fields_are_ignored(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo(later={"fields": ["of", "a", "later", "version"]}, context={"shard": 7, "x": None})


@executor_check("EXE-03")
def optional_fields_may_be_absent_or_null(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo()
    examinee.check_echo(context={"deadline": None, "trace_context": None, "worker_id": None})


@executor_check("EXE-03")
def the_context_reaches_the_handler(examinee: ExecutorUnderTest) -> None:
    told = {"attempt": 3, "queue_name": "orders", "worker_id": "worker-7"}
    got = _context(examinee, **told)
    for name, value in told.items():
        expect(json_equal(got.get(name), value), f"context.{name} did not reach the handler")


@executor_check("EXE-03", "EXE-07")
def the_deadline_reaches_the_handler(examinee: ExecutorUnderTest) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    got = _context(examinee, deadline=due.isoformat().replace("+00:00", "Z")).get("deadline")
    try:
        found = datetime.fromisoformat(str(got))
    except ValueError:
        found = None
    expect(found is not None and found.tzinfo is not None, "context.deadline did not reach the handler as a time")
    expect(found == due, "another deadline reached the handler than the one that was sent")


@executor_check("EXE-03", "EXE-14")
def the_trace_context_reaches_the_handler(examinee: ExecutorUnderTest) -> None:
    got = _context(examinee, trace_context=TRACE).get("trace_context")
    expect(json_equal(got, TRACE), "context.trace_context did not reach the handler as it was sent")


def _context(examinee: ExecutorUnderTest, **told: Any) -> dict[str, Any]:
    got = examinee.ask("exam.context", context=told)
    expect(isinstance(got.result, dict), f"exam.context ended with {got.status} and returned no object")
    found: dict[str, Any] = got.result
    return found


@executor_check("EXE-08", "EXE-24")
def an_error_says_what_went_wrong(examinee: ExecutorUnderTest) -> None:
    got = examinee.ask("exam.fail", "no such order")
    expect(got.status == "error", f"a handler that fails ended with {got.status}")
    expect("no such order" in (got.error_message or ""), "error_message does not say what the handler said")
    expect(got.error_type, "error_type is empty")
    examinee.check_echo()


@executor_check("EXE-06")
def a_retry_says_when(examinee: ExecutorUnderTest) -> None:
    got = examinee.ask("exam.retry", 7.5)
    expect(got.status == "retry", f"a handler that asks for a retry ended with {got.status}")
    expect(got.retry_after_seconds == 7.5, f"retry_after_seconds is {got.retry_after_seconds}, not 7.5")
    examinee.check_echo()
