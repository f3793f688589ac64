"""Where a piece of work is now, in a sentence, and what somebody may do about it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Final

from ergon_framework.cli.dlq_view import told
from ergon_framework.executor.jobs.model import PREFIX
from ergon_framework.history import History, Kind, Place, State


def now_of(history: History, *, now: float) -> str:
    """One sentence on where it is."""
    sentence = _SENTENCES.get((history.kind, history.place.state), _plain)
    return sentence(history, history.place, now)


def next_of(history: History, names: Mapping[str, str]) -> str:
    """A command, or what to look at; empty where nothing is to be done.

    *names* says how the connector of a queue is called on the command line.
    """
    advice = _ADVICE.get((history.kind, history.place.state))
    return "" if advice is None else advice(history, names.get(history.where))


# -- sentences --------------------------------------------------------------------------------------


def _plain(_history: History, place: Place, _now: float) -> str:
    verb = "has" if place.state in (State.SUCCEEDED, State.FAILED) else "is"
    words = f"it {verb} {place.state.value}{_since(place)}"
    return f"{words}: {place.words}" if place.words else words


def _ready(history: History, place: Place, now: float) -> str:
    waited = "" if place.since is None else f", for {lasting(now - place.since)} now"
    return f"it is ready in {history.where} and waits for a worker{waited}"


def _delayed(history: History, place: Place, now: float) -> str:
    return f"it waits in {history.where} until {_moment(place.until)}{_ahead(place.until, now)}"


def _behind(history: History, _place: Place, _now: float) -> str:
    return f"it waits in {history.where} behind an older one of its key {history.about.get('key', '')!r}"


def _held(history: History, place: Place, now: float) -> str:
    if place.until is None or place.until <= now:
        return f"{place.holder} had it and is gone; it comes back when another worker of {history.where} looks"
    return f"{place.holder} has it, until {_moment(place.until)} unless it is renewed"


def _queued(history: History, _place: Place, _now: float) -> str:
    return f"it is in {history.where}: ready, delayed or in a worker's hands"


def _dead(history: History, place: Place, _now: float) -> str:
    return f"it is a dead letter of {history.where}{_since(place)}: {place.words}"


def _done(history: History, place: Place, _now: float) -> str:
    return f"it has succeeded in {history.where}{_since(place)}, and is not run again"


def _pending(history: History, place: Place, now: float) -> str:
    if orchestrator := history.about.get("orchestrator"):
        return f"it waits for an orchestrator: {orchestrator}"
    if place.until is None or place.until <= now:
        before = history.about.get("due before it")
        others = f" behind {before} of its kind" if before else ""
        return f"it waits for its turn{others}; it has been due since {_moment(place.until)}"
    return f"it waits until {_moment(place.until)}{_ahead(place.until, now)}"


def _retrying(_history: History, place: Place, _now: float) -> str:
    return f"the last attempt, at {_moment(place.since)}, was to be made again ({place.words}), and none is written yet"


def _dropped(_history: History, place: Place, _now: float) -> str:
    return f"its id is known since {_moment(place.since)}; retention has dropped the fact itself"


_SENTENCES: Final[dict[tuple[Kind, State], Callable[[History, Place, float], str]]] = {
    (Kind.TRANSACTION, State.READY): _ready,
    (Kind.TRANSACTION, State.DELAYED): _delayed,
    (Kind.TRANSACTION, State.BEHIND): _behind,
    (Kind.TRANSACTION, State.HELD): _held,
    (Kind.TRANSACTION, State.QUEUED): _queued,
    (Kind.TRANSACTION, State.DEAD): _dead,
    (Kind.TRANSACTION, State.DONE): _done,
    (Kind.JOB, State.PENDING): _pending,
    (Kind.CALL, State.RETRYING): _retrying,
    (Kind.FACT, State.DROPPED): _dropped,
}


# -- advice -----------------------------------------------------------------------------------------


def _replay(history: History, name: str | None) -> str:
    if history.where.startswith(PREFIX):
        return f"ergon job replay {_quoted(history)}"
    # Written together with its option: an id may begin with a dash.
    return f"mend the cause, then run: ergon dlq replay {name or 'MODULE:NAME'} --id={_quoted(history)}"


def _replay_job(history: History, _name: str | None) -> str:
    return f"mend the cause, then run: ergon job replay {_quoted(history)}"


def _show_job(history: History, _name: str | None) -> str:
    return f"its result: ergon job show {_quoted(history)}"


def _worker(_history: History, name: str | None) -> str:
    # The name of a queue alone is no task.
    task = name if name is not None and ":" in name else "MODULE:TASK"
    return f"nothing, if a worker runs; else: ergon run {task}"


def _executors(history: History, _name: str | None) -> str:
    if "orchestrator" in history.about:
        return f"start an orchestrator that serves {history.where!r}, or run: ergon job cancel {_quoted(history)}"
    if running := history.about.get("running of its kind"):
        return f"nothing; jobs of its kind are being run, {running} at this moment"
    return "nothing, if an orchestrator runs and its executors start (see ergon doctor); else start one with ergon run"


def _doubt(history: History, _name: str | None) -> str:
    return f"ask the provider whether {history.where} was carried out, before anything else is done"


def _failed_call(history: History, _name: str | None) -> str:
    tenant = shlex.quote(str(history.about.get("tenant", "")))
    return f"look at the provider: ergon provider health --tenant {tenant}"


_ADVICE: Final[dict[tuple[Kind, State], Callable[[History, str | None], str]]] = {
    (Kind.TRANSACTION, State.DEAD): _replay,
    (Kind.TRANSACTION, State.READY): _worker,
    (Kind.JOB, State.FAILED): _replay_job,
    (Kind.JOB, State.SUCCEEDED): _show_job,
    (Kind.JOB, State.PENDING): _executors,
    (Kind.CALL, State.DOUBTFUL): _doubt,
    (Kind.CALL, State.FAILED): _failed_call,
    (Kind.CALL, State.DEAD): _failed_call,
}


# -- words ------------------------------------------------------------------------------------------


def _quoted(history: History) -> str:
    return shlex.quote(history.id)


def _since(place: Place) -> str:
    return "" if place.since is None else f" since {_moment(place.since)}"


def _moment(at: float | None) -> str:
    return "an unknown moment" if at is None else told(at)


def _ahead(until: float | None, now: float) -> str:
    return "" if until is None or until <= now else f", {lasting(until - now)} from now"


def lasting(seconds: float) -> str:
    """About how long, in its largest unit."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"
