"""The pool: one job at a time in each executor, killed in time, and no process left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from ergon_framework.executors import descendants, process
from ergon_framework.executors.descendants import Descendant, kill_all, list_children
from ergon_framework.executors.json_lines import MAX_LINE_BYTES, LineError
from ergon_framework.executors.pool import ExecutorPool, ExecutorsBusy, PoolClosed, PoolPolicy, WaitLimits
from ergon_framework.executors.process import (
    _START_GATE,
    ExecutorCommand,
    ExecutorInterrupted,
    ExecutorProcess,
    ResourceLimits,
)
from ergon_framework.executors.protocol import Status, read_outcome
from ergon_framework.executors.reaper import ProcessReaper
from ergon_framework.executors.startup import ExecutorNotStarted
from ergon_framework.redaction import redact_text
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.telemetry.names import METRICS, Attribute
from ergon_framework.worker.policies import RetryPolicy
from tests.log_events import get_event

PROGRAM = str(Path(__file__).with_name("stubborn.py"))
STUBBORN = ("0", "stubborn")


def make_command(*arguments, **options):
    return ExecutorCommand(
        words=(sys.executable, "-S", PROGRAM, *arguments), environment={"PATH": os.environ["PATH"]}, **options
    )


def run_with_pool(scenario, *arguments, environment=None, limits=None, **policy):
    """Run *body* with a pool of executors."""
    changes = {} if environment is None else {"environment": environment}
    changes |= {} if limits is None else {"limits": limits}
    policy = PoolPolicy(**{"size": 1, "grace": 0.2} | policy)

    async def main():
        async with ExecutorPool(make_command(*arguments).model_copy(update=changes), policy=policy) as pool:
            return await asyncio.wait_for(scenario(pool), 30)

    return asyncio.run(main())


def has_exited(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@contextmanager
def sleeper_process():
    """A process in a group of its own."""
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as sleeper:
        try:
            yield sleeper
        finally:
            sleeper.kill()


def run_within(seconds, act):
    """Do what might never return."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


async def wait_until(condition):
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - other processes set no events
            await asyncio.sleep(0.01)


# -- everyday -------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-10")
def test_each_job_has_its_own_outcome():
    async def scenario(pool):
        jobs = [pool.run("echo", [number], job_id=f"job-{number}", timeout=10) for number in range(30)]
        return [(outcome.job_id, outcome.result) for outcome in await asyncio.gather(*jobs)]

    assert run_with_pool(scenario, size=3) == [(f"job-{number}", number) for number in range(30)]


def test_an_executor_has_one_job_at_a_time():
    async def scenario(pool):
        started_at = time.monotonic()
        await asyncio.gather(*(pool.run("sleep", [0.15], job_id=str(n), timeout=10) for n in range(3)))
        return time.monotonic() - started_at

    assert run_with_pool(scenario) >= 0.45
    assert run_with_pool(scenario, max_in_flight=3) < 0.4


@pytest.mark.spec("EXE-25")
def test_mebibytes_go_both_ways_simultaneously():
    async def scenario(pool):
        values = [f"{n}" * 2**20 for n in range(4)]
        jobs = [pool.run("echo", [value], job_id=value[0], timeout=20) for value in values]
        return [outcome.result for outcome in await asyncio.gather(*jobs)] == values

    assert run_with_pool(scenario, max_in_flight=4)


def test_a_request_that_cannot_be_sent_leaves_the_executor_running():
    async def scenario(pool):
        with pytest.raises(LineError):
            await pool.run("echo", [object()], job_id="a", timeout=5)
        return await pool.run("echo", [1], job_id="b", timeout=5), pool.counts["started"]

    outcome, started_count = run_with_pool(scenario)
    assert (outcome.result, started_count) == (1, 1)


@pytest.mark.spec("EXE-25")
def test_arguments_with_two_keys_of_the_same_text_are_never_sent():
    async def scenario(pool):
        with pytest.raises(LineError, match="'1'") as caught:
            await pool.run("echo", [{"x": {1: "a", "1": "b"}}], job_id="a", timeout=5)
        return caught.value.reason, (await pool.run("echo", [{1: "a"}], job_id="b", timeout=5)).result

    assert run_with_pool(scenario) == ("repeated_key", {"1": "a"})


@pytest.mark.parametrize(
    "invalid_fields",
    [{"job_id": ""}, {"job_id": "j" * 1025}, {"attempt_number": 0}, {"queue_name": ""}, {"kwargs": {1: 2}}],
)
def test_arguments_that_break_the_protocol_are_never_sent(invalid_fields):
    async def scenario(pool):
        with pytest.raises(LineError) as caught:
            await pool.run("echo", **{"job_id": "a", "timeout": 5} | invalid_fields)
        return caught.value.reason, (await pool.run("echo", [1], job_id="b", timeout=5)).result

    assert run_with_pool(scenario) == ("bad_field", 1)


def test_a_job_that_is_in_an_executor_is_not_sent_to_it_again():
    async def scenario(pool):
        first = asyncio.create_task(pool.run("sleep", [0.3], job_id="a", timeout=5))
        await wait_until(lambda: pool._used_slots and sum(pool._used_slots.values()) == 1)
        with pytest.raises(ExecutorInterrupted) as caught:
            await pool.run("echo", [1], job_id="a", timeout=0.1)
        return caught.value.not_attempted, (await first).status

    assert run_with_pool(scenario, max_in_flight=2) == (True, Status.SUCCESS)


