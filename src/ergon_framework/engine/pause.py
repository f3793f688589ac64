"""Pause: the word of whoever holds a loop back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pause:
    """Do not fetch now, because …; the gate is asked again after *seconds*, or earlier."""

    because: str
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):  # also refuses NaN
            raise ValueError(f"a pause must be a finite number of seconds > 0, not {self.seconds!r}")
