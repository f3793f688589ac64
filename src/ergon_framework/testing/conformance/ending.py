"""Checks of how an executor exits."""

from __future__ import annotations

import signal
import time
from typing import Final

from ergon_framework.executor import lines
from ergon_framework.testing.conformance.check import expect
from ergon_framework.testing.conformance.examinee import ExecutorUnderTest, executor_check

#: Seconds after which the executor handles a request that was sent.
UNDER_WAY: Final = 0.3


@executor_check("EXE-01")
def a_closed_stdin_ends_it(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo()
    examinee.close()
    code = examinee.exit_code()
    expect(code is not None, f"it still runs {examinee.patience:g} s after its stdin was closed")
    expect(code == 0, f"it ended with exit code {code}")


@executor_check("EXE-17")
def what_came_before_the_end_is_answered(examinee: ExecutorUnderTest) -> None:
    requests = [examinee.request("exam.echo", number) for number in range(3)]
    examinee.send(*requests)
    examinee.close()
    for request in requests:
        examinee.answer(request)


@executor_check("EXE-02")
def half_a_line_is_not_answered(examinee: ExecutorUnderTest) -> None:
    request = examinee.request("exam.echo", "half")
    # Everything but the line feed: without it the executor cannot know whether the line is complete.
    examinee.send(lines.format_line(request)[:-1])
    examinee.close()
    examinee.remaining_output(within=min(examinee.patience, 2.0))
    expect(
        all(outcome.job_id != request["job_id"] for outcome in examinee.remaining_output(within=0)),
        "half a line was answered",
    )


@executor_check("EXE-19")
def a_crash_leaves_no_half_answer(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo("x" * 200_000)
    before = len(examinee.strays)
    request = examinee.request("exam.crash")
    examinee.send(request)
    expect(examinee.exit_code() is not None, "exam.crash did not end the process")
    expect(not examinee.half_a_line and len(examinee.strays) == before, "the crash left something on stdout")
    expect(
        all(outcome.job_id != request["job_id"] for outcome in examinee.remaining_output()),
        "the job that crashed was answered",
    )


@executor_check("EXE-18")
def a_signal_ends_it_when_idle(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo()
    examinee.signal(signal.SIGTERM)
    _ended(examinee)


@executor_check("EXE-18")
def a_signal_ends_it_when_busy(examinee: ExecutorUnderTest) -> None:
    examinee.check_echo()
    before = len(examinee.strays)
    request = examinee.request("exam.sleep", 600)
    examinee.send(request)
    examinee.remaining_output(within=UNDER_WAY)
    examinee.signal(signal.SIGTERM)
    _ended(examinee)
    expect(not examinee.half_a_line and len(examinee.strays) == before, "the signal left half a line on stdout")
    done = [outcome for outcome in examinee.remaining_output() if outcome.job_id == request["job_id"]]
    expect(all(outcome.status != "success" for outcome in done), "a job that was ended by a signal is a success")


def _ended(examinee: ExecutorUnderTest) -> None:
    began = time.monotonic()
    expect(examinee.exit_code() is not None, f"it still runs {time.monotonic() - began:.1f} s after SIGTERM")
