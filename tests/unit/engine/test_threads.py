"""The thread driver with threads that never start: the test runs each of them, one step at a time."""

from __future__ import annotations

import contextvars
import importlib.util
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from ergon_framework import scope
from ergon_framework.clock import Clock, RealTime
from ergon_framework.engine import daemon_executor
from ergon_framework.engine.daemon_executor import DaemonExecutor
from ergon_framework.engine.effects import NEVER, Call, Err, Interrupted, Ok, Script, Sleep
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction


class FakeInbox:
    """An inbox that counts its calls; *get* calls *on_get*."""

    def __init__(self) -> None:
        self.put_count = 0
        self.get_count = 0
        self.on_get: Callable[[], object] = list

    def put(self, item: Any) -> None:
        self.put_count += 1

    def get(self) -> Any:
        self.get_count += 1
        self.on_get()


class FakeWakeup:
    """An alarm that writes down who waits for how long, and wakes everybody at once."""

    def __init__(self) -> None:
        self.set_count = 0
        self.waits: list[float | None] = []
        self.on_wait: Callable[[], object] = list

    def set(self) -> None:
        self.set_count += 1

    def wait(self, seconds: float | None) -> None:
        self.waits.append(seconds)
        assert len(self.waits) < 9, "this wait leads nowhere"
        self.on_wait()


class FakeThreadClock:
    """Waiting in which nothing happens by itself: threads are kept and not started."""

    def __init__(self) -> None:
        self.now = 10.0
        self.time_source = Clock(monotonic=lambda: self.now)
        self.inboxes: list[FakeInbox] = []
        self.wakeups: list[FakeWakeup] = []
        self.threads: list[threading.Thread] = []
        self.joined: list[str] = []
        self.ended_count = 0
        #: How many more threads the machine has.
        self.max_threads = 99

    def create_inbox(self) -> FakeInbox:
        self.inboxes.append(FakeInbox())
        return self.inboxes[-1]

    def create_wakeup(self) -> FakeWakeup:
        self.wakeups.append(FakeWakeup())
        return self.wakeups[-1]

    def start(self, thread: threading.Thread) -> None:
        if len(self.threads) == self.max_threads:
            raise RuntimeError("can't start new thread")
        self.threads.append(thread)
        thread.join = lambda timeout=None: self.joined.append(thread.name)  # type: ignore[method-assign]

    def thread_ended(self) -> None:
        self.ended_count += 1


@pytest.fixture
def fake_clock() -> FakeThreadClock:
    return FakeThreadClock()


