"""Histories: the order of events, accepted queries, and the description of each state."""

from __future__ import annotations

import pytest

from ergon_framework.cli.why_view import describe_status, suggest_remedy
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


def make_history(kind, state, **fields):
    source = "orders" if kind is WorkKind.TRANSACTION else "pay.charge"
    return History(kind=kind, id="o 1", where=source, location=Location(state=state, **fields))


def test_events_are_sorted_by_time_and_those_without_a_time_follow_their_predecessor():
    events = [HistoryEvent(at=2.0, event="b"), HistoryEvent(at=None, event="after b"), HistoryEvent(at=1.0, event="a")]
    assert [event.event for event in sort_events(events)] == ["a", "b", "after b"]


def test_attempts_count_from_one_and_keep_their_delay():
    [event] = attempt_events(
        [Attempt(attempt=0, category=Category.TIMEOUT, code="slow", error="late", at=5.0, delay=2.0)]
    )
    assert (event.event, event.result, event.details, event.values) == (
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
        (
            WorkKind.TRANSACTION,
            {"state": WorkState.READY, "since": NOW - 300},
            "queued in orders for 5 min, waiting for a worker",
        ),
        (WorkKind.TRANSACTION, {"state": WorkState.DELAYED, "until": NOW + 7200}, ", 2 h from now"),
        (
            WorkKind.TRANSACTION,
            {"state": WorkState.CLAIMED, "holder": "worker 1", "until": NOW + 9},
            "claimed by worker 1 until ",
        ),
        (
            WorkKind.TRANSACTION,
            {"state": WorkState.CLAIMED, "holder": "worker 1", "until": NOW - 9},
            "claimed by worker 1, whose lease has expired",
        ),
        (
            WorkKind.TRANSACTION,
            {"state": WorkState.CLAIMED, "holder": "worker 1"},
            "claimed by worker 1, whose lease has expired",
        ),
        (WorkKind.TRANSACTION, {"state": WorkState.QUEUED}, "in orders: ready, delayed or claimed by a worker"),
        (WorkKind.JOB, {"state": WorkState.PENDING, "until": NOW - 9}, "waiting for its turn, due since 2023-"),
        (WorkKind.JOB, {"state": WorkState.PENDING, "until": NOW + 30}, ", 30 s from now"),
        (
            WorkKind.CALL,
            {"state": WorkState.RETRYING, "since": NOW, "details": "timeout"},
            "retry expected after the attempt at 2023-11-14T22:13:20Z (timeout), none recorded",
        ),
        (WorkKind.FACT, {"state": WorkState.DROPPED, "since": NOW}, "fact deleted by retention; id known since "),
        (WorkKind.JOB, {"state": WorkState.FAILED, "details": "kept"}, "failed: kept"),
        (WorkKind.JOB, {"state": WorkState.RUNNING}, "running"),
    ],
)
def test_a_state_is_described_without_a_subject(kind, location, expected):
    assert expected in describe_status(make_history(kind, **location), now=NOW)


@pytest.mark.parametrize("kind", WorkKind)
@pytest.mark.parametrize("state", WorkState)
def test_every_state_has_a_description(kind, state):
    assert describe_status(make_history(kind, state), now=NOW)


def test_the_suggested_command_is_quoted_for_a_shell():
    dead = make_history(WorkKind.TRANSACTION, WorkState.DEAD)
    assert suggest_remedy(dead, {"orders": "app:charge"}).endswith("ergon dlq replay app:charge --id='o 1'")
    assert suggest_remedy(dead, {}).endswith("ergon dlq replay MODULE:NAME --id='o 1'")
    assert suggest_remedy(dead, {"orders": "orders"}).endswith("ergon dlq replay orders --id='o 1'")
    ready = make_history(WorkKind.TRANSACTION, WorkState.READY)
    assert suggest_remedy(ready, {"orders": "app:charge"}).endswith("ergon run app:charge")
    assert suggest_remedy(ready, {"orders": "orders"}).endswith("ergon run MODULE:TASK")  # a queue is not a task
    assert suggest_remedy(make_history(WorkKind.TRANSACTION, WorkState.DONE), {}) == ""
