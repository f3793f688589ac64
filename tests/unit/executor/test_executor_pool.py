"""The pool: one job at a time in each executor, killed in time, and nobody left behind."""

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

from ergon_framework.executor import descendants, process
from ergon_framework.executor.descendants import Descendant, kill_all, list_children
from ergon_framework.executor.guard import Guard
from ergon_framework.executor.lines import MAX_LINE, LineError
from ergon_framework.executor.pool import ExecutorPool, ExecutorsBusy, Patience, PoolClosed, PoolPolicy
from ergon_framework.executor.process import _GATE, Command, ExecutorProcess, ExecutorReleased, Limits
from ergon_framework.executor.protocol import Status, read_outcome
from ergon_framework.executor.start import ExecutorNotStarted
from ergon_framework.task.mixins.policies import RetryPolicy
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.telemetry.names import METRICS, Attribute
from tests.log_events import event_of

PROGRAM = str(Path(__file__).with_name("stubborn.py"))
STUBBORN = ("0", "stubborn")


def command(*words, **more):
    return Command(words=(sys.executable, "-S", PROGRAM, *words), environment={"PATH": os.environ["PATH"]}, **more)


def pooled(body, *words, environment=None, limits=None, **policy):
    """Run *body* with a pool of executors."""
    changes = {} if environment is None else {"environment": environment}
    changes |= {} if limits is None else {"limits": limits}
    policy = PoolPolicy(**{"size": 1, "grace": 0.2} | policy)

    async def main():
        async with ExecutorPool(command(*words).model_copy(update=changes), policy=policy) as pool:
            return await asyncio.wait_for(body(pool), 30)

    return asyncio.run(main())


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@contextmanager
def sleeping():
    """A process in a group of its own."""
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as sleeper:
        try:
            yield sleeper
        finally:
            sleeper.kill()


