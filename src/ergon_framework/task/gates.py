"""Gates: whoever may hold a loop back before it fetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ergon_framework.engine.pause import Pause
from ergon_framework.errors import text

__all__ = ["Gate", "Pause", "ask"]

#: Asked before every fetch, on the loop's own thread: it answers at once and never waits.
Gate: TypeAlias = Callable[[], Pause | None]


def ask(gates: tuple[Gate, ...]) -> Pause | None:
    """The first reason to pause, if there is one. A gate that breaks holds the loop: it may have had a reason."""
    for gate in gates:
        try:
            pause: Any = gate()
        except BaseException as error:  # noqa: BLE001 - a gate is foreign code; its failure is a reason to wait
            return Pause(f"a gate failed: {type(error).__name__}: {text(error)}")
        if pause is not None:
            return pause if isinstance(pause, Pause) else Pause(f"a gate answered with a {type(pause).__name__}")
    return None
