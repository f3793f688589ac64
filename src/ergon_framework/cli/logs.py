"""Logging of the command line: one record per line on stderr, as logfmt or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from ergon_framework.errors import to_one_line
from ergon_framework.redaction import redact_text
from ergon_framework.telemetry.logs import TransactionFilter, format_logfmt, get_event, get_fields, is_own
from ergon_framework.telemetry.redaction import redact

#: Libraries that log every step of a connection, and as errors what the framework's errors and events already report.
_NOISY_LIBRARIES = ("pika",)


class KeyValueFormatter(logging.Formatter):
    """Format a record as one line of logfmt; a traceback follows in indented lines.

    Only the first line of a record begins without a space, so a log collector can tell records apart.
    """

    def format(self, record: logging.LogRecord) -> str:
        line, traceback = _split_record(record, self)
        return "\n".join([format_logfmt(line), *("  " + _to_line(each) for each in traceback.splitlines())])


def _to_line(text: str) -> str:
    """Return one line of a traceback with terminal control characters escaped."""
    return to_one_line(text.expandtabs(4))


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON, with a traceback as the field ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        line, traceback = _split_record(record, self)
        return json.dumps(line | {"traceback": traceback} if traceback else line, default=str)


def _split_record(record: logging.LogRecord, formatter: logging.Formatter) -> tuple[dict[str, Any], str]:
    """Return time, level, logger, event and fields of *record*, and its traceback and stack as text."""
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": get_event(record),
    }
    traceback = record.exc_text or (formatter.formatException(record.exc_info) if record.exc_info else "")
    stack = formatter.formatStack(record.stack_info) if record.stack_info else ""
    fields = get_fields(record)
    if not is_own(record):  # the framework's events are redacted where they are logged
        line["event"] = redact_text(line["event"])
        fields = {name: redact(name, value) for name, value in fields.items()}
    return line | fields | line, redact_text("\n".join(filter(None, [traceback, stack])))


def configure_logging(level: str, log_format: str = "text") -> None:
    """Log *level* and above to stderr, unless the program has already configured logging.

    Noisy libraries are logged at the level debug only.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else KeyValueFormatter())
    handler.addFilter(TransactionFilter())
    logging.basicConfig(level=level, handlers=[handler])
    for library in map(logging.getLogger, _NOISY_LIBRARIES):
        if level != "DEBUG" and library.level == logging.NOTSET:
            library.setLevel(logging.CRITICAL)
