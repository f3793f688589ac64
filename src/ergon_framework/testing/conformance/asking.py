"""Questions about requests and their outcomes."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ergon_framework.testing.conformance.check import expect
from ergon_framework.testing.conformance.examinee import Examinee, question, same

MEBIBYTE: Final = 1024 * 1024
#: Values nested as deeply as a request allows: 64 with the request and its arguments around them.
DEPTH: Final = 62
#: Characters of one to four bytes, two that some readers take for line ends, and all that JSON must escape.
UNICODE: Final = 'naïve — 日本語 😀 e\u0301 \u2028\u2029\x85\ufeff "\\/\b\f\n\r\t\x00\x1f\x7f'
NUMBERS: Final = [0, -1, 2**53 - 1, -(2**53) + 1, 0.1, -2.5, 1e300, 1e-300, 5e-324]
TRACE: Final = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
}


@question("EXE-01", "EXE-04", "EXE-15")
def an_answer_names_its_job(examinee: Examinee) -> None:
    for job_id in ("4c7e1d0a-9f0e-4a8e-8f3a-0d3a4f3f6f00", "job/ü 😀 #1", "x" * 500):
        examinee.echoes(job_id=job_id)


@question("EXE-01")
def requests_are_answered_one_after_the_other(examinee: Examinee) -> None:
    for number in range(20):
        examinee.echoes({"number": number})


@question("EXE-01", "EXE-10")
def two_requests_may_come_before_the_first_answer(examinee: Examinee) -> None:
    requests = [examinee.request("exam.echo", name) for name in ("first", "second")]
    examinee.send(*requests)
    for request in requests:
        got = examinee.answer(request)
        expect(same(got.result, request["args"][0]), f"job {got.job_id} has the result of another")


@question("EXE-10", "EXE-17")
def each_request_is_answered_once(examinee: Examinee) -> None:
    requests = [examinee.request("exam.echo", number) for number in range(5)]
    requests.append(examinee.request("exam.fail", "once"))
    for request in requests:
        examinee.send(request)
        examinee.answer(request)
    examinee.close()
    answered = [outcome.job_id for outcome in examinee.rest()]
    expect(
        sorted(answered) == sorted(request["job_id"] for request in requests),
        f"{len(requests)} requests, and {len(answered)} answers",
    )


@question("EXE-02")
def arguments_come_by_place_and_by_name(examinee: Examinee) -> None:
    examinee.echoes("by place")
    got = examinee.ask("exam.echo", kwargs={"value": "by name"})
    expect(got.status == "success" and got.result == "by name", "a keyword argument did not reach the handler")


@question("EXE-01")
def text_in_any_script_arrives_unchanged(examinee: Examinee) -> None:
    examinee.echoes({UNICODE: UNICODE})
    # Once more with every character as it is: our own lines escape those that end lines elsewhere.
    request = examinee.request("exam.echo", UNICODE)
    examinee.send(json.dumps(request, ensure_ascii=False).encode() + b"\n")
    expect(same(examinee.answer(request).result, UNICODE), "text that was not escaped came back as something else")


@question("EXE-01")
def numbers_arrive_unchanged(examinee: Examinee) -> None:
    examinee.echoes([*NUMBERS, True, False, None, "1", {"1": 1}, []])


@question("EXE-25")
def a_mebibyte_goes_both_ways(examinee: Examinee) -> None:
    examinee.echoes("x" * MEBIBYTE)
    examinee.echoes([{"key": "value", "n": number} for number in range(MEBIBYTE // 24)])


@question("EXE-25")
def deep_values_go_both_ways(examinee: Examinee) -> None:
    value: Any = []
    for level in range(1, DEPTH):
        value = [value] if level % 2 else {"deeper": value}
    examinee.echoes(value)


@question("EXE-02")
def unknown_fields_are_ignored(examinee: Examinee) -> None:
    examinee.echoes(later={"fields": ["of", "a", "later", "version"]}, context={"shard": 7, "x": None})


@question("EXE-03")
def optional_fields_may_be_absent_or_null(examinee: Examinee) -> None:
    examinee.echoes()
    examinee.echoes(context={"deadline": None, "trace_context": None, "worker_id": None})


@question("EXE-03")
def the_context_reaches_the_handler(examinee: Examinee) -> None:
    told = {"attempt": 3, "queue_name": "orders", "worker_id": "worker-7"}
    got = _context(examinee, **told)
    for name, value in told.items():
        expect(same(got.get(name), value), f"context.{name} did not reach the handler")


@question("EXE-03", "EXE-07")
def the_deadline_reaches_the_handler(examinee: Examinee) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    got = _context(examinee, deadline=due.isoformat().replace("+00:00", "Z")).get("deadline")
    try:
        found = datetime.fromisoformat(str(got))
    except ValueError:
        found = None
    expect(found is not None and found.tzinfo is not None, "context.deadline did not reach the handler as a time")
    expect(found == due, "another deadline reached the handler than the one that was sent")


@question("EXE-03", "EXE-14")
def the_trace_context_reaches_the_handler(examinee: Examinee) -> None:
    got = _context(examinee, trace_context=TRACE).get("trace_context")
    expect(same(got, TRACE), "context.trace_context did not reach the handler as it was sent")


def _context(examinee: Examinee, **told: Any) -> dict[str, Any]:
    got = examinee.ask("exam.context", context=told)
    expect(isinstance(got.result, dict), f"exam.context ended with {got.status} and returned no object")
    found: dict[str, Any] = got.result
    return found


@question("EXE-08", "EXE-24")
def an_error_says_what_went_wrong(examinee: Examinee) -> None:
    got = examinee.ask("exam.fail", "no such order")
    expect(got.status == "error", f"a handler that fails ended with {got.status}")
    expect("no such order" in (got.error_message or ""), "error_message does not say what the handler said")
    expect(got.error_type, "error_type is empty")
    examinee.echoes()


@question("EXE-06")
def a_retry_says_when(examinee: Examinee) -> None:
    got = examinee.ask("exam.retry", 7.5)
    expect(got.status == "retry", f"a handler that asks for a retry ended with {got.status}")
    expect(got.retry_after_seconds == 7.5, f"retry_after_seconds is {got.retry_after_seconds}, not 7.5")
    examinee.echoes()
