"""A thread that waits for a server is woken at once, and never by nothing."""

from __future__ import annotations

import threading
import time

from ergon_framework.schema.hearing import Hearing

LONG = 20.0


def test_it_waits_for_as_long_as_it_was_told():
    with Hearing() as hearing:
        began = time.monotonic()
        hearing.wait(0.1)
        assert 0.09 <= time.monotonic() - began < LONG


def test_it_is_woken_while_it_waits():
    with Hearing() as hearing:
        over = threading.Event()
        thread = threading.Thread(target=lambda: (hearing.wait(10 * LONG), over.set()))
        thread.start()
        hearing.wake()
        assert over.wait(LONG)
        thread.join(LONG)


def test_woken_before_it_waits_it_does_not_wait_and_then_it_does():
    with Hearing() as hearing:
        hearing.wake()
        hearing.wake()
        began = time.monotonic()
        hearing.wait(LONG)
        assert time.monotonic() - began < LONG / 2
        hearing.wait(0.1)
        assert time.monotonic() - began >= 0.1


def test_it_is_woken_ever_so_often_and_after_its_end():
    with Hearing() as hearing:
        for _ in range(100_000):
            hearing.wake()  # nobody takes it: soon there is no room for more
    hearing.wake()
