"""Gates: callables that can pause a loop before it fetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ergon_framework.engine.pause import Pause
from ergon_framework.errors import error_message

__all__ = ["Gate", "Pause", "first_pause"]

#: Called before every fetch, on the loop's own thread: it must return immediately and never wait.
Gate: TypeAlias = Callable[[], Pause | None]


def first_pause(gates: tuple[Gate, ...]) -> Pause | None:
    """Return the first reason to pause, if any. If a gate raises, the loop pauses: the reason is unknown."""
    for gate in gates:
        try:
            pause: Any = gate()
        except BaseException as error:  # noqa: BLE001 - a gate is third-party code; after its failure the loop pauses
            return Pause(f"a gate failed: {type(error).__name__}: {error_message(error)}")
        if pause is not None:
            return pause if isinstance(pause, Pause) else Pause(f"a gate answered with a {type(pause).__name__}")
    return None
