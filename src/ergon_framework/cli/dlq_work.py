"""What ``ergon dlq`` does: find the connector, list, show, replay and discard, and say how it ended."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import typer

from ergon_framework.audit import acting
from ergon_framework.cli.dlq_canary import Canary
from ergon_framework.cli.dlq_exits import DlqExit
from ergon_framework.cli.dlq_moving import Letter, Pace, Stop, Stopped, Tally, choose, found, move
from ergon_framework.cli.dlq_progress import shown
from ergon_framework.cli.dlq_view import as_line, clean, show_list, show_one, told
from ergon_framework.cli.logs import configure
from ergon_framework.cli.summary import tell
from ergon_framework.cli.telling import explained
from ergon_framework.connectors.audit import use_database
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery
from ergon_framework.errors import ConfigurationError, ErgonError, text
from ergon_framework.runner.loading import load_connector
from ergon_framework.runner.settings import settings

#: The most of one id that are shown.
SAME = 100
#: The least by which times are told apart, with room for rounding.
MOMENT = 2e-6
#: The longest id or message of a failure that is repeated.
LONGEST = 500


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be done with which dead letters, and how carefully."""

    verb: Literal["replay", "discard"]
    query: DeadLetterQuery
    everything: bool
    limit: int | None
    batch: int
    rate: float | None
    dry_run: bool
    as_json: bool
    #: Who asks for it, and why.
    actor: str = ""
    audit_reason: str = ""
    yes: bool = True
    canary: int = 0
    max_failed: int = 0
    canary_wait: float = 60.0
    stop: Stop = field(default_factory=Stop)

    @property
    def done(self) -> Became:
        return Became.REPLAYED if self.verb == "replay" else Became.DISCARDED


def listed(where: str, query: DeadLetterQuery, *, limit: int, payload: bool, as_json: bool) -> DlqExit:
    """Print the dead letters that *query* means, the oldest first."""

    def work(connector: Connector) -> DlqExit:
        # One more than is shown tells whether there are more.
        records = list(found(connector, query, limit=limit + 1))
        if as_json:
            _lines(as_line(record, payload=payload) for record in records[:limit])
        elif records:
            show_list(records[:limit], payload=payload)
        else:
            typer.echo(f"{connector.name} has no dead letters{'' if query.everything else ' of that kind'}")
        if len(records) > limit:
            _say(f"there are more; --limit {limit * 10} shows up to ten times as many")
        return DlqExit.OK

    return with_connector(where, work)


def showed(where: str, transaction_id: str, *, payload: bool, as_json: bool) -> DlqExit:
    """Print everything about the dead letters of one transaction."""

    def work(connector: Connector) -> DlqExit:
        records = connector.list_dead(DeadLetterQuery.load(id=transaction_id), limit=SAME)
        if not records:
            _say(
                f"{connector.name} has no dead letter of transaction {clean(transaction_id, LONGEST)!r}, or no longer; "
                f"to see those it has, run: ergon dlq list {where}"
            )
            return DlqExit.FAILED
        if as_json:
            _lines(as_line(record, payload=payload) for record in records)
        else:
            for record in records:
                show_one(record, payload=payload)
        return DlqExit.OK

    return with_connector(where, work)


def moved(where: str, order: Order) -> DlqExit:
    """Replay or discard what *order* means."""
    if order.query.everything != order.everything:
        problem = "--all and a filter exclude each other" if order.everything else f"this would {order.verb} everything"
        _say(f"{problem}; give a filter such as --reason, or --all")
        return DlqExit.USAGE
    return with_connector(where, lambda connector: _move(connector, order))


