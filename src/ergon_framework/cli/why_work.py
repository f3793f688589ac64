"""What ``ergon why`` does: ask everybody who may know, put the answers together, and say how it ended."""

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
from ergon_framework.cli.logs import configure
from ergon_framework.cli.why_advice import next_of, now_of
from ergon_framework.cli.why_providers import Ask, Involved, advised, as_plain, because, involved_in, seen_of, used_by
from ergon_framework.cli.why_sources import Connected, Database, tables
from ergon_framework.errors import ConfigurationError, ErgonError, text
from ergon_framework.history import History, Kind, Question, Source, Value
from ergon_framework.providers.standing import Standing
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.loading import load_connector, load_task
from ergon_framework.runner.settings import Settings, settings
from ergon_framework.task.defaults import choose_policy
from ergon_framework.task.mixins.policies import ConsumerPolicy


class WhyExit(ExitCode):
    """Every exit code of ``ergon why`` with what it means."""

    OK = 0, "something is known of it"
    UNKNOWN = 1, "nobody who was asked knows it"
    USAGE = 2, "the command line or the configuration is wrong, or there is nobody to ask"
    UNANSWERED = 3, "nothing was found, and somebody who may know it did not answer"


@dataclass(slots=True)
class Answer:
    """What one source said, or why it did not."""

    source: str
    found: Sequence[History] = ()
    note: str = ""
    error: str | None = None


@dataclass(slots=True)
class Inquiry:
    """One question on its way through the sources."""

    question: Question
    answers: list[Answer] = field(default_factory=list)

    def ask(self, sources: Iterable[Source]) -> None:
        """Ask each of them; one that fails spoils no other."""
        for source in sources:
            answer = Answer(source.name)
            try:
                answer.found = source.ask(self.question)
            except ErgonError as error:
                answer.error = text(error)
            if isinstance(source, Connected):
                answer.note = source.note
            self.answers.append(answer)

    def widen(self) -> None:
        """From now on ask for the correlations too that were found, and of their tenants only."""
        found = self.histories
        known = (history.about.get("correlation") for history in found)
        whose = (history.about.get("tenant") for history in found)
        self.question = replace(
            self.question,
            correlations=tuple(str(name) for name in known if name is not None),
            tenants=tuple(dict.fromkeys(str(name) for name in whose if name is not None)),
        )

    def standings(self, database: Database | None) -> Ask:
        """Who says how providers are. Of an outage one question is enough."""
        lost = False

        def ask(tenant: str, accounts: Sequence[tuple[str, str]]) -> Sequence[Standing] | None:
            nonlocal lost
            if database is None or lost:
                return None
            try:
                return database.standings(tenant, accounts)
            except ErgonError as error:
                lost = True
                self.answers.append(Answer("providers of the database", error=text(error)))
                return None

        return ask

    @property
    def histories(self) -> list[History]:
        """All that was found; what two sources say alike is said once."""
        found: list[History] = []
        for answer in self.answers:
            found += [history for history in answer.found if history not in found]
        return found

    @property
    def code(self) -> WhyExit:
        if self.histories:
            return WhyExit.OK
        return WhyExit.UNANSWERED if any(answer.error for answer in self.answers) else WhyExit.UNKNOWN


@dataclass(frozen=True, slots=True)
class Account:
    """One history, the providers that it waits for or failed by, where it is in a sentence, and what to do."""

    history: History
    providers: Sequence[Involved]
    now: str
    next: str


def explained(
    work_id: str, *, tasks: Sequence[str], queues: Sequence[str], config: Path | None, as_json: bool
) -> WhyExit:
    """Print what is known of *work_id*."""
    configure("WARNING")
    try:
        inquiry, accounts = _asked(Question(work_id), tasks=tasks, queues=queues, found=settings(config))
    except ConfigurationError as error:
        return _refused(text(error), as_json=as_json)
    if as_json:
        typer.echo(json.dumps(_told(inquiry, accounts), allow_nan=False))
        return inquiry.code
    for number, account in enumerate(accounts):
        if number:
            typer.echo()
        view.show(
            account.history,
            providers=[seen_of(one) for one in account.providers],
            sentence=account.now,
            advice=account.next,
        )
    for why, sources in _unanswered(inquiry).items():
        _say(f"{', '.join(sources)} did not answer: {why}")
    if not accounts:
        _say(_unknown(inquiry))
    return inquiry.code


