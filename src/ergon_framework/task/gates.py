"""Gates: whoever may hold a loop back before it fetches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Pause:
    """Do not fetch now, because …; the gate is asked again after *seconds*, or earlier."""

    because: str
    seconds: float = 1.0


#: Asked before every fetch, on the loop's own thread: it answers at once and never waits.
Gate: TypeAlias = Callable[[], Pause | None]


def ask(gates: tuple[Gate, ...]) -> Pause | None:
    """The first reason to pause, if there is one. A gate that breaks holds the loop: it may have had a reason."""
    for gate in gates:
        try:
            pause = gate()
        except Exception as error:  # noqa: BLE001 - a gate is foreign code; its failure is a reason to wait
            return Pause(f"a gate failed: {type(error).__name__}: {error}")
        if pause is not None:
            return pause
    return None
