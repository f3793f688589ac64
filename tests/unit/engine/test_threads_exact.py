"""Threads that are never started: what each would do is done by the test, one step at a time."""

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
from ergon_framework.engine.drivers import daemons
from ergon_framework.engine.drivers.daemons import DaemonExecutor
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.drivers.waiting import RealTime
from ergon_framework.engine.effects import NEVER, Call, Script, Sleep
from ergon_framework.engine.outcome import Err, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction


class Tray:
    """An inbox in which things lie; whoever looks into it does *at_get* first."""

    def __init__(self) -> None:
        self.put_in = 0
        self.taken = 0
        self.at_get: Callable[[], object] = list

    def put(self, item: Any) -> None:
        self.put_in += 1

    def get(self) -> Any:
        self.taken += 1
        self.at_get()


class Bell:
    """An alarm that writes down who waits for how long, and wakes everybody at once."""

    def __init__(self) -> None:
        self.rung = 0
        self.waits: list[float | None] = []
        self.at_wait: Callable[[], object] = list

    def ring(self) -> None:
        self.rung += 1

    def wait(self, seconds: float | None) -> None:
        self.waits.append(seconds)
        assert len(self.waits) < 9, "this wait leads nowhere"
        self.at_wait()


class Still:
    """Waiting in which nothing happens by itself: threads are kept and not started."""

    def __init__(self) -> None:
        self.now = 10.0
        self.senses = Senses(clock=lambda: self.now)
        self.trays: list[Tray] = []
        self.bells: list[Bell] = []
        self.threads: list[threading.Thread] = []
        self.joined: list[str] = []
        self.over = 0
        #: How many more threads the machine has.
        self.room = 99

    def inbox(self) -> Tray:
        self.trays.append(Tray())
        return self.trays[-1]

    def alarm(self) -> Bell:
        self.bells.append(Bell())
        return self.bells[-1]

    def start(self, thread: threading.Thread) -> None:
        if len(self.threads) == self.room:
            raise RuntimeError("can't start new thread")
        self.threads.append(thread)
        thread.join = lambda timeout=None: self.joined.append(thread.name)  # type: ignore[method-assign]

    def ended(self) -> None:
        self.over += 1


@pytest.fixture
def still() -> Still:
    return Still()


def bounded(fn: Callable[..., Any], *args: Any) -> Any:
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


def test_the_first_job_starts_one_daemon_thread_and_the_next_wait_for_it(still: Still) -> None:
    executor, ran = DaemonExecutor(3, name="x", waiting=still), []
    for job in "abc":
        executor.execute(ran.append, job)
    (thread,) = still.threads
    assert (executor.threads, thread.daemon, ran) == (1, True, [])
    assert thread.name.startswith("x-")
    assert thread.name.endswith("-0")
    assert executor._done() is True
    assert (ran, executor.threads) == (["a", "b", "c"], 2), "it called for one more, and not for each"
    assert still.threads[1].name == thread.name[:-1] + "1"


def test_a_thread_without_more_to_do_calls_for_nobody(still: Still) -> None:
    executor, ran = DaemonExecutor(3, waiting=still), []
    executor.execute(ran.append, "a")
    assert executor._done() is True
    assert (ran, executor.threads, still.trays[0].put_in) == (["a"], 1, 0)


def test_an_idle_thread_is_woken_rather_than_another_started(still: Still) -> None:
    executor, ran = DaemonExecutor(3, waiting=still), []
    executor.execute(ran.append, "a")
    executor._done()
    executor.execute(ran.append, "b")
    executor.execute(ran.append, "c")
    assert (executor.threads, still.trays[0].put_in) == (1, 1), "one wake is enough for both"
    executor.execute(lambda: executor.execute(ran.append, "e"))
    executor._done()
    assert (executor.threads, still.trays[0].put_in) == (2, 1), "nobody idled when more was found"
    assert ran == ["a", "b", "c", "e"]


def test_a_job_that_comes_while_one_runs_calls_for_a_thread(still: Still) -> None:
    executor, seen = DaemonExecutor(2, waiting=still), []

    def body() -> None:
        executor.execute(seen.append, "inner")
        seen.append(executor.threads)

    executor.execute(body)
    executor._done()
    assert seen == [2, "inner"]


def test_where_no_more_threads_are_allowed_the_job_waits(still: Still) -> None:
    executor, seen = DaemonExecutor(1, waiting=still), []

    def body() -> None:
        executor.execute(seen.append, "inner")
        seen.append(executor.threads)

    executor.execute(body)
    executor._done()
    assert (seen, still.trays[0].put_in) == ([1, "inner"], 0)


