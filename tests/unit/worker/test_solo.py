from __future__ import annotations

import pytest

from ergon_framework.engine.effects import NEVER
from ergon_framework.worker.solo import (
    MAX_PAUSE_SECONDS,
    MAX_REST_SECONDS,
    MAX_WAIT_SECONDS,
    SoloMember,
    SoloPause,
    SoloRun,
    SoloStart,
)

pytestmark = pytest.mark.spec("CNN-11")


class Process:
    """Loops of one process on one clock, each with the number of times that it was notified."""

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.run = SoloRun(lambda: self.now)
        self.notified: dict[str, int] = dict.fromkeys(names, 0)
        self.members = {name: self.create(name) for name in names}

    def create(self, name: str) -> SoloMember:
        def notify() -> None:
            self.notified[name] = self.notified.get(name, 0) + 1

        member = SoloMember(self.run, notify, lambda: self.now)
        member.join()
        return member

    def __getitem__(self, name: str) -> SoloMember:
        return self.members[name]


def test_a_loop_by_itself_starts_immediately_and_again_without_a_rest() -> None:
    process = Process("a")
    for _ in range(2):
        assert process["a"].try_start() == SoloStart(0.0, alone=True)
        process.now += 5.0
        process["a"].finish()


def test_a_suspect_starts_when_every_other_loop_has_confirmed() -> None:
    process = Process("a", "b", "c")
    assert process["a"].try_start() is None
    assert (process["b"].is_held, process["c"].is_held, process["a"].is_held) == (True, True, False)
    assert (process.notified, process["a"].deadline) == ({"a": 0, "b": 1, "c": 1}, 100.0 + MAX_WAIT_SECONDS)
    process["b"].confirm()
    assert process["a"].try_start() is None
    process.now += 2.0
    process["c"].confirm()
    assert process.notified["a"] == 1
    assert process["a"].try_start() == SoloStart(2.0, alone=True)
    process["a"].finish()
    assert (process["b"].is_held, process["c"].is_held) == (False, False)
    assert process.notified == {"a": 1, "b": 2, "c": 2}


def test_the_wait_for_the_others_has_a_limit() -> None:
    process = Process("a", "b")
    assert process["a"].try_start() is None
    process.now += MAX_WAIT_SECONDS
    assert process["a"].try_start() == SoloStart(MAX_WAIT_SECONDS, alone=False)
    assert process["a"].deadline == NEVER


def test_a_pause_has_a_limit_and_reports_its_length() -> None:
    process = Process("a", "b")
    process["a"].try_start()
    assert process["b"].pause()
    assert process["b"].deadline == 100.0 + MAX_PAUSE_SECONDS
    process.now += MAX_PAUSE_SECONDS
    assert not process["b"].pause()
    assert process["b"].resume() == SoloPause(MAX_PAUSE_SECONDS, timed_out=True)
    assert (process["b"].is_held, process["b"].deadline, process["b"].resume()) == (False, NEVER, None)


def test_a_pause_withdraws_the_request_of_its_own_loop() -> None:
    process = Process("a", "b")
    process["a"].try_start()
    process["b"].is_held = False  # its pause has lasted too long
    assert process["b"].try_start() is None, "another loop has the solo run"
    process["a"].finish()
    process.now += 1.0
    process["a"].try_start()
    assert process["b"].pause()
    process["b"].confirm()
    assert process["a"].try_start() == SoloStart(0.0, alone=True)


def test_the_next_solo_run_begins_after_a_rest_as_long_as_the_last_one() -> None:
    process = Process("a", "b")
    process["a"].try_start()
    process["b"].confirm()
    process.now += 0.5
    process["a"].finish()
    assert process["a"].try_start() is None
    assert (process["b"].is_held, process["a"].deadline) == (False, pytest.approx(101.0))
    process.now += 0.5
    assert process["a"].try_start() is None
    assert process["b"].is_held
    process.now += 1_000.0
    process["a"].finish()
    assert process.run.rest_seconds() == MAX_REST_SECONDS


def test_a_loop_that_joins_during_a_solo_run_waits_for_its_end() -> None:
    process = Process("a", "b")
    process["a"].try_start()
    process["b"].confirm()
    late = process.create("late")
    assert late.is_held
    assert process["a"].try_start() == SoloStart(0.0, alone=True), "it runs nothing, so no loop waits for it"
    process["a"].finish()
    assert not late.is_held


def test_a_loop_that_ends_is_not_waited_for_and_ends_its_own_solo_run() -> None:
    process = Process("a", "b")
    process["a"].try_start()
    process["b"].leave()
    assert process["a"].try_start() == SoloStart(0.0, alone=True)
    other = process.create("c")
    process["a"].leave()
    assert not other.is_held
    process["a"].leave()


def test_a_closed_event_loop_is_not_notified() -> None:
    process = Process("a")

    def fail() -> None:
        raise RuntimeError("Event loop is closed")

    SoloMember(process.run, fail, lambda: process.now).join()
    assert process["a"].try_start() is None
