"""Health: whether a process is live, and whether it is ready, each with the reasons against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: How many reasons are told, and how long each may be.
REASONS = 20
LONGEST = 300


@dataclass(frozen=True, slots=True)
class Health:
    """Live: it can still make progress, so a restart would not help. Ready: it takes work in, if there is any."""

    live: bool
    ready: bool
    reasons: tuple[str, ...] = ()

    def told(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "live": self.live,
            "ready": self.ready,
            "reasons": [reason[:LONGEST] for reason in self.reasons[:REASONS]],
        }

    @classmethod
    def heard(cls, told: Mapping[str, Any]) -> Health:
        """From plain data, of which nothing is believed but what fits."""
        reasons = told.get("reasons")
        kept = [reason[:LONGEST] for reason in reasons if isinstance(reason, str)] if isinstance(reasons, list) else []
        return cls(told.get("live") is True, told.get("ready") is True, tuple(kept[:REASONS]))


STARTING = Health(live=True, ready=False, reasons=("starting",))


def together(parts: Mapping[int, Health]) -> Health:
    """All processes as one: it is live, or ready, when each of them is."""
    return Health(
        all(part.live for part in parts.values()),
        all(part.ready for part in parts.values()),
        tuple(f"process {number}: {reason}" for number, part in parts.items() for reason in part.reasons),
    )
