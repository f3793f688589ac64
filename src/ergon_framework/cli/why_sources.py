"""Whom ``ergon why`` asks: the tables of the database, each by its own slice, and connectors by their contract."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ergon_framework.cli.dlq_work import opened
from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.tracing import traced, unsearchable
from ergon_framework.history import History, Question, Traceable
from ergon_framework.providers.standing import Standing
from ergon_framework.schema import libraries

#: Seconds for all questions of one source, and for reaching it.
_WITHIN = 30.0


@runtime_checkable
class InDatabase(Protocol):
    """A connector whose queue may be in the database."""

    def is_in(self, dsn: str) -> bool:
        """Tell whether the queue is in the database at *dsn*."""


@dataclass(slots=True)
class Connected:
    """One connector, named on the command line."""

    where: str
    #: The address of the database whose queues are asked together; a queue in it is not asked a second time.
    database: str | None = None
    #: The name of its queue, once it was asked.
    queue: str | None = None
    #: What it cannot say.
    note: str = ""

    @property
    def name(self) -> str:
        return self.where

    def ask(self, question: Question) -> Sequence[History]:
        with opened(self.where) as connector:
            self.queue = connector.name
            if self.database and isinstance(connector, InDatabase) and connector.is_in(self.database):
                self.note = "asked with the queues of the database"
                return ()
            if isinstance(connector, Traceable):
                return connector.trace(question.id)
            notes = [] if connector.capabilities.dead_letters else ["keeps no dead letters"]
            notes += ["cannot say whether a transaction is in its queue"] if unsearchable(connector) else []
            self.note = " and ".join(notes)
            return traced(connector, question.id)


@dataclass(frozen=True, slots=True)
class Tables:
    """Some tables of the database."""

    name: str
    _lines: Any
    _script: Callable[[Question], Any]

    def ask(self, question: Question) -> Sequence[History]:
        found: Sequence[History] = self._lines.run(self._script(question), within=_WITHIN)
        return found


class Database(NamedTuple):
    """What the database has."""

    #: Where correlations are found, and where they are asked for.
    first: Sequence[Tables]
    then: Sequence[Tables]
    #: How the providers of a tenant are: those named, or all that hold calls back.
    standings: Callable[[str, Sequence[tuple[str, str]]], Sequence[Standing]]


@contextmanager
def tables(dsn: str) -> Iterator[Database]:
    """The tables of the database at *dsn*."""
    # Loaded when it is needed: not everybody has its libraries, and no other command needs them all.
    libraries.needed()
    queues, jobs, journal, calls, facts, books = (
        importlib.import_module(f"ergon_framework.{name}")
        for name in (
            "connectors.postgres.tracing",
            "executor.jobs.tracing",
            "connectors.postgres.journal",
            "providers.sql.tracing",
            "facts.stores.postgres_tracing",
            "providers.sql.standings",
        )
    )
    lines = importlib.import_module("ergon_framework.schema.lines").Lines(dsn, other=ConnectorError)
    try:
        yield Database(
            (
                Tables("queues of the database", lines, lambda question: queues.trace(question.id)),
                Tables("jobs of the database", lines, lambda question: jobs.trace(question.id)),
                Tables("journal of the database", lines, lambda question: journal.trace(question.id)),
            ),
            (
                Tables(
                    "provider calls of the database",
                    lines,
                    lambda question: calls.trace(question.names, question.tenants),
                ),
                Tables("facts of the database", lines, lambda question: facts.trace(question.id, question.names)),
            ),
            lambda tenant, accounts: lines.run(books.standings(tenant, accounts), within=_WITHIN),
        )
    finally:
        lines.close()
