"""Health of a process: whether it is live and whether it is ready, with the reasons against each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Maximum number of reported reasons, and of characters in each.
MAX_REASONS = 20
MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """Live: it can still make progress, so a restart would not help. Ready: it accepts work, if there is any."""

    live: bool
    ready: bool
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the health as plain data."""
        return {
            "live": self.live,
            "ready": self.ready,
            "reasons": [reason[:MAX_REASON_CHARS] for reason in self.reasons[:MAX_REASONS]],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProcessHealth:
        """Build the health from plain data; invalid values are ignored."""
        reasons = data.get("reasons")
        valid = (
            [reason[:MAX_REASON_CHARS] for reason in reasons if isinstance(reason, str)]
            if isinstance(reasons, list)
            else []
        )
        return cls(data.get("live") is True, data.get("ready") is True, tuple(valid[:MAX_REASONS]))


STARTING = ProcessHealth(live=True, ready=False, reasons=("starting",))


def combine_health(parts: Mapping[int, ProcessHealth]) -> ProcessHealth:
    """Combine the health of all processes: it is live, or ready, if each of them is."""
    return ProcessHealth(
        all(part.live for part in parts.values()),
        all(part.ready for part in parts.values()),
        tuple(f"process {number}: {reason}" for number, part in parts.items() for reason in part.reasons),
    )
