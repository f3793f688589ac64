"""Threads of our own: few, reused, and no obstacle to leaving."""

from __future__ import annotations

import subprocess
import sys
import threading

from ergon_framework._util.daemon_executor import DaemonExecutor


def get_job_thread(daemons):
    """The thread that a job ran on."""
    done, threads = threading.Event(), []

    def job():
        threads.append(threading.current_thread())
        done.set()

    daemons.submit(job)
    assert done.wait(10.0)
    return threads[0]


def join_all(threads):
    for thread in threads:
        thread.join(10.0)
    return [thread for thread in threads if thread.is_alive()]


def test_jobs_run_on_at_most_size_daemon_threads():
    daemons = DaemonExecutor("few", size=2)
    gate, started, threads, lock = threading.Event(), threading.Semaphore(0), set(), threading.Lock()

    def job():
        with lock:
            threads.add(threading.current_thread())
        started.release()
        gate.wait(10.0)

    for _ in range(5):
        daemons.submit(job)
    for _ in range(2):
        assert started.acquire(timeout=10.0)
    assert len(daemons._jobs) == 3
    gate.set()
    for _ in range(3):
        assert started.acquire(timeout=10.0)
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)
    daemons.close()
    assert join_all(threads) == []


def test_threads_exit_at_close_and_a_later_job_still_runs():
    daemons = DaemonExecutor("few", size=2)
    first = get_job_thread(daemons)
    daemons.close()
    assert join_all([first]) == []
    second = get_job_thread(daemons)
    assert join_all([second]) == []
    daemons.open()
    third = get_job_thread(daemons)
    assert third.is_alive()
    daemons.close()
    assert join_all([third]) == []


def test_a_hung_job_does_not_block_process_exit():
    code = (
        "import threading\n"
        "from ergon_framework._util.daemon_executor import DaemonExecutor\n"
        "begun = threading.Event()\n"
        "DaemonExecutor('hung', size=1).submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait()"
    )
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60, check=False).returncode == 0
