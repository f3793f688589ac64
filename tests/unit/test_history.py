"""Histories: the order of events, accepted queries, and the description of each state."""

from __future__ import annotations

import pytest

from ergon_framework.cli.why_view import describe_state, suggest_action
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.failure import Attempt
from ergon_framework.history import (
    History,
    HistoryEvent,
    HistoryQuery,
    Location,
    WorkKind,
    WorkState,
    attempt_events,
    sort_events,
)

NOW = 1_700_000_000.0


def make_history(kind, state, **location):
    source = "orders" if kind is WorkKind.TRANSACTION else "pay.charge"
    return History(kind=kind, id="o 1", where=source, place=Location(state=state, **location))


def test_events_are_sorted_by_time_and_those_without_a_time_follow_their_predecessor():
    events = [HistoryEvent(at=2.0, what="b"), HistoryEvent(at=None, what="after b"), HistoryEvent(at=1.0, what="a")]
    assert [event.what for event in sort_events(events)] == ["a", "b", "after b"]


def test_attempts_count_from_one_and_keep_their_delay():
    [event] = attempt_events(
        [Attempt(attempt=0, category=Category.TIMEOUT, code="slow", error="late", at=5.0, delay=2.0)]
    )
    assert (event.what, event.verdict, event.words, event.values) == (
        "attempt 1",
        "TIMEOUT",
        "slow: late",
        {"delay": 2.0},
    )


def test_a_correlation_that_equals_the_id_is_queried_once():
    assert HistoryQuery("a", ("b", "a", "b")).ids == ("a", "b")


@pytest.mark.parametrize("name", ["", "x" * 257, "a\tb", "\ud800"])
def test_an_invalid_id_is_rejected(name):
    with pytest.raises(ConfigurationError, match="1 to 256 printable characters"):
        HistoryQuery(name)


@pytest.mark.parametrize(
    "kind, location, expected",
    [
        (WorkKind.TRANSACTION, {"state": WorkState.READY, "since": NOW - 300}, "waits for a worker, for 5 minutes now"),
        (WorkKind.TRANSACTION, {"state": WorkState.DELAYED, "until": NOW + 7200}, "2 hours from now"),
        (
            WorkKind.TRANSACTION,
            {"state": WorkState.HELD, "holder": "worker 1", "until": NOW + 9},
            "worker 1 has claimed it until ",
        ),
        (
            WorkKind.TRANSACTION,
            {"state": WorkState.HELD, "holder": "worker 1", "until": NOW - 9},
            "worker 1 claimed it and is gone",
        ),
        (WorkKind.TRANSACTION, {"state": WorkState.HELD, "holder": "worker 1"}, "worker 1 claimed it and is gone"),
        (WorkKind.TRANSACTION, {"state": WorkState.QUEUED}, "it is in orders: ready, delayed or claimed by a worker"),
        (WorkKind.JOB, {"state": WorkState.PENDING, "until": NOW - 9}, "it has been due since 2023-"),
        (WorkKind.JOB, {"state": WorkState.PENDING, "until": NOW + 30}, "30 seconds from now"),
        (
            WorkKind.CALL,
            {"state": WorkState.RETRYING, "since": NOW, "words": "timeout"},
            "is to be retried (timeout)",
        ),
        (WorkKind.FACT, {"state": WorkState.DROPPED, "since": NOW}, "retention has dropped the fact itself"),
        (WorkKind.JOB, {"state": WorkState.FAILED, "words": "kept"}, "it has failed: kept"),
        (WorkKind.JOB, {"state": WorkState.RUNNING}, "it is running"),
    ],
)
def test_a_state_is_described_in_a_sentence(kind, location, expected):
    assert expected in describe_state(make_history(kind, **location), now=NOW)


@pytest.mark.parametrize("kind", WorkKind)
@pytest.mark.parametrize("state", WorkState)
def test_every_state_has_a_sentence(kind, state):
    assert describe_state(make_history(kind, state), now=NOW)


def test_the_suggested_command_is_quoted_for_a_shell():
    dead = make_history(WorkKind.TRANSACTION, WorkState.DEAD)
    assert suggest_action(dead, {"orders": "app:charge"}).endswith("ergon dlq replay app:charge --id='o 1'")
    assert suggest_action(dead, {}).endswith("ergon dlq replay MODULE:NAME --id='o 1'")
    assert suggest_action(dead, {"orders": "orders"}).endswith("ergon dlq replay orders --id='o 1'")
    ready = make_history(WorkKind.TRANSACTION, WorkState.READY)
    assert suggest_action(ready, {"orders": "app:charge"}).endswith("ergon run app:charge")
    assert suggest_action(ready, {"orders": "orders"}).endswith("ergon run MODULE:TASK")  # a queue is not a task
    assert suggest_action(make_history(WorkKind.TRANSACTION, WorkState.DONE), {}) == ""
