"""Work of the ``ergon dlq`` commands: load the connector, list, show, replay or discard, and report the result."""

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

from ergon_framework.audit import act_as
from ergon_framework.cli.dlq_canary import Canary
from ergon_framework.cli.dlq_exits import DlqExit
from ergon_framework.cli.dlq_moving import (
    MoveProgress,
    RateLimit,
    SelectedLetter,
    StopFlag,
    StopReason,
    iter_dead,
    move_letters,
    select_letters,
)
from ergon_framework.cli.dlq_progress import progress
from ergon_framework.cli.dlq_view import format_time, sanitize, show_list, show_one, to_json_line
from ergon_framework.cli.logs import configure_logging
from ergon_framework.cli.summary import print_rows
from ergon_framework.cli.telling import explain_error
from ergon_framework.connectors.audit import use_database
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterResult
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.runner.loading import load_connector
from ergon_framework.runner.settings import load_settings

#: Maximum number of dead letters shown for one id.
MAX_LETTERS_PER_ID = 100
#: Smallest difference between two times, with a margin for rounding.
TIME_TOLERANCE_SECONDS = 2e-6
#: Maximum length of an id or failure message in the output.
MAX_MESSAGE_CHARS = 500


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
    audit_reason: str = ""
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
            typer.echo(f"{connector.name} has no dead letters{'' if query.is_unfiltered else ' of that kind'}")
        if len(records) > limit:
            _print_stderr(f"there are more; --limit {limit * 10} shows up to ten times as many")
        return DlqExit.OK

    return with_connector(target, work)


def show_dead(target: str, transaction_id: str, *, payload: bool, as_json: bool) -> DlqExit:
    """Print all details of the dead letters of one transaction."""

    def work(connector: Connector) -> DlqExit:
        records = connector.list_dead(DeadLetterQuery.load(id=transaction_id), limit=MAX_LETTERS_PER_ID)
        if not records:
            _print_stderr(
                f"{connector.name} has no dead letter of transaction {sanitize(transaction_id, MAX_MESSAGE_CHARS)!r}, "
                f"or no longer; to see those it has, run: ergon dlq list {target}"
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
        _print_stderr(f"{problem}; give a filter such as --reason, or --all")
        return DlqExit.USAGE
    return with_connector(target, lambda connector: _move(connector, request))


def _move(connector: Connector, request: MoveRequest) -> DlqExit:
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
                act_as(request.actor, reason=request.audit_reason, selection=selection, ids=ids),
                progress(
                    f"{request.verb}ing" if request.verb == "discard" else "replaying", len(letters)
                ) as on_batch_end,
            ):
                _move_all(connector, request, letters=letters, move_progress=move_progress, on_batch_end=on_batch_end)
    exit_code = _to_exit_code(move_progress)
    _report(connector, request, letters=letters, move_progress=move_progress, exit_code=exit_code)
    return exit_code


def _move_all(
    connector: Connector,
    request: MoveRequest,
    *,
    letters: Sequence[SelectedLetter],
    move_progress: MoveProgress,
    on_batch_end: Callable[[MoveProgress], None],
) -> None:
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
        except ErgonError as error:
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
    _print_stderr(f"waiting for the canary to end, {request.canary_wait:g} s at most")
    move_progress.canary_result = canary.wait(move_progress.moved, wait=request.canary_wait, stop=request.stop)
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
        return typer.confirm(f"Discard {count} dead letters of {connector.name} for good?", err=True)
    _print_stderr(f"{count} dead letters would be gone for good; look at them with --dry-run, then give --yes")
    return False


def is_interactive() -> bool:
    """Return whether stdin is a terminal, so that an operator can answer a prompt."""
    return sys.stdin.isatty()


# -- output -----------------------------------------------------------------------------------