def run_with_timeout(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` on a thread of its own, so that one that never ends is noticed."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(1)


# -- the executor -------------------------------------------------------------------------------


def test_the_first_job_starts_one_daemon_thread_and_later_jobs_wait_for_it(fake_clock: FakeThreadClock) -> None:
    executor, ran = DaemonExecutor(3, name="x", waiting=fake_clock), []
    for job in "abc":
        executor.submit_nowait(ran.append, job)
    (thread,) = fake_clock.threads
    assert (executor.thread_count, thread.daemon, ran) == (1, True, [])
    assert thread.name.startswith("x-")
    assert thread.name.endswith("-0")
    assert executor._run_jobs() is True
    assert (ran, executor.thread_count) == (["a", "b", "c"], 2), "it called for one more, and not for each"
    assert fake_clock.threads[1].name == thread.name[:-1] + "1"


def test_a_thread_without_more_jobs_starts_no_other(fake_clock: FakeThreadClock) -> None:
    executor, ran = DaemonExecutor(3, waiting=fake_clock), []
    executor.submit_nowait(ran.append, "a")
    assert executor._run_jobs() is True
    assert (ran, executor.thread_count, fake_clock.inboxes[0].put_count) == (["a"], 1, 0)


def test_an_idle_thread_is_woken_rather_than_another_started(fake_clock: FakeThreadClock) -> None:
    executor, ran = DaemonExecutor(3, waiting=fake_clock), []
    executor.submit_nowait(ran.append, "a")
    executor._run_jobs()
    executor.submit_nowait(ran.append, "b")
    executor.submit_nowait(ran.append, "c")
    assert (executor.thread_count, fake_clock.inboxes[0].put_count) == (1, 1), "one wake is enough for both"
    executor.submit_nowait(lambda: executor.submit_nowait(ran.append, "e"))
    executor._run_jobs()
    assert (executor.thread_count, fake_clock.inboxes[0].put_count) == (2, 1), "no thread was idle for another job"
    assert ran == ["a", "b", "c", "e"]


def test_a_job_that_arrives_while_one_runs_starts_a_thread(fake_clock: FakeThreadClock) -> None:
    executor, seen = DaemonExecutor(2, waiting=fake_clock), []

    def handler() -> None:
        executor.submit_nowait(seen.append, "inner")
        seen.append(executor.thread_count)

    executor.submit_nowait(handler)
    executor._run_jobs()
    assert seen == [2, "inner"]


def test_at_the_thread_limit_a_job_waits(fake_clock: FakeThreadClock) -> None:
    executor, seen = DaemonExecutor(1, waiting=fake_clock), []

    def handler() -> None:
        executor.submit_nowait(seen.append, "inner")
        seen.append(executor.thread_count)

    executor.submit_nowait(handler)
    executor._run_jobs()
    assert (seen, fake_clock.inboxes[0].put_count) == ([1, "inner"], 0)


def test_a_job_is_rejected_if_no_thread_can_be_started(fake_clock: FakeThreadClock) -> None:
    executor, ran = DaemonExecutor(2, waiting=fake_clock), []
    fake_clock.max_threads = 0
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.submit_nowait(ran.append, "refused")
    assert executor.thread_count == 0
    fake_clock.max_threads = 1
    executor.submit_nowait(ran.append, "taken")
    executor._run_jobs()
    assert (ran, executor.thread_count) == (["taken"], 1)


def test_a_job_waits_for_an_existing_thread_if_no_other_can_be_started(fake_clock: FakeThreadClock) -> None:
    executor, ran = DaemonExecutor(3, waiting=fake_clock), []
    fake_clock.max_threads = 1
    executor.submit_nowait(lambda: (executor.submit_nowait(ran.append, "a"), ran.append(executor.thread_count)))
    executor._run_jobs()
    assert (ran, executor.thread_count) == ([1, "a"], 1)
    fake_clock.max_threads = 2
    executor.submit_nowait(lambda: executor.submit_nowait(ran.append, "b"))
    executor._run_jobs()
    assert (ran[2:], executor.thread_count) == (["b"], 2), "no thread counts as starting"


def test_shutdown_wakes_idle_threads_once_and_joins_all(fake_clock: FakeThreadClock) -> None:
    executor = DaemonExecutor(4, waiting=fake_clock)
    for _ in range(2):
        executor.submit_nowait(lambda: executor.submit_nowait(int))
    executor._run_jobs()
    executor._run_jobs()
    started = [thread.name for thread in fake_clock.threads]
    assert len(started) == 2
    executor.shutdown(wait=False)
    assert (fake_clock.inboxes[0].put_count, fake_clock.joined) == (2, [])
    executor.shutdown()
    assert (fake_clock.inboxes[0].put_count, fake_clock.joined) == (2, started)


def test_after_shutdown_a_thread_finishes_waiting_jobs_and_ends(fake_clock: FakeThreadClock) -> None:
    executor, ran = DaemonExecutor(1, waiting=fake_clock), []
    executor.submit_nowait(ran.append, "a")
    executor.shutdown(wait=False)
    assert executor._run_jobs() is False
    assert ran == ["a"]
    executor.shutdown(wait=False)
    assert fake_clock.inboxes[0].put_count == 0, "it is not idle, so it needs no wake-up"
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit_nowait(ran.append, "b")
    assert executor._run_jobs() is False
    assert ran == ["a"], "what was refused was not kept"


def test_shutdown_cancels_waiting_futures_only_with_cancel_futures(fake_clock: FakeThreadClock) -> None:
    ran: list[str] = []
    for options, cancelled in (({}, False), ({"cancel_futures": True}, True)):
        executor = DaemonExecutor(1, waiting=fake_clock)
        future = executor.submit(ran.append, "submitted")
        executor.submit_nowait(ran.append, "executed")
        executor.shutdown(wait=False, **options)
        assert future.cancelled() is cancelled
        assert executor._run_jobs() is False
    assert ran == ["submitted", "executed"]


def test_a_worker_thread_blocks_between_jobs_and_reports_when_it_exits(fake_clock: FakeThreadClock) -> None:
    executor, ran = DaemonExecutor(1, waiting=fake_clock), []
    fake_clock.inboxes[0].on_get = lambda: (ran.append(fake_clock.ended_count), executor.shutdown(wait=False))
    executor.submit_nowait(ran.append, "a")
    run_with_timeout(executor._work)
    assert (ran, fake_clock.inboxes[0].get_count, fake_clock.ended_count) == (["a", 0], 1, 1)


def test_a_thread_does_its_jobs_before_it_ends(fake_clock: FakeThreadClock) -> None:
    executor, ran = DaemonExecutor(1, waiting=fake_clock), []
    executor.submit_nowait(ran.append, "a")
    executor.shutdown(wait=False)
    executor._work()
    assert (ran, fake_clock.inboxes[0].get_count, fake_clock.ended_count) == (["a"], 0, 1)


def test_an_idle_thread_keeps_nothing_of_its_last_job(fake_clock: FakeThreadClock) -> None:
    class Payload: ...

    executor, payloads = DaemonExecutor(1, waiting=fake_clock), []
    payload = Payload()
    payload_ref = weakref.ref(payload)
    executor.submit_nowait(id, payload)
    del payload

    def record_payload() -> None:
        payloads.append(payload_ref())
        executor.shutdown(wait=False)

    fake_clock.inboxes[0].on_get = record_payload
    run_with_timeout(executor._work)
    assert payloads == [None]


def test_submit_takes_keywords_and_returns_a_future(fake_clock: FakeThreadClock) -> None:
    executor = DaemonExecutor(1, waiting=fake_clock)
    good: Future[int] = executor.submit(int, "11", base=2)
    bad = executor.submit(int, "x")
    dropped = executor.submit(pytest.fail, "it was cancelled")
    dropped.cancel()
    executor._run_jobs()
    assert good.result(0) == 3
    assert isinstance(bad.exception(0), ValueError)
    assert dropped.cancelled()


def test_system_exit_of_a_job_is_raised_by_its_future(fake_clock: FakeThreadClock) -> None:
    executor = DaemonExecutor(1, waiting=fake_clock)

    def exit_process() -> None:
        raise SystemExit

    future = executor.submit(exit_process)
    executor._run_jobs()
    assert isinstance(future.exception(0), SystemExit)


def test_one_thread_is_a_valid_size() -> None:
    assert DaemonExecutor(1, waiting=FakeThreadClock()).thread_count == 0


def test_executors_are_named_ergon_and_numbered_from_one(fake_clock: FakeThreadClock) -> None:
    spec = importlib.util.find_spec(daemon_executor.__name__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    for number in (1, 2):
        fresh.DaemonExecutor(1, waiting=fake_clock).submit_nowait(int)
        assert fake_clock.threads[-1].name == f"ergon-{number}-0"


# -- waiting ------------------------------------------------------------------------------------


def test_a_wakeup_that_is_not_set_waits() -> None:
    wakeup, began = RealTime().create_wakeup(), time.monotonic()
    wakeup.wait(0.1)
    assert time.monotonic() - began >= 0.09
    wakeup.set()
    wakeup.set()
    wakeup.wait(1000.0)


def test_a_wakeup_waits_for_its_timeout_and_is_cleared() -> None:
    wakeup: Any = RealTime().create_wakeup()
    lock_calls: list[Any] = []

    class Lock:
        def acquire(self, *, timeout: float) -> None:
            lock_calls.append(timeout)

        def release(self) -> None:
            lock_calls.append("rung")

    wakeup._lock = Lock()
    wakeup.set()
    wakeup.wait(3.0)
    assert lock_calls == ["rung", 3.0]
    lock_calls.clear()
    wakeup.wait(None)
    wakeup.wait(1e300)
    wakeup.wait(-1e-9)
    assert lock_calls == [-1, threading.TIMEOUT_MAX, 0.0], (
        "longer waits are capped, and a deadline in the past does not mean 'forever'"
    )


def test_a_wakeup_that_is_set_twice_ends_one_wait() -> None:
    wakeup: Any = RealTime().create_wakeup()
    wakeup.set()
    wakeup.set()
    wakeup.wait(2.0)
    assert wakeup._lock.locked()


def test_real_threads_are_started() -> None:
    ran = threading.Event()
    RealTime().start(threading.Thread(target=ran.set, daemon=True))
    assert ran.wait(1)


def test_an_inbox_returns_its_items() -> None:
    inbox = RealTime().create_inbox()
    inbox.put("x")
    assert inbox.get() == "x"


# -- the driver ---------------------------------------------------------------------------------


class ThreadsHarness:
    """A thread driver whose threads do nothing by themselves."""

    def __init__(self, fake_clock: FakeThreadClock) -> None:
        self.fake_clock = fake_clock
        self.driver = ThreadDriver(2, waiting=fake_clock)
        self.timer_wakeup, self.end_wakeup = fake_clock.wakeups
        self.answers: list[Any] = []

    def make_script(self, *effects: Any) -> Script[str]:
        for effect in effects:
            self.answers.append((yield effect))
        return "end"

    def run_pending(self) -> None:
        """What the threads would do now."""
        self.driver._workers._run_jobs()
        self.driver._helpers._run_jobs()


@pytest.fixture
def harness(fake_clock: FakeThreadClock) -> ThreadsHarness:
    return ThreadsHarness(fake_clock)


def get_thread_names(fake_clock: FakeThreadClock) -> list[str]:
    return [thread.name.rsplit("-", 2)[0] for thread in fake_clock.threads]


@pytest.mark.parametrize(
    "counted, bodies, name", [(True, 0, "worker"), (True, 1, "helper"), (False, 0, "helper"), (False, 1, "helper")]
)
def test_a_counted_script_runs_on_a_worker_unless_a_call_occupies_it(
    fake_clock: FakeThreadClock, harness: ThreadsHarness, counted: bool, bodies: int, name: str
) -> None:
    slot = harness.driver.start(harness.make_script(), notify=harness.driver.create_mailbox(), counted=counted)
    harness.run_pending()
    fake_clock.threads.clear()
    slot.abandoned_calls = bodies
    harness.driver = ThreadDriver(2, waiting=fake_clock)
    harness.driver.resume(slot, None)
    assert get_thread_names(fake_clock) == [f"ergon-{name}"]


def test_a_driver_runs_at_most_its_number_of_counted_scripts(
    fake_clock: FakeThreadClock, harness: ThreadsHarness
) -> None:
    driver = harness.driver
    names: list[int] = []

    def handler() -> None:
        # Each occupies its thread while the next one is begun.
        if len(names) < 4:
            names.append(driver._workers.thread_count)
            driver._workers._run_jobs()

    for _ in range(4):
        driver.start(harness.make_script(Call("x", handler, ())), notify=driver.create_mailbox(), counted=True)
    driver._workers._run_jobs()
    assert max(names) == 2


def test_a_handler_runs_in_its_scope_and_its_context(harness: ThreadsHarness) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    context = contextvars.copy_context()
    context.run(variable.set, "given")
    call_scope = Scope(Transaction(id="1"), "x", 0)

    def handler(number: int) -> Any:
        return number, variable.get(), scope.current()

    effects = Call("x", handler, (1,), NEVER, call_scope, context), Call("x", handler, (2,)), Call("x", divmod, (1, 0))
    harness.driver.start(harness.make_script(*effects))
    harness.run_pending()
    first, second, third = harness.answers
    assert (first.value, second.value) == ((1, "given", call_scope), (2, "unset", None))
    assert isinstance(third, Err)
    assert isinstance(third.error, ZeroDivisionError)
    assert harness.driver._result == ("end", None)


def test_the_result_of_an_abandoned_call_is_ignored(harness: ThreadsHarness) -> None:
    driver = harness.driver
    slot = driver.start(harness.make_script(Call("x", lambda: driver.interrupt(slot), ()), Sleep(NEVER)))
    driver._helpers._run_jobs()
    (stopped,) = harness.answers
    assert isinstance(stopped, Interrupted)
    assert (stopped.call.exited, driver.late_results, slot.abandoned_calls) == (True, 1, 0)


def test_the_timer_waits_for_the_next_deadline(harness: ThreadsHarness) -> None:
    driver = harness.driver
    harness.timer_wakeup.on_wait = driver.close
    run_with_timeout(driver._run_timer)
    assert harness.timer_wakeup.waits == [None]
    driver._run_timer()
    assert harness.timer_wakeup.waits == [None], "a closed driver needs no watcher"


@pytest.mark.parametrize("elapsed, seconds", [(0.0, 5.5), (5.5, 0.0), (6.0, 0.0)])
def test_the_timer_never_waits_for_a_negative_time(
    fake_clock: FakeThreadClock, harness: ThreadsHarness, elapsed: float, seconds: float
) -> None:
    driver = harness.driver
    driver.start(harness.make_script(Sleep(15.5)))
    driver._helpers._run_jobs()
    assert harness.timer_wakeup.set_count == 1, "an earlier deadline wakes it"
    harness.timer_wakeup.on_wait = driver.close
    readings: list[float] = []

    def clock() -> float:
        # The first look at it finds nothing due; then time goes by.
        readings.append(fake_clock.now)
        return fake_clock.now if len(readings) == 1 else fake_clock.now + elapsed

    driver.monotonic = clock
    run_with_timeout(driver._run_timer)
    assert harness.timer_wakeup.waits == [seconds]


def test_the_first_result_is_kept_and_every_end_wakes_the_caller(harness: ThreadsHarness) -> None:
    error = LookupError("first")
    harness.driver._finish(None, error)
    harness.driver._finish("second", None)
    assert (harness.driver._result, harness.end_wakeup.set_count) == ((None, error), 2)


def test_close_ends_the_threads_without_joining_them(fake_clock: FakeThreadClock, harness: ThreadsHarness) -> None:
    driver = harness.driver
    driver.start(harness.make_script(Sleep(NEVER)))
    driver.start(harness.make_script(Sleep(NEVER)), notify=driver.create_mailbox(), counted=True)
    harness.run_pending()
    driver._close()
    assert (driver.closed, harness.timer_wakeup.set_count, fake_clock.joined) == (True, 1, [])
    assert [inbox.put_count for inbox in fake_clock.inboxes] == [1, 1]
    driver.resume(driver.start(harness.make_script()), None)
    assert len(fake_clock.threads) == 2


def test_a_closed_driver_starts_nothing(fake_clock: FakeThreadClock, harness: ThreadsHarness) -> None:
    harness.driver.close()
    harness.driver.start(harness.make_script())
    assert fake_clock.threads == []


def test_a_resume_after_the_end_is_dropped(harness: ThreadsHarness) -> None:
    harness.driver._helpers.shutdown(wait=False)
    harness.driver.start(harness.make_script())
    assert harness.answers == []


def test_a_run_returns_the_value_of_its_script(harness: ThreadsHarness) -> None:
    driver = harness.driver
    harness.timer_wakeup.on_wait = driver.close
    harness.end_wakeup.on_wait = driver._helpers._run_jobs
    assert run_with_timeout(driver.run, harness.make_script(Call("x", abs, (-1,)))) == "end"
    assert isinstance(harness.answers[0], Ok)
    assert (harness.end_wakeup.waits, harness.timer_wakeup.waits) == ([None], [None])
    assert harness.timer_wakeup.set_count == 1, "the end wakes the watcher"


def test_a_run_raises_the_error_of_a_script(harness: ThreadsHarness) -> None:
    def fail() -> Script[None]:
        yield from ()
        raise LookupError("defect")

    harness.timer_wakeup.on_wait = harness.driver.close
    harness.end_wakeup.on_wait = harness.driver._helpers._run_jobs
    with pytest.raises(LookupError, match="defect"):
        run_with_timeout(harness.driver.run, fail())
    assert harness.timer_wakeup.set_count == 1


@pytest.mark.spec("CON-35")
def test_one_ctrl_c_stops_the_script_and_is_raised_at_the_end(harness: ThreadsHarness) -> None:
    driver = harness.driver

    def press_ctrl_c() -> None:
        harness.end_wakeup.on_wait = driver._helpers._run_jobs
        raise KeyboardInterrupt

    harness.timer_wakeup.on_wait = driver.close
    harness.end_wakeup.on_wait = press_ctrl_c
    with pytest.raises(KeyboardInterrupt):
        run_with_timeout(driver.run, harness.make_script(Call("x", abs, (1,))))
    assert [type(answer) for answer in harness.answers] == [Interrupted]
    assert len(harness.end_wakeup.waits) == 2


def test_a_second_ctrl_c_ends_the_run_immediately(harness: ThreadsHarness) -> None:
    def press_ctrl_c() -> None:
        raise KeyboardInterrupt

    harness.end_wakeup.on_wait = press_ctrl_c
    with pytest.raises(KeyboardInterrupt):
        run_with_timeout(harness.driver.run, harness.make_script(Sleep(NEVER)))
    assert (len(harness.end_wakeup.waits), harness.driver.closed, harness.timer_wakeup.set_count) == (2, True, 1)


def test_an_exception_in_the_callers_wait_ends_the_run(harness: ThreadsHarness) -> None:
    def raise_exit() -> None:
        raise SystemExit

    harness.end_wakeup.on_wait = raise_exit
    with pytest.raises(SystemExit):
        run_with_timeout(harness.driver.run, harness.make_script(Sleep(NEVER)))
    assert (len(harness.end_wakeup.waits), harness.driver.closed, harness.timer_wakeup.set_count) == (1, True, 1)


def test_a_run_fails_if_no_thread_can_be_started(fake_clock: FakeThreadClock, harness: ThreadsHarness) -> None:
    fake_clock.max_threads = 0
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_with_timeout(harness.driver.run, harness.make_script())
    assert harness.driver.closed


def test_a_signal_is_urgent_and_a_stop_interrupts_the_root(harness: ThreadsHarness) -> None:
    driver = harness.driver
    box = driver.create_mailbox()
    driver.put_from_any_thread(box, "x")
    slot = driver.start(harness.make_script())
    assert box.register_waiter(slot, 9) is False
    driver.stop()
    assert slot.pending_interrupts
