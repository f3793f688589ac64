"""The script of publishing by itself: how it goes by the clock, and what it does when its caller is stopped."""

from __future__ import annotations

import pytest

from ergon_framework.engine.effects import Call, Sleep
from ergon_framework.engine.outcome import Err, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.errors import PublishError
from ergon_framework.facts.model import Envelope, Stored
from ergon_framework.facts.policy import AppendRetry
from ergon_framework.facts.publish import Means, Publication, Upload, publish
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction

ENVELOPE = Envelope(message_id="m-1", from_zone="A", to_zone="B", produced_at_unix_ms=0)
UPLOAD = Upload("b", "k", [b"abc"])
STORED = Stored("sha256:" + "0" * 64, 3)
DOWN = ConnectionLost("the line is down")


class Drive:
    """Answers the script's calls in turn, each after some seconds, and remembers when they were made."""

    def __init__(self, *answers, takes=0.0, sleeps=None, outer=None, **published):
        self.now = 0.0
        self.made = []
        self._answers = list(answers)
        self._takes = takes
        self._sleeps = sleeps
        publication = Publication.of(ENVELOPE, subject="s", predicate="p", **published)
        means = Means(lambda *_: None, lambda *_: None, lambda *_: None)
        senses = Senses(clock=lambda: self.now, dice=lambda: 0.5)
        self._script = publish(publication, means, retry=AppendRetry(), senses=senses, outer=outer)

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
            self.made.append((effect.step, round(self.now, 6)))
            self.now += self._takes
            answer = self._answers.pop(0) if self._answers else Err(DOWN)


@pytest.mark.spec("FAC-05")
def test_attempts_that_take_their_time_end_after_ten_seconds_too():
    drive = Drive(takes=3.0)
    with pytest.raises(PublishError, match="failed 4 times"):
        drive.run()
    # The fourth begins within the ten seconds, and the fifth would not.
    assert [at for _, at in drive.made] == [0.0, 3.1, 6.3, 9.7]


@pytest.mark.spec("FAC-05", "FAC-06")
def test_the_time_of_an_upload_is_not_taken_from_its_fact():
    drive = Drive(Ok(STORED), Err(DOWN), Ok("confirmed"), takes=9.0, artifact=UPLOAD)
    assert drive.run() == "confirmed"
    assert drive.made == [("put_object", 0.0), ("append_fact", 9.0), ("append_fact", 18.1)]


@pytest.mark.spec("FAC-06")
def test_a_caller_who_is_stopped_in_an_upload_appends_nothing():
    drive = Drive(Stopped(None), artifact=UPLOAD)
    assert drive.run() is None
    assert drive.made == [("put_object", 0.0)]


@pytest.mark.parametrize("asks", [False, True])
def test_a_caller_who_is_stopped_begins_nothing_more(asks):
    drive = Drive(Stopped(None), asks=asks)
    assert drive.run() is None
    assert len(drive.made) == 1


def test_a_caller_who_is_stopped_while_it_waits_tries_no_more():
    drive = Drive(Err(DOWN), sleeps=Stopped(None))
    assert drive.run() is None
    assert len(drive.made) == 1


def test_nothing_is_appended_for_an_attempt_that_nobody_waits_for():
    outer = Scope(Transaction("order-7"), "process", 0)
    outer.cancel()
    drive = Drive(Ok("confirmed"), outer=outer)
    with pytest.raises(PublishError, match="nobody waits") as caught:
        drive.run()
    assert caught.value.code == "not_begun"
    assert drive.made == []


def test_an_attempt_that_is_left_while_its_artifact_is_stored_appends_nothing():
    outer = Scope(Transaction("order-7"), "process", 0, deadline=5.0, clock=lambda: 0.0)
    drive = Drive(Ok(STORED), Ok("confirmed"), takes=6.0, artifact=UPLOAD, outer=outer)
    with pytest.raises(PublishError, match="append_fact was not begun"):
        drive.run()
    assert drive.made == [("put_object", 0.0)]


def test_what_strikes_the_caller_is_no_failure_of_the_store():
    with pytest.raises(KeyboardInterrupt):
        Drive(Err(KeyboardInterrupt())).run()
