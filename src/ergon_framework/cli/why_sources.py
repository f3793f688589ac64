"""Sources of ``ergon why``: groups of database tables, and connectors through their contract."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ergon_framework.cli.dlq_work import open_connector
from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.tracing import lacks_search, lookup_transaction
from ergon_framework.history import History, HistoryQuery, SupportsLookup
from ergon_framework.providers.standing import ProviderAvailability
from ergon_framework.schema import libraries

#: Timeout in seconds for connecting to one source and for all its queries.
_SOURCE_TIMEOUT_SECONDS = 30.0


@runtime_checkable
class DatabaseConnector(Protocol):
    """A connector whose queue may be in the database."""

    def is_in(self, dsn: str) -> bool:
        """Return whether the queue is in the database at *dsn*."""


@dataclass(slots=True)
class ConnectorSource:
    """One connector named on the command line."""

    target: str
    #: Address of the database whose queues are queried together; a queue in it is not queried again.
    database: str | None = None
    #: Name of its queue, set by the lookup.
    queue: str | None = None
    #: What this connector cannot look up.
    note: str = ""

    @property
    def name(self) -> str:
        return self.target

    def lookup(self, query: HistoryQuery) -> Sequence[History]:
        with open_connector(self.target) as connector:
            self.queue = connector.name
            if self.database and isinstance(connector, DatabaseConnector) and connector.is_in(self.database):
                self.note = "asked with the queues of the database"
                return ()
            if isinstance(connector, SupportsLookup):
                return connector.lookup(query.id)
            notes = [] if connector.capabilities.dead_letters else ["keeps no dead letters"]
            notes += ["cannot say whether a transaction is in its queue"] if lacks_search(connector) else []
            self.note = " and ".join(notes)
            return lookup_transaction(connector, query.id)


@dataclass(frozen=True, slots=True)
class TableSource:
    """A group of database tables."""

    name: str
    _pool: Any
    _script: Callable[[HistoryQuery], Any]

    def lookup(self, query: HistoryQuery) -> Sequence[History]:
        histories: Sequence[History] = self._pool.run(self._script(query), timeout_seconds=_SOURCE_TIMEOUT_SECONDS)
        return histories


class DatabaseSources(NamedTuple):
    """The sources in the database."""

    #: Sources queried by id, which also find correlations, and sources queried by correlation.
    id_sources: Sequence[TableSource]
    correlation_sources: Sequence[TableSource]
    #: Returns the availability of the named providers of a tenant, or of all that block calls.
    lookup_availability: Callable[[str, Sequence[tuple[str, str]]], Sequence[ProviderAvailability]]


@contextmanager
def table_sources(dsn: str) -> Iterator[DatabaseSources]:
    """Yield the sources in the database at *dsn*."""
    # Imported on demand: only this command needs all of these libraries, which are an optional extra.
    libraries.require_psycopg()
    queues, jobs, journal, calls, facts, availability = (
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
    pool = importlib.import_module("ergon_framework.schema.lines").ConnectionPool(dsn, error_type=ConnectorError)
    try:
        yield DatabaseSources(
            (
                TableSource("queues of the database", pool, lambda question: queues.lookup_transaction(question.id)),
                TableSource("jobs of the database", pool, lambda question: jobs.lookup_job(question.id)),
                TableSource("journal of the database", pool, lambda question: journal.lookup_journal(question.id)),
            ),
            (
                TableSource(
                    "provider calls of the database",
                    pool,
                    lambda question: calls.lookup_calls(question.ids, question.tenants),
                ),
                TableSource(
                    "facts of the database", pool, lambda question: facts.lookup_facts(question.id, question.ids)
                ),
            ),
            lambda tenant, accounts: pool.run(
                availability.provider_availability(tenant, accounts), timeout_seconds=_SOURCE_TIMEOUT_SECONDS
            ),
        )
    finally:
        pool.close()
