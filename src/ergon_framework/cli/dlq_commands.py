"""Implements ``ergon dlq``: list, show, replay or discard dead letters, and report the result; edit is in ``dlq_edit``.

A move, that is a replay or a discard, selects all its dead letters first, and then moves them in batches. A signal
takes effect between two batches; an error may leave its batch moved in part. A replay with a canary first replays a few
letters, and waits until their transactions have ended. The progress of a long move appears on stderr: a bar on a
terminal, periodic lines elsewhere.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ergon_framework.audit import act_as
from ergon_framework.cli.dlq_view import DlqExit, format_time, sanitize, show_list, show_one, to_json_line
from ergon_framework.cli.output import configure_logging, explain_error
from ergon_framework.cli.summary import print_rows
from ergon_framework.connectors.audit import use_database
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult, ReplayResult
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.runner.loading import load_connector
from ergon_framework.runner.settings import load_settings

#: Records per page; each record includes its payload.
PAGE_SIZE = 200
#: Maximum number of failures that are listed with id and message.
MAX_NAMED_FAILURES = 20
#: Number of batches per second that a rate limit is divided into.
_BATCHES_PER_SECOND = 5


class StopReason(StrEnum):
    """Why some of the selected letters were not moved."""

    SIGNAL = "signal"
    CANARY = "canary"
    ERROR = "error"


class SelectedLetter(NamedTuple):
    """What a move and its report need of a dead letter; the output calls the handle ``entry``."""

    handle: str
    id: str
    dead_at: float
    reason: str


@dataclass(slots=True)
class CanaryResult:
    """The outcome of the canary; ``waiting`` counts transactions that had not ended when the time limit expired."""

    succeeded: int = 0
    failed: int = 0
    waiting: int = 0


@dataclass(slots=True)
class MoveProgress:
    """The progress of a move."""

    selected: int
    counts: Counter[DeadLetterResult] = field(default_factory=Counter)
    #: The first failures with their messages.
    failures: list[tuple[SelectedLetter, str]] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str = ""
    canary_result: CanaryResult | None = None
    #: Letters that were replayed or discarded.
    moved: list[SelectedLetter] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """The number of selected letters that were not tried."""
        return self.selected - self.counts.total()

    def add(self, letters: Sequence[SelectedLetter], results: Sequence[ReplayResult]) -> None:
        for letter, result in zip(letters, results, strict=True):
            self.counts[result.outcome] += 1
            if result.outcome in (DeadLetterResult.REPLAYED, DeadLetterResult.DISCARDED):
                self.moved.append(letter)
            if result.outcome is DeadLetterResult.FAILED and len(self.failures) < MAX_NAMED_FAILURES:
                self.failures.append((letter, result.message))


class RateLimit:
    """Limits moves to a number per second."""

    def __init__(self, rate: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._due = clock()

    def batch_size(self, batch: int) -> int:
        """Return the number of letters to move in one batch."""
        return batch if self._rate is None else max(1, min(batch, int(self._rate / _BATCHES_PER_SECOND)))

    def reserve_delay(self, count: int) -> float:
        """Return the seconds to wait before the next *count* letters."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        # An unused rate is not carried over, because a burst would overload the downstream systems.
        due = max(self._due, now)
        self._due = due + count / self._rate
        return due - now


