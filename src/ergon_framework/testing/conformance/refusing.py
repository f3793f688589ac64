"""Checks of invalid requests, and of output that must not be on stdout."""

from __future__ import annotations

import json
from typing import Any, Final

from ergon_framework.executor.protocol import ErrorType, ExecutionOutcome
from ergon_framework.testing.conformance.check import expect
from ergon_framework.testing.conformance.examinee import ExecutorUnderTest, executor_check

#: Lines that name no job. The last one contains an unmatched brace and is not UTF-8.
NOT_REQUESTS: Final = (b"hello", b"", b"[1, 2]", b"null", b'{"job_id": 7}', b'{"job_id": "half', b'"\xff\xfe{"')


@executor_check("EXE-02")
def another_version_is_answered_with_unsupported_version(examinee: ExecutorUnderTest) -> None:
    _refused(examinee.ask("exam.echo", 1, protocol_version="2"), ErrorType.UNSUPPORTED_VERSION)
    examinee.check_echo()


@executor_check("EXE-09")
def an_unknown_handler_is_answered_with_handler_not_found(examinee: ExecutorUnderTest) -> None:
    for name in ("exam.there_is_no_such_handler", "toString", "__init__"):
        _refused(examinee.ask(name), ErrorType.HANDLER_NOT_FOUND)
    examinee.check_echo()


@executor_check("EXE-02")
def a_bad_request_that_names_its_job_is_answered_with_bad_request(examinee: ExecutorUnderTest) -> None:
    for changes in ({"args": "none"}, {"kwargs": [1]}, {"function_name": 7}, {"context": None}):
        request: dict[str, Any] = examinee.request("exam.echo") | changes
        examinee.send(request)
        _refused(examinee.answer(request), ErrorType.BAD_REQUEST)
    examinee.check_echo()


def _refused(got: ExecutionOutcome, kind: ErrorType) -> None:
    expect(got.status == "error", f"the status is {got.status}, not error")
    expect(got.error_type == kind, f"error_type is {got.error_type!r}, not {kind.value!r}")


@executor_check("EXE-02")
def a_line_that_is_no_request_is_not_answered(examinee: ExecutorUnderTest) -> None:
    requests = [examinee.request("exam.echo", number) for number in range(2)]
    examinee.send(requests[0])
    examinee.answer(requests[0])
    before = len(examinee.strays)
    examinee.send(*(line + b"\n" for line in NOT_REQUESTS), requests[1])
    examinee.answer(requests[1])
    examinee.close()
    answered = {outcome.job_id for outcome in examinee.remaining_output()} - {request["job_id"] for request in requests}
    expect(not answered and len(examinee.strays) == before, "a line that names no job was answered")


@executor_check("EXE-01", "EXE-16")
def it_says_nothing_by_itself(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo()
    examinee.close()
    examinee.remaining_output()
    _quiet(examinee, 0)


@executor_check("EXE-16")
def what_handlers_print_stays_off_stdout(examinee: ExecutorUnderTest) -> None:
    _printed(examinee, "exam.print")


@executor_check("EXE-16")
def what_children_print_stays_off_stdout(examinee: ExecutorUnderTest) -> None:
    _printed(examinee, "exam.child")


def _printed(examinee: ExecutorUnderTest, handler: str) -> None:
    examinee.check_echo()
    before = len(examinee.strays)
    for forged in (False, True):
        request = examinee.request(handler, "")
        forgery = {"job_id": request["job_id"], "status": "success", "result": "forged"}
        # The printed text may look like an outcome of the same job.
        request["args"] = [json.dumps(forgery) if forged else "printed by a handler"]
        examinee.send(request)
        got = examinee.answer(request)
        expect(got.result != "forged", "what was printed was taken for the outcome")
        expect(got.status == "success", f"{handler} ended with {got.status}: {got.error_message}")
    examinee.check_echo()
    _quiet(examinee, before)


def _quiet(examinee: ExecutorUnderTest, before: int) -> None:
    strays = examinee.strays[before:]
    expect(not strays, f"{len(strays)} lines on stdout are no outcomes" + (f": {strays[0].message}" if strays else ""))
    expect(not examinee.half_a_line, "stdout ended in the middle of a line")
