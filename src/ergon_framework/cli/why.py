"""``ergon why``: query every source for a piece of work, combine the answers, and report the result.

The sources are groups of database tables, and connectors through their contract. Each answers with histories: the
events and the current state of one transaction, job, provider call or fact. A correlation is the id that all work of
one business process shares. The availability of a provider says which of its quotas and circuit breakers block calls.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import typer

from ergon_framework.cli import why_view as view
from ergon_framework.cli.dlq_commands import open_connector
from ergon_framework.cli.options import Config, Json
from ergon_framework.cli.output import configure_logging
from ergon_framework.cli.why_providers import (
    AvailabilityLookup,
    InvolvedProvider,
    add_provider_remedy,
    describe_provider,
    find_involved_providers,
    task_providers,
    to_dict,
    waiting_reason,
)
from ergon_framework.cli.why_view import describe_status, suggest_remedy
from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.lookup import lacks_search, lookup_transaction
from ergon_framework.database import extras
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.history import History, HistoryQuery, Source, SupportsLookup, Value, WorkKind
from ergon_framework.providers.circuit_breaker import ProviderAvailability
from ergon_framework.runner.exit import ExitCode
from ergon_framework.runner.loading import load_connector, load_task
from ergon_framework.runner.settings import Settings, load_settings
from ergon_framework.task.context import choose_policy
from ergon_framework.worker.policies import ConsumerPolicy

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
                self.note = "searched with the PostgreSQL queues"
                return ()
            if isinstance(connector, SupportsLookup):
                return connector.lookup(query.id)
            notes = [] if connector.capabilities.dead_letters else ["keeps no dead letters"]
            notes += ["cannot report whether a transaction is in its queue"] if lacks_search(connector) else []
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
    #: Returns the availability of the named providers of a tenant; an empty sequence asks for all that block calls.
    lookup_availability: Callable[[str, Sequence[tuple[str, str]]], Sequence[ProviderAvailability]]


@contextmanager
def table_sources(dsn: str) -> Iterator[DatabaseSources]:
    """Yield the sources in the database at *dsn*."""
    # Imported on demand: only this command needs all of these libraries, which are an optional extra.
    extras.require_psycopg()
    queues, jobs, journal, calls, facts, availability = (
        importlib.import_module(f"ergon_framework.{name}")
        for name in (
            "connectors.postgres.lookup",
            "jobs.lookup",
            "connectors.postgres.journal",
            "providers.postgres.lookup",
            "facts.stores.postgres.lookup",
            "providers.postgres.admin",
        )
    )
    pool = importlib.import_module("ergon_framework.database.pool").ConnectionPool(dsn, error_type=ConnectorError)
    try:
        yield DatabaseSources(
            (
                TableSource("PostgreSQL queues", pool, lambda query: queues.lookup_transaction(query.id)),
                TableSource("jobs", pool, lambda query: jobs.lookup_job(query.id)),
                TableSource("journal", pool, lambda query: journal.lookup_journal(query.id)),
            ),
            (
                TableSource(
                    "provider calls",
                    pool,
                    lambda query: calls.lookup_calls(query.ids, query.tenants),
                ),
                TableSource("facts", pool, lambda query: facts.lookup_facts(query.id, query.ids)),
            ),
            lambda tenant, accounts: pool.run(
                availability.provider_availability(tenant, accounts), timeout_seconds=_SOURCE_TIMEOUT_SECONDS
            ),
        )
    finally:
        pool.close()


# -- search -----------------------------------------------------------------------------------------


class WhyExit(ExitCode):
    """Exit codes of ``ergon why`` and their meanings."""

    OK = 0, "found"
    UNKNOWN = 1, "not found in any source"
    USAGE = 2, "the command line or the configuration is invalid, or there is no source to query"
    UNANSWERED = 3, "not found, and at least one source did not answer"


@dataclass(slots=True)
class SourceAnswer:
    """The histories found by one source, or the reason why it did not answer."""

    source: str
    histories: Sequence[History] = ()
    note: str = ""
    error: str | None = None


@dataclass(slots=True)
class HistorySearch:
    """One query and the answers of the sources."""

    query: HistoryQuery
    answers: list[SourceAnswer] = field(default_factory=list)

    def run(self, sources: Iterable[Source]) -> None:
        """Query each source; a source that fails does not affect the others."""
        for source in sources:
            answer = SourceAnswer(source.name)
            try:
                answer.histories = source.lookup(self.query)
            except ErgonError as error:
                answer.error = error_message(error)
            if isinstance(source, ConnectorSource):
                answer.note = source.note
            self.answers.append(answer)

    def follow_correlations(self) -> None:
        """Extend the query to the correlations found so far, limited to their tenants."""
        histories = self.histories
        correlations = (history.attributes.get("correlation") for history in histories)
        tenants = (history.attributes.get("tenant") for history in histories)
        self.query = replace(
            self.query,
            correlations=tuple(str(name) for name in correlations if name is not None),
            tenants=tuple(dict.fromkeys(str(name) for name in tenants if name is not None)),
        )

    def availability_lookup(self, database: DatabaseSources | None) -> AvailabilityLookup:
        """Return the lookup of provider availability; after one failed query it does not query the database again."""
        failed = False

        def lookup(tenant: str, accounts: Sequence[tuple[str, str]]) -> Sequence[ProviderAvailability] | None:
            nonlocal failed
            if database is None or failed:
                return None
            try:
                return database.lookup_availability(tenant, accounts)
            except ErgonError as error:
                failed = True
                self.answers.append(SourceAnswer("provider state", error=error_message(error)))
                return None

        return lookup

    @property
    def histories(self) -> list[History]:
        """All histories found, without duplicates of several sources."""
        unique: list[History] = []
        for answer in self.answers:
            unique += [history for history in answer.histories if history not in unique]
        return unique

    @property
    def code(self) -> WhyExit:
        if self.histories:
            return WhyExit.OK
        return WhyExit.UNANSWERED if any(answer.error for answer in self.answers) else WhyExit.UNKNOWN


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """One history, the providers that block or failed it, its current status, and the remedy."""

    history: History
    providers: Sequence[InvolvedProvider]
    status: str
    remedy: str


def explain(
    work_id: str, *, tasks: Sequence[str], queues: Sequence[str], config: Path | None, as_json: bool
) -> WhyExit:
    """Print what the sources know about *work_id*."""
    configure_logging("WARNING")
    try:
        search, reports = _search_sources(
            HistoryQuery(work_id), tasks=tasks, queues=queues, settings=load_settings(config)
        )
    except ConfigurationError as error:
        return _report_usage_error(error_message(error), as_json=as_json)
    if as_json:
        typer.echo(json.dumps(_to_dict(search, reports), allow_nan=False))
        return search.code
    for index, report in enumerate(reports):
        if index:
            typer.echo()
        view.show(
            report.history,
            providers=[describe_provider(one) for one in report.providers],
            status=report.status,
            remedy=report.remedy,
        )
    for reason, sources in _group_errors(search).items():
        _print_stderr(f"{', '.join(sources)} did not answer: {reason}")
    if not reports:
        _print_stderr(_describe_not_found(search))
    return search.code


def _search_sources(
    query: HistoryQuery, *, tasks: Sequence[str], queues: Sequence[str], settings: Settings
) -> tuple[HistorySearch, list[HistoryReport]]:
    """Query the sources and build the reports."""
    connectors = [ConnectorSource(target, settings.postgres.dsn) for target in dict.fromkeys((*tasks, *queues))]
    if not connectors and not settings.postgres.dsn:
        raise ConfigurationError("no source to query: set ERGON_POSTGRES__DSN, or pass --task or --queue")
    # Load everything before the first query: a mistyped name is a usage error, not an unavailable source.
    policies = {load_connector(name).name: _read_policy_values(name, settings) for name in tasks}
    used_providers = {load_connector(name).name: task_providers(load_task(name).gates) for name in tasks}
    for name in queues:
        load_connector(name)
    search = HistorySearch(query)
    with ExitStack() as stack:
        database = stack.enter_context(table_sources(settings.postgres.dsn)) if settings.postgres.dsn else None
        search.run((*(database.id_sources if database else ()), *connectors))
        search.follow_correlations()
        search.run(database.correlation_sources if database else ())
        histories = [_add_policy_values(history, policies) for history in search.histories]
        lookup = search.availability_lookup(database)
        involved = [
            find_involved_providers(one, histories, used_providers.get(one.where, ()), lookup) for one in histories
        ]
    # Queues of the settings whose tables the database has: their names are enough to address them.
    names = {
        name: name
        for name, queue_settings in settings.queues.items()
        if (queue_settings.url or "").startswith("postgres")
    }
    names |= {one.queue: one.target for one in connectors if one.queue is not None}
    now = time.time()
    return search, [_build_report(*one, names, now) for one in zip(histories, involved, strict=True)]


def _build_report(
    history: History, providers: Sequence[InvolvedProvider], names: Mapping[str, str], now: float
) -> HistoryReport:
    return HistoryReport(
        history,
        providers,
        status=describe_status(history, now=now) + waiting_reason(history, providers),
        remedy=add_provider_remedy(history, providers, suggest_remedy(history, names)),
    )


def _read_policy_values(name: str, settings: Settings) -> dict[str, Value]:
    """Return the current policy values of a task that decide about retries and giving up."""
    task = load_task(name)
    policy = settings.policy(task.name, choose_policy(task, None, ConsumerPolicy))
    retry = policy.steps.process.retry.model_dump(include=set(_SHOWN_RETRY_FIELDS))
    values = {f"policy.process.retry.{key}": retry[key] for key in _SHOWN_RETRY_FIELDS if retry[key] is not None}
    return {**values, "policy.loop.max_deliveries": policy.loop.max_deliveries}


_SHOWN_RETRY_FIELDS = ("max_attempts", "timeout", "backoff", "multiplier", "cap", "jitter")


def _add_policy_values(history: History, policies: Mapping[str, Mapping[str, Value]]) -> History:
    if history.kind is not WorkKind.TRANSACTION or history.where not in policies:
        return history
    return replace(history, attributes={**history.attributes, **policies[history.where]})


# -- output -----------------------------------------------------------------------------------------


def _to_dict(search: HistorySearch, reports: Sequence[HistoryReport]) -> dict[str, Any]:
    return {
        "id": search.query.id,
        "exit_code": int(search.code),
        "histories": [
            {
                **asdict(report.history),
                "providers": [to_dict(provider) for provider in report.providers],
                "status": report.status,
                "remedy": report.remedy,
            }
            for report in reports
        ],
        "sources": [
            {"source": answer.source, "found": len(answer.histories), "note": answer.note, "error": answer.error}
            for answer in search.answers
        ],
    }


def _group_errors(search: HistorySearch) -> dict[str, list[str]]:
    """Return the sources that did not answer, grouped by error, so that one outage is reported once."""
    sources_by_error: dict[str, list[str]] = {}
    for answer in search.answers:
        if answer.error is not None:
            sources_by_error.setdefault(answer.error, []).append(answer.source)
    return sources_by_error


def _describe_not_found(search: HistorySearch) -> str:
    source_names = ", ".join(
        f"{one.source} ({one.note})" if one.note else one.source for one in search.answers if one.error is None
    )
    qualifier = " in the sources that answered" if search.code is WhyExit.UNANSWERED else ""
    return (
        f"{view.truncate(search.query.id)!r} not found{qualifier}. Searched: {source_names or 'none'}. "
        "Success is recorded only if the queue has an inbox or its workers a journal (run.journal.enabled); query "
        "other brokers with --queue"
    )


def _report_usage_error(message: str, *, as_json: bool) -> WhyExit:
    if as_json:
        typer.echo(json.dumps({"error": message, "exit_code": int(WhyExit.USAGE)}))
    else:
        _print_stderr(message)
    return WhyExit.USAGE


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)


# -- command ----------------------------------------------------------------------------------------

why = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@why.command("why")
def why_(
    id_: Annotated[str, typer.Argument(metavar="ID", help="Id of a transaction, job or fact, or a correlation id.")],
    *,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:TASK", help="Also query this task's connector, and show its policy; repeatable."),
    ] = None,
    queue: Annotated[
        list[str] | None, typer.Option(metavar="MODULE:CONNECTOR", help="Also query this connector; repeatable.")
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Show what happened to a piece of work, its current state, and what to do next.

    The database is queried if its address is set by ERGON_POSTGRES__DSN or by postgres.dsn in ergon.toml. Payloads are
    never shown.

    Exit codes: 0 found, 1 not found, 2 invalid option or configuration, or no source to query, 3 not found, but some
    sources did not answer.

    Example: ergon why order-3 --task app:charge
    """
    raise typer.Exit(explain(id_, tasks=task or (), queues=queue or (), config=config, as_json=json))
