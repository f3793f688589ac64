"""Virtual time under threads and under asyncio: it stands still while code runs, and jumps otherwise."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.engine.daemon_executor import DaemonExecutor
from ergon_framework.engine.effects import NEVER, sleep, wait
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.task.consumer import ConsumerMixin
from ergon_framework.testing.virtual_time import (
    START_UNIX_SECONDS,
    DeadlockError,
    VirtualLoop,
    VirtualTime,
    run_virtual,
)
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy


class SleepingTask(ConsumerMixin):
    def __init__(self, virtual, connector):
        self.virtual = virtual
        self.connector = connector

    def process_transaction(self, transaction):
        self.virtual.sleep(transaction.payload)


def consume_naps(virtual, naps, **loop):
    connector = MemoryConnector("naps", clock=virtual.clock)
    connector.dispatch([Transaction(nap, id=f"t{n}", source="test") for n, nap in enumerate(naps)])
    policy = ConsumerPolicy.load({"loop": loop, "steps": {"process": {"retry": {"timeout": None}}}})
    return SleepingTask(virtual, connector).consume_transactions(policy, driver=partial(ThreadDriver, waiting=virtual))


def test_an_hour_of_threads_takes_no_time():
    virtual, start = VirtualTime(), time.monotonic()
    report = consume_naps(virtual, [3600.0, 1800.0, 1800.0], concurrency={"value": 2})
    assert report.finished == 3
    assert virtual.clock() == 3600.0
    assert time.monotonic() - start < 5


def test_time_stands_still_while_a_thread_works():
    virtual = VirtualTime()
    pool = DaemonExecutor(2, waiting=virtual)
    seen = []

    def record_times():
        seen.extend(virtual.clock() for _ in range(1000))

    pool.submit_nowait(virtual.sleep, 5.0)
    pool.submit_nowait(record_times)
    virtual.sleep(1.0)
    assert set(seen) == {0.0}
    assert virtual.clock() == 1.0
    pool.shutdown(wait=False)
    virtual.run_until_idle()
    assert virtual.clock() == 5.0


def test_sleeping_threads_wake_in_the_order_of_their_times():
    virtual, wakes = VirtualTime(), []
    pool = DaemonExecutor(3, waiting=virtual)
    for seconds in (3.0, 1.0, 2.0):
        pool.submit_nowait(lambda seconds=seconds: (virtual.sleep(seconds), wakes.append((virtual.clock(), seconds))))
    pool.shutdown(wait=False)
    virtual.run_until_idle()
    assert wakes == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_an_action_happens_at_its_moment():
    virtual, seen = VirtualTime(start=10.0), []
    virtual.call_at(12.5, lambda: seen.append(virtual.clock()))
    virtual.sleep(5.0)
    assert (seen, virtual.clock(), virtual.time_source.wall()) == ([12.5], 15.0, START_UNIX_SECONDS + 15.0)


def test_an_alarm_before_the_wait_ends_the_next_wait():
    virtual = VirtualTime()
    alarm = virtual.create_wakeup()
    alarm.set()
    alarm.wait(None)
    alarm.wait(2.0)
    assert virtual.clock() == 2.0


def test_threads_that_wait_for_nothing_are_a_deadlock_and_not_a_hang():
    virtual = VirtualTime()
    driver = ThreadDriver(1, waiting=virtual)

    def script():
        yield from wait(driver.create_mailbox())

    with pytest.raises(DeadlockError, match="every thread waits"):
        driver.run(script())


def test_one_seed_gives_the_same_random_numbers():
    first, second, other = (VirtualTime(seed).time_source.random for seed in (7, 7, 8))
    assert [first(), first()] == [second(), second()]
    assert first() != other()


def test_an_event_loop_jumps_to_its_timers():
    async def main():
        start = asyncio.get_running_loop().time()
        await asyncio.gather(asyncio.sleep(3600.0), asyncio.sleep(60.0))
        return asyncio.get_running_loop().time() - start

    start = time.monotonic()
    assert run_virtual(main()) == pytest.approx(3600.0)
    assert time.monotonic() - start < 5


def test_an_event_loop_stands_still_while_a_thread_of_its_own_works():
    async def main():
        loop, go = asyncio.get_running_loop(), threading.Event()
        timer = loop.call_later(10.0, lambda: None)
        outside = loop.run_in_executor(None, go.wait)
        await asyncio.sleep(0)
        threading.Timer(0.01, go.set).start()
        await outside
        timer.cancel()
        return loop.time()

    assert run_virtual(main()) == 0.0


def test_an_event_loop_receives_callbacks_of_other_threads():
    async def main():
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        await loop.run_in_executor(None, lambda: loop.call_soon_threadsafe(future.set_result, "heard"))
        return await future

    assert run_virtual(main()) == "heard"


def test_tasks_that_wait_for_nothing_are_a_deadlock_and_not_a_hang():
    loop = VirtualLoop()
    future = loop.create_future()
    with pytest.raises(DeadlockError, match="every task waits"):
        loop.run_until_complete(future)
    loop.close()


def test_a_driver_sleeps_in_virtual_time():
    virtual = VirtualTime()

    def script():
        yield from sleep(42.0)
        return virtual.clock()

    assert ThreadDriver(1, waiting=virtual).run(script()) == 42.0
    assert virtual.clock() < NEVER
