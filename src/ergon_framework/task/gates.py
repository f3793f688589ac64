"""Gates: whoever may hold a loop back before it fetches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ergon_framework.errors import text


@dataclass(frozen=True, slots=True)
class Pause:
    """Do not fetch now, because …; the gate is asked again after *seconds*, or earlier."""

    because: str
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):  # also refuses NaN
            raise ValueError(f"a pause must be a finite number of seconds > 0, not {self.seconds!r}")


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