def test_a_machine_without_any_thread_refuses_the_job(still: Still) -> None:
    executor, ran = DaemonExecutor(2, waiting=still), []
    still.room = 0
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.execute(ran.append, "refused")
    assert executor.threads == 0
    still.room = 1
    executor.execute(ran.append, "taken")
    executor._done()
    assert (ran, executor.threads) == (["taken"], 1)


def test_a_machine_without_another_thread_leaves_the_job_to_those_there_are(still: Still) -> None:
    executor, ran = DaemonExecutor(3, waiting=still), []
    still.room = 1
    executor.execute(lambda: (executor.execute(ran.append, "a"), ran.append(executor.threads)))
    executor._done()
    assert (ran, executor.threads) == ([1, "a"], 1)
    still.room = 2
    executor.execute(lambda: executor.execute(ran.append, "b"))
    executor._done()
    assert (ran[2:], executor.threads) == (["b"], 2), "nobody was taken to be on the way"


def test_a_shutdown_wakes_those_who_idle_once_and_joins_all(still: Still) -> None:
    executor = DaemonExecutor(4, waiting=still)
    for _ in range(2):
        executor.execute(lambda: executor.execute(int))
    executor._done()
    executor._done()
    started = [thread.name for thread in still.threads]
    assert len(started) == 2
    executor.shutdown(wait=False)
    assert (still.trays[0].put_in, still.joined) == (2, [])
    executor.shutdown()
    assert (still.trays[0].put_in, still.joined) == (2, started)


def test_after_a_shutdown_a_thread_does_what_is_left_and_goes(still: Still) -> None:
    executor, ran = DaemonExecutor(1, waiting=still), []
    executor.execute(ran.append, "a")
    executor.shutdown(wait=False)
    assert executor._done() is False
    assert ran == ["a"]
    executor.shutdown(wait=False)
    assert still.trays[0].put_in == 0, "it does not idle, so that nobody has to wake it"
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.execute(ran.append, "b")
    assert executor._done() is False
    assert ran == ["a"], "what was refused was not kept"


def test_a_shutdown_cancels_what_waits_only_when_asked(still: Still) -> None:
    ran: list[str] = []
    for keywords, cancelled in (({}, False), ({"cancel_futures": True}, True)):
        executor = DaemonExecutor(1, waiting=still)
        future = executor.submit(ran.append, "submitted")
        executor.execute(ran.append, "executed")
        executor.shutdown(wait=False, **keywords)
        assert future.cancelled() is cancelled
        assert executor._done() is False
    assert ran == ["submitted", "executed"]


def test_a_thread_waits_between_its_jobs_and_says_when_it_ends(still: Still) -> None:
    executor, ran = DaemonExecutor(1, waiting=still), []
    still.trays[0].at_get = lambda: (ran.append(still.over), executor.shutdown(wait=False))
    executor.execute(ran.append, "a")
    bounded(executor._work)
    assert (ran, still.trays[0].taken, still.over) == (["a", 0], 1, 1)


def test_a_thread_does_its_jobs_before_it_ends(still: Still) -> None:
    executor, ran = DaemonExecutor(1, waiting=still), []
    executor.execute(ran.append, "a")
    executor.shutdown(wait=False)
    executor._work()
    assert (ran, still.trays[0].taken, still.over) == (["a"], 0, 1)


def test_an_idle_thread_keeps_nothing_of_its_last_job(still: Still) -> None:
    class Payload: ...

    executor, kept = DaemonExecutor(1, waiting=still), []
    payload = Payload()
    remembered = weakref.ref(payload)
    executor.execute(id, payload)
    del payload

    def look() -> None:
        kept.append(remembered())
        executor.shutdown(wait=False)

    still.trays[0].at_get = look
    bounded(executor._work)
    assert kept == [None]


def test_submitted_work_takes_keywords_and_answers_through_its_future(still: Still) -> None:
    executor = DaemonExecutor(1, waiting=still)
    good: Future[int] = executor.submit(int, "11", base=2)
    bad = executor.submit(int, "x")
    dropped = executor.submit(pytest.fail, "it was cancelled")
    dropped.cancel()
    executor._done()
    assert good.result(0) == 3
    assert isinstance(bad.exception(0), ValueError)
    assert dropped.cancelled()


def test_what_ends_a_process_belongs_to_whoever_waits_for_the_future(still: Still) -> None:
    executor = DaemonExecutor(1, waiting=still)

    def leave() -> None:
        raise SystemExit

    future = executor.submit(leave)
    executor._done()
    assert isinstance(future.exception(0), SystemExit)


def test_one_thread_is_a_size() -> None:
    assert DaemonExecutor(1, waiting=Still()).threads == 0