def _move(connector: Connector, order: Order) -> DlqExit:
    with _heard(order.stop):
        letters = choose(connector, order.query, limit=order.limit, stop=order.stop)
        tally = Tally(len(letters))
        if order.stop.asked:
            tally.stopped = Stopped.SIGNAL
        elif not order.dry_run and letters:
            if not _sure(connector, order, count=len(letters)):
                return DlqExit.USAGE
            selection = order.query.model_dump(mode="json", exclude_none=True)
            ids = {letter.place: letter.id for letter in letters}
            with (
                acting(order.actor, reason=order.audit_reason, selection=selection, ids=ids),
                shown(f"{order.verb}ing" if order.verb == "discard" else "replaying", len(letters)) as progress,
            ):
                _carry_out(connector, order, letters=letters, tally=tally, progress=progress)
    code = _code(tally)
    _report(connector, order, letters=letters, tally=tally, code=code)
    return code


def _carry_out(
    connector: Connector,
    order: Order,
    *,
    letters: Sequence[Letter],
    tally: Tally,
    progress: Callable[[Tally], None],
) -> None:
    moving = connector.replay_dead if order.verb == "replay" else connector.discard_dead
    pace, first = Pace(order.rate), letters[: order.canary]

    def part(some: Sequence[Letter]) -> None:
        move(some, moving, tally=tally, batch=order.batch, pace=pace, stop=order.stop, moved=progress)

    if first:
        try:
            _try_out(connector, order, first=first, tally=tally, part=part)
        except ErgonError as error:
            tally.stopped, tally.error = Stopped.ERROR, text(error)
    if tally.stopped is None:
        part(letters[len(first) :])


def _try_out(
    connector: Connector,
    order: Order,
    *,
    first: Sequence[Letter],
    tally: Tally,
    part: Callable[[Sequence[Letter]], None],
) -> None:
    """Replay the first few and wait for their end; too many failures stop everything."""
    canary = Canary(connector, first)
    part(first)
    if tally.stopped is not None:
        return
    # Only those that were moved: who was gone is somebody else's, and who failed has not left.
    _say(f"waiting for the canary to end, {order.canary_wait:g} s at most")
    tally.trial = canary.watch(tally.moved, wait=order.canary_wait, stop=order.stop)
    failed = tally.trial.failed + tally.counts[Became.FAILED]
    if order.stop.asked:
        tally.stopped = Stopped.SIGNAL
    elif failed > order.max_failed or tally.trial.waiting:
        tally.stopped = Stopped.CANARY


def _code(tally: Tally) -> DlqExit:
    if tally.stopped is Stopped.SIGNAL:
        return DlqExit.STOPPED
    if tally.stopped is Stopped.CANARY:
        return DlqExit.CANARY
    return DlqExit.FAILED if tally.stopped or tally.counts[Became.FAILED] else DlqExit.OK


def _sure(connector: Connector, order: Order, *, count: int) -> bool:
    if order.yes:
        return True
    if terminal():
        return typer.confirm(f"Discard {count} dead letters of {connector.name} for good?", err=True)
    _say(f"{count} dead letters would be gone for good; look at them with --dry-run, then give --yes")
    return False


def terminal() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty()


# -- what is said -----------------------------------------------------------------------------


def _report(connector: Connector, order: Order, *, letters: Sequence[Letter], tally: Tally, code: DlqExit) -> None:
    if order.as_json:
        typer.echo(json.dumps(_summary(connector, order, letters=letters, tally=tally, code=code)))
    else:
        tell(connector.name, list(_rows(order, letters=letters, tally=tally)))
    if tally.stopped is not None:
        _say(_why(order, letters=letters, tally=tally))
    elif not letters and not order.as_json:
        fits = "" if order.everything else " that fits all filters"
        _say(f"{connector.name} has no dead letter{fits}; those it has are listed by ergon dlq list")


def _summary(
    connector: Connector, order: Order, *, letters: Sequence[Letter], tally: Tally, code: DlqExit
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "queue": connector.name,
        "command": order.verb,
        "dry_run": order.dry_run,
        "exit_code": int(code),
        "chosen": tally.chosen,
        "reasons": Counter(letter.reason for letter in letters),
        **{became.value: tally.counts[became] for became in (order.done, Became.GONE, Became.FAILED)},
        "left": tally.left,
        "stopped": tally.stopped,
        "failures": [{"place": letter.place, "id": letter.id, "words": words} for letter, words in tally.failures],
    }
    if tally.error:
        summary["error"] = tally.error
    if tally.trial is not None:
        trial = tally.trial
        summary["canary"] = {"succeeded": trial.succeeded, "failed": trial.failed, "waiting": trial.waiting}
    return summary


