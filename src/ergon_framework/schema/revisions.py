"""Which schema this release needs; read without any library, because every connector asks it."""

from __future__ import annotations

from typing import Final

#: The schema that all tables live in.
SCHEMA: Final = "ergon"
#: The chain of migrations, the oldest first. Each leaves the tables usable for the release before it.
CHAIN: Final = (
    "0001",
    "0002",
    "0003",
    "0004",
    "0005",
    "0006",
    "0007",
    "0008",
    "0009",
    "0010",
    "0011",
    "0012",
    "0013",
    "0014",
    "0015",
    "0016",
)
#: The oldest revision that this release can work on.
NEEDED: Final = "0001"


def suffices(found: str | None, needed: str = NEEDED) -> bool:
    """Whether a database at revision *found* will do; one that this release does not know is newer, and does."""
    if found is None:
        return False
    return found not in CHAIN or CHAIN.index(found) >= CHAIN.index(needed)
