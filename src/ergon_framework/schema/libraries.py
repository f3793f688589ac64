"""Libraries of the database, which not everybody has installed."""

from __future__ import annotations

from ergon_framework.errors import extra


def needed() -> None:
    """Say which extra is missing, if one is, before anything fails in the middle."""
    extra("postgres", "psycopg")