class StopFlag:
    """Whether a signal arrived; a plain flag without a lock, because a signal handler may interrupt a lock holder."""

    def __init__(
        self, *, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_set = False
        self._sleep = sleep
        self._clock = clock

    def wait(self, seconds: float) -> None:
        """Sleep for *seconds*, or until a signal arrives."""
        deadline = self._clock() + seconds
        while not self.is_set and (remaining := deadline - self._clock()) > 0:
            self._sleep(min(remaining, 0.1))


def iter_dead(connector: Connector, query: DeadLetterQuery, *, limit: int | None = None) -> Iterator[DeadLetterRecord]:
    """Yield the records that match *query*, oldest first, page by page."""
    after: str | None = None
    remaining = sys.maxsize if limit is None else limit
    while remaining > 0:
        page_limit = min(PAGE_SIZE, remaining)
        records = connector.list_dead(query, after=after, limit=page_limit)
        yield from records
        if len(records) < page_limit:
            return
        after, remaining = records[-1].handle, remaining - len(records)


def select_letters(
    connector: Connector, query: DeadLetterQuery, *, limit: int | None, stop: StopFlag
) -> list[SelectedLetter]:
    """Return all letters that match *query* now, oldest first.

    The selection ends before anything moves: otherwise a replayed transaction that is dead-lettered again would be
    selected again without end.
    """
    records = takewhile(lambda _: not stop.is_set, iter_dead(connector, query, limit=limit))
    return [SelectedLetter(record.handle, record.id, record.at, record.reason) for record in records]


MoveBatch = Callable[[Sequence[str]], Sequence[ReplayResult]]


def move_letters(
    letters: Sequence[SelectedLetter],
    move_batch: MoveBatch,
    *,
    move_progress: MoveProgress,
    batch_size: int,
    rate_limit: RateLimit,
    stop: StopFlag,
    on_batch_end: Callable[[MoveProgress], None],
) -> None:
    """Move *letters* in batches; call *on_batch_end* after each."""
    for chunk in _split_batches(letters, rate_limit.batch_size(batch_size)):
        stop.wait(rate_limit.reserve_delay(len(chunk)))
        if stop.is_set:
            move_progress.stop_reason = StopReason.SIGNAL
            return
        try:
            results = move_batch([letter.handle for letter in chunk])
        except ErgonError as error:
            move_progress.stop_reason, move_progress.error = StopReason.ERROR, error_message(error)
            return
        move_progress.add(chunk, results)
        on_batch_end(move_progress)


def _split_batches(letters: Sequence[SelectedLetter], size: int) -> Iterator[Sequence[SelectedLetter]]:
    return (letters[start : start + size] for start in range(0, len(letters), size))


# -- canary -----------------------------------------------------------------------------------------

#: Seconds between two polls.
POLL_INTERVAL_SECONDS = 0.25


class Canary:
    """Watches transactions by their ids: a dead letter with a new handle means that the transaction failed again."""

    def __init__(self, connector: Connector, letters: Sequence[SelectedLetter]) -> None:
        """Store the current dead-letter handles of the ids before any of them is replayed."""
        self._connector = connector
        self._known_handles = {letter.id: self._list_handles(letter.id) for letter in letters}

    def wait(
        self,
        letters: Sequence[SelectedLetter],
        *,
        timeout: float,
        stop: StopFlag,
        clock: Callable[[], float] = time.monotonic,
    ) -> CanaryResult:
        """Return the outcome of the replayed *letters* within *timeout* seconds.

        If the broker cannot report queued transactions, a transaction that has no new dead letter after the timeout
        counts as succeeded.
        """
        result, deadline = CanaryResult(), clock() + timeout
        pending = Counter(letter.id for letter in letters)
        while pending:
            queued_ids = self._list_queued_ids(list(pending))
            is_over = stop.is_set or clock() >= deadline
            for transaction_id, count in list(pending.items()):
                failed = min(count, len(self._list_handles(transaction_id) - self._known_handles[transaction_id]))
                # If the broker cannot tell, it has ended when it failed as often as it was replayed, or when time is
                # up.
                has_ended = (
                    transaction_id not in queued_ids
                    if queued_ids is not None
                    else failed == count or (is_over and not stop.is_set)
                )
                if has_ended:
                    result.failed += failed
                    result.succeeded += count - failed
                    del pending[transaction_id]
            if is_over:
                break
            if pending:
                stop.wait(min(POLL_INTERVAL_SECONDS, max(0.0, deadline - clock())))
        result.waiting = pending.total()
        return result

    def _list_queued_ids(self, ids: Sequence[str]) -> set[str] | None:
        """Return those of *ids* that are still queued; None if the broker cannot tell.

        Call this before listing dead letters: a transaction that is dead-lettered in between is then in at least one
        of the two results.
        """
        queued_ids = self._connector.find_queued(ids)
        if queued_ids is not None:
            return set(queued_ids)
        # A connector in log mode reads a partitioned log: its depth would take partitions from running consumers.
        depth = self._connector.depth() if self._connector.capabilities.mode == "queue" else None
        return set() if depth is not None and not depth.ready + depth.delayed + depth.in_flight else None

    def _list_handles(self, transaction_id: str) -> set[str]:
        return {record.handle for record in iter_dead(self._connector, DeadLetterQuery.load(id=transaction_id))}


# -- progress ---------------------------------------------------------------------------------------

#: Seconds between two lines.
LINE_INTERVAL_SECONDS = 5.0


@contextmanager
def progress(
    label: str, total: int, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[MoveProgress], None]]:
    """Yield a function to call after each batch."""
    if not sys.stderr.isatty():
        yield _make_line_printer(label, total, clock=clock)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as display:
        bar = display.add_task(label, total=total)
        yield lambda state: display.update(bar, completed=state.counts.total())


