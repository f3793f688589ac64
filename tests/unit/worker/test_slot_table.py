"""Slots are free when the last body has left."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.engine.effects import NEVER
from ergon_framework.engine.scheduler import ScriptEnded, Slot, SlotFreed
from ergon_framework.worker.consume import SlotTable


def make_slot() -> Slot:
    def script() -> Any:
        yield

    return Slot(script(), notify=None, counted=True)


@pytest.mark.spec("CON-29")
def test_a_slot_is_occupied_until_its_last_call_has_exited() -> None:
    now = 100.0
    slot_table: SlotTable[str] = SlotTable(2, stall_timeout=30.0, clock=lambda: now)
    a, b = make_slot(), make_slot()
    slot_table.running.update({a: "a", b: "b"})
    assert slot_table.free == 0
    assert slot_table.handle_event(ScriptEnded(a, None, freed=True)) == "a"
    assert slot_table.free == 1
    assert slot_table.handle_event(ScriptEnded(b, None, freed=False)) is None
    assert slot_table.free == 1
    assert slot_table.handle_event(SlotFreed(b)) == "b"
    assert slot_table.free == 2
    assert slot_table.handle_event(SlotFreed(b)) is None, "a helper's call held no slot"


@pytest.mark.spec("CON-29")
def test_the_stall_clock_starts_when_the_last_slot_is_blocked() -> None:
    now = 100.0
    slot_table: SlotTable[str] = SlotTable(2, stall_timeout=30.0, clock=lambda: now)
    a, b = make_slot(), make_slot()
    slot_table.running.update({a: "a", b: "b"})
    slot_table.handle_event(ScriptEnded(a, None, freed=False))
    assert (slot_table.stall_deadline, slot_table.live) == (NEVER, True)
    now = 110.0
    slot_table.handle_event(ScriptEnded(b, None, freed=False))
    now = 120.0
    slot_table.handle_event(SlotFreed(make_slot()))
    assert (slot_table.stall_deadline, slot_table.live) == (140.0, True)
    slot_table.handle_event(SlotFreed(a))
    assert (slot_table.stall_deadline, slot_table.live, slot_table.free) == (NEVER, True, 1)


@pytest.mark.spec("CON-29")
def test_a_slot_table_stalled_for_too_long_starts_nothing_more() -> None:
    now = 100.0
    slot_table: SlotTable[str] = SlotTable(1, stall_timeout=30.0, clock=lambda: now)
    a = make_slot()
    slot_table.running[a] = "a"
    slot_table.handle_event(ScriptEnded(a, None, freed=False))
    now = 130.0
    assert not slot_table.live
    slot_table.handle_event(SlotFreed(a))
    assert (slot_table.live, slot_table.free) == (False, 0)