def _asked(
    question: Question, *, tasks: Sequence[str], queues: Sequence[str], found: Settings
) -> tuple[Inquiry, list[Account]]:
    """The answers, and what is made of them."""
    connected = [Connected(where, found.postgres.dsn) for where in dict.fromkeys((*tasks, *queues))]
    if not connected and not found.postgres.dsn:
        raise ConfigurationError(
            "there is nobody to ask: set ERGON_POSTGRES__DSN, or name a task or connector with --task or --queue"
        )
    # Before anybody is asked: a slip of the hand is no source that does not answer.
    ruled = {load_connector(name).name: _rules(name, found) for name in tasks}
    used = {load_connector(name).name: used_by(load_task(name).gates) for name in tasks}
    for name in queues:
        load_connector(name)
    inquiry = Inquiry(question)
    with ExitStack() as stack:
        database = stack.enter_context(tables(found.postgres.dsn)) if found.postgres.dsn else None
        inquiry.ask((*(database.first if database else ()), *connected))
        inquiry.widen()
        inquiry.ask(database.then if database else ())
        histories = [_ruled(history, ruled) for history in inquiry.histories]
        ask = inquiry.standings(database)
        involved = [involved_in(one, histories, used.get(one.where, ()), ask) for one in histories]
    # Those of the settings that the tables of the database know, too: their names alone are enough.
    names = {name: name for name, said in found.queues.items() if (said.url or "").startswith("postgres")}
    names |= {one.queue: one.where for one in connected if one.queue is not None}
    now = time.time()
    return inquiry, [_account(*one, names, now) for one in zip(histories, involved, strict=True)]


def _account(history: History, providers: Sequence[Involved], names: Mapping[str, str], now: float) -> Account:
    return Account(
        history,
        providers,
        now=now_of(history, now=now) + because(history, providers),
        next=advised(history, providers, next_of(history, names)),
    )


def _rules(name: str, found: Settings) -> dict[str, Value]:
    """The values of a task's policy by which transactions are tried again and given up, as they are now."""
    task = load_task(name)
    policy = found.policy(task.name, choose_policy(task, None, ConsumerPolicy))
    retry = policy.steps.process.retry.model_dump(include=set(_SHOWN))
    rules = {f"policy.process.retry.{key}": retry[key] for key in _SHOWN if retry[key] is not None}
    return {**rules, "policy.loop.max_deliveries": policy.loop.max_deliveries}


_SHOWN = ("max_attempts", "timeout", "backoff", "multiplier", "cap", "jitter")


def _ruled(history: History, rules: Mapping[str, Mapping[str, Value]]) -> History:
    if history.kind is not Kind.TRANSACTION or history.where not in rules:
        return history
    return replace(history, about={**history.about, **rules[history.where]})


# -- what is said -----------------------------------------------------------------------------------


def _told(inquiry: Inquiry, accounts: Sequence[Account]) -> dict[str, Any]:
    return {
        "id": inquiry.question.id,
        "exit_code": int(inquiry.code),
        "histories": [
            {
                **asdict(one.history),
                "providers": [as_plain(provider) for provider in one.providers],
                "now": one.now,
                "next": one.next,
            }
            for one in accounts
        ],
        "asked": [
            {"source": one.source, "found": len(one.found), "note": one.note, "error": one.error}
            for one in inquiry.answers
        ],
    }


def _unanswered(inquiry: Inquiry) -> dict[str, list[str]]:
    """Who did not answer, by why: one outage is told once."""
    found: dict[str, list[str]] = {}
    for answer in inquiry.answers:
        if answer.error is not None:
            found.setdefault(answer.error, []).append(answer.source)
    return found


def _unknown(inquiry: Inquiry) -> str:
    asked = ", ".join(
        f"{one.source} ({one.note})" if one.note else one.source for one in inquiry.answers if one.error is None
    )
    doubt = " of those who answered" if inquiry.code is WhyExit.UNANSWERED else ""
    return (
        f"nobody{doubt} knows {view.short(inquiry.question.id)!r}; asked: {asked or 'nobody else'}. What has succeeded "
        "leaves a trace only where a queue has an inbox or its workers a journal (run.journal.on); other brokers are "
        "asked with --queue"
    )


def _refused(words: str, *, as_json: bool) -> WhyExit:
    if as_json:
        typer.echo(json.dumps({"error": words, "exit_code": int(WhyExit.USAGE)}))
    else:
        _say(words)
    return WhyExit.USAGE


def _say(words: str) -> None:
    typer.echo(f"ergon: {words}", err=True)