def _make_line_printer(label: str, total: int, *, clock: Callable[[], float]) -> Callable[[MoveProgress], None]:
    last_printed_at = clock()

    def print_line(state: MoveProgress) -> None:
        nonlocal last_printed_at
        if clock() - last_printed_at >= LINE_INTERVAL_SECONDS:
            last_printed_at = clock()
            typer.echo(f"ergon: {label} {state.counts.total()} of {total}", err=True)

    return print_line


# -- commands ---------------------------------------------------------------------------------------

#: Maximum number of dead letters shown for one id.
MAX_LETTERS_PER_ID = 100
#: Added to a time that is printed for --until, because printing rounds it to microseconds.
TIME_TOLERANCE_SECONDS = 2e-6
#: Maximum length of an id or failure message in the output.
MAX_SHOWN_CHARS = 500


@dataclass(frozen=True, kw_only=True)
class MoveRequest:
    """A replay or discard command: selection of dead letters, pace and safety limits."""

    verb: Literal["replay", "discard"]
    query: DeadLetterQuery
    select_all: bool
    limit: int | None
    batch: int
    rate: float | None
    dry_run: bool
    as_json: bool
    #: The requesting operator and the reason.
    actor: str = ""
    reason: str = ""
    #: Skip confirmation; only a discard asks for one.
    yes: bool = True
    canary: int = 0
    max_failed: int = 0
    canary_wait: float = 60.0
    stop: StopFlag = field(default_factory=StopFlag)

    @property
    def success_result(self) -> DeadLetterResult:
        return DeadLetterResult.REPLAYED if self.verb == "replay" else DeadLetterResult.DISCARDED


def list_dead(target: str, query: DeadLetterQuery, *, limit: int, payload: bool, as_json: bool) -> DlqExit:
    """Print the dead letters that match *query*, oldest first."""

    def work(connector: Connector) -> DlqExit:
        # Fetch one extra record to detect whether there are more.
        records = list(iter_dead(connector, query, limit=limit + 1))
        if as_json:
            _print_lines(to_json_line(record, payload=payload) for record in records[:limit])
        elif records:
            show_list(records[:limit], payload=payload)
        else:
            typer.echo(
                f"{connector.name} has no dead letters{'' if query.is_unfiltered else ' that match the filters'}"
            )
        if len(records) > limit:
            _print_stderr(f"there are more dead letters; to show more, pass --limit {limit * 10}")
        return DlqExit.OK

    return with_connector(target, work)


def show_dead(target: str, transaction_id: str, *, payload: bool, as_json: bool) -> DlqExit:
    """Print all details of the dead letters of one transaction."""

    def work(connector: Connector) -> DlqExit:
        records = connector.list_dead(DeadLetterQuery.load(id=transaction_id), limit=MAX_LETTERS_PER_ID)
        if not records:
            _print_stderr(
                f"{connector.name} has no dead letter of transaction {sanitize(transaction_id, MAX_SHOWN_CHARS)!r}; "
                f"to list its dead letters, run: ergon dlq list {target}"
            )
            return DlqExit.FAILED
        if as_json:
            _print_lines(to_json_line(record, payload=payload) for record in records)
        else:
            for record in records:
                show_one(record, payload=payload)
        return DlqExit.OK

    return with_connector(target, work)