def within(seconds, act):
    """Do what might never return."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


async def until(holds):
    async with asyncio.timeout(15):
        while not holds():  # noqa: ASYNC110 - other processes set no events
            await asyncio.sleep(0.01)


# -- everyday -------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-10")
def test_each_job_has_its_own_outcome():
    async def body(pool):
        jobs = [pool.run("echo", [number], job_id=f"job-{number}", timeout=10) for number in range(30)]
        return [(got.job_id, got.result) for got in await asyncio.gather(*jobs)]

    assert pooled(body, size=3) == [(f"job-{number}", number) for number in range(30)]


def test_an_executor_has_one_job_at_a_time():
    async def body(pool):
        began = time.monotonic()
        await asyncio.gather(*(pool.run("sleep", [0.15], job_id=str(n), timeout=10) for n in range(3)))
        return time.monotonic() - began

    assert pooled(body) >= 0.45
    assert pooled(body, max_in_flight=3) < 0.4


@pytest.mark.spec("EXE-25")
def test_mebibytes_go_both_ways_at_once():
    async def body(pool):
        values = [f"{n}" * 2**20 for n in range(4)]
        jobs = [pool.run("echo", [value], job_id=value[0], timeout=20) for value in values]
        return [got.result for got in await asyncio.gather(*jobs)] == values

    assert pooled(body, max_in_flight=4)


def test_what_cannot_be_sent_costs_nobody_his_executor():
    async def body(pool):
        with pytest.raises(LineError):
            await pool.run("echo", [object()], job_id="a", timeout=5)
        return await pool.run("echo", [1], job_id="b", timeout=5), pool.counts["started"]

    got, started = pooled(body)
    assert (got.result, started) == (1, 1)


@pytest.mark.spec("EXE-25")
def test_arguments_with_two_keys_that_are_written_alike_are_never_sent():
    async def body(pool):
        with pytest.raises(LineError, match="'1'") as refused:
            await pool.run("echo", [{"x": {1: "a", "1": "b"}}], job_id="a", timeout=5)
        return refused.value.reason, (await pool.run("echo", [{1: "a"}], job_id="b", timeout=5)).result

    assert pooled(body) == ("repeated_key", {"1": "a"})


@pytest.mark.parametrize(
    "wrong", [{"job_id": ""}, {"job_id": "j" * 1025}, {"attempt_number": 0}, {"queue_name": ""}, {"kwargs": {1: 2}}]
)
def test_what_breaks_the_protocol_is_never_sent(wrong):
    async def body(pool):
        with pytest.raises(LineError) as refused:
            await pool.run("echo", **{"job_id": "a", "timeout": 5} | wrong)
        return refused.value.reason, (await pool.run("echo", [1], job_id="b", timeout=5)).result

    assert pooled(body) == ("bad_field", 1)


def test_a_job_that_is_in_an_executor_is_not_sent_to_it_again():
    async def body(pool):
        first = asyncio.create_task(pool.run("sleep", [0.3], job_id="a", timeout=5))
        await until(lambda: pool._taken and sum(pool._taken.values()) == 1)
        with pytest.raises(ExecutorReleased) as refused:
            await pool.run("echo", [1], job_id="a", timeout=0.1)
        return refused.value.later, (await first).status

    assert pooled(body, max_in_flight=2) == (True, Status.SUCCESS)


def test_an_executor_sees_only_the_environment_it_was_given(monkeypatch):
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")

    async def body(pool):
        return (await pool.run("environment", job_id="a", timeout=5)).result

    assert pooled(body, environment={"COLOUR": "red"}).keys() - {"PWD", "SHLVL", "_", "LC_CTYPE", "OLDPWD"} == {
        "COLOUR",
        "ERGON_EXECUTOR",
    }


def escaped(caplog):
    """Return the processes that an executor has started in other sessions."""
    (words,) = [record.line.split() for record in caplog.records if getattr(record, "line", "").startswith("escaped")]
    return [int(word) for word in words[1:]]


def all_gone(pids):
    until = time.monotonic() + 20
    while time.monotonic() < until and not all(map(gone, pids)):
        time.sleep(0.02)
    return all(map(gone, pids))


@pytest.mark.spec("SEC-22")
@pytest.mark.parametrize("words", [("0",), STUBBORN], ids=["ends at SIGTERM", "is killed"])
def test_a_job_that_times_out_takes_processes_in_other_sessions_with_it(caplog, words):
    caplog.set_level(logging.INFO, "ergon_framework.executor")

    async def body(pool):
        return (await pool.run("escape", [60], job_id="a", timeout=2)).status

    assert pooled(body, *words) is Status.TIMEOUT
    pids = escaped(caplog)
    assert len(pids) == 2
    assert all_gone(pids)


@pytest.mark.spec("SEC-22")
def test_an_executor_that_ends_by_itself_takes_an_orphan_in_another_session_with_it(caplog):
    caplog.set_level(logging.INFO, "ergon_framework.executor")

    async def body(pool):
        assert (await pool.run("escape", [0], job_id="a", timeout=20)).status is Status.SUCCESS
        await pool.run("crash", job_id="b", timeout=20)
        orphan, bare = escaped(caplog)
        try:
            # While the pool is open: its guard ends what is left when it is closed.
            await until(lambda: gone(orphan))
        finally:
            if not gone(bare):
                os.kill(bare, signal.SIGKILL)

    pooled(body)


@pytest.mark.spec("SEC-22")
def test_children_are_found_with_and_without_the_help_of_the_kernel():
    with subprocess.Popen(["/bin/sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as shell:
        below = int(shell.stdout.readline())
        try:
            assert below in {each.pid for each in list_children(os.getpid())}
            assert descendants._read_children(shell.pid) == descendants._index_parents()[shell.pid] == [below]
        finally:
            os.kill(below, signal.SIGKILL)


@pytest.mark.spec("SEC-22")
def test_another_process_that_has_the_number_of_a_descendant_is_not_killed():
    with sleeping() as sleeper:
        kill_all({Descendant(sleeper.pid, "1")})
        # A process that is killed ends a moment later.
        with pytest.raises(subprocess.TimeoutExpired):
            sleeper.wait(1)


def test_what_it_says_is_logged_with_its_job_and_trace(caplog):
    caplog.set_level(logging.INFO, "ergon_framework.executor")
    trace = "0af7651916cd43dd8448eb211c80319c"

    async def body(pool):
        carrier = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        await pool.run("say", ["hello password=hunter2"], job_id="job-7", timeout=5, carrier=carrier)

    pooled(body)
    (record,) = [each for each in caplog.records if event_of(each) == "executor said"]
    assert (record.line, record.transaction_id, record.trace_id) == ("hello password=[hidden]", "job-7", trace)


# -- long lines -----------------------------------------------------------------------------------


async def late(work):
    """What *work* gives, and for how long the event loop was held at most meanwhile."""
    worst, over = 0.0, asyncio.ensure_future(work)
    while not over.done():
        before = time.monotonic()
        await asyncio.wait([over], timeout=0.001)
        worst = max(worst, time.monotonic() - before)
    return over.result(), worst


@pytest.mark.spec("EXE-25", "EXE-26")
@pytest.mark.parametrize(
    "unit, kind",
    [("[]", None), ('{"a": [{}]}', None), ("[" * 100 + "]" * 100, "bad_outcome"), ('"\\udc00"', "bad_outcome")],
)
def test_a_line_of_4_mebibytes_does_not_hold_the_event_loop(unit, kind):
    size = MAX_LINE // 4

    async def body(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        return await late(pool.run("fill", [unit, size], job_id="a", timeout=60))

    # Without the collector of garbage, which holds everybody while it looks at a million lists: it is not the pool's.
    gc.disable()
    try:
        got, worst = pooled(body)
        # Beside what it takes to read the same line here and now, whatever else the machine does.
        units = ",".join([unit] * (size // (len(unit) + 1)))
        began = time.monotonic()
        read_outcome(f'{{"job_id": "a", "status": "success", "result": [{units}]}}'.encode())
        alone = time.monotonic() - began
    finally:
        gc.enable()
    assert got.error_type == kind
    assert kind is not None or len(got.result) == size // (len(unit) + 1)
    assert worst < max(0.2, 0.5 * alone)


@pytest.mark.spec("EXE-10")
def test_lines_behind_a_long_one_wait_for_it():
    async def body(pool):
        jobs = [pool.run("fill", ["1", 2**20], job_id="long", timeout=20)]
        jobs += [pool.run("echo", [n], job_id=str(n), timeout=20) for n in range(5)]
        return [got.status for got in await asyncio.gather(*jobs)]

    assert pooled(body, max_in_flight=6) == [Status.SUCCESS] * 6


@pytest.mark.spec("EXE-10")
def test_the_long_last_words_of_an_executor_are_heard():
    async def body(pool):
        got = await pool.run("last", ["1", 2**22], job_id="a", timeout=20)
        return len(got.result), (await pool.run("echo", [1], job_id="b", timeout=5)).result

    assert pooled(body) == (2**21, 1)


def hold_long_lines(monkeypatch):
    """Let the pool read no long line before the returned event is set."""
    over, read = threading.Event(), process.read_outcome

    def wait_and_read(line, **options):
        if len(line) > process.LONG:
            over.wait(60)
        return read(line, **options)

    monkeypatch.setattr(process, "read_outcome", wait_and_read)
    return over


@pytest.mark.spec("EXE-18")
def test_a_job_that_times_out_while_its_line_is_read_is_killed(monkeypatch):
    over = hold_long_lines(monkeypatch)

    async def body(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        job = asyncio.create_task(pool.run("fill", ["[[[]]]", MAX_LINE // 4], job_id="a", timeout=0.5))
        await until(lambda: pool.counts["killed"])
        # What is read stays read to its end; nobody takes it for an outcome any more.
        over.set()
        return (await job).status, (await pool.run("echo", [1], job_id="b", timeout=5)).result

    assert pooled(body) == (Status.TIMEOUT, 1)


@pytest.mark.spec("EXE-18")
def test_the_outcome_of_a_timed_out_job_does_not_wait_until_the_output_is_read(monkeypatch):
    over = hold_long_lines(monkeypatch)

    async def body(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        try:
            job = pool.run("fill", ["[[[]]]", MAX_LINE // 4], job_id="a", timeout=0.5)
            outcome = await asyncio.wait_for(job, 20)
        finally:
            over.set()
        # The line that is read afterwards is an outcome of no job.
        return outcome.status, (await pool.run("echo", [1], job_id="b", timeout=5)).result, pool.counts["stray_late"]

    assert pooled(body) == (Status.TIMEOUT, 1, 1)


def test_a_flood_of_lines_does_not_hold_the_event_loop():
    async def body(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        return await late(pool.run("lines", [60_000], job_id="a", timeout=60))

    got, worst = pooled(body)
    assert got.status is Status.SUCCESS
    assert worst < 0.3


# -- timeouts -------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-18")
@pytest.mark.parametrize("handler, args", [("spin", []), ("sleep", [300])])
def test_a_job_that_takes_too_long_is_killed_in_time_and_disturbs_nobody(handler, args):
    async def body(pool):
        beside = asyncio.create_task(pool.run("sleep", [0.8], job_id="beside", timeout=10))
        await asyncio.sleep(0)
        began = time.monotonic()
        got = await pool.run(handler, args, job_id="slow", timeout=0.3)
        took = time.monotonic() - began
        pids = set(pool.pids)
        await until(lambda: len(pool.pids) == 2 and set(pool.pids) != pids)
        return got, took, await beside, await pool.run("echo", [1], job_id="next", timeout=5)

    got, took, beside, after = pooled(body, *STUBBORN, size=2)
    assert (got.status, got.error_type) == (Status.TIMEOUT, "hard_timeout")
    # It ignores SIGTERM, so the whole grace passes.
    assert 0.3 + 0.2 <= took < 0.3 + 0.2 + 0.5
    assert (beside.status, after.result) == (Status.SUCCESS, 1)


@pytest.mark.spec("DX-37", "EXE-12")
def test_a_job_that_is_to_be_killed_and_succeeds_before_its_executor_is_gone_has_succeeded():
    async def body(pool):
        job = asyncio.create_task(pool.run("sleep", [0.2], job_id="a", timeout=10))
        await asyncio.sleep(0)
        await until(lambda: pool.kill("a"))
        return await job, await pool.run("echo", [1], job_id="next", timeout=10)

    # It ignores SIGTERM.
    got, after = pooled(body, *STUBBORN, grace=1.0)
    assert (got.status, after.result) == (Status.SUCCESS, 1)


@pytest.mark.spec("EXE-18")
def test_the_whole_group_is_killed():
    async def body(pool):
        child = (await pool.run("child", job_id="a", timeout=5)).result
        await pool.run("spin", job_id="b", timeout=0.1)
        await until(lambda: gone(child))
        return True

    assert pooled(body)


@pytest.mark.spec("EXE-18")
def test_neighbours_of_a_killed_job_are_released_and_keep_their_attempt():
    async def body(pool):
        beside = asyncio.create_task(pool.run("sleep", [300], job_id="beside", timeout=60))
        got = await pool.run("sleep", [300], job_id="slow", timeout=0.2)
        with pytest.raises(ExecutorReleased) as released:
            await beside
        return got, released.value

    got, released = pooled(body, max_in_flight=2)
    assert got.error_type == "hard_timeout"
    assert (released.later, released.retry_after) == (True, 0.0)


@pytest.mark.spec("EXE-20")
def test_the_clock_starts_when_the_request_is_sent():
    async def body(pool):
        first = asyncio.create_task(pool.run("sleep", [0.5], job_id="first", timeout=10))
        await asyncio.sleep(0)
        second = await pool.run("echo", ["ran"], job_id="second", timeout=0.3)
        await first
        return second.result

    assert pooled(body) == "ran"


@pytest.mark.spec("EXE-20")
def test_the_start_of_an_executor_is_not_the_jobs_time():
    async def body(pool):
        return (await pool.run("echo", ["ran"], job_id="a", timeout=0.3)).result

    assert pooled(body, "0.6") == "ran"


def test_a_caller_who_leaves_ends_the_executor_and_not_the_pool():
    async def body(pool):
        pids = pool.pids
        job = asyncio.create_task(pool.run("sleep", [300], job_id="a", timeout=60))
        await until(lambda: pool._taken and sum(pool._taken.values()) == 1)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        got = await pool.run("pid", job_id="b", timeout=5)
        return got.result not in pids

    assert pooled(body)


def test_a_caller_who_leaves_while_he_waits_takes_no_place():
    async def body(pool):
        busy = asyncio.create_task(pool.run("sleep", [0.2], job_id="busy", timeout=5))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(pool.run("echo", [1], job_id="waits", timeout=5))
        await until(lambda: pool._figures().waiting == 1)
        waiting.cancel()
        await busy
        return (await pool.run("echo", [2], job_id="next", timeout=5)).result, pool.counts["started"]

    assert pooled(body) == (2, 1)


@pytest.mark.spec("EXE-18")
def test_each_job_has_a_deadline_of_its_own_whatever_the_order():
    async def body(pool):
        began = time.monotonic()

        async def over(job_id, timeout):
            got = await pool.run("sleep", [300], job_id=job_id, timeout=timeout)
            return got.error_type, time.monotonic() - began

        jobs = [over("long", 0.9), over("short", 0.2), over("middle", 0.5)]
        return await asyncio.gather(*jobs), len(pool._deadlines._due)

    ends, left = pooled(body, size=3)
    assert [kind for kind, _ in ends] == ["hard_timeout"] * 3
    assert all(due <= took < due + 0.5 for due, (_, took) in zip((0.9, 0.2, 0.5), ends, strict=True))
    assert left == 0


# -- deaths ---------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-19")
def test_a_job_that_kills_its_executor_has_an_outcome_and_another_executor_takes_over():
    async def body(pool):
        got = await pool.run("crash", job_id="a", timeout=5)
        return got, await pool.run("echo", [1], job_id="b", timeout=5), pool.counts

    got, after, counts = pooled(body)
    assert (got.status, got.error_type) == (Status.ERROR, "executor_died")
    assert "exit code 9" in got.error_message
    assert (after.result, counts["died"], counts["started"]) == (1, 1, 2)


def test_an_executor_that_dies_without_a_job_costs_none():
    async def body(pool):
        await pool.run("echo", [0], job_id="warm", timeout=5)
        (idle,) = pool.pids
        os.kill(idle, signal.SIGKILL)
        await until(lambda: idle not in pool.pids)
        return (await pool.run("echo", [1], job_id="a", timeout=5)).result, pool.counts["died"]

    assert pooled(body) == (1, 1)


@pytest.mark.spec("EXE-10")
def test_strays_are_counted_and_never_taken_for_another_jobs_outcome():
    async def body(pool):
        beside = asyncio.create_task(pool.run("sleep", [0.3], job_id="beside", timeout=5))
        await until(lambda: sum(pool._taken.values()) == 1)
        got = await pool.run("forge", ["nobody"], job_id="a", timeout=5)
        forged = await pool.run("forge", ["beside"], job_id="b", timeout=5)
        # Whoever answered for a job that he did not have is replaced, before the same job may come to him.
        await until(lambda: pool.counts["retired"] == 2)
        return got.result, forged.result, (await beside).result, pool.counts

    got, forged, beside, counts = pooled(body, size=2)
    assert (got, forged, beside) == ("true", "true", None)
    assert counts["stray_unknown"] == 2
    assert counts["stray_malformed"] == 4


@pytest.mark.spec("EXE-10")
def test_an_answer_that_cannot_be_read_is_an_error_of_its_own_job():
    async def body(pool):
        return await pool.run("malformed", job_id="a", timeout=5)

    got = pooled(body)
    assert (got.status, got.error_type) == (Status.ERROR, "bad_outcome")


def started(*words, folder=None, **policy):
    """A pool whose executors do not start."""
    wrong = Command(words=words, environment={"PATH": os.environ["PATH"]}, folder=folder)
    return ExecutorPool(wrong, policy=PoolPolicy(**{"size": 1, "grace": 0.2} | policy))


MUTE = "import sys; print('up, token=abc', file=sys.stderr); print('hello', flush=True); sys.stdin.read()"


@pytest.mark.spec("EXE-20")
@pytest.mark.parametrize(
    "words, seen, do",
    [
        (
            ("./there-is-no-such-program",),
            "'./there-is-no-such-program' ended before its first answer, with exit code 127: it wrote .*not found",
            "the environment of its Command has the PATH to it",
        ),
        (
            (sys.executable, "-c", "import none_such"),
            r"with exit code 1: it wrote ModuleNotFoundError: No module named 'none_such' \| .*line 1, in <module>",
            "ergon executor check -- ",
        ),
        ((sys.executable, "-c", "print(1 /) or print()"), "with exit code 1: it wrote SyntaxError: ", "check -- "),
        ((sys.executable, "nowhere.py"), "with exit code 2: it wrote .*nowhere.py.*No such file", "check -- "),
        (("true",), "'true' ended before its first answer, with exit code 0: it wrote nothing to stderr", "check -- "),
        (("sh", "-c", "kill -9 $$"), "ended before its first answer, with SIGKILL: it wrote nothing", "check -- "),
        (
            (sys.executable, "-S", "-c", MUTE),
            r"within 1 s \(it wrote 1 other lines to stdout\) and was killed: it wrote up, token=\[hidden\]$",
            "answer each line of stdin with one on stdout, and flush it",
        ),
    ],
)
def test_who_waits_for_an_executor_that_does_not_start_is_told_why_and_what_to_do(words, seen, do, caplog):
    async def main():
        async with started(*words, start_timeout=1 if MUTE in words else 30) as pool, asyncio.timeout(15):
            with pytest.raises(ExecutorNotStarted) as caught:
                await pool.run("echo", [1], job_id="a", timeout=60)
            return caught.value

    error = asyncio.run(main())
    assert re.search(seen, error.seen), error.seen
    assert do in error.do
    assert str(error) == f"{error.seen}; {error.do}"
    # Nothing was sent: it costs no attempt.
    assert (error.later, error.final, error.code) == (True, False, "executor_not_started")
    assert error.retry_after >= 1
    told = next(record for record in caplog.records if event_of(record) == "executor not started")
    assert (told.levelname, told.error) == ("ERROR", str(error))
    assert not [record for record in caplog.records if event_of(record) == "executor ended"]


def test_a_folder_that_is_not_there_is_named():
    async def main():
        async with started("true", folder="/nowhere/at-all") as pool, asyncio.timeout(15):
            with pytest.raises(ExecutorNotStarted, match=r"'true' cannot be started: No such file.*'/nowhere/at-all'"):
                await pool.reserve()

    asyncio.run(main())


def test_all_that_is_told_of_a_failed_start_is_bounded_and_without_credentials(caplog):
    lines = "('x' * 5000 + ' password=hunter2\\n') * 500 + 'Error: dsn=abc\\n' + 'at y\\n' * 20"
    noise = f"import sys; sys.stderr.write({lines})"

    async def main():
        async with started(sys.executable, "-S", "-c", noise, "--token", "abc") as pool, asyncio.timeout(15):
            with pytest.raises(ExecutorNotStarted) as caught:
                await pool.reserve()
            return str(caught.value)

    told = asyncio.run(main())
    assert len(told) <= 500
    # What says most is told first, although much was written after it.
    assert "it wrote Error: dsn=[hidden] | at y | " in told
    record = next(record for record in caplog.records if event_of(record) == "executor not started")
    assert record.line.startswith("Error: dsn=[hidden] | … | at y")
    assert len(record.line) < 4000
    assert "hunter2" not in record.line + told


def test_an_executor_that_does_not_start_is_tried_again_with_waits():
    async def main():
        began, restart = time.monotonic(), RetryPolicy(backoff=0.2, multiplier=2, cap=1)
        async with started("./there-is-no-such-program", restart=restart) as pool:
            await until(lambda: pool.counts["failed_starts"] >= 3)
        return time.monotonic() - began

    assert asyncio.run(main()) >= 0.2 + 0.4


def test_who_comes_between_two_starts_is_told_at_once_and_not_kept():
    async def main():
        restart = RetryPolicy(backoff=60, cap=60)
        async with started("./there-is-no-such-program", restart=restart) as pool, asyncio.timeout(15):
            for _ in range(3):
                with pytest.raises(ExecutorNotStarted) as caught:
                    await pool.reserve()
            return caught.value.retry_after, pool.counts["failed_starts"], len(pool._waiting)

    after, starts, waiting = asyncio.run(main())
    # It comes back when there is something new to be known.
    assert 30 < after <= 60
    assert (starts, waiting) == (1, 0)


@pytest.mark.spec("EXE-20")
def test_one_that_ended_before_it_could_be_asked_is_told_as_well(monkeypatch):
    start = ExecutorProcess.start

    async def too_late(*given):
        made = await start(*given)
        await made.gone
        return made

    monkeypatch.setattr(ExecutorProcess, "start", too_late)

    async def main():
        async with started("./there-is-no-such-program") as pool, asyncio.timeout(15):
            await pool.reserve()

    with pytest.raises(ExecutorNotStarted, match="exit code 127"):
        asyncio.run(main())


def test_one_that_answers_and_leaves_before_it_has_a_job_is_not_started_in_a_hot_loop():
    leaves = "import json, sys; print(json.dumps({'job_id': json.loads(input())['job_id'], 'status': 'success'}))"

    async def main():
        began, restart = time.monotonic(), RetryPolicy(backoff=1, multiplier=1)
        async with started(sys.executable, "-S", "-c", leaves, restart=restart) as pool:
            await until(lambda: pool.counts["started"] >= 3)
        return time.monotonic() - began

    assert asyncio.run(main()) >= 2


def test_a_pool_that_could_not_start_works_as_soon_as_it_can(tmp_path):
    program, works = tmp_path / "late.py", Path(PROGRAM).read_text(encoding="utf-8")

    async def main():
        restart = RetryPolicy(backoff=0.05, multiplier=1)
        async with started(sys.executable, "-S", str(program), "0", restart=restart) as pool, asyncio.timeout(15):
            with pytest.raises(ExecutorNotStarted, match=r"late\.py"):
                await pool.reserve()
            assert pool.unstarted is not None
            program.write_text(works, encoding="utf-8")
            await until(lambda: pool.unstarted is None)
            return (await pool.run("echo", [1], job_id="a", timeout=5)).result

    assert asyncio.run(main()) == 1


def test_one_that_is_up_serves_those_who_wait_while_another_does_not_start(tmp_path):
    first = f"mkdir {tmp_path}/taken || exit 3; exec {sys.executable} -S {PROGRAM} 0"

    async def main():
        async with started("sh", "-c", first, size=2) as pool, asyncio.timeout(15):
            await until(lambda: pool.counts["failed_starts"] and pool._up)
            hold = asyncio.create_task(pool.run("sleep", [0.3], job_id="a", timeout=5))
            beside = asyncio.create_task(pool.run("echo", [2], job_id="b", timeout=5))
            return (await hold).status, (await beside).result

    assert asyncio.run(main()) == (Status.SUCCESS, 2)


@pytest.mark.parametrize("policy", [{"max_jobs": 2}, {"max_age": 0.001}, {"max_memory": 1}])
def test_a_worn_executor_is_replaced_between_jobs(policy):
    async def body(pool):
        return [(await pool.run("pid", job_id=str(n), timeout=5)).result for n in range(4)]

    pids = pooled(body, **policy)
    assert len(set(pids)) == (2 if "max_jobs" in policy else 4)


def test_the_system_limits_what_an_executor_may_use():
    async def body(pool):
        limits = (await pool.run("limits", job_id="a", timeout=5)).result
        return limits, await pool.run("spin", job_id="b", timeout=20)

    limits, spun = pooled(body, limits=Limits(cpu=1, open_files=64))
    assert limits == [64, 1]
    assert spun.error_type == "executor_died"
    assert "SIGKILL" in spun.error_message or "SIGXCPU" in spun.error_message


@pytest.mark.spec("EXE-26")
def test_a_slow_kind_delays_no_other():
    async def body(slow):
        jobs = [asyncio.create_task(slow.run("sleep", [60], job_id=str(n), timeout=60)) for n in range(100)]
        async with ExecutorPool(command(), policy=PoolPolicy(size=1)) as quick:
            await quick.run("echo", [0], job_id="warm", timeout=5)
            began = time.monotonic()
            await quick.run("echo", [1], job_id="a", timeout=5)
            took = time.monotonic() - began
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        return took

    assert pooled(body, grace=0.0) < 0.3


# -- what is counted ------------------------------------------------------------------------------


def figures(name):
    """Every metric of the pool *name*, as somebody who collects sees it."""
    registry, found = registry_of(), {}
    for metric in (each for each in METRICS if Attribute.EXECUTOR in each.attributes):
        for labels, value in registry.read(metric):
            if labels.pop(Attribute.EXECUTOR) == name:
                found[metric.name.removeprefix("ergon."), *labels.values()] = value
    return found


@pytest.mark.spec("EXE-10")
def test_a_pool_tells_what_it_does_and_what_it_did():
    async def main():
        policy = PoolPolicy(size=1, grace=0.0)
        async with ExecutorPool(command(), policy=policy, name="counted") as pool:
            await pool.run("echo", [1], job_id="a", timeout=5)
            busy = asyncio.create_task(pool.run("sleep", [0.3], job_id="b", timeout=5))
            await until(lambda: sum(pool._taken.values()) == 1)
            waits = asyncio.create_task(pool.run("malformed", job_id="c", timeout=5))
            await until(lambda: len(pool._waiting) == 1)
            meanwhile = figures("counted")
            await asyncio.gather(busy, waits)
            await pool.run("spin", job_id="d", timeout=0.05)
            await pool.run("crash", job_id="e", timeout=5)
            await pool.run("forge", ["nobody"], job_id="f", timeout=5)
            live = figures("counted")
        return meanwhile, live, figures("counted")

    meanwhile, live, after = asyncio.run(main())
    assert [meanwhile["executors",], meanwhile["executor.jobs",], meanwhile["executor.jobs.waiting",]] == [1, 1, 1]
    # What one says that still runs is counted already.
    assert (live["executor.strays", "unknown"], live["executor.strays", "malformed"]) == (1, 2)
    told = {name[0]: value for name, value in after.items() if len(name) == 1}
    waited = told.pop("executor.waits.duration")
    assert 0.1 < waited < 15
    assert told.pop("executors.started") >= 3
    assert told == {"executor.waits": 6, "executors.killed": 1, "executors.died": 1, "executors.retired": 1}
    assert after["executor.strays", "unknown"] == 1


# -- nobody is left behind ------------------------------------------------------------------------


def test_a_closed_pool_leaves_nobody_and_takes_nothing():
    kept = []

    async def body(pool):
        await pool.run("child", job_id="a", timeout=5)
        kept.append(pool)
        return pool.pids

    pids = pooled(body, *STUBBORN, size=2)
    assert all(gone(pid) for pid in pids)
    with pytest.raises(PoolClosed):
        asyncio.run(kept[0].run("echo", [1], job_id="b", timeout=5))


def test_pools_may_share_a_guard():
    guard = Guard()

    async def main():
        first = ExecutorPool(command(), policy=PoolPolicy(size=1), guard=guard)
        second = ExecutorPool(command(), policy=PoolPolicy(size=1), guard=guard)
        async with first:
            async with second:
                await second.run("echo", [1], job_id="a", timeout=5)
            return (await first.run("echo", [2], job_id="b", timeout=5)).result

    assert asyncio.run(main()) == 2
    assert not gone(guard.pid)
    guard.close()
    assert gone(guard.pid)


def test_a_place_is_kept_for_whoever_reserved_it():
    async def body(pool):
        with await pool.reserve() as place:
            assert pool.reserve_now() is None
            waiting = asyncio.create_task(pool.run("echo", [2], job_id="b", timeout=5))
            await asyncio.sleep(0)
            first = await pool.run("echo", [1], job_id="a", timeout=5, place=place)
            again = await pool.run("echo", [3], job_id="c", timeout=5, place=place)
            assert not waiting.done()
        return first.result, again.result, (await waiting).result

    assert pooled(body) == (1, 3, 2)


def test_a_place_that_nobody_waits_for_is_free_at_once():
    async def body(pool):
        (await pool.reserve()).__exit__()
        with pool.reserve_now() as place:
            return (await pool.run("echo", [1], job_id="a", timeout=5, place=place)).result

    assert pooled(body) == 1


def test_an_executor_that_dies_in_a_reserved_place_costs_the_job_nothing():
    async def body(pool):
        with await pool.reserve() as place:
            os.kill(place.process.pid, signal.SIGKILL)
            await asyncio.shield(place.process.gone)
            with pytest.raises(ExecutorReleased) as released:
                await pool.run("echo", [1], job_id="a", timeout=5, place=place)
        assert released.value.later
        return (await pool.run("echo", [2], job_id="b", timeout=5)).result

    assert pooled(body) == 2


@pytest.mark.spec("EXE-18")
def test_a_job_is_killed_on_demand_and_no_other():
    async def body(pool):
        spinning = asyncio.create_task(pool.run("spin", job_id="a", timeout=None))
        beside = asyncio.create_task(pool.run("sleep", [0.5], job_id="b", timeout=None))
        await until(lambda: {"a", "b"} <= {job for process in pool._running for job in process._flights})
        assert not pool.kill("nobody")
        assert pool.kill("a")
        return await spinning, await beside, pool.counts["killed"]

    killed, beside, counted = pooled(body, size=2)
    assert (killed.status, killed.error_type, beside.status, counted) == (Status.ERROR, "killed", Status.SUCCESS, 1)


def test_the_pool_runs_on_uvloop_too():
    async def main():
        async with ExecutorPool(command(*STUBBORN), policy=PoolPolicy(size=1, grace=0.1)) as pool:
            echoed = await pool.run("echo", ["x" * 2**20], job_id="a", timeout=10)
            return len(echoed.result), (await pool.run("spin", job_id="b", timeout=0.2)).error_type

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == (2**20, "hard_timeout")


ORCHESTRATOR = """
import asyncio, sys
from ergon_framework.executor.pool import ExecutorPool, PoolPolicy
from ergon_framework.executor.process import Command

