"""Reads the events of log records: the message of a record also has its fields."""

from __future__ import annotations

import logging
from collections.abc import Iterable


def get_event(record: logging.LogRecord) -> str | None:
    """Return the event of *record*, None if it is not a record of this package."""
    return getattr(record, "event", None)


def list_events(records: Iterable[logging.LogRecord]) -> list[str | None]:
    """Return the events of *records*, in their order."""
    return [get_event(record) for record in records]