def _report(
    connector: Connector,
    request: MoveRequest,
    *,
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
        _print_stderr(_describe_stop(request, letters=letters, move_progress=move_progress))
    elif not letters and not request.as_json:
        fits = "" if request.select_all else " that fits all filters"
        _print_stderr(f"{connector.name} has no dead letter{fits}; those it has are listed by ergon dlq list")


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
        "chosen": move_progress.selected,
        "reasons": Counter(letter.reason for letter in letters),
        **{
            result.value: move_progress.counts[result]
            for result in (request.success_result, DeadLetterResult.GONE, DeadLetterResult.FAILED)
        },
        "left": move_progress.remaining,
        "stopped": move_progress.stop_reason,
        "failures": [
            {"place": letter.handle, "id": letter.id, "words": message} for letter, message in move_progress.failures
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
        yield from ((sanitize(reason, MAX_MESSAGE_CHARS), str(count)) for reason, count in reasons)
        return
    yield request.success_result.value, str(move_progress.counts[request.success_result])
    if move_progress.counts[DeadLetterResult.GONE]:
        yield "gone", f"{move_progress.counts[DeadLetterResult.GONE]}, moved by somebody else"
    if move_progress.counts[DeadLetterResult.FAILED]:
        yield "failed", f"{move_progress.counts[DeadLetterResult.FAILED]}, still dead letters"
    if move_progress.remaining:
        yield "not touched", str(move_progress.remaining)
    if move_progress.canary_result is not None:
        canary_result = move_progress.canary_result
        succeeded, failed, waiting = canary_result.succeeded, canary_result.failed, canary_result.waiting
        yield "canary", f"{succeeded} succeeded, {failed} failed, {waiting} have not ended"
    yield from (
        (sanitize(letter.id, MAX_MESSAGE_CHARS), sanitize(message, MAX_MESSAGE_CHARS))
        for letter, message in move_progress.failures
    )


def _describe_stop(request: MoveRequest, *, letters: Sequence[SelectedLetter], move_progress: MoveProgress) -> str:
    done_count = move_progress.counts[request.success_result]
    progress_text = (
        f"{done_count} of {move_progress.selected} {request.success_result}, {move_progress.remaining} not touched"
    )
    if move_progress.stop_reason is StopReason.CANARY:
        return f"stopped by the canary: {progress_text}. {_describe_canary(request, move_progress)}"
    retry_hint = "run the same command again to go on"
    if request.verb == "replay" and done_count and request.query.until is None:
        # Use the letters' own clock plus a tolerance, so that a second run selects the newest of them again.
        until = format_time(max(letter.dead_at for letter in letters) + TIME_TOLERANCE_SECONDS, "microseconds")
        retry_hint += f"; with --until {until} it leaves alone what has died again since"
    if move_progress.stop_reason is StopReason.ERROR:
        return (
            f"stopped: {sanitize(move_progress.error, MAX_MESSAGE_CHARS)}. {progress_text}; the part that was under "
            f"way was moved or was not, and none of it twice: {retry_hint}"
        )
    return f"stopped by a signal: {progress_text}; {retry_hint}"


def _describe_canary(request: MoveRequest, move_progress: MoveProgress) -> str:
    canary_result = move_progress.canary_result
    if canary_result is not None and canary_result.waiting and canary_result.failed <= request.max_failed:
        return (
            f"{canary_result.waiting} of the canary have not ended in {request.canary_wait:g} s; is a worker running? "
            "Look at the queue, or give --canary-wait more seconds"
        )
    return "Look at what is dead again with ergon dlq list, mend the cause, then run it again"


# -- helpers ----------------------------------------------------------------------------------


def with_connector(target: str, work: Callable[[Connector], DlqExit]) -> DlqExit:
    """Call *work* with the connector that *target* names; print the framework's errors with their explanation."""
    configure_logging("WARNING")
    with suppress(ConfigurationError):  # reported below if the connector needs the database
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
    """Yield the connector that *target* names, for queries only, not for consuming."""
    connector = as_sync(load_connector(target))
    # Opening a log connector takes its partitions over from running consumers.
    if connector.capabilities.mode == "queue":
        connector.open()
    try:
        yield connector
    finally:
        connector.close()


@contextmanager
def _handle_signals(stop: StopFlag) -> Iterator[None]:
    """Stop after the current part on the first signal; a second signal has Python's default effect."""
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
