"""Reaching the database: a connection on which no wait is longer than its owner allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from ergon_framework.schema.failures import Silent, translated
from ergon_framework.schema.line import Line
from ergon_framework.schema.lines import options_of


class PatientLine(Line):
    """A connection that gives up waiting for an answer after *patience* seconds, and is closed by that."""

    patience: float = 30.0

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        self.until = time.monotonic() + self.patience
        try:
            return super().wait(gen, *args, **options)
        except Silent:
            self.close()
            raise


def connect(dsn: str, *, patience: float) -> PatientLine:
    """A line to *dsn*, on which nothing is prepared, because a pooler may stand between."""
    line = PatientLine.connect(**options_of(dsn), autocommit=True, prepare_threshold=None)
    line.patience = patience
    return line


@contextmanager
def reached(dsn: str, *, patience: float) -> Iterator[PatientLine]:
    """A line for one piece of work; the driver's errors in our words."""
    try:
        with connect(dsn, patience=patience) as line:
            yield line
    except psycopg.Error as error:
        # Without its cause, which quotes the statement. Whatever the server refuses here it may grant later.
        raise translated(error, broken=True) from None
