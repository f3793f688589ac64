"""The step that has dead letters published: it never waits for an end that nobody will tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ergon_framework.providers import celery_feed
from ergon_framework.providers.celery_feed import DeadLetterStep

pytestmark = pytest.mark.spec("PRV-23")


class Worker:
    """What the step sees of Celery: a timer, places of a pool that are handed out or forgotten, and the pool."""

    def __init__(self):
        self.sent, self.waiting, self.free = [], [], True
        self.app = SimpleNamespace(tasks={})
        self.timer = SimpleNamespace(call_repeatedly=lambda *given: None)
        self.controller = SimpleNamespace(semaphore=self)
        self.pool = SimpleNamespace(apply_async=lambda *given, **options: self.sent.append(options))

    def acquire(self, call, *given):
        if self.free:
            call(*given)
        else:
            self.waiting.append(call)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(celery_feed.time, "monotonic", lambda: clock.now)
    return clock


def test_one_look_at_a_time_and_the_next_when_it_is_over(clock):
    worker = Worker()
    step = DeadLetterStep(worker)
    step._look(worker)
    step._look(worker)
    assert len(worker.sent) == 1
    worker.sent[0]["callback"](0)
    step._look(worker)
    assert len(worker.sent) == 2
    worker.sent[1]["error_callback"](RuntimeError())
    step._look(worker)
    assert len(worker.sent) == 3


def test_one_that_was_forgotten_with_the_broker_does_not_hold_the_next(clock):
    worker = Worker()
    step = DeadLetterStep(worker)
    worker.free = False
    step._look(worker)
    worker.waiting.clear()  # so does Celery, when its connection is gone
    worker.free = True
    step.stop(worker)
    step.start(worker)
    step._look(worker)
    assert len(worker.sent) == 1


def test_one_whose_end_is_never_told_is_over_some_time(clock):
    worker = Worker()
    step = DeadLetterStep(worker)
    step._look(worker)
    clock.now += celery_feed._FORGOTTEN - 1
    step._look(worker)
    assert len(worker.sent) == 1
    clock.now += 2
    step._look(worker)
    assert len(worker.sent) == 2
