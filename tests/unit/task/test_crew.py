"""Slots are free when the last body has left."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.engine.effects import NEVER
from ergon_framework.engine.slots import Done, Freed, Slot
from ergon_framework.task.crew import Crew


def slot() -> Slot:
    def script() -> Any:
        yield

    return Slot(script(), told=None, counted=True)


@pytest.mark.spec("CON-29")
def test_a_slot_is_held_until_the_last_body_has_left() -> None:
    now = 100.0
    crew: Crew[str] = Crew(2, patience=30.0, clock=lambda: now)
    a, b = slot(), slot()
    crew.flights.update({a: "a", b: "b"})
    assert crew.free == 0
    assert crew.hear(Done(a, None, freed=True)) == "a"
    assert crew.free == 1
    assert crew.hear(Done(b, None, freed=False)) is None
    assert crew.free == 1
    assert crew.hear(Freed(b)) == "b"
    assert crew.free == 2
    assert crew.hear(Freed(b)) is None, "an aide's body held no slot"


@pytest.mark.spec("CON-29")
def test_the_stall_clock_runs_from_the_moment_that_the_last_slot_was_lost() -> None:
    now = 100.0
    crew: Crew[str] = Crew(2, patience=30.0, clock=lambda: now)
    a, b = slot(), slot()
    crew.flights.update({a: "a", b: "b"})
    crew.hear(Done(a, None, freed=False))
    assert (crew.stall_ends, crew.live) == (NEVER, True)
    now = 110.0
    crew.hear(Done(b, None, freed=False))
    now = 120.0
    crew.hear(Freed(slot()))
    assert (crew.stall_ends, crew.live) == (140.0, True)
    crew.hear(Freed(a))
    assert (crew.stall_ends, crew.live, crew.free) == (NEVER, True, 1)


@pytest.mark.spec("CON-29")
def test_who_was_stalled_for_too_long_starts_nothing_more() -> None:
    now = 100.0
    crew: Crew[str] = Crew(1, patience=30.0, clock=lambda: now)
    a = slot()
    crew.flights[a] = "a"
    crew.hear(Done(a, None, freed=False))
    now = 130.0
    assert not crew.live
    crew.hear(Freed(a))
    assert (crew.live, crew.free) == (False, 0)
