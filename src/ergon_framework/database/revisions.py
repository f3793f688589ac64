"""The schema revisions, and which one this release needs; free of dependencies, because every connector reads it."""

from __future__ import annotations

from typing import Final

#: The database schema of all tables.
SCHEMA: Final = "ergon"
#: The migrations, the oldest first. Each leaves the tables usable for the release before it.
REVISIONS: Final = ("0001", "0002", "0003", "0004")
#: The oldest revision that this release can work on.
REQUIRED_REVISION: Final = "0001"


def is_compatible(revision: str | None, required: str = REQUIRED_REVISION) -> bool:
    """Return whether a database at *revision* is recent enough; an unknown revision is newer, and compatible."""
    if revision is None:
        return False
    return revision not in REVISIONS or REVISIONS.index(revision) >= REVISIONS.index(required)
