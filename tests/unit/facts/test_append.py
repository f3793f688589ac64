"""The script of publishing by itself: how it goes by the clock, and what it does when its caller is stopped."""

from __future__ import annotations

import pytest

from ergon_framework.clock import Clock
from ergon_framework.engine.effects import Call, Err, Interrupted, Ok, Sleep
from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.append import BoundaryCalls, Publication, Upload, publish
from ergon_framework.facts.errors import PublishError
from ergon_framework.facts.model import Envelope, StoredArtifact
from ergon_framework.facts.policy import AppendRetry
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction

ENVELOPE = Envelope(message_id="m-1", from_zone="A", to_zone="B", produced_at_unix_ms=0)
UPLOAD = Upload("b", "k", [b"abc"])
STORED = StoredArtifact("sha256:" + "0" * 64, 3)
DOWN = ConnectionLostError("the line is down")


class ScriptDriver:
    """Answers the script's calls in turn, each after some seconds, and remembers when they were made."""

    def __init__(self, *answers, takes=0.0, sleeps=None, outer=None, **publication_fields):
        self.now = 0.0
        self.calls = []
        self._answers = list(answers)
        self._takes = takes
        self._sleeps = sleeps
        publication = Publication.create(ENVELOPE, subject="s", predicate="p", **publication_fields)
        means = BoundaryCalls(lambda *_: None, lambda *_: None, lambda *_: None)
        senses = Clock(monotonic=lambda: self.now, random=lambda: 0.5)
        self._script = publish(publication, means, retry=AppendRetry(), clock=senses, outer=outer)

    def run(self):
        answer = None
        while True:
            try:
                effect = self._script.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(effect, Sleep):
                self.now, answer = effect.until, self._sleeps
                continue
            assert isinstance(effect, Call)
            self.calls.append((effect.step, round(self.now, 6)))
            self.now += self._takes
            answer = self._answers.pop(0) if self._answers else Err(DOWN)


@pytest.mark.spec("FAC-05")
def test_slow_attempts_also_end_after_ten_seconds():
    driver = ScriptDriver(takes=3.0)
    with pytest.raises(PublishError, match="failed after 4 attempts"):
        driver.run()
    # The fourth begins within the ten seconds, and the fifth would not.
    assert [at for _, at in driver.calls] == [0.0, 3.1, 6.3, 9.7]


@pytest.mark.spec("FAC-05", "FAC-06")
def test_the_duration_of_an_upload_does_not_shorten_the_time_of_its_fact():
    driver = ScriptDriver(Ok(STORED), Err(DOWN), Ok("confirmed"), takes=9.0, artifact=UPLOAD)
    assert driver.run() == "confirmed"
    assert driver.calls == [("put_object", 0.0), ("append_fact", 9.0), ("append_fact", 18.1)]


@pytest.mark.spec("FAC-06")
def test_a_caller_stopped_during_an_upload_appends_nothing():
    driver = ScriptDriver(Interrupted(None), artifact=UPLOAD)
    assert driver.run() is None
    assert driver.calls == [("put_object", 0.0)]


@pytest.mark.parametrize("asks", [False, True])
def test_a_stopped_caller_makes_no_further_call(asks):
    driver = ScriptDriver(Interrupted(None), check_first=asks)
    assert driver.run() is None
    assert len(driver.calls) == 1


def test_a_caller_stopped_during_a_wait_does_not_retry():
    driver = ScriptDriver(Err(DOWN), sleeps=Interrupted(None))
    assert driver.run() is None
    assert len(driver.calls) == 1


def test_a_cancelled_attempt_appends_nothing():
    outer = Scope(Transaction(id="order-7"), "process", 0)
    outer.cancel()
    driver = ScriptDriver(Ok("confirmed"), outer=outer)
    with pytest.raises(PublishError, match="cancelled or timed out") as caught:
        driver.run()
    assert caught.value.code == "not_begun"
    assert driver.calls == []


def test_an_attempt_whose_deadline_passes_during_its_upload_appends_nothing():
    outer = Scope(Transaction(id="order-7"), "process", 0, deadline=5.0, clock=lambda: 0.0)
    driver = ScriptDriver(Ok(STORED), Ok("confirmed"), takes=6.0, artifact=UPLOAD, outer=outer)
    with pytest.raises(PublishError, match="append_fact was not started"):
        driver.run()
    assert driver.calls == [("put_object", 0.0)]


def test_an_interrupt_of_the_caller_is_not_a_store_failure():
    with pytest.raises(KeyboardInterrupt):
        ScriptDriver(Err(KeyboardInterrupt())).run()
