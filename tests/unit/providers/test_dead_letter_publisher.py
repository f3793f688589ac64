"""The worker step that has dead letters published: a lost callback does not block it forever."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ergon_framework.providers.celery import dead_letter_publisher
from ergon_framework.providers.celery.dead_letter_publisher import DeadLetterBootstep

pytestmark = pytest.mark.spec("PRV-23")


class Worker:
    """The parts of a Celery worker that the step uses: a timer, pool slots that are granted or lost, and the pool."""

    def __init__(self):
        self.sent, self.waiting, self.free = [], [], True
        self.app = SimpleNamespace(tasks={})
        self.timer = SimpleNamespace(call_repeatedly=lambda *given: None)
        self.controller = SimpleNamespace(semaphore=self)
        self.pool = SimpleNamespace(apply_async=lambda *given, **options: self.sent.append(options))

    def acquire(self, call, *args):
        if self.free:
            call(*args)
        else:
            self.waiting.append(call)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(dead_letter_publisher.time, "monotonic", lambda: clock.now)
    return clock


def test_one_poll_runs_at_a_time(clock):
    worker = Worker()
    step = DeadLetterBootstep(worker)
    step._poll(worker)
    step._poll(worker)
    assert len(worker.sent) == 1
    worker.sent[0]["callback"](0)
    step._poll(worker)
    assert len(worker.sent) == 2
    worker.sent[1]["error_callback"](RuntimeError())
    step._poll(worker)
    assert len(worker.sent) == 3


def test_a_poll_lost_with_the_connection_does_not_block_the_next(clock):
    worker = Worker()
    step = DeadLetterBootstep(worker)
    worker.free = False
    step._poll(worker)
    worker.waiting.clear()  # Celery does the same when its connection is lost
    worker.free = True
    step.stop(worker)
    step.start(worker)
    step._poll(worker)
    assert len(worker.sent) == 1


def test_a_poll_without_a_callback_expires(clock):
    worker = Worker()
    step = DeadLetterBootstep(worker)
    step._poll(worker)
    clock.now += dead_letter_publisher._RUN_ABANDONED_SECONDS - 1
    step._poll(worker)
    assert len(worker.sent) == 1
    clock.now += 2
    step._poll(worker)
    assert len(worker.sent) == 2