def move_dead(target: str, request: MoveRequest) -> DlqExit:
    """Replay or discard the dead letters that *request* selects."""
    if request.query.is_unfiltered != request.select_all:
        problem = (
            "--all and a filter exclude each other" if request.select_all else f"this would {request.verb} everything"
        )
        _print_stderr(f"{problem}; pass a filter such as --dead-letter-reason, or --all")
        return DlqExit.USAGE
    return with_connector(target, lambda connector: _move(connector, request, target=target))


def _move(connector: Connector, request: MoveRequest, *, target: str) -> DlqExit:
    """Select the letters, ask for confirmation if necessary, move them under the operator's name, and report."""
    with _handle_signals(request.stop):
        letters = select_letters(connector, request.query, limit=request.limit, stop=request.stop)
        move_progress = MoveProgress(len(letters))
        if request.stop.is_set:
            move_progress.stop_reason = StopReason.SIGNAL
        elif not request.dry_run and letters:
            if not _confirm(connector, request, count=len(letters)):
                return DlqExit.USAGE
            selection = request.query.model_dump(mode="json", exclude_none=True)
            ids = {letter.handle: letter.id for letter in letters}
            with (
                # The audit entries of the batches name this operator and these transactions.
                act_as(request.actor, reason=request.reason, selection=selection, ids=ids),
                progress("discarding" if request.verb == "discard" else "replaying", len(letters)) as on_batch_end,
            ):
                _move_all(connector, request, letters=letters, move_progress=move_progress, on_batch_end=on_batch_end)
    exit_code = _to_exit_code(move_progress)
    _report(connector, request, target=target, letters=letters, move_progress=move_progress, exit_code=exit_code)
    return exit_code


def _move_all(
    connector: Connector,
    request: MoveRequest,
    *,
    letters: Sequence[SelectedLetter],
    move_progress: MoveProgress,
    on_batch_end: Callable[[MoveProgress], None],
) -> None:
    """Move the canary's letters, and the rest unless the command was stopped meanwhile."""
    move_batch = connector.replay_dead if request.verb == "replay" else connector.discard_dead
    rate_limit, canary_letters = RateLimit(request.rate), letters[: request.canary]

    def move_chunk(chunk: Sequence[SelectedLetter]) -> None:
        move_letters(
            chunk,
            move_batch,
            move_progress=move_progress,
            batch_size=request.batch,
            rate_limit=rate_limit,
            stop=request.stop,
            on_batch_end=on_batch_end,
        )

    if canary_letters:
        try:
            _run_canary(
                connector, request, canary_letters=canary_letters, move_progress=move_progress, move_chunk=move_chunk
            )
        except ErgonError as error:  # raised while the canary was watched; move_letters() records its own errors
            move_progress.stop_reason, move_progress.error = StopReason.ERROR, error_message(error)
    if move_progress.stop_reason is None:
        move_chunk(letters[len(canary_letters) :])


def _run_canary(
    connector: Connector,
    request: MoveRequest,
    *,
    canary_letters: Sequence[SelectedLetter],
    move_progress: MoveProgress,
    move_chunk: Callable[[Sequence[SelectedLetter]], None],
) -> None:
    """Replay the canary letters and wait for their outcome; too many failures stop the command."""
    canary = Canary(connector, canary_letters)
    move_chunk(canary_letters)
    if move_progress.stop_reason is not None:
        return
    # Watch only moved letters: another operator moved the missing ones, and failed ones are still dead letters.
    _print_stderr(f"waiting up to {request.canary_wait:g} s for the canary")
    move_progress.canary_result = canary.wait(move_progress.moved, timeout=request.canary_wait, stop=request.stop)
    failed = move_progress.canary_result.failed + move_progress.counts[DeadLetterResult.FAILED]
    if request.stop.is_set:
        move_progress.stop_reason = StopReason.SIGNAL
    elif failed > request.max_failed or move_progress.canary_result.waiting:
        move_progress.stop_reason = StopReason.CANARY


