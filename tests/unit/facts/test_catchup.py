"""Progress of catching up: told while a pair is far behind, and not of the everyday lag."""

from __future__ import annotations

import threading

import pytest

from ergon_framework.cli import facts_catchup as catchup
from ergon_framework.facts.model import Pair
from ergon_framework.facts.replica import Lag, ReplicaState, Status


def state(offset, facts):
    lag = None if facts is None else Lag(facts=facts, bytes=0, seconds=1.0, asked_at=0.0)
    return ReplicaState(
        name="hub",
        pair=Pair("plant", "hub"),
        status=Status.FOLLOWING,
        since=0.0,
        offset=offset,
        confirmed=offset,
        lag=lag,
    )


@pytest.mark.parametrize("facts, told", [(None, None), (999, None), (1_000, (50, 1_050))])
def test_only_a_backlog_is_worth_telling(facts, told):
    assert catchup.behind(state(50, facts)) == told


@pytest.mark.parametrize("terminal", [False, True])
def test_a_backlog_is_told_on_stderr_for_as_long_as_there_is_one(monkeypatch, capsys, terminal):
    monkeypatch.setattr(catchup, "EVERY", 0.001)
    monkeypatch.setattr(catchup, "OFTEN", 0.001)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    left = iter([state(1_000, 9_000), state(10_000, 0), state(2_000, 8_000)])
    seen = threading.Event()

    def states():
        found = next(left, None)
        if found is None:
            seen.set()
            return []
        return [found]

    with catchup.shown(states):
        assert seen.wait(10)
    said = capsys.readouterr().err
    assert "plant to hub" in said
    if not terminal:
        assert said.splitlines() == [
            "ergon: plant to hub: 1,000 of 10,000 facts",
            "ergon: plant to hub: 2,000 of 10,000 facts",
        ]


def test_nobody_tells_any_more_once_it_is_over(monkeypatch):
    monkeypatch.setattr(catchup, "EVERY", 0.001)
    monkeypatch.setattr(catchup, "OFTEN", 0.001)
    looking, over = threading.Event(), threading.Event()

    def states():
        looking.set()
        over.wait(0.1)
        return []

    with catchup.shown(states):
        assert looking.wait(10)
    assert not [thread for thread in threading.enumerate() if thread.name == "ergon-catchup"]