def test_an_executor_sees_only_the_environment_it_was_given(monkeypatch):
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")

    async def scenario(pool):
        return (await pool.run("environment", job_id="a", timeout=5)).result

    assert run_with_pool(scenario, environment={"COLOUR": "red"}).keys() - {
        "PWD",
        "SHLVL",
        "_",
        "LC_CTYPE",
        "OLDPWD",
    } == {
        "COLOUR",
        "ERGON_EXECUTOR",
    }


def read_escaped_pids(caplog):
    """Return the processes that an executor has started in other sessions."""
    (fields,) = [record.line.split() for record in caplog.records if getattr(record, "line", "").startswith("escaped")]
    return [int(word) for word in fields[1:]]


def wait_until_all_exited(pids):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(map(has_exited, pids)):
        time.sleep(0.02)
    return all(map(has_exited, pids))


@pytest.mark.spec("SEC-22")
@pytest.mark.parametrize("arguments", [("0",), STUBBORN], ids=["ends at SIGTERM", "is killed"])
def test_a_job_that_times_out_also_ends_its_processes_in_other_sessions(caplog, arguments):
    caplog.set_level(logging.INFO, "ergon_framework.executors")

    async def scenario(pool):
        return (await pool.run("escape", [60], job_id="a", timeout=2)).status

    assert run_with_pool(scenario, *arguments) is Status.TIMEOUT
    pids = read_escaped_pids(caplog)
    assert len(pids) == 2
    assert wait_until_all_exited(pids)


@pytest.mark.spec("SEC-22")
def test_an_executor_that_exits_also_ends_its_orphan_in_another_session(caplog):
    caplog.set_level(logging.INFO, "ergon_framework.executors")

    async def scenario(pool):
        assert (await pool.run("escape", [0], job_id="a", timeout=20)).status is Status.SUCCESS
        await pool.run("crash", job_id="b", timeout=20)
        orphan, bare = read_escaped_pids(caplog)
        try:
            # While the pool is open: its guard ends what is left when it is closed.
            await wait_until(lambda: has_exited(orphan))
        finally:
            if not has_exited(bare):
                os.kill(bare, signal.SIGKILL)

    run_with_pool(scenario)


