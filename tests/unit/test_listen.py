"""A thread that waits for a server is woken immediately, and never without a reason."""

from __future__ import annotations

import threading
import time

from ergon_framework.database.listen import NotificationWaiter

LONG_SECONDS = 20.0


def test_it_waits_for_the_given_time():
    with NotificationWaiter() as waiter:
        start = time.monotonic()
        waiter.wait(0.1)
        assert 0.09 <= time.monotonic() - start < LONG_SECONDS


def test_it_is_woken_while_it_waits():
    with NotificationWaiter() as waiter:
        has_returned = threading.Event()
        thread = threading.Thread(target=lambda: (waiter.wait(10 * LONG_SECONDS), has_returned.set()))
        thread.start()
        waiter.wake()
        assert has_returned.wait(LONG_SECONDS)
        thread.join(LONG_SECONDS)


def test_several_wakeups_before_a_wait_end_only_that_wait():
    with NotificationWaiter() as waiter:
        waiter.wake()
        waiter.wake()
        start = time.monotonic()
        waiter.wait(LONG_SECONDS)
        assert time.monotonic() - start < LONG_SECONDS / 2
        waiter.wait(0.1)
        assert time.monotonic() - start >= 0.1


def test_it_accepts_many_wakes_and_one_after_its_end():
    with NotificationWaiter() as waiter:
        for _ in range(100_000):
            waiter.wake()  # the wake is not consumed: the buffer is soon full
    waiter.wake()
