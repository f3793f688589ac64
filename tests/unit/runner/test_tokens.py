"""What is put is got, signals wake, and no flood blocks anybody."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ergon_framework.runner.signals import heard
from ergon_framework.runner.tokens import Tokens


def test_tokens_come_in_order_and_none_when_the_time_is_over() -> None:
    tokens: Tokens[int] = Tokens()
    assert tokens.get(0.0) is None
    tokens.put(1)
    tokens.put(2)
    assert (tokens.get(5.0), tokens.get(None), tokens.get(0.01)) == (1, 2, None)


def test_a_token_from_another_thread_ends_the_wait() -> None:
    tokens: Tokens[str] = Tokens()
    threading.Timer(0.02, tokens.put, ("late",)).start()
    assert tokens.get(5.0) == "late"


def test_a_full_pipe_blocks_nobody() -> None:
    tokens: Tokens[int] = Tokens()
    for number in range(100_000):
        tokens.put(number)
    assert [tokens.get(5.0) for _ in range(100_000)] == list(range(100_000))
    assert tokens.get(0.0) is None


@pytest.mark.spec("CON-36")
def test_the_system_itself_writes_a_signal_into_the_pipe() -> None:
    tokens: Tokens[signal.Signals] = Tokens()
    before = signal.getsignal(signal.SIGTERM)
    with heard(tokens):
        assert signal.set_wakeup_fd(tokens.wakeup) == tokens.wakeup
        os.kill(os.getpid(), signal.SIGTERM)
        assert tokens.get(5.0) is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