async def main():
    command = Command(words=tuple(sys.argv[1:]), environment={"PATH": "/usr/bin:/bin"})
    async with ExecutorPool(command, policy=PoolPolicy(size=2)) as pool:
        child = (await pool.run("child", job_id="a", timeout=5)).result
        away = (await pool.run("session", job_id="c", timeout=5)).result
        spinning = asyncio.create_task(pool.run("spin", job_id="b", timeout=60))
        while not pool._figures().in_flight:
            await asyncio.sleep(0)
        print(pool._guard.pid, child, away, *pool.pids, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.spec("EXE-21", "SEC-22")
def test_executors_die_with_their_orchestrator_however_stubborn_they_are():
    words = [sys.executable, "-c", ORCHESTRATOR, sys.executable, "-S", PROGRAM, *STUBBORN]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as orchestrator:
        pids = [int(word) for word in orchestrator.stdout.readline().split()]
        assert len(pids) == 5
        assert not any(gone(pid) for pid in pids)
        orchestrator.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < end, [pid for pid in pids if not gone(pid)]
        time.sleep(0.01)


@pytest.mark.spec("EXE-21")
def test_a_guard_that_is_killed_is_replaced_and_knows_all_groups():
    guard = Guard()
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as sleeper:
        guard.add(sleeper.pid)
        first = guard.pid
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 10
        while guard.pid == first or guard._lock.acquire(blocking=False) is False:
            assert time.monotonic() < end
            time.sleep(0.01)
        guard._lock.release()
        guard.close()
        assert sleeper.wait(10) == -signal.SIGKILL


@pytest.mark.spec("EXE-21")
def test_a_guard_that_hangs_is_killed_and_replaced_and_knows_all_groups():
    guard = Guard(patience=0.3)
    with sleeping() as first, sleeping() as second:
        guard.add(first.pid)
        hanging = guard.pid
        os.kill(hanging, signal.SIGSTOP)
        within(10, lambda: guard.add(second.pid))
        assert gone(hanging)
        assert guard.pid != hanging
        guard.close()
        assert [sleeper.wait(10) for sleeper in (first, second)] == [-signal.SIGKILL] * 2


@pytest.mark.spec("EXE-21")
def test_a_guard_that_hangs_at_its_end_leaves_nobody_either():
    guard = Guard(patience=0.3)
    with sleeping() as sleeper:
        guard.add(sleeper.pid)
        os.kill(guard.pid, signal.SIGSTOP)
        within(10, guard.close)
        assert sleeper.wait(10) == -signal.SIGKILL


def test_a_pool_whose_guard_cannot_be_reached_tries_again(caplog):
    guard = Guard()
    guard._closed = True  # so that nobody replaces it
    os.kill(guard.pid, signal.SIGKILL)

    async def main():
        policy = PoolPolicy(size=1, restart=RetryPolicy(backoff=0.01))
        async with ExecutorPool(command(), policy=policy, guard=guard) as pool:
            await until(lambda: pool.counts["failed_starts"] >= 2 or pool._keepers[0].done())
            return pool._keepers[0].done()

    assert asyncio.run(main()) is False
    assert "the guard of the executors cannot be reached" in caplog.records[0].error
    guard.close()


def test_a_guard_forgets_what_it_is_told_to_forget():
    guard = Guard()
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as sleeper:
        guard.add(sleeper.pid)
        guard.remove(sleeper.pid)
        guard.close()
        assert sleeper.poll() is None
        sleeper.kill()


def test_nothing_is_started_for_an_orchestrator_that_dies_before_the_guard_knows(tmp_path):
    # The gate: without its line the command is never executed.
    with subprocess.Popen([*_GATE, "touch", tmp_path / "ran"], stdin=subprocess.PIPE) as gate:
        gate.stdin.close()
        assert gate.wait(10) != 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.spec("EXE-20")
def test_who_waits_for_a_place_gives_up_and_was_not_begun():
    async def body(pool):
        await pool.tried()
        with await pool.reserve():
            began = time.monotonic()
            with pytest.raises(ExecutorsBusy, match=r"for 0\.2 s all executors were busy") as caught:
                await pool.reserve(Patience(busy=0.2, start=20.0))
            taken = time.monotonic() - began
        with await pool.reserve(Patience(busy=0.0, start=0.0)):
            return caught.value, taken, pool.places

    error, taken, places = pooled(body)
    assert (error.later, error.final, error.code, error.retry_after, places) == (True, False, "executors_busy", 1.0, 1)
    assert 0.2 <= taken < 5


@pytest.mark.spec("EXE-20")
def test_who_waits_for_a_start_is_not_sent_away_as_if_all_were_busy():
    async def body(pool):
        with await pool.reserve(Patience(busy=0.01, start=20.0)):
            pass
        return True

    assert pooled(body, "0.5")
