"""Work of ``ergon why``: query every source, combine the answers, and report the result."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from ergon_framework.cli import why_view as view
from ergon_framework.cli.logs import configure_logging
from ergon_framework.cli.why_advice import describe_state, suggest_action
from ergon_framework.cli.why_providers import (
    AvailabilityLookup,
    InvolvedProvider,
    add_provider_advice,
    describe_provider,
    find_involved_providers,
    task_providers,
    to_dict,
    waiting_reason,
)
from ergon_framework.cli.why_sources import ConnectorSource, DatabaseSources, table_sources
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.history import History, HistoryQuery, Source, Value, WorkKind
from ergon_framework.providers.standing import ProviderAvailability
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.loading import load_connector, load_task
from ergon_framework.runner.settings import Settings, load_settings
from ergon_framework.task.defaults import choose_policy
from ergon_framework.task.mixins.policies import ConsumerPolicy


class WhyExit(ExitCode):
    """Exit codes of ``ergon why`` and their meanings."""

    OK = 0, "something is known of it"
    UNKNOWN = 1, "nobody who was asked knows it"
    USAGE = 2, "the command line or the configuration is wrong, or there is nobody to ask"
    UNANSWERED = 3, "nothing was found, and somebody who may know it did not answer"


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
        correlations = (history.about.get("correlation") for history in histories)
        tenants = (history.about.get("tenant") for history in histories)
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
                self.answers.append(SourceAnswer("providers of the database", error=error_message(error)))
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
    """One history, the providers that block or failed it, a sentence about its state, and the advice."""

    history: History
    providers: Sequence[InvolvedProvider]
    sentence: str
    advice: str


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
            sentence=report.sentence,
            advice=report.advice,
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
        raise ConfigurationError(
            "there is nobody to ask: set ERGON_POSTGRES__DSN, or name a task or connector with --task or --queue"
        )
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
        sentence=describe_state(history, now=now) + waiting_reason(history, providers),
        advice=add_provider_advice(history, providers, suggest_action(history, names)),
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
    return replace(history, about={**history.about, **policies[history.where]})


# -- output -----------------------------------------------------------------------------------------


def _to_dict(search: HistorySearch, reports: Sequence[HistoryReport]) -> dict[str, Any]:
    return {
        "id": search.query.id,
        "exit_code": int(search.code),
        "histories": [
            {
                **asdict(report.history),
                "providers": [to_dict(provider) for provider in report.providers],
                "now": report.sentence,
                "next": report.advice,
            }
            for report in reports
        ],
        "asked": [
            {"source": report.source, "found": len(report.histories), "note": report.note, "error": report.error}
            for report in search.answers
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
    qualifier = " of those who answered" if search.code is WhyExit.UNANSWERED else ""
    return (
        f"nobody{qualifier} knows {view.truncate(search.query.id)!r}; asked: {source_names or 'nobody else'}. What has "
        "succeeded leaves a trace only where a queue has an inbox or its workers a journal (run.journal.on); other "
        "brokers are asked with --queue"
    )


def _report_usage_error(message: str, *, as_json: bool) -> WhyExit:
    if as_json:
        typer.echo(json.dumps({"error": message, "exit_code": int(WhyExit.USAGE)}))
    else:
        _print_stderr(message)
    return WhyExit.USAGE


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)
