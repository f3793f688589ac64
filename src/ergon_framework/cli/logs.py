"""Logs of the command: one line an event on stderr, its fields behind it."""

from __future__ import annotations

import json
import logging
from typing import Any

from ergon_framework.telemetry.logs import TransactionFilter

#: What every record has; whatever else is there was given as a field.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: Libraries that log every step of every connection, and as errors what our own errors and events tell already.
_TALKATIVE = ("pika",)


class Fielded(logging.Formatter):
    """Time, level and event, then every field as ``name=value``."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        fields = [f"{name}={value}" for name, value in vars(record).items() if name not in _OWN and value is not None]
        return " ".join([super().formatMessage(record), *fields])


class Structured(logging.Formatter):
    """One object of JSON a line: time, level, logger and event, every field, and the error if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _OWN and value is not None:
                line.setdefault(name, value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, form: str = "text") -> None:
    """Log *level* and above to stderr, unless the program has already said where logs go.

    What talkative libraries say is logged at the level debug only.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(Structured() if form == "json" else Fielded("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(TransactionFilter())
    logging.basicConfig(level=level, handlers=[handler])
    for library in map(logging.getLogger, _TALKATIVE):
        if level != "DEBUG" and library.level == logging.NOTSET:
            library.setLevel(logging.CRITICAL)
