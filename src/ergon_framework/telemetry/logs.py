"""Log events: logged once, where a result becomes final, with fields and never with a payload.

The message of a record is the event followed by its fields as logfmt, so that it is complete under any formatter. The
record also has each field as an attribute (``extra=``) and the event itself as ``event``, for structured formatters.

The current scope is that of the handler that runs here: its transaction with tenant and correlation, its step and the
number of its attempt. It is None outside handlers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.redaction import redact_text
from ergon_framework.telemetry.context import current_ids
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.tracebacks import ExcInfo

#: The logger of the loops.
log: Final = logging.getLogger(f"{LIBRARY}.task")
_logger: Final = logging.getLogger(__name__)
#: Attributes of every log record; all others were passed as fields.
_STANDARD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def log_event(
    level: int,
    event: str,
    fields: Mapping[str, Any],
    *,
    to: logging.Logger = log,
    exc_info: BaseException | None = None,
    raised: tuple[ExcInfo, str] | None = None,
    keep_none: bool = False,
) -> None:
    """Log *event* with *fields* to the logger *to*.

    Fields that are None are left out; with *keep_none* they stay attributes of the record. A record about a transaction
    has a correlation id, which is the transaction's id if it has no other. The text of fields is redacted. *raised* is
    an error with its redacted traceback; *exc_info* is an error that is formatted unchanged.
    """
    if not to.isEnabledFor(level):
        return
    # Filters and handlers are third-party code, and must not end the loop that logs.
    with suppress(Exception):
        fields = {name: _redact(value) for name, value in _add_correlation(fields).items()}
        present = {name: value for name, value in fields.items() if value is not None}
        # The template is the same for each record of an event, so that error trackers group them.
        template = " ".join([event, *(f"{name}=%s" for name in present)])
        extra = {Field.EVENT: event, **(fields if keep_none else present)}
        values = tuple(map(quote, present.values()))
        if raised is None:
            to.log(level, template, *values, extra=extra, exc_info=exc_info, stacklevel=2)
            return
        file, line, function, _ = to.findCaller(stacklevel=2)
        record = to.makeRecord(to.name, level, file, line, template, values, raised[0], function, extra)
        # Formatters print this text and do not format the error again.
        record.exc_text = raised[1]
        to.handle(record)


def _redact(value: Any) -> Any:
    return redact_text(value) if type(value) is str else value


def _add_correlation(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    transaction_id = fields.get(Field.TRANSACTION_ID)
    if transaction_id is None or fields.get(Field.CORRELATION_ID) is not None:
        return fields
    current_scope = scope.current()
    if current_scope is not None and current_scope.transaction_id == transaction_id:
        return {**fields, Field.CORRELATION_ID: current_scope.correlation}
    return {**fields, Field.CORRELATION_ID: transaction_id}


def log_telemetry_failure(error: BaseException) -> None:
    """Log that a sampler, processor or exporter raised; the loop goes on without its span."""
    log_event(logging.WARNING, Event.TELEMETRY_FAILED, {Field.ERROR_TYPE: type(error).__name__}, to=_logger)


def is_own(record: logging.LogRecord) -> bool:
    """Return whether this package has logged *record*."""
    return record.name.partition(".")[0] == LIBRARY


def get_event(record: logging.LogRecord) -> str:
    """Return the event of a record of this package, and the message of any other record."""
    if is_own(record):
        return getattr(record, Field.EVENT, None) or record.getMessage()
    return record.getMessage()


def get_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of *record* that are not None, without its event."""
    return {
        name: value
        for name, value in vars(record).items()
        if value is not None and name not in _STANDARD_ATTRIBUTES and name != Field.EVENT
    }


def format_logfmt(fields: Mapping[str, Any]) -> str:
    """Return *fields* as one line of logfmt."""
    return " ".join(f"{_clean_key(name)}={quote(value)}" for name, value in fields.items())


def quote(value: Any) -> str:
    """Return *value* as a value of logfmt: bare if it is one plain word, else quoted with the escapes of JSON."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if text and text.isprintable() and not any(mark in text for mark in ' ="\\'):
        return text
    # Line ends, control characters and lone surrogates are escaped; all other letters stay readable.
    return '"' + "".join(_escape(char) for char in text) + '"'


def _escape(char: str) -> str:
    return char if char.isprintable() and char not in '"\\' else json.dumps(char)[1:-1]


def _clean_key(name: str) -> str:
    """Return *name* without characters that would end a key of logfmt."""
    return "".join(char if char.isprintable() and char not in ' ="\\' else "_" for char in name)


class TransactionFilter(logging.Filter):
    """Adds the current transaction and its trace to records logged inside a handler; attach it to a logging handler.

    Fields that a record already has are left unchanged.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        fields = record.__dict__
        current_scope = scope.current()
        if current_scope is not None:
            fields.setdefault(Field.TRANSACTION_ID, current_scope.transaction_id)
            fields.setdefault(Field.CORRELATION_ID, current_scope.correlation)
            fields.setdefault(Field.TENANT_ID, current_scope.tenant)
            fields.setdefault(Field.STEP, current_scope.step)
            # Attempts in logs count from 1.
            fields.setdefault(Field.ATTEMPT, current_scope.attempt + 1)
        trace_ids = current_ids()
        if trace_ids is not None:
            fields.setdefault(Field.TRACE_ID, trace_ids[0])
            fields.setdefault(Field.SPAN_ID, trace_ids[1])
        return True
