"""Who waits, and how: Ctrl-C in the caller's thread, and a watcher that comes too late."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ergon_framework.clock import RealTime, Wakeup
from ergon_framework.engine.effects import Call, Expired, Interrupted, Script, await_exit, call, sleep, spawn
from ergon_framework.engine.threads import ThreadDriver


class InterruptingWakeup:
    """An alarm at which Ctrl-C is pressed *times* times, each time after *ready* was released."""

    def __init__(self, interrupts: int, ready: threading.Semaphore) -> None:
        self._interrupts_left = interrupts
        self._ready = ready
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, seconds: float | None) -> None:
        if self._interrupts_left:
            self._interrupts_left -= 1
            assert self._ready.acquire(timeout=10)
            raise KeyboardInterrupt
        self._event.wait(seconds)
        self._event.clear()


class InterruptingClock(RealTime):
    """Real time in which Ctrl-C is pressed while the caller waits."""

    def __init__(self, interrupts: int) -> None:
        self.ready = threading.Semaphore(0)
        self._interrupts = interrupts
        self._wakeup_count = 0

    def create_wakeup(self) -> Wakeup:
        self._wakeup_count += 1
        return super().create_wakeup() if self._wakeup_count == 1 else InterruptingWakeup(self._interrupts, self.ready)


@pytest.mark.spec("CON-35")
def test_ctrl_c_stops_the_script_and_is_raised_when_it_has_ended() -> None:
    clock = InterruptingClock(1)
    driver = ThreadDriver(1, waiting=clock)
    seen: list[Any] = []

    def script() -> Script[None]:
        clock.ready.release()
        seen.append((yield from sleep(driver.monotonic() + 60)))

    with pytest.raises(KeyboardInterrupt):
        driver.run(script())
    assert [type(answer) for answer in seen] == [Interrupted]


def test_a_second_ctrl_c_does_not_wait_for_the_end() -> None:
    clock = InterruptingClock(2)
    driver = ThreadDriver(1, waiting=clock)
    release = threading.Event()

    def block() -> None:
        clock.ready.release()
        release.wait(10)

    def call_until_released() -> Script[None]:
        while not release.is_set():
            yield from call(Call("x", block, ()))

    with pytest.raises(KeyboardInterrupt):
        driver.run(call_until_released())
    assert driver.closed
    release.set()


class ManualWakeup:
    """A wakeup that ends no wait by itself."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, seconds: float | None) -> None:
        self._event.wait()
        self._event.clear()


class LateClock(RealTime):
    """Real time with a watcher that comes too late, as on a machine that is too busy."""

    def create_wakeup(self) -> Wakeup:
        return ManualWakeup()


@pytest.mark.spec("CON-28")
def test_a_value_after_the_deadline_is_late_even_if_the_timer_has_not_fired() -> None:
    driver = ThreadDriver(1, waiting=LateClock())
    late_values: list[Any] = []

    def return_late() -> str:
        until = driver.monotonic() + 0.02
        while driver.monotonic() < until:
            pass
        return "late"

    def script() -> Script[Any]:
        answer = yield from call(Call("x", return_late, (), driver.monotonic() + 0.01, None, None, late_values.append))
        assert isinstance(answer, Expired)
        return (yield from await_exit(answer.call, driver.monotonic() + 60))

    assert driver.run(script()) is True
    assert (late_values, driver.late_results) == (["late"], 1)


class NoThreadsClock(RealTime):
    """A machine that has no thread left for workers."""

    def start(self, thread: threading.Thread) -> None:
        if "worker" in thread.name:
            raise RuntimeError("can't start new thread")
        super().start(thread)


def test_a_run_raises_if_no_worker_thread_can_be_started() -> None:
    driver = ThreadDriver(1, waiting=NoThreadsClock())

    def child() -> Script[None]:
        yield from ()

    def script() -> Script[None]:
        yield from spawn(child(), notify=driver.create_mailbox(), counted=True)
        yield from sleep(driver.monotonic() + 60)

    with pytest.raises(RuntimeError, match="can't start new thread"):
        driver.run(script())