def _to_exit_code(move_progress: MoveProgress) -> DlqExit:
    if move_progress.stop_reason is StopReason.SIGNAL:
        return DlqExit.STOPPED
    if move_progress.stop_reason is StopReason.CANARY:
        return DlqExit.CANARY
    return DlqExit.FAILED if move_progress.stop_reason or move_progress.counts[DeadLetterResult.FAILED] else DlqExit.OK


def _confirm(connector: Connector, request: MoveRequest, *, count: int) -> bool:
    if request.yes:
        return True
    if is_interactive():
        return typer.confirm(f"Discard {count} dead letters of {connector.name} permanently?", err=True)
    _print_stderr(f"{count} dead letters would be deleted permanently; check them with --dry-run, then pass --yes")
    return False


def is_interactive() -> bool:
    """Return whether stdin is a terminal, so that an operator can answer a prompt."""
    return sys.stdin.isatty()


# -- output -----------------------------------------------------------------------------------------


def _report(
    connector: Connector,
    request: MoveRequest,
    *,
    target: str,
    letters: Sequence[SelectedLetter],
    move_progress: MoveProgress,
    exit_code: DlqExit,
) -> None:
    if request.as_json:
        typer.echo(
            json.dumps(
                _build_summary(connector, request, letters=letters, move_progress=move_progress, exit_code=exit_code)
            )
        )
    else:
        print_rows(connector.name, list(_build_rows(request, letters=letters, move_progress=move_progress)))
    if move_progress.stop_reason is not None:
        _print_stderr(_describe_stop(request, target=target, letters=letters, move_progress=move_progress))
    elif not letters and not request.as_json:
        fits = "" if request.select_all else " that matches all filters"
        _print_stderr(
            f"{connector.name} has no dead letter{fits}; to list its dead letters, run: ergon dlq list {target}"
        )


def _build_summary(
    connector: Connector,
    request: MoveRequest,
    *,
    letters: Sequence[SelectedLetter],
    move_progress: MoveProgress,
    exit_code: DlqExit,
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "queue": connector.name,
        "command": request.verb,
        "dry_run": request.dry_run,
        "exit_code": int(exit_code),
        "selected": move_progress.selected,
        "reasons": Counter(letter.reason for letter in letters),
        **{
            result.value: move_progress.counts[result]
            for result in (request.success_result, DeadLetterResult.GONE, DeadLetterResult.FAILED)
        },
        "not_tried": move_progress.remaining,
        "stop_reason": move_progress.stop_reason,
        "failures": [
            {"entry": letter.handle, "id": letter.id, "message": message} for letter, message in move_progress.failures
        ],
    }
    if move_progress.error:
        summary["error"] = move_progress.error
    if move_progress.canary_result is not None:
        canary_result = move_progress.canary_result
        summary["canary"] = {
            "succeeded": canary_result.succeeded,
            "failed": canary_result.failed,
            "waiting": canary_result.waiting,
        }
    return summary


def _build_rows(
    request: MoveRequest, *, letters: Sequence[SelectedLetter], move_progress: MoveProgress
) -> Iterator[tuple[str, str]]:
    if request.dry_run:
        yield f"would {request.verb}", str(move_progress.selected)
        reasons = Counter(letter.reason for letter in letters).most_common()
        yield from ((sanitize(reason, MAX_SHOWN_CHARS), str(count)) for reason, count in reasons)
        return
    yield request.success_result.value, str(move_progress.counts[request.success_result])
    if move_progress.counts[DeadLetterResult.GONE]:
        yield "gone", f"{move_progress.counts[DeadLetterResult.GONE]}, moved by another operator"
    if move_progress.counts[DeadLetterResult.FAILED]:
        yield "failed", f"{move_progress.counts[DeadLetterResult.FAILED]}, still dead letters"
    if move_progress.remaining:
        yield "not tried", str(move_progress.remaining)
    if move_progress.canary_result is not None:
        canary_result = move_progress.canary_result
        succeeded, failed, waiting = canary_result.succeeded, canary_result.failed, canary_result.waiting
        yield "canary", f"{succeeded} succeeded, {failed} failed, {waiting} waiting"
    yield from (
        (sanitize(letter.id, MAX_SHOWN_CHARS), sanitize(message, MAX_SHOWN_CHARS))
        for letter, message in move_progress.failures
    )