def _rows(order: Order, *, letters: Sequence[Letter], tally: Tally) -> Iterator[tuple[str, str]]:
    if order.dry_run:
        yield f"would {order.verb}", str(tally.chosen)
        reasons = Counter(letter.reason for letter in letters).most_common()
        yield from ((clean(reason, LONGEST), str(count)) for reason, count in reasons)
        return
    yield order.done.value, str(tally.counts[order.done])
    if tally.counts[Became.GONE]:
        yield "gone", f"{tally.counts[Became.GONE]}, moved by somebody else"
    if tally.counts[Became.FAILED]:
        yield "failed", f"{tally.counts[Became.FAILED]}, still dead letters"
    if tally.left:
        yield "not touched", str(tally.left)
    if tally.trial is not None:
        trial = tally.trial
        yield "canary", f"{trial.succeeded} succeeded, {trial.failed} failed, {trial.waiting} have not ended"
    yield from ((clean(letter.id, LONGEST), clean(words, LONGEST)) for letter, words in tally.failures)


def _why(order: Order, *, letters: Sequence[Letter], tally: Tally) -> str:
    done = tally.counts[order.done]
    far = f"{done} of {tally.chosen} {order.done}, {tally.left} not touched"
    if tally.stopped is Stopped.CANARY:
        return f"stopped by the canary: {far}. {_verdict(order, tally)}"
    again = "run the same command again to go on"
    if order.verb == "replay" and done and order.query.until is None:
        # By the letters' own clock, and a moment later: the last of them is to be among the chosen again.
        until = told(max(letter.at for letter in letters) + MOMENT, "microseconds")
        again += f"; with --until {until} it leaves alone what has died again since"
    if tally.stopped is Stopped.ERROR:
        return (
            f"stopped: {clean(tally.error, LONGEST)}. {far}; the part that was under way was moved or was not, and "
            f"none of it twice: {again}"
        )
    return f"stopped by a signal: {far}; {again}"


def _verdict(order: Order, tally: Tally) -> str:
    trial = tally.trial
    if trial is not None and trial.waiting and trial.failed <= order.max_failed:
        return (
            f"{trial.waiting} of the canary have not ended in {order.canary_wait:g} s; is a worker running? "
            "Look at the queue, or give --canary-wait more seconds"
        )
    return "Look at what is dead again with ergon dlq list, mend the cause, then run it again"


# -- around it --------------------------------------------------------------------------------


def with_connector(where: str, work: Callable[[Connector], DlqExit]) -> DlqExit:
    """Do *work* with the connector that *where* names; errors of ours explain themselves."""
    configure("WARNING")
    with suppress(ConfigurationError):  # said below, if the connector needs it
        use_database(settings().postgres.dsn)
    try:
        with opened(where) as connector:
            return work(connector)
    except ConfigurationError as error:
        _say(text(error))
        return DlqExit.USAGE
    except ErgonError as error:
        _say(explained(error))
        return DlqExit.FAILED


@contextmanager
def opened(where: str) -> Iterator[Connector]:
    """The connector that *where* names, to be asked and not to be consumed from."""
    connector = as_sync(load_connector(where))
    # Opening a log takes its partitions over from the consumers that run.
    if connector.capabilities.mode == "queue":
        connector.open()
    try:
        yield connector
    finally:
        connector.close()


@contextmanager
def _heard(stop: Stop) -> Iterator[None]:
    """The first signal lets the part under way finish; a second one is Python's own business."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, _frame: object) -> None:
        stop.asked = True
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _say(words: str) -> None:
    typer.echo(f"ergon: {words}", err=True)


def _lines(lines: Iterator[str]) -> None:
    for line in lines:
        typer.echo(line)