@pytest.mark.spec("SEC-22")
def test_children_are_found_with_and_without_the_help_of_the_kernel():
    with subprocess.Popen(["/bin/sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as shell:
        child_pid = int(shell.stdout.readline())
        try:
            assert child_pid in {each.pid for each in list_children(os.getpid())}
            assert descendants._read_children(shell.pid) == descendants._index_parents()[shell.pid] == [child_pid]
        finally:
            os.kill(child_pid, signal.SIGKILL)


@pytest.mark.spec("SEC-22")
def test_another_process_that_has_the_pid_of_a_descendant_is_not_killed():
    with sleeper_process() as sleeper:
        kill_all({Descendant(sleeper.pid, "1")})
        # A process that is killed ends a moment later.
        with pytest.raises(subprocess.TimeoutExpired):
            sleeper.wait(1)


def test_stderr_of_an_executor_is_logged_with_its_job_and_trace(caplog):
    caplog.set_level(logging.INFO, "ergon_framework.executors")
    trace = "0af7651916cd43dd8448eb211c80319c"

    async def scenario(pool):
        carrier = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        await pool.run("say", ["hello password=hunter2"], job_id="job-7", timeout=5, carrier=carrier)

    run_with_pool(scenario)
    (record,) = [each for each in caplog.records if get_event(each) == "executor stderr"]
    assert (record.line, record.transaction_id, record.trace_id) == ("hello password=[hidden]", "job-7", trace)


# -- long lines -----------------------------------------------------------------------------------


async def measure_max_loop_delay(awaitable):
    """What *work* gives, and for how long the event loop was held at most meanwhile."""
    max_delay, task = 0.0, asyncio.ensure_future(awaitable)
    while not task.done():
        before = time.monotonic()
        await asyncio.wait([task], timeout=0.001)
        max_delay = max(max_delay, time.monotonic() - before)
    return task.result(), max_delay


@pytest.mark.spec("EXE-25", "EXE-26")
@pytest.mark.parametrize(
    "unit, error_type",
    [("[]", None), ('{"a": [{}]}', None), ("[" * 100 + "]" * 100, "bad_outcome"), ('"\\udc00"', "bad_outcome")],
)
def test_a_line_of_4_mebibytes_does_not_block_the_event_loop(unit, error_type):
    size = MAX_LINE_BYTES // 4

    async def scenario(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        return await measure_max_loop_delay(pool.run("fill", [unit, size], job_id="a", timeout=60))

    # Without the collector of garbage, which holds everybody while it looks at a million lists: it is not the pool's.
    gc.disable()
    try:
        outcome, max_delay = run_with_pool(scenario)
        # Beside what it takes to read the same line here and now, whatever else the machine does.
        units = ",".join([unit] * (size // (len(unit) + 1)))
        started_at = time.monotonic()
        read_outcome(f'{{"job_id": "a", "status": "success", "result": [{units}]}}'.encode())
        baseline_seconds = time.monotonic() - started_at
    finally:
        gc.enable()
    assert outcome.error_type == error_type
    assert error_type is not None or len(outcome.result) == size // (len(unit) + 1)
    assert max_delay < max(0.2, 0.5 * baseline_seconds)


@pytest.mark.spec("EXE-10")
def test_lines_after_a_long_one_wait_for_it():
    async def scenario(pool):
        jobs = [pool.run("fill", ["1", 2**20], job_id="long", timeout=20)]
        jobs += [pool.run("echo", [n], job_id=str(n), timeout=20) for n in range(5)]
        return [outcome.status for outcome in await asyncio.gather(*jobs)]

    assert run_with_pool(scenario, max_in_flight=6) == [Status.SUCCESS] * 6


@pytest.mark.spec("EXE-10")
def test_the_long_last_outcome_of_an_executor_is_read():
    async def scenario(pool):
        outcome = await pool.run("last", ["1", 2**22], job_id="a", timeout=20)
        return len(outcome.result), (await pool.run("echo", [1], job_id="b", timeout=5)).result

    assert run_with_pool(scenario) == (2**21, 1)


def block_long_lines(monkeypatch):
    """Let the pool read no long line before the returned event is set."""
    release, original = threading.Event(), process.read_outcome

    def wait_and_read(line, **options):
        if len(line) > process.LONG_LINE_BYTES:
            release.wait(60)
        return original(line, **options)

    monkeypatch.setattr(process, "read_outcome", wait_and_read)
    return release


@pytest.mark.spec("EXE-18")
def test_a_job_that_times_out_while_its_line_is_read_is_killed(monkeypatch):
    release = block_long_lines(monkeypatch)

    async def scenario(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        job = asyncio.create_task(pool.run("fill", ["[[[]]]", MAX_LINE_BYTES // 4], job_id="a", timeout=0.5))
        await wait_until(lambda: pool.counts["killed"])
        # The line is read to its end, but no longer taken for an outcome.
        release.set()
        return (await job).status, (await pool.run("echo", [1], job_id="b", timeout=5)).result

    assert run_with_pool(scenario) == (Status.TIMEOUT, 1)


@pytest.mark.spec("EXE-18")
def test_the_outcome_of_a_timed_out_job_does_not_wait_until_the_output_is_read(monkeypatch):
    release = block_long_lines(monkeypatch)

    async def scenario(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        try:
            job = pool.run("fill", ["[[[]]]", MAX_LINE_BYTES // 4], job_id="a", timeout=0.5)
            outcome = await asyncio.wait_for(job, 20)
        finally:
            release.set()
        # The line that is read afterwards is an outcome of no job.
        return (
            outcome.status,
            (await pool.run("echo", [1], job_id="b", timeout=5)).result,
            pool.counts["unexpected_late"],
        )

    assert run_with_pool(scenario) == (Status.TIMEOUT, 1, 1)


def test_a_flood_of_lines_does_not_block_the_event_loop():
    async def scenario(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        return await measure_max_loop_delay(pool.run("lines", [60_000], job_id="a", timeout=60))

    outcome, max_delay = run_with_pool(scenario)
    assert outcome.status is Status.SUCCESS
    assert max_delay < 0.3


# -- timeouts -------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-18")
@pytest.mark.parametrize("handler, args", [("spin", []), ("sleep", [300])])
def test_a_job_that_takes_too_long_is_killed_in_time_and_disturbs_no_other_job(handler, args):
    async def scenario(pool):
        neighbour = asyncio.create_task(pool.run("sleep", [0.8], job_id="beside", timeout=10))
        await asyncio.sleep(0)
        started_at = time.monotonic()
        outcome = await pool.run(handler, args, job_id="slow", timeout=0.3)
        elapsed = time.monotonic() - started_at
        pids = set(pool.pids)
        await wait_until(lambda: len(pool.pids) == 2 and set(pool.pids) != pids)
        return outcome, elapsed, await neighbour, await pool.run("echo", [1], job_id="next", timeout=5)

    outcome, elapsed, neighbour, after = run_with_pool(scenario, *STUBBORN, size=2)
    assert (outcome.status, outcome.error_type) == (Status.TIMEOUT, "hard_timeout")
    # It ignores SIGTERM, so the whole grace passes.
    assert 0.3 + 0.2 <= elapsed < 0.3 + 0.2 + 0.5
    assert (neighbour.status, after.result) == (Status.SUCCESS, 1)


@pytest.mark.spec("DX-37", "EXE-12")
def test_a_killed_job_that_succeeds_before_its_executor_exits_has_succeeded():
    async def scenario(pool):
        job = asyncio.create_task(pool.run("sleep", [0.2], job_id="a", timeout=10))
        await asyncio.sleep(0)
        await wait_until(lambda: pool.kill("a"))
        return await job, await pool.run("echo", [1], job_id="next", timeout=10)

    # It ignores SIGTERM.
    outcome, after = run_with_pool(scenario, *STUBBORN, grace=1.0)
    assert (outcome.status, after.result) == (Status.SUCCESS, 1)


@pytest.mark.spec("EXE-18")
def test_the_whole_group_is_killed():
    async def scenario(pool):
        child = (await pool.run("child", job_id="a", timeout=5)).result
        await pool.run("spin", job_id="b", timeout=0.1)
        await wait_until(lambda: has_exited(child))
        return True

    assert run_with_pool(scenario)


@pytest.mark.spec("EXE-18")
def test_neighbours_of_a_killed_job_are_released_and_keep_their_attempt():
    async def scenario(pool):
        neighbour = asyncio.create_task(pool.run("sleep", [300], job_id="beside", timeout=60))
        outcome = await pool.run("sleep", [300], job_id="slow", timeout=0.2)
        with pytest.raises(ExecutorInterrupted) as released:
            await neighbour
        return outcome, released.value

    outcome, released = run_with_pool(scenario, max_in_flight=2)
    assert outcome.error_type == "hard_timeout"
    assert (released.not_attempted, released.retry_after) == (True, 0.0)


@pytest.mark.spec("EXE-20")
def test_the_clock_starts_when_the_request_is_sent():
    async def scenario(pool):
        first = asyncio.create_task(pool.run("sleep", [0.5], job_id="first", timeout=10))
        await asyncio.sleep(0)
        second = await pool.run("echo", ["ran"], job_id="second", timeout=0.3)
        await first
        return second.result

    assert run_with_pool(scenario) == "ran"


@pytest.mark.spec("EXE-20")
def test_the_startup_of_an_executor_is_not_part_of_the_job_timeout():
    async def scenario(pool):
        return (await pool.run("echo", ["ran"], job_id="a", timeout=0.3)).result

    assert run_with_pool(scenario, "0.6") == "ran"


def test_a_cancelled_caller_ends_the_executor_and_not_the_pool():
    async def scenario(pool):
        pids = pool.pids
        job = asyncio.create_task(pool.run("sleep", [300], job_id="a", timeout=60))
        await wait_until(lambda: pool._used_slots and sum(pool._used_slots.values()) == 1)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        outcome = await pool.run("pid", job_id="b", timeout=5)
        return outcome.result not in pids

    assert run_with_pool(scenario)


def test_a_caller_that_is_cancelled_while_it_waits_takes_no_slot():
    async def scenario(pool):
        busy = asyncio.create_task(pool.run("sleep", [0.2], job_id="busy", timeout=5))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(pool.run("echo", [1], job_id="waits", timeout=5))
        await wait_until(lambda: pool._get_stats().waiting == 1)
        waiting.cancel()
        await busy
        return (await pool.run("echo", [2], job_id="next", timeout=5)).result, pool.counts["started"]

    assert run_with_pool(scenario) == (2, 1)


@pytest.mark.spec("EXE-18")
def test_each_job_has_its_own_deadline_in_any_order():
    async def scenario(pool):
        started_at = time.monotonic()

        async def run_sleep(job_id, timeout):
            outcome = await pool.run("sleep", [300], job_id=job_id, timeout=timeout)
            return outcome.error_type, time.monotonic() - started_at

        jobs = [run_sleep("long", 0.9), run_sleep("short", 0.2), run_sleep("middle", 0.5)]
        return await asyncio.gather(*jobs), len(pool._deadlines._deadlines)

    results, pending_count = run_with_pool(scenario, size=3)
    assert [kind for kind, _ in results] == ["hard_timeout"] * 3
    assert all(due <= elapsed < due + 0.5 for due, (_, elapsed) in zip((0.9, 0.2, 0.5), results, strict=True))
    assert pending_count == 0


# -- deaths ---------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-19")
def test_a_job_that_kills_its_executor_has_an_outcome_and_another_executor_takes_over():
    async def scenario(pool):
        outcome = await pool.run("crash", job_id="a", timeout=5)
        return outcome, await pool.run("echo", [1], job_id="b", timeout=5), pool.counts

    outcome, after, counts = run_with_pool(scenario)
    assert (outcome.status, outcome.error_type) == (Status.ERROR, "executor_died")
    assert "exit code 9" in outcome.error_message
    assert (after.result, counts["died"], counts["started"]) == (1, 1, 2)


def test_an_idle_executor_that_is_killed_fails_no_job():
    async def scenario(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        (idle,) = pool.pids
        os.kill(idle, signal.SIGKILL)
        await wait_until(lambda: idle not in pool.pids)
        return (await pool.run("echo", [1], job_id="a", timeout=5)).result, pool.counts["died"]

    assert run_with_pool(scenario) == (1, 1)


@pytest.mark.spec("EXE-10")
def test_unexpected_lines_are_counted_and_never_taken_for_the_outcome_of_another_job():
    async def scenario(pool):
        neighbour = asyncio.create_task(pool.run("sleep", [0.3], job_id="beside", timeout=5))
        await wait_until(lambda: sum(pool._used_slots.values()) == 1)
        outcome = await pool.run("forge", ["unknown"], job_id="a", timeout=5)
        forged = await pool.run("forge", ["beside"], job_id="b", timeout=5)
        # An executor that answered for a job it did not have is replaced before it may get that job.
        await wait_until(lambda: pool.counts["retired"] == 2)
        return outcome.result, forged.result, (await neighbour).result, pool.counts

    outcome, forged, neighbour, counts = run_with_pool(scenario, size=2)
    assert (outcome, forged, neighbour) == ("true", "true", None)
    assert counts["unexpected_unknown"] == 2
    assert counts["unexpected_malformed"] == 4


@pytest.mark.spec("EXE-10")
def test_an_answer_that_cannot_be_read_is_an_error_of_its_own_job():
    async def scenario(pool):
        return await pool.run("malformed", job_id="a", timeout=5)

    outcome = run_with_pool(scenario)
    assert (outcome.status, outcome.error_type) == (Status.ERROR, "bad_outcome")


def make_failing_pool(*arguments, folder=None, **policy):
    """A pool whose executors do not start."""
    failing_command = ExecutorCommand(words=arguments, environment={"PATH": os.environ["PATH"]}, folder=folder)
    return ExecutorPool(failing_command, policy=PoolPolicy(**{"size": 1, "grace": 0.2} | policy))


SILENT_PROGRAM = "import sys; print('up, token=abc', file=sys.stderr); print('hello', flush=True); sys.stdin.read()"


@pytest.mark.spec("EXE-20")
@pytest.mark.parametrize(
    "arguments, cause_pattern, remedy",
    [
        (
            ("./there-is-no-such-program",),
            "'./there-is-no-such-program' exited before its first answer, with exit code 127: it wrote .*not found",
            "the environment of its ExecutorCommand has the PATH to it",
        ),
        (
            (sys.executable, "-c", "import none_such"),
            r"with exit code 1: it wrote ModuleNotFoundError: No module named 'none_such' \| .*line 1, in <module>",
            "ergon executor check -- ",
        ),
        ((sys.executable, "-c", "print(1 /) or print()"), "with exit code 1: it wrote SyntaxError: ", "check -- "),
        ((sys.executable, "nowhere.py"), "with exit code 2: it wrote .*nowhere.py.*No such file", "check -- "),
        (("true",), "'true' exited before its first answer, with exit code 0: it wrote nothing to stderr", "check -- "),
        (("sh", "-c", "kill -9 $$"), "exited before its first answer, with SIGKILL: it wrote nothing", "check -- "),
        (
            (sys.executable, "-S", "-c", SILENT_PROGRAM),
            r"within 1 s \(it wrote 1 other lines to stdout\) and was killed: it wrote up, token=\[hidden\]$",
            "answer each line of stdin with one line on stdout and flush it",
        ),
    ],
)
def test_a_failed_start_raises_its_cause_and_a_remedy(arguments, cause_pattern, remedy, caplog):
    async def main():
        async with (
            make_failing_pool(*arguments, start_timeout=1 if SILENT_PROGRAM in arguments else 30) as pool,
            asyncio.timeout(15),
        ):
            with pytest.raises(ExecutorNotStarted) as caught:
                await pool.run("echo", [1], job_id="a", timeout=60)
            return caught.value

    error = asyncio.run(main())
    assert re.search(cause_pattern, error.problem), error.problem
    assert remedy in error.remedy
    assert str(error) == f"{error.problem}; {error.remedy}"
    # Nothing was sent: it costs no attempt.
    assert (error.not_attempted, error.final, error.code) == (True, False, "executor_not_started")
    assert error.retry_after >= 1
    log_record = next(record for record in caplog.records if get_event(record) == "executor not started")
    # The log hides secrets again: the path of the interpreter decides where the command of the message is cut.
    assert (log_record.levelname, log_record.error) == ("ERROR", redact_text(str(error)))
    assert not [record for record in caplog.records if get_event(record) == "executor exited"]


def test_a_missing_folder_is_named():
    async def main():
        async with make_failing_pool("true", folder="/nowhere/at-all") as pool, asyncio.timeout(15):
            with pytest.raises(ExecutorNotStarted, match=r"'true' cannot be started: No such file.*'/nowhere/at-all'"):
                await pool.reserve()

    asyncio.run(main())


def test_messages_about_a_failed_start_are_bounded_and_without_credentials(caplog):
    lines = "('x' * 5000 + ' password=hunter2\\n') * 500 + 'Error: dsn=abc\\n' + 'at y\\n' * 20"
    noise = f"import sys; sys.stderr.write({lines})"

    async def main():
        async with make_failing_pool(sys.executable, "-S", "-c", noise, "--token", "abc") as pool, asyncio.timeout(15):
            with pytest.raises(ExecutorNotStarted) as caught:
                await pool.reserve()
            return str(caught.value)

    message = asyncio.run(main())
    assert len(message) <= 500
    # The most informative line comes first, although much was written after it.
    assert "it wrote Error: dsn=[hidden] | at y | " in message
    record = next(record for record in caplog.records if get_event(record) == "executor not started")
    assert record.line.startswith("Error: dsn=[hidden] | … | at y")
    assert len(record.line) < 4000
    assert "hunter2" not in record.line + message


def test_a_failed_start_is_retried_with_backoff():
    async def main():
        started_at, restart = time.monotonic(), RetryPolicy(backoff=0.2, multiplier=2, cap=1)
        async with make_failing_pool("./there-is-no-such-program", restart=restart) as pool:
            await wait_until(lambda: pool.counts["failed_starts"] >= 3)
        return time.monotonic() - started_at

    assert asyncio.run(main()) >= 0.2 + 0.4


def test_a_caller_between_two_starts_fails_immediately_and_is_not_queued():
    async def main():
        restart = RetryPolicy(backoff=60, cap=60)
        async with make_failing_pool("./there-is-no-such-program", restart=restart) as pool, asyncio.timeout(15):
            for _ in range(3):
                with pytest.raises(ExecutorNotStarted) as caught:
                    await pool.reserve()
            return caught.value.retry_after, pool.counts["failed_starts"], len(pool._waiters)

    after, starts, waiting = asyncio.run(main())
    # It comes back when there is something new to be known.
    assert 30 < after <= 60
    assert (starts, waiting) == (1, 0)


@pytest.mark.spec("EXE-20")
def test_an_executor_that_exits_before_its_first_request_is_a_failed_start(monkeypatch):
    start = ExecutorProcess.start

    async def start_and_wait_for_exit(*args):
        started_process = await start(*args)
        await started_process.exited
        return started_process

    monkeypatch.setattr(ExecutorProcess, "start", start_and_wait_for_exit)

    async def main():
        async with make_failing_pool("./there-is-no-such-program") as pool, asyncio.timeout(15):
            await pool.reserve()

    with pytest.raises(ExecutorNotStarted, match="exit code 127"):
        asyncio.run(main())


def test_an_executor_that_exits_after_its_first_answer_is_not_restarted_in_a_hot_loop():
    program = "import json, sys; print(json.dumps({'job_id': json.loads(input())['job_id'], 'status': 'success'}))"

    async def main():
        started_at, restart = time.monotonic(), RetryPolicy(backoff=1, multiplier=1)
        async with make_failing_pool(sys.executable, "-S", "-c", program, restart=restart) as pool:
            await wait_until(lambda: pool.counts["started"] >= 3)
        return time.monotonic() - started_at

    assert asyncio.run(main()) >= 2


def test_a_pool_works_as_soon_as_its_executor_can_start(tmp_path):
    program, source = tmp_path / "late.py", Path(PROGRAM).read_text(encoding="utf-8")

    async def main():
        restart = RetryPolicy(backoff=0.05, multiplier=1)
        async with (
            make_failing_pool(sys.executable, "-S", str(program), "0", restart=restart) as pool,
            asyncio.timeout(15),
        ):
            with pytest.raises(ExecutorNotStarted, match=r"late\.py"):
                await pool.reserve()
            assert pool.startup_error is not None
            program.write_text(source, encoding="utf-8")
            await wait_until(lambda: pool.startup_error is None)
            return (await pool.run("echo", [1], job_id="a", timeout=5)).result

    assert asyncio.run(main()) == 1


def test_a_running_executor_serves_waiting_callers_while_another_fails_to_start(tmp_path):
    first = f"mkdir {tmp_path}/taken || exit 3; exec {sys.executable} -S {PROGRAM} 0"

    async def main():
        async with make_failing_pool("sh", "-c", first, size=2) as pool, asyncio.timeout(15):
            await wait_until(lambda: pool.counts["failed_starts"] and pool._is_up)
            busy = asyncio.create_task(pool.run("sleep", [0.3], job_id="a", timeout=5))
            neighbour = asyncio.create_task(pool.run("echo", [2], job_id="b", timeout=5))
            return (await busy).status, (await neighbour).result

    assert asyncio.run(main()) == (Status.SUCCESS, 2)


@pytest.mark.parametrize("policy", [{"max_jobs": 2}, {"max_age": 0.001}, {"max_memory": 1}])
def test_an_executor_at_its_limits_is_replaced_between_jobs(policy):
    async def scenario(pool):
        return [(await pool.run("pid", job_id=str(n), timeout=5)).result for n in range(4)]

    pids = run_with_pool(scenario, **policy)
    assert len(set(pids)) == (2 if "max_jobs" in policy else 4)


def test_the_system_limits_what_an_executor_may_use():
    async def scenario(pool):
        limits = (await pool.run("limits", job_id="a", timeout=5)).result
        return limits, await pool.run("spin", job_id="b", timeout=20)

    limits, spin_outcome = run_with_pool(scenario, limits=ResourceLimits(cpu=1, open_files=64))
    assert limits == [64, 1]
    assert spin_outcome.error_type == "executor_died"
    assert "SIGKILL" in spin_outcome.error_message or "SIGXCPU" in spin_outcome.error_message


@pytest.mark.spec("EXE-26")
def test_a_slow_pool_does_not_delay_another_pool():
    async def scenario(slow):
        jobs = [asyncio.create_task(slow.run("sleep", [60], job_id=str(n), timeout=60)) for n in range(100)]
        async with ExecutorPool(make_command(), policy=PoolPolicy(size=1)) as quick:
            await quick.run("echo", [0], job_id="warm", timeout=5)
            started_at = time.monotonic()
            await quick.run("echo", [1], job_id="a", timeout=5)
            elapsed = time.monotonic() - started_at
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        return elapsed

    assert run_with_pool(scenario, grace=0.0) < 0.3


# -- what is counted ------------------------------------------------------------------------------


def read_metrics(name):
    """Every metric of the pool *name*, as a collector sees it."""
    registry, values = get_registry(), {}
    for metric in (each for each in METRICS if Attribute.EXECUTOR_KIND in each.attributes):
        for labels, value in registry.read(metric):
            if labels.pop(Attribute.EXECUTOR_KIND) == name:
                values[metric.name.removeprefix("ergon."), *labels.values()] = value
    return values


@pytest.mark.spec("EXE-10")
def test_a_pool_exports_its_current_state_and_its_totals():
    async def main():
        policy = PoolPolicy(size=1, grace=0.0)
        async with ExecutorPool(make_command(), policy=policy, name="counted") as pool:
            await pool.run("echo", [1], job_id="a", timeout=5)
            busy = asyncio.create_task(pool.run("sleep", [0.3], job_id="b", timeout=5))
            await wait_until(lambda: sum(pool._used_slots.values()) == 1)
            waiting = asyncio.create_task(pool.run("malformed", job_id="c", timeout=5))
            await wait_until(lambda: len(pool._waiters) == 1)
            meanwhile = read_metrics("counted")
            await asyncio.gather(busy, waiting)
            await pool.run("spin", job_id="d", timeout=0.05)
            await pool.run("crash", job_id="e", timeout=5)
            await pool.run("forge", ["unknown"], job_id="f", timeout=5)
            live = read_metrics("counted")
        return meanwhile, live, read_metrics("counted")

    meanwhile, live, after = asyncio.run(main())
    assert [meanwhile["executors",], meanwhile["executor.jobs",], meanwhile["executor.jobs.waiting",]] == [1, 1, 1]
    # What one says that still runs is counted already.
    assert (live["executor.unexpected_lines", "unknown"], live["executor.unexpected_lines", "malformed"]) == (1, 2)
    totals = {name[0]: value for name, value in after.items() if len(name) == 1}
    wait_seconds = totals.pop("executor.acquisitions.duration")
    assert 0.1 < wait_seconds < 15
    assert totals.pop("executors.started") >= 3
    assert totals == {"executor.acquisitions": 6, "executors.killed": 1, "executors.died": 1, "executors.retired": 1}
    assert after["executor.unexpected_lines", "unknown"] == 1


# -- no process is left behind --------------------------------------------------------------------


def test_a_closed_pool_leaves_no_process_and_takes_no_job():
    pools = []

    async def scenario(pool):
        await pool.run("child", job_id="a", timeout=5)
        pools.append(pool)
        return pool.pids

    pids = run_with_pool(scenario, *STUBBORN, size=2)
    assert all(has_exited(pid) for pid in pids)
    with pytest.raises(PoolClosed):
        asyncio.run(pools[0].run("echo", [1], job_id="b", timeout=5))


def test_pools_may_share_a_reaper():
    reaper = ProcessReaper()

    async def main():
        first = ExecutorPool(make_command(), policy=PoolPolicy(size=1), reaper=reaper)
        second = ExecutorPool(make_command(), policy=PoolPolicy(size=1), reaper=reaper)
        async with first:
            async with second:
                await second.run("echo", [1], job_id="a", timeout=5)
            return (await first.run("echo", [2], job_id="b", timeout=5)).result

    assert asyncio.run(main()) == 2
    assert not has_exited(reaper.pid)
    reaper.close()
    assert has_exited(reaper.pid)


def test_a_reserved_slot_is_kept_for_its_caller():
    async def scenario(pool):
        with await pool.reserve() as slot:
            assert pool.reserve_now() is None
            waiting = asyncio.create_task(pool.run("echo", [2], job_id="b", timeout=5))
            await asyncio.sleep(0)
            first = await pool.run("echo", [1], job_id="a", timeout=5, reservation=slot)
            again = await pool.run("echo", [3], job_id="c", timeout=5, reservation=slot)
            assert not waiting.done()
        return first.result, again.result, (await waiting).result

    assert run_with_pool(scenario) == (1, 3, 2)


def test_a_released_slot_is_free_immediately():
    async def scenario(pool):
        (await pool.reserve()).__exit__()
        with pool.reserve_now() as slot:
            return (await pool.run("echo", [1], job_id="a", timeout=5, reservation=slot)).result

    assert run_with_pool(scenario) == 1


def test_an_executor_that_is_killed_in_a_reserved_slot_costs_no_attempt():
    async def scenario(pool):
        with await pool.reserve() as slot:
            os.kill(slot.process.pid, signal.SIGKILL)
            await asyncio.shield(slot.process.exited)
            with pytest.raises(ExecutorInterrupted) as released:
                await pool.run("echo", [1], job_id="a", timeout=5, reservation=slot)
        assert released.value.not_attempted
        return (await pool.run("echo", [2], job_id="b", timeout=5)).result

    assert run_with_pool(scenario) == 2


@pytest.mark.spec("EXE-18")
def test_a_job_is_killed_on_demand_and_no_other():
    async def scenario(pool):
        spinning = asyncio.create_task(pool.run("spin", job_id="a", timeout=None))
        neighbour = asyncio.create_task(pool.run("sleep", [0.5], job_id="b", timeout=None))
        await wait_until(lambda: {"a", "b"} <= {job for process in pool._running for job in process._replies})
        assert not pool.kill("unknown")
        assert pool.kill("a")
        return await spinning, await neighbour, pool.counts["killed"]

    killed, neighbour, killed_count = run_with_pool(scenario, size=2)
    assert (killed.status, killed.error_type, neighbour.status, killed_count) == (
        Status.ERROR,
        "killed",
        Status.SUCCESS,
        1,
    )


def test_the_pool_runs_on_uvloop_too():
    async def main():
        async with ExecutorPool(make_command(*STUBBORN), policy=PoolPolicy(size=1, grace=0.1)) as pool:
            echoed = await pool.run("echo", ["x" * 2**20], job_id="a", timeout=10)
            return len(echoed.result), (await pool.run("spin", job_id="b", timeout=0.2)).error_type

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == (2**20, "hard_timeout")


ORCHESTRATOR = """
import asyncio, sys
from ergon_framework.executors.pool import ExecutorPool, PoolPolicy
from ergon_framework.executors.process import ExecutorCommand

async def main():
    command = ExecutorCommand(words=tuple(sys.argv[1:]), environment={"PATH": "/usr/bin:/bin"})
    async with ExecutorPool(command, policy=PoolPolicy(size=2)) as pool:
        child = (await pool.run("child", job_id="a", timeout=5)).result
        away = (await pool.run("session", job_id="c", timeout=5)).result
        spinning = asyncio.create_task(pool.run("spin", job_id="b", timeout=60))
        while not pool._get_stats().in_flight:
            await asyncio.sleep(0)
        print(pool._reaper.pid, child, away, *pool.pids, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.spec("EXE-21", "SEC-22")
def test_executors_end_with_their_orchestrator_even_if_they_ignore_signals():
    argv = [sys.executable, "-c", ORCHESTRATOR, sys.executable, "-S", PROGRAM, *STUBBORN]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as orchestrator:
        pids = [int(word) for word in orchestrator.stdout.readline().split()]
        assert len(pids) == 5
        assert not any(has_exited(pid) for pid in pids)
        orchestrator.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while not all(has_exited(pid) for pid in pids):
        assert time.monotonic() < end, [pid for pid in pids if not has_exited(pid)]
        time.sleep(0.01)


@pytest.mark.spec("EXE-21")
def test_a_killed_reaper_is_replaced_and_knows_all_groups():
    reaper = ProcessReaper()
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as sleeper:
        reaper.add(sleeper.pid)
        first = reaper.pid
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 10
        while reaper.pid == first or reaper._lock.acquire(blocking=False) is False:
            assert time.monotonic() < end
            time.sleep(0.01)
        reaper._lock.release()
        reaper.close()
        assert sleeper.wait(10) == -signal.SIGKILL


@pytest.mark.spec("EXE-21")
def test_a_hanging_reaper_is_replaced_and_knows_all_groups():
    reaper = ProcessReaper(answer_timeout=0.3)
    with sleeper_process() as first, sleeper_process() as second:
        reaper.add(first.pid)
        hanging = reaper.pid
        os.kill(hanging, signal.SIGSTOP)
        run_within(10, lambda: reaper.add(second.pid))
        assert has_exited(hanging)
        assert reaper.pid != hanging
        reaper.close()
        assert [sleeper.wait(10) for sleeper in (first, second)] == [-signal.SIGKILL] * 2


@pytest.mark.spec("EXE-21")
def test_a_reaper_that_hangs_at_shutdown_leaves_no_process():
    reaper = ProcessReaper(answer_timeout=0.3)
    with sleeper_process() as sleeper:
        reaper.add(sleeper.pid)
        os.kill(reaper.pid, signal.SIGSTOP)
        run_within(10, reaper.close)
        assert sleeper.wait(10) == -signal.SIGKILL


def test_a_pool_retries_while_its_reaper_cannot_be_reached(caplog):
    reaper = ProcessReaper()
    reaper._closed = True  # so that it is not replaced
    os.kill(reaper.pid, signal.SIGKILL)

    async def main():
        policy = PoolPolicy(size=1, restart=RetryPolicy(backoff=0.01))
        async with ExecutorPool(make_command(), policy=policy, reaper=reaper) as pool:
            await wait_until(lambda: pool.counts["failed_starts"] >= 2 or pool._keeper_tasks[0].done())
            return pool._keeper_tasks[0].done()

    assert asyncio.run(main()) is False
    assert "is unavailable: no executor can be started" in caplog.records[0].error
    reaper.close()


def test_a_reaper_spares_removed_groups():
    reaper = ProcessReaper()
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as sleeper:
        reaper.add(sleeper.pid)
        reaper.remove(sleeper.pid)
        reaper.close()
        assert sleeper.poll() is None
        sleeper.kill()


def test_no_command_starts_if_the_orchestrator_is_killed_before_the_reaper_has_registered_it(tmp_path):
    # The gate: without its line the command is never executed.
    with subprocess.Popen([*_START_GATE, "touch", tmp_path / "ran"], stdin=subprocess.PIPE) as gate:
        gate.stdin.close()
        assert gate.wait(10) != 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.spec("EXE-20")
def test_a_caller_that_waits_too_long_for_a_slot_is_not_started():
    async def scenario(pool):
        await pool.wait_first_start()
        with await pool.reserve():
            started_at = time.monotonic()
            with pytest.raises(ExecutorsBusy, match=r"all executors were busy for 0\.2 s") as caught:
                await pool.reserve(WaitLimits(busy=0.2, start=20.0))
            elapsed = time.monotonic() - started_at
        with await pool.reserve(WaitLimits(busy=0.0, start=0.0)):
            return caught.value, elapsed, pool.slot_count

    error, elapsed, slot_count = run_with_pool(scenario)
    assert (error.not_attempted, error.final, error.code, error.retry_after, slot_count) == (
        True,
        False,
        "executors_busy",
        1.0,
        1,
    )
    assert 0.2 <= elapsed < 5


@pytest.mark.spec("EXE-20")
def test_waiting_for_a_start_has_its_own_limit():
    async def scenario(pool):
        with await pool.reserve(WaitLimits(busy=0.01, start=20.0)):
            pass
        return True

    assert run_with_pool(scenario, "0.5")