def _describe_stop(
    request: MoveRequest, *, target: str, letters: Sequence[SelectedLetter], move_progress: MoveProgress
) -> str:
    done_count = move_progress.counts[request.success_result]
    progress_text = (
        f"{done_count} of {move_progress.selected} {request.success_result}, {move_progress.remaining} not tried"
    )
    if move_progress.stop_reason is StopReason.CANARY:
        return f"stopped by the canary: {progress_text}. {_describe_canary(request, move_progress, target=target)}"
    retry_hint = "run the same command again to continue"
    if request.verb == "replay" and done_count and request.query.until is None:
        # Use the letters' own clock plus a tolerance, so that a second run selects the newest of them again.
        until = format_time(max(letter.dead_at for letter in letters) + TIME_TOLERANCE_SECONDS, "microseconds")
        retry_hint += f"; to skip newer dead letters, pass --until {until}"
    if move_progress.stop_reason is StopReason.ERROR:
        return (
            f"stopped by an error: {sanitize(move_progress.error, MAX_SHOWN_CHARS)}. {progress_text}; the last batch "
            f"may be moved in part, but no letter was moved twice: {retry_hint}"
        )
    return f"stopped by a signal: {progress_text}; {retry_hint}"


def _describe_canary(request: MoveRequest, move_progress: MoveProgress, *, target: str) -> str:
    result, not_replayed = move_progress.canary_result or CanaryResult(), move_progress.counts[DeadLetterResult.FAILED]
    if result.waiting and result.failed + not_replayed <= request.max_failed:
        return (
            f"{result.waiting} canary transactions have not ended after {request.canary_wait:g} s; is a worker "
            "running? Check the queue, or increase --canary-wait"
        )
    if not result.failed:
        return f"{not_replayed} dead letters could not be replayed: fix the reported errors, then run the command again"
    return f"List the new dead letters with: ergon dlq list {target}; fix the cause, then run the command again"


# -- helpers ----------------------------------------------------------------------------------------


def with_connector(target: str, work: Callable[[Connector], DlqExit]) -> DlqExit:
    """Call *work* with the connector that *target* names; print the framework's errors with their explanation."""
    configure_logging("WARNING")
    # The rows of the audit go to this database; an invalid configuration is reported below if the connector needs it.
    with suppress(ConfigurationError):
        use_database(load_settings().postgres.dsn)
    try:
        with open_connector(target) as connector:
            return work(connector)
    except ConfigurationError as error:
        _print_stderr(error_message(error))
        return DlqExit.USAGE
    except ErgonError as error:
        _print_stderr(explain_error(error))
        return DlqExit.FAILED


@contextmanager
def open_connector(target: str) -> Iterator[Connector]:
    """Yield the connector that *target* names, to inspect and move messages; nothing is consumed with it."""
    connector = as_sync(load_connector(target))
    # Opening a connector in log mode takes partitions over from running consumers.
    if connector.capabilities.mode == "queue":
        connector.open()
    try:
        yield connector
    finally:
        connector.close()


@contextmanager
def _handle_signals(stop: StopFlag) -> Iterator[None]:
    """Stop after the current batch on the first signal; a second signal has Python's default effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, _frame: object) -> None:
        stop.is_set = True
        signal.signal(signum, previous_handlers[signum])

    previous_handlers: dict[int, Any] = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    for signum in previous_handlers:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, previous in previous_handlers.items():
            signal.signal(signum, previous)


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)


def _print_lines(lines: Iterator[str]) -> None:
    for line in lines:
        typer.echo(line)
