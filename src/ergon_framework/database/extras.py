"""Checks for the optional libraries of the database."""

from __future__ import annotations

from ergon_framework.errors import require_extra


def require_psycopg() -> None:
    """Raise MissingExtraError if the driver is not installed, before any work begins."""
    require_extra("postgres", "psycopg")
