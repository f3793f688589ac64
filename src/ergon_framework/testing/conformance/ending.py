"""Questions about how an executor ends."""

from __future__ import annotations

import signal
import time
from typing import Final

from ergon_framework.executor import lines
from ergon_framework.testing.conformance.check import expect
from ergon_framework.testing.conformance.examinee import Examinee, question

#: Seconds in which a request that was sent is being handled.
UNDER_WAY: Final = 0.3


@question("EXE-01")
def a_closed_stdin_ends_it(examinee: Examinee) -> None:
    examinee.echoes()
    examinee.close()
    code = examinee.ended()
    expect(code is not None, f"it still runs {examinee.patience:g} s after its stdin was closed")
    expect(code == 0, f"it ended with exit code {code}")


@question("EXE-17")
def what_came_before_the_end_is_answered(examinee: Examinee) -> None:
    requests = [examinee.request("exam.echo", number) for number in range(3)]
    examinee.send(*requests)
    examinee.close()
    for request in requests:
        examinee.answer(request)


@question("EXE-02")
def half_a_line_is_not_answered(examinee: Examinee) -> None:
    request = examinee.request("exam.echo", "half")
    # The whole of it, but for the line feed: nobody knows whether that was all.
    examinee.send(lines.write(request)[:-1])
    examinee.close()
    examinee.rest(within=min(examinee.patience, 2.0))
    expect(all(outcome.job_id != request["job_id"] for outcome in examinee.rest(within=0)), "half a line was answered")


@question("EXE-19")
def a_crash_leaves_no_half_answer(examinee: Examinee) -> None:
    examinee.echoes("x" * 200_000)
    before = len(examinee.strays)
    request = examinee.request("exam.crash")
    examinee.send(request)
    expect(examinee.ended() is not None, "exam.crash did not end the process")
    expect(not examinee.half_a_line and len(examinee.strays) == before, "the crash left something on stdout")
    expect(all(outcome.job_id != request["job_id"] for outcome in examinee.rest()), "the job that crashed was answered")


@question("EXE-18")
def a_signal_ends_it_when_idle(examinee: Examinee) -> None:
    examinee.echoes()
    examinee.signal(signal.SIGTERM)
    _ended(examinee)


@question("EXE-18")
def a_signal_ends_it_when_busy(examinee: Examinee) -> None:
    examinee.echoes()
    before = len(examinee.strays)
    request = examinee.request("exam.sleep", 600)
    examinee.send(request)
    examinee.rest(within=UNDER_WAY)
    examinee.signal(signal.SIGTERM)
    _ended(examinee)
    expect(not examinee.half_a_line and len(examinee.strays) == before, "the signal left half a line on stdout")
    done = [outcome for outcome in examinee.rest() if outcome.job_id == request["job_id"]]
    expect(all(outcome.status != "success" for outcome in done), "a job that was ended by a signal is a success")


def _ended(examinee: Examinee) -> None:
    began = time.monotonic()
    expect(examinee.ended() is not None, f"it still runs {time.monotonic() - began:.1f} s after SIGTERM")
