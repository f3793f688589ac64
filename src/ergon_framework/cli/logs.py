"""Logs of the command: one line an event on stderr, its fields behind it."""

from __future__ import annotations

import logging

from ergon_framework.telemetry.logs import TransactionFilter

#: What every record has; whatever else is there was given as a field.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Fielded(logging.Formatter):
    """Time, level and event, then every field as ``name=value``."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        fields = [f"{name}={value}" for name, value in vars(record).items() if name not in _OWN and value is not None]
        return " ".join([super().formatMessage(record), *fields])


def configure(level: str) -> None:
    """Log *level* and above to stderr, unless the program has already said where logs go."""
    handler = logging.StreamHandler()
    handler.setFormatter(Fielded("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(TransactionFilter())
    logging.basicConfig(level=level, handlers=[handler])
