"""Pause: the reason of a gate for not fetching."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pause:
    """The reason for not fetching; the loop calls the gate again after *seconds* or earlier."""

    reason: str
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):  # also rejects NaN
            raise ValueError(f"a pause must be a finite number of seconds > 0, not {self.seconds!r}")
