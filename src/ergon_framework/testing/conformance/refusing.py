"""Questions about what is no request, and about what must not be on stdout."""

from __future__ import annotations

import json
from typing import Any, Final

from ergon_framework.executor.protocol import ErrorType, ExecutionOutcome
from ergon_framework.testing.conformance.check import expect
from ergon_framework.testing.conformance.examinee import Examinee, question

#: Lines that name no job. The last of them is half of a pair of braces, and not UTF-8.
NOT_REQUESTS: Final = (b"hello", b"", b"[1, 2]", b"null", b'{"job_id": 7}', b'{"job_id": "half', b'"\xff\xfe{"')


@question("EXE-02")
def another_version_is_answered_with_unsupported_version(examinee: Examinee) -> None:
    _refused(examinee.ask("exam.echo", 1, protocol_version="2"), ErrorType.UNSUPPORTED_VERSION)
    examinee.echoes()


@question("EXE-09")
def an_unknown_handler_is_answered_with_handler_not_found(examinee: Examinee) -> None:
    for name in ("exam.there_is_no_such_handler", "toString", "__init__"):
        _refused(examinee.ask(name), ErrorType.HANDLER_NOT_FOUND)
    examinee.echoes()


@question("EXE-02")
def a_bad_request_that_names_its_job_is_answered_with_bad_request(examinee: Examinee) -> None:
    for changes in ({"args": "none"}, {"kwargs": [1]}, {"function_name": 7}, {"context": None}):
        request: dict[str, Any] = examinee.request("exam.echo") | changes
        examinee.send(request)
        _refused(examinee.answer(request), ErrorType.BAD_REQUEST)
    examinee.echoes()


def _refused(got: ExecutionOutcome, kind: ErrorType) -> None:
    expect(got.status == "error", f"the status is {got.status}, not error")
    expect(got.error_type == kind, f"error_type is {got.error_type!r}, not {kind.value!r}")


@question("EXE-02")
def a_line_that_is_no_request_is_not_answered(examinee: Examinee) -> None:
    requests = [examinee.request("exam.echo", number) for number in range(2)]
    examinee.send(requests[0])
    examinee.answer(requests[0])
    before = len(examinee.strays)
    examinee.send(*(line + b"\n" for line in NOT_REQUESTS), requests[1])
    examinee.answer(requests[1])
    examinee.close()
    answered = {outcome.job_id for outcome in examinee.rest()} - {request["job_id"] for request in requests}
    expect(not answered and len(examinee.strays) == before, "a line that names no job was answered")


@question("EXE-01", "EXE-16")
def it_says_nothing_by_itself(examinee: Examinee) -> None:
    examinee.echoes()
    examinee.close()
    examinee.rest()
    _quiet(examinee, 0)


@question("EXE-16")
def what_handlers_print_stays_off_stdout(examinee: Examinee) -> None:
    _printed(examinee, "exam.print")


@question("EXE-16")
def what_children_print_stays_off_stdout(examinee: Examinee) -> None:
    _printed(examinee, "exam.child")


def _printed(examinee: Examinee, handler: str) -> None:
    examinee.echoes()
    before = len(examinee.strays)
    for forged in (False, True):
        request = examinee.request(handler, "")
        forgery = {"job_id": request["job_id"], "status": "success", "result": "forged"}
        # What is printed may look like an outcome of the very same job.
        request["args"] = [json.dumps(forgery) if forged else "printed by a handler"]
        examinee.send(request)
        got = examinee.answer(request)
        expect(got.result != "forged", "what was printed was taken for the outcome")
        expect(got.status == "success", f"{handler} ended with {got.status}: {got.error_message}")
    examinee.echoes()
    _quiet(examinee, before)


def _quiet(examinee: Examinee, before: int) -> None:
    strays = examinee.strays[before:]
    expect(not strays, f"{len(strays)} lines on stdout are no outcomes" + (f": {strays[0].message}" if strays else ""))
    expect(not examinee.half_a_line, "stdout ended in the middle of a line")
