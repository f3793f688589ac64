"""Progress of catching up: told while a pair is far behind, and not of the everyday lag."""

from __future__ import annotations

import threading

import pytest

from ergon_framework.cli import output as catchup
from ergon_framework.facts.model import ZonePair
from ergon_framework.facts.replica_state import Lag, ReplicaState, ReplicaStatus


def state(offset, facts):
    lag = None if facts is None else Lag(facts=facts, bytes=0, seconds=1.0, asked_at=0.0)
    return ReplicaState(
        name="hub",
        pair=ZonePair("plant", "hub"),
        status=ReplicaStatus.FOLLOWING,
        since=0.0,
        offset=offset,
        confirmed=offset,
        lag=lag,
    )


@pytest.mark.parametrize("facts, expected", [(None, None), (999, None), (1_000, (50, 1_050))])
def test_only_a_backlog_is_reported(facts, expected):
    assert catchup.progress_of(state(50, facts)) == expected


@pytest.mark.parametrize("terminal", [False, True])
def test_a_backlog_is_reported_on_stderr_while_it_lasts(monkeypatch, capsys, terminal):
    monkeypatch.setattr(catchup, "CATCHUP_LINE_SECONDS", 0.001)
    monkeypatch.setattr(catchup, "CATCHUP_BAR_SECONDS", 0.001)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    remaining = iter([state(1_000, 9_000), state(10_000, 0), state(2_000, 8_000)])
    exhausted = threading.Event()

    def states():
        current = next(remaining, None)
        if current is None:
            exhausted.set()
            return []
        return [current]

    with catchup.catchup_progress(states):
        assert exhausted.wait(10)
    output = capsys.readouterr().err
    assert "plant to hub" in output
    if not terminal:
        assert output.splitlines() == [
            "ergon: plant to hub: 1,000 of 10,000 facts",
            "ergon: plant to hub: 2,000 of 10,000 facts",
        ]


def test_no_progress_thread_remains_after_the_end(monkeypatch):
    monkeypatch.setattr(catchup, "CATCHUP_LINE_SECONDS", 0.001)
    monkeypatch.setattr(catchup, "CATCHUP_BAR_SECONDS", 0.001)
    polled, over = threading.Event(), threading.Event()

    def states():
        polled.set()
        over.wait(0.1)
        return []

    with catchup.catchup_progress(states):
        assert polled.wait(10)
    assert not [thread for thread in threading.enumerate() if thread.name == "ergon-catchup"]
