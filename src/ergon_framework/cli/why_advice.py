"""Describe the current state of a piece of work in one sentence, and suggest what an operator can do."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Final

from ergon_framework.cli.dlq_view import format_time
from ergon_framework.executor.jobs.model import QUEUE_PREFIX
from ergon_framework.history import History, Location, WorkKind, WorkState


def describe_state(history: History, *, now: float) -> str:
    """Return one sentence about the current state."""
    sentence = _SENTENCES.get((history.kind, history.place.state), _describe_default)
    return sentence(history, history.place, now)


def suggest_action(history: History, names: Mapping[str, str]) -> str:
    """Return a command or what to check; empty if there is nothing to do.

    *names* maps each queue to the name of its connector on the command line.
    """
    advice = _ADVICE.get((history.kind, history.place.state))
    return "" if advice is None else advice(history, names.get(history.where))


# -- sentences --------------------------------------------------------------------------------------


def _describe_default(_history: History, location: Location, _now: float) -> str:
    verb = "has" if location.state in (WorkState.SUCCEEDED, WorkState.FAILED) else "is"
    sentence = f"it {verb} {location.state.value}{_format_since(location)}"
    return f"{sentence}: {location.words}" if location.words else sentence


def _describe_ready(history: History, location: Location, now: float) -> str:
    waited = "" if location.since is None else f", for {format_duration(now - location.since)} now"
    return f"it is ready in {history.where} and waits for a worker{waited}"


def _describe_delayed(history: History, location: Location, now: float) -> str:
    return f"it waits in {history.where} until {_format_moment(location.until)}{_format_remaining(location.until, now)}"


def _describe_blocked(history: History, _location: Location, _now: float) -> str:
    return f"it waits in {history.where} behind an older one of its key {history.about.get('key', '')!r}"


def _describe_claimed(history: History, location: Location, now: float) -> str:
    if location.until is None or location.until <= now:
        return f"{location.holder} had it and is gone; it comes back when another worker of {history.where} looks"
    return f"{location.holder} has it, until {_format_moment(location.until)} unless it is renewed"


def _describe_queued(history: History, _location: Location, _now: float) -> str:
    return f"it is in {history.where}: ready, delayed or in a worker's hands"


def _describe_dead(history: History, location: Location, _now: float) -> str:
    return f"it is a dead letter of {history.where}{_format_since(location)}: {location.words}"


def _describe_done(history: History, location: Location, _now: float) -> str:
    return f"it has succeeded in {history.where}{_format_since(location)}, and is not run again"


def _describe_pending(history: History, location: Location, now: float) -> str:
    if orchestrator := history.about.get("orchestrator"):
        return f"it waits for an orchestrator: {orchestrator}"
    if location.until is None or location.until <= now:
        earlier_count = history.about.get("due before it")
        ahead_text = f" behind {earlier_count} of its kind" if earlier_count else ""
        return f"it waits for its turn{ahead_text}; it has been due since {_format_moment(location.until)}"
    return f"it waits until {_format_moment(location.until)}{_format_remaining(location.until, now)}"


def _describe_retrying(_history: History, location: Location, _now: float) -> str:
    moment = _format_moment(location.since)
    return f"the last attempt, at {moment}, was to be made again ({location.words}), and none is written yet"


def _describe_dropped(_history: History, location: Location, _now: float) -> str:
    return f"its id is known since {_format_moment(location.since)}; retention has dropped the fact itself"


_SENTENCES: Final[dict[tuple[WorkKind, WorkState], Callable[[History, Location, float], str]]] = {
    (WorkKind.TRANSACTION, WorkState.READY): _describe_ready,
    (WorkKind.TRANSACTION, WorkState.DELAYED): _describe_delayed,
    (WorkKind.TRANSACTION, WorkState.BLOCKED_BY_KEY): _describe_blocked,
    (WorkKind.TRANSACTION, WorkState.HELD): _describe_claimed,
    (WorkKind.TRANSACTION, WorkState.QUEUED): _describe_queued,
    (WorkKind.TRANSACTION, WorkState.DEAD): _describe_dead,
    (WorkKind.TRANSACTION, WorkState.DONE): _describe_done,
    (WorkKind.JOB, WorkState.PENDING): _describe_pending,
    (WorkKind.CALL, WorkState.RETRYING): _describe_retrying,
    (WorkKind.FACT, WorkState.DROPPED): _describe_dropped,
}


# -- advice -----------------------------------------------------------------------------------------


def _suggest_replay(history: History, name: str | None) -> str:
    if history.where.startswith(QUEUE_PREFIX):
        return f"ergon job replay {_quote_id(history)}"
    # The option and its value are one argument, because an id may begin with a dash.
    return f"mend the cause, then run: ergon dlq replay {name or 'MODULE:NAME'} --id={_quote_id(history)}"


def _suggest_job_replay(history: History, _name: str | None) -> str:
    return f"mend the cause, then run: ergon job replay {_quote_id(history)}"


def _suggest_job_result(history: History, _name: str | None) -> str:
    return f"its result: ergon job show {_quote_id(history)}"


def _suggest_worker(_history: History, name: str | None) -> str:
    # The name of a queue alone is not a task.
    task = name if name is not None and ":" in name else "MODULE:TASK"
    return f"nothing, if a worker runs; else: ergon run {task}"


def _suggest_orchestrator(history: History, _name: str | None) -> str:
    if "orchestrator" in history.about:
        return f"start an orchestrator that serves {history.where!r}, or run: ergon job cancel {_quote_id(history)}"
    if running := history.about.get("running of its kind"):
        return f"nothing; jobs of its kind are being run, {running} at this moment"
    return "nothing, if an orchestrator runs and its executors start (see ergon doctor); else start one with ergon run"


def _suggest_outcome_check(history: History, _name: str | None) -> str:
    return f"ask the provider whether {history.where} was carried out, before anything else is done"


def _suggest_provider_check(history: History, _name: str | None) -> str:
    tenant = shlex.quote(str(history.about.get("tenant", "")))
    return f"look at the provider: ergon provider health --tenant {tenant}"


_ADVICE: Final[dict[tuple[WorkKind, WorkState], Callable[[History, str | None], str]]] = {
    (WorkKind.TRANSACTION, WorkState.DEAD): _suggest_replay,
    (WorkKind.TRANSACTION, WorkState.READY): _suggest_worker,
    (WorkKind.JOB, WorkState.FAILED): _suggest_job_replay,
    (WorkKind.JOB, WorkState.SUCCEEDED): _suggest_job_result,
    (WorkKind.JOB, WorkState.PENDING): _suggest_orchestrator,
    (WorkKind.CALL, WorkState.UNKNOWN): _suggest_outcome_check,
    (WorkKind.CALL, WorkState.FAILED): _suggest_provider_check,
    (WorkKind.CALL, WorkState.DEAD): _suggest_provider_check,
}


# -- formatting -------------------------------------------------------------------------------------


def _quote_id(history: History) -> str:
    return shlex.quote(history.id)


def _format_since(location: Location) -> str:
    return "" if location.since is None else f" since {_format_moment(location.since)}"


def _format_moment(timestamp: float | None) -> str:
    return "an unknown moment" if timestamp is None else format_time(timestamp)


def _format_remaining(until: float | None, now: float) -> str:
    return "" if until is None or until <= now else f", {format_duration(until - now)} from now"


def format_duration(seconds: float) -> str:
    """Format an approximate duration in its largest unit."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"
