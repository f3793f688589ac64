"""The executor keeps the standard one's contract, except that nothing waits for its threads at exit."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
from concurrent.futures import Executor, wait

import pytest

from ergon_framework.engine.daemon_executor import DaemonExecutor


@pytest.mark.spec("CON-11", "PRO-06")
def test_the_executor_returns_results_and_raises_errors() -> None:
    with DaemonExecutor(2) as executor:
        assert isinstance(executor, Executor)
        assert executor.submit(divmod, 7, 2).result(5) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            executor.submit(divmod, 7, 0).result(5)
        assert list(executor.map(abs, [-1, -2, -3])) == [1, 2, 3]


@pytest.mark.spec("CON-11")
def test_the_executor_runs_at_most_size_threads() -> None:
    executor = DaemonExecutor(2)
    gate, entered = threading.Event(), threading.Semaphore(0)

    def block() -> str:
        entered.release()
        gate.wait(5)
        return threading.current_thread().name

    futures = [executor.submit(block) for _ in range(6)]
    assert entered.acquire(timeout=5)
    assert entered.acquire(timeout=5)
    assert not entered.acquire(blocking=False), "the third waits for a thread"
    gate.set()
    assert len({future.result(5) for future in futures}) == 2
    assert executor.thread_count == 2
    executor.shutdown()


def test_an_idle_thread_is_reused() -> None:
    with DaemonExecutor(8) as executor:
        done = threading.Event()
        executor.submit(done.set).result(5)
        # The thread counts as idle a moment after its future is done: ask until it does.
        for _ in range(50):
            executor.submit(int).result(5)
        assert executor.thread_count < 8


def test_without_a_limit_threads_are_added_as_needed() -> None:
    executor = DaemonExecutor()
    barrier = threading.Barrier(5)
    futures = [executor.submit(barrier.wait, 5) for _ in range(5)]
    assert sorted(future.result(5) for future in futures) == [0, 1, 2, 3, 4]
    executor.shutdown()


def test_submit_after_shutdown_is_rejected() -> None:
    executor = DaemonExecutor(1)
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(int)


def test_shutdown_finishes_waiting_jobs_unless_it_cancels_them() -> None:
    for cancel in (False, True):
        executor = DaemonExecutor(1)
        gate, entered = threading.Event(), threading.Event()
        first = executor.submit(lambda entered=entered, gate=gate: (entered.set(), gate.wait(5)))
        assert entered.wait(5)
        waiting = [executor.submit(int) for _ in range(3)]
        executor.submit_nowait(int)
        executor.shutdown(wait=False, cancel_futures=cancel)
        gate.set()
        wait([first, *waiting], 5)
        assert [future.cancelled() for future in waiting] == [cancel] * 3
        executor.shutdown(wait=True)


def test_a_future_cancelled_before_its_turn_does_not_run() -> None:
    executor = DaemonExecutor(1)
    gate, ran = threading.Event(), []
    executor.submit(gate.wait, 5)
    future = executor.submit(ran.append, 1)
    assert future.cancel()
    gate.set()
    executor.shutdown()
    assert ran == []


def test_a_job_runs_in_a_copy_of_the_callers_context() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("caller's")
    with DaemonExecutor(1) as executor:
        assert executor.submit(variable.get).result(5) == "caller's"
        executor.submit(variable.set, "thread's").result(5)
    assert variable.get() == "caller's"


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_rejected(size: int) -> None:
    with pytest.raises(ValueError, match=f"not {size}"):
        DaemonExecutor(size)


@pytest.mark.spec("CON-11")
def test_a_hung_thread_does_not_block_process_exit() -> None:
    program = (
        "import threading\n"
        "from ergon_framework.engine.daemon_executor import DaemonExecutor\n"
        "entered = threading.Event()\n"
        "DaemonExecutor(1).submit_nowait(lambda: (entered.set(), threading.Event().wait()))\n"
        "assert entered.wait(5)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20)
