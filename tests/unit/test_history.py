"""Histories: how events are ordered, what may be asked for, and what is said of each place."""

from __future__ import annotations

import pytest

from ergon_framework.cli.why_advice import next_of, now_of
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.failure import Attempt
from ergon_framework.history import Event, History, Kind, Place, Question, State, in_order, tried

NOW = 1_700_000_000.0


def history(kind, state, **place):
    where = "orders" if kind is Kind.TRANSACTION else "pay.charge"
    return History(kind=kind, id="o 1", where=where, place=Place(state=state, **place))


def test_events_are_in_the_order_of_time_and_those_without_stay_behind_their_elder():
    events = [Event(at=2.0, what="b"), Event(at=None, what="after b"), Event(at=1.0, what="a")]
    assert [event.what for event in in_order(events)] == ["a", "b", "after b"]


def test_attempts_count_from_one_and_keep_their_delay():
    [event] = tried([Attempt(attempt=0, category=Category.TIMEOUT, code="slow", error="late", at=5.0, delay=2.0)])
    assert (event.what, event.verdict, event.words, event.values) == (
        "attempt 1",
        "TIMEOUT",
        "slow: late",
        {"delay": 2.0},
    )


def test_a_correlation_that_is_the_id_is_asked_for_once():
    assert Question("a", ("b", "a", "b")).names == ("a", "b")


@pytest.mark.parametrize("name", ["", "x" * 257, "a\tb", "\ud800"])
def test_what_cannot_be_an_id_is_refused(name):
    with pytest.raises(ConfigurationError, match="1 to 256 characters"):
        Question(name)


@pytest.mark.parametrize(
    "kind, place, said",
    [
        (Kind.TRANSACTION, {"state": State.READY, "since": NOW - 300}, "waits for a worker, for 5 minutes now"),
        (Kind.TRANSACTION, {"state": State.DELAYED, "until": NOW + 7200}, "2 hours from now"),
        (Kind.TRANSACTION, {"state": State.HELD, "holder": "worker 1", "until": NOW + 9}, "worker 1 has it, until "),
        (
            Kind.TRANSACTION,
            {"state": State.HELD, "holder": "worker 1", "until": NOW - 9},
            "worker 1 had it and is gone",
        ),
        (Kind.TRANSACTION, {"state": State.HELD, "holder": "worker 1"}, "worker 1 had it and is gone"),
        (Kind.TRANSACTION, {"state": State.QUEUED}, "it is in orders: ready, delayed or in a worker's hands"),
        (Kind.JOB, {"state": State.PENDING, "until": NOW - 9}, "it has been due since 2023-"),
        (Kind.JOB, {"state": State.PENDING, "until": NOW + 30}, "30 seconds from now"),
        (Kind.CALL, {"state": State.RETRYING, "since": NOW, "words": "timeout"}, "was to be made again (timeout)"),
        (Kind.FACT, {"state": State.DROPPED, "since": NOW}, "retention has dropped the fact itself"),
        (Kind.JOB, {"state": State.FAILED, "words": "kept"}, "it has failed: kept"),
        (Kind.JOB, {"state": State.RUNNING}, "it is running"),
    ],
)
def test_a_place_is_told_in_a_sentence(kind, place, said):
    assert said in now_of(history(kind, **place), now=NOW)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("state", State)
def test_every_place_has_a_sentence(kind, state):
    assert now_of(history(kind, state), now=NOW)


def test_the_command_is_one_that_a_shell_understands():
    dead = history(Kind.TRANSACTION, State.DEAD)
    assert next_of(dead, {"orders": "app:charge"}).endswith("ergon dlq replay app:charge --id='o 1'")
    assert next_of(dead, {}).endswith("ergon dlq replay MODULE:NAME --id='o 1'")
    assert next_of(dead, {"orders": "orders"}).endswith("ergon dlq replay orders --id='o 1'")
    ready = history(Kind.TRANSACTION, State.READY)
    assert next_of(ready, {"orders": "app:charge"}).endswith("ergon run app:charge")
    assert next_of(ready, {"orders": "orders"}).endswith("ergon run MODULE:TASK")  # a queue is no task
    assert next_of(history(Kind.TRANSACTION, State.DONE), {}) == ""