def test_executors_are_named_ergon_and_numbered_from_one(still: Still) -> None:
    spec = importlib.util.find_spec(daemons.__name__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    for number in (1, 2):
        fresh.DaemonExecutor(1, waiting=still).execute(int)
        assert still.threads[-1].name == f"ergon-{number}-0"


# -- waiting ------------------------------------------------------------------------------------


def test_an_alarm_that_nobody_has_rung_makes_wait() -> None:
    alarm, began = RealTime().alarm(), time.monotonic()
    alarm.wait(0.1)
    assert time.monotonic() - began >= 0.09
    alarm.ring()
    alarm.ring()
    alarm.wait(1000.0)


def test_an_alarm_waits_as_long_as_it_is_told_and_forgets_the_ring() -> None:
    alarm: Any = RealTime().alarm()
    heard: list[Any] = []

    class Lock:
        def acquire(self, *, timeout: float) -> None:
            heard.append(timeout)

        def release(self) -> None:
            heard.append("rung")

    alarm._lock = Lock()
    alarm.ring()
    alarm.wait(3.0)
    assert heard == ["rung", 3.0]
    heard.clear()
    alarm.wait(None)
    alarm.wait(1e300)
    alarm.wait(-1e-9)
    assert heard == [-1, threading.TIMEOUT_MAX, 0.0], (
        "nobody can wait longer, and a moment that has passed is no 'for ever'"
    )


def test_a_ring_that_comes_first_is_heard_once_however_often_it_rang() -> None:
    alarm: Any = RealTime().alarm()
    alarm.ring()
    alarm.ring()
    alarm.wait(2.0)
    assert alarm._lock.locked()


def test_real_threads_are_started() -> None:
    ran = threading.Event()
    RealTime().start(threading.Thread(target=ran.set, daemon=True))
    assert ran.wait(1)


def test_an_inbox_gives_what_was_put() -> None:
    inbox = RealTime().inbox()
    inbox.put("x")
    assert inbox.get() == "x"


# -- the driver ---------------------------------------------------------------------------------


class World:
    """A thread driver whose threads do nothing by themselves."""

    def __init__(self, still: Still) -> None:
        self.still = still
        self.driver = Threads(2, waiting=still)
        self.watch, self.end = still.bells
        self.heard: list[Any] = []

    def script(self, *effects: Any) -> Script[str]:
        for effect in effects:
            self.heard.append((yield effect))
        return "end"

    def work(self) -> None:
        """What the threads would do now."""
        self.driver._workers._done()
        self.driver._aides._done()


@pytest.fixture
def world(still: Still) -> World:
    return World(still)


def named(still: Still) -> list[str]:
    return [thread.name.rsplit("-", 2)[0] for thread in still.threads]


@pytest.mark.parametrize(
    "counted, bodies, name", [(True, 0, "worker"), (True, 1, "aide"), (False, 0, "aide"), (False, 1, "aide")]
)
def test_a_counted_script_has_a_worker_unless_a_body_occupies_it(
    still: Still, world: World, counted: bool, bodies: int, name: str
) -> None:
    slot = world.driver.start(world.script(), told=world.driver.mailbox(), counted=counted)
    world.work()
    still.threads.clear()
    slot.bodies = bodies
    world.driver = Threads(2, waiting=still)
    world.driver.resume(slot, None)
    assert named(still) == [f"ergon-{name}"]


def test_a_driver_runs_as_many_counted_scripts_as_it_was_told(still: Still, world: World) -> None:
    driver = world.driver
    names: list[int] = []

    def body() -> None:
        # Each occupies its thread while the next one is begun.
        if len(names) < 4:
            names.append(driver._workers.threads)
            driver._workers._done()

    for _ in range(4):
        driver.start(world.script(Call("x", body, ())), told=driver.mailbox(), counted=True)
    driver._workers._done()
    assert max(names) == 2


def test_a_body_runs_within_its_scope_and_its_context(world: World) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    given = contextvars.copy_context()
    given.run(variable.set, "given")
    inside = Scope(Transaction("1"), "x", 0)

    def body(number: int) -> Any:
        return number, variable.get(), scope.current()

    effects = Call("x", body, (1,), NEVER, inside, given), Call("x", body, (2,)), Call("x", divmod, (1, 0))
    world.driver.start(world.script(*effects))
    world.work()
    first, second, third = world.heard
    assert (first.value, second.value) == ((1, "given", inside), (2, "unset", None))
    assert isinstance(third, Err)
    assert isinstance(third.error, ZeroDivisionError)
    assert world.driver._result == ("end", None)


def test_a_body_that_was_given_up_on_leads_nowhere(world: World) -> None:
    driver = world.driver
    slot = driver.start(world.script(Call("x", lambda: driver.interrupt(slot), ()), Sleep(NEVER)))
    driver._aides._done()
    (stopped,) = world.heard
    assert isinstance(stopped, Stopped)
    assert (stopped.body.left, driver.fenced, slot.bodies) == (True, 1, 0)


def test_the_watcher_waits_for_what_is_due_next(world: World) -> None:
    driver = world.driver
    world.watch.at_wait = driver.close
    bounded(driver._watch)
    assert world.watch.waits == [None]
    driver._watch()
    assert world.watch.waits == [None], "a closed driver needs no watcher"


@pytest.mark.parametrize("moved, seconds", [(0.0, 5.5), (5.5, 0.0), (6.0, 0.0)])
def test_the_watcher_never_waits_for_less_than_nothing(
    still: Still, world: World, moved: float, seconds: float
) -> None:
    driver = world.driver
    driver.start(world.script(Sleep(15.5)))
    driver._aides._done()
    assert world.watch.rung == 1, "whoever is due earlier pokes it"
    world.watch.at_wait = driver.close
    looked: list[float] = []

    def clock() -> float:
        # The first look at it finds nothing due; then time goes by.
        looked.append(still.now)
        return still.now if len(looked) == 1 else still.now + moved

    driver.clock = clock
    bounded(driver._watch)
    assert world.watch.waits == [seconds]


def test_the_first_end_is_the_end_and_rings_every_time(world: World) -> None:
    error = LookupError("first")
    world.driver._finish(None, error)
    world.driver._finish("second", None)
    assert (world.driver._result, world.end.rung) == ((None, error), 2)


def test_closing_ends_the_threads_and_waits_for_none(still: Still, world: World) -> None:
    driver = world.driver
    driver.start(world.script(Sleep(NEVER)))
    driver.start(world.script(Sleep(NEVER)), told=driver.mailbox(), counted=True)
    world.work()
    driver._close()
    assert (driver.closed, world.watch.rung, still.joined) == (True, 1, [])
    assert [tray.put_in for tray in still.trays] == [1, 1]
    driver.resume(driver.start(world.script()), None)
    assert len(still.threads) == 2


def test_a_closed_driver_begins_nothing(still: Still, world: World) -> None:
    world.driver.close()
    world.driver.start(world.script())
    assert still.threads == []


def test_a_resume_that_is_overtaken_by_the_end_is_dropped(world: World) -> None:
    world.driver._aides.shutdown(wait=False)
    world.driver.start(world.script())
    assert world.heard == []


def test_a_run_returns_what_the_script_returned(world: World) -> None:
    driver = world.driver
    world.watch.at_wait = driver.close
    world.end.at_wait = driver._aides._done
    assert bounded(driver.run, world.script(Call("x", abs, (-1,)))) == "end"
    assert isinstance(world.heard[0], Ok)
    assert (world.end.waits, world.watch.waits) == ([None], [None])
    assert world.watch.rung == 1, "the end wakes the watcher"


def test_a_run_raises_what_broke_a_script(world: World) -> None:
    def broken() -> Script[None]:
        yield from ()
        raise LookupError("defect")

    world.watch.at_wait = world.driver.close
    world.end.at_wait = world.driver._aides._done
    with pytest.raises(LookupError, match="defect"):
        bounded(world.driver.run, broken())
    assert world.watch.rung == 1


@pytest.mark.spec("CON-35")
def test_one_ctrl_c_is_a_stop_and_is_raised_at_the_end(world: World) -> None:
    driver = world.driver

    def press() -> None:
        world.end.at_wait = driver._aides._done
        raise KeyboardInterrupt

    world.watch.at_wait = driver.close
    world.end.at_wait = press
    with pytest.raises(KeyboardInterrupt):
        bounded(driver.run, world.script(Call("x", abs, (1,))))
    assert [type(answer) for answer in world.heard] == [Stopped]
    assert len(world.end.waits) == 2


def test_two_ctrl_c_wait_for_nothing(world: World) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    world.end.at_wait = press
    with pytest.raises(KeyboardInterrupt):
        bounded(world.driver.run, world.script(Sleep(NEVER)))
    assert (len(world.end.waits), world.driver.closed, world.watch.rung) == (2, True, 1)


def test_whatever_strikes_the_caller_ends_everything(world: World) -> None:
    def strike() -> None:
        raise SystemExit

    world.end.at_wait = strike
    with pytest.raises(SystemExit):
        bounded(world.driver.run, world.script(Sleep(NEVER)))
    assert (len(world.end.waits), world.driver.closed, world.watch.rung) == (1, True, 1)


def test_a_machine_without_any_thread_runs_nothing(still: Still, world: World) -> None:
    still.room = 0
    with pytest.raises(RuntimeError, match="can't start new thread"):
        bounded(world.driver.run, world.script())
    assert world.driver.closed


def test_a_signal_is_urgent_and_a_stop_is_a_halt(world: World) -> None:
    driver = world.driver
    box = driver.mailbox()
    driver.signal(box, "x")
    slot = driver.start(world.script())
    assert box.await_by(slot, 9) is False
    driver.stop()
    assert slot.interrupted
