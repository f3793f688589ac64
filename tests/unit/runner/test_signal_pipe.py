"""Tokens arrive, signals wake the reader, and a full pipe does not block the writer."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ergon_framework.runner.signals import SignalQueue, handle_signals


def test_tokens_arrive_in_order_and_get_returns_none_after_its_timeout() -> None:
    queue: SignalQueue[int] = SignalQueue()
    assert queue.get(0.0) is None
    queue.put(1)
    queue.put(2)
    assert (queue.get(5.0), queue.get(None), queue.get(0.01)) == (1, 2, None)


def test_a_token_from_another_thread_ends_the_wait() -> None:
    queue: SignalQueue[str] = SignalQueue()
    threading.Timer(0.02, queue.put, ("late",)).start()
    assert queue.get(5.0) == "late"


def test_a_full_pipe_does_not_block_the_writer() -> None:
    queue: SignalQueue[int] = SignalQueue()
    for number in range(100_000):
        queue.put(number)
    assert [queue.get(5.0) for _ in range(100_000)] == list(range(100_000))
    assert queue.get(0.0) is None


@pytest.mark.spec("CON-36")
def test_the_system_itself_writes_a_signal_into_the_pipe() -> None:
    queue: SignalQueue[signal.Signals] = SignalQueue()
    previous_handler = signal.getsignal(signal.SIGTERM)
    with handle_signals(queue):
        assert signal.set_wakeup_fd(queue.wakeup_fd) == queue.wakeup_fd
        os.kill(os.getpid(), signal.SIGTERM)
        assert queue.get(5.0) is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is previous_handler
    assert signal.set_wakeup_fd(-1) == -1
