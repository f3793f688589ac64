"""Gates: callables that can pause a loop before it fetches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ergon_framework.errors import error_message

__all__ = ["Gate", "Pause", "first_pause"]


@dataclass(frozen=True, slots=True)
class Pause:
    """The reason for not fetching; the loop calls the gate again after *seconds* or earlier."""

    reason: str
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):  # also rejects NaN
            raise ValueError(f"a pause must be a finite number of seconds > 0, not {self.seconds!r}")


#: Called before every fetch, on the loop's own thread: it must return immediately and never wait.
Gate: TypeAlias = Callable[[], Pause | None]


def first_pause(gates: tuple[Gate, ...]) -> Pause | None:
    """Return the first reason to pause, if any. If a gate raises, the loop pauses: the reason is unknown."""
    for gate in gates:
        try:
            pause: Any = gate()
        except BaseException as error:  # noqa: BLE001 - a gate is third-party code; after its failure the loop pauses
            return Pause(f"gate raised {type(error).__name__}: {error_message(error)}: loop is paused")
        if pause is not None:
            return pause if isinstance(pause, Pause) else Pause(f"gate returned a {type(pause).__name__}, not a Pause")
    return None
