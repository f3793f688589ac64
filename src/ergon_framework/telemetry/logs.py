"""Log events: once, where something becomes final, with fields instead of sentences and never a payload."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.telemetry.context import current_ids
from ergon_framework.telemetry.names import LIBRARY, Event, Field

#: What the loops say.
log: Final = logging.getLogger(f"{LIBRARY}.task")
_own: Final = logging.getLogger(__name__)


def say(level: int, event: str, fields: Mapping[str, Any], *, to: logging.Logger = log) -> None:
    """Log *event*; fields that are None are left out."""
    if to.isEnabledFor(level):
        # Filters and handlers are foreign code, and must not end the loop that has something to say.
        with suppress(Exception):
            to.log(level, event, extra={name: value for name, value in fields.items() if value is not None})


def telemetry_failed(error: BaseException) -> None:
    """Somebody's sampler, processor or exporter raised; the loop goes on without its span."""
    _own.warning(Event.TELEMETRY_FAILED, extra={Field.ERROR_TYPE: type(error).__name__})


class TransactionFilter(logging.Filter):
    """Adds to every record below a handler whose it is; put it on a handler of the logging configuration.

    What a record already has under one of these names is left as it is.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        fields = record.__dict__
        below = scope.current()
        if below is not None:
            fields.setdefault(Field.TRANSACTION_ID, below.transaction_id)
            fields.setdefault(Field.CORRELATION_ID, below.correlation)
            fields.setdefault(Field.TENANT_ID, below.tenant)
            fields.setdefault(Field.STEP, below.step)
            fields.setdefault(Field.ATTEMPT, below.attempt)
        found = current_ids()
        if found is not None:
            fields.setdefault(Field.TRACE_ID, found[0])
            fields.setdefault(Field.SPAN_ID, found[1])
        return True
