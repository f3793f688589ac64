"""Who waits, and how: Ctrl-C in the caller's thread, and a watcher that comes too late."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.drivers.waiting import Alarm, RealTime
from ergon_framework.engine.effects import Call, Script, call, gone, sleep, spawn
from ergon_framework.engine.outcome import Expired, Stopped


class Impatient:
    """An alarm at which Ctrl-C is pressed *times* times, each time after somebody has said so."""

    def __init__(self, times: int, ready: threading.Semaphore) -> None:
        self._times = times
        self._ready = ready
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self, seconds: float | None) -> None:
        if self._times:
            self._times -= 1
            assert self._ready.acquire(timeout=10)
            raise KeyboardInterrupt
        self._event.wait(seconds)
        self._event.clear()


class Pressing(RealTime):
    """Real time in which somebody presses Ctrl-C while the caller waits."""

    def __init__(self, times: int) -> None:
        self.ready = threading.Semaphore(0)
        self._times = times
        self._alarms = 0

    def alarm(self) -> Alarm:
        self._alarms += 1
        return super().alarm() if self._alarms == 1 else Impatient(self._times, self.ready)


@pytest.mark.spec("CON-35")
def test_ctrl_c_stops_the_script_and_is_raised_when_it_has_ended() -> None:
    pressing = Pressing(1)
    driver = Threads(1, waiting=pressing)
    seen: list[Any] = []

    def script() -> Script[None]:
        pressing.ready.release()
        seen.append((yield from sleep(driver.clock() + 60)))

    with pytest.raises(KeyboardInterrupt):
        driver.run(script())
    assert [type(answer) for answer in seen] == [Stopped]


def test_a_second_ctrl_c_does_not_wait_for_the_end() -> None:
    pressing = Pressing(2)
    driver = Threads(1, waiting=pressing)
    release = threading.Event()

    def body() -> None:
        pressing.ready.release()
        release.wait(10)

    def stubborn() -> Script[None]:
        while not release.is_set():
            yield from call(Call("x", body, ()))

    with pytest.raises(KeyboardInterrupt):
        driver.run(stubborn())
    assert driver.closed
    release.set()


class Drowsy:
    """An alarm that wakes nobody by itself."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self, seconds: float | None) -> None:
        self._event.wait()
        self._event.clear()


class Late(RealTime):
    """Real time with a watcher that comes too late, as on a machine that is too busy."""

    def alarm(self) -> Alarm:
        return Drowsy()


@pytest.mark.spec("CON-28")
def test_a_body_that_comes_back_after_its_deadline_has_timed_out_though_nobody_looked() -> None:
    driver = Threads(1, waiting=Late())
    late: list[Any] = []

    def body() -> str:
        until = driver.clock() + 0.02
        while driver.clock() < until:
            pass
        return "late"

    def script() -> Script[Any]:
        answer = yield from call(Call("x", body, (), driver.clock() + 0.01, None, None, late.append))
        assert isinstance(answer, Expired)
        return (yield from gone(answer.body, driver.clock() + 60))

    assert driver.run(script()) is True
    assert (late, driver.fenced) == (["late"], 1)


class Exhausted(RealTime):
    """A machine that has no thread left for workers."""

    def start(self, thread: threading.Thread) -> None:
        if "worker" in thread.name:
            raise RuntimeError("can't start new thread")
        super().start(thread)


def test_a_machine_without_threads_is_an_error_and_no_silence() -> None:
    driver = Threads(1, waiting=Exhausted())

    def child() -> Script[None]:
        yield from ()

    def script() -> Script[None]:
        yield from spawn(child(), told=driver.mailbox(), counted=True)
        yield from sleep(driver.clock() + 60)

    with pytest.raises(RuntimeError, match="can't start new thread"):
        driver.run(script())
