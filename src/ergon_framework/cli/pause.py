"""``ergon pause``, ``resume`` and ``paused``: store an operator's pause, and show which workers have applied it.

A pause is a row in the database with the name of a task or a queue. Each worker (a process of ``ergon run``) with the
same database reads the rows, stops fetching, and records that it has applied the pause. The fleet is all these workers:
``applied`` of a WorkerLoopState is the name of the pause under which its loop has stopped fetching, None if it fetches.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ergon_framework.cli.dlq_view import format_time, sanitize
from ergon_framework.cli.options import Actor, Config, Json, Reason, duration_option, resolve_actor_name
from ergon_framework.cli.output import configure_logging, explain_error
from ergon_framework.cli.summary import print_rows
from ergon_framework.database import extras
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.runner.exit import ExitCode
from ergon_framework.runner.loading import load_task
from ergon_framework.runner.settings import database_dsn

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.pauses import PauseRecord, WorkerLoopState


#: Timeout of one query, and time between two polls of the fleet, in seconds.
_QUERY_TIMEOUT_SECONDS: Final = 15.0
_POLL_INTERVAL_SECONDS: Final = 0.2
#: Maximum length of a name, as in the table, and of a text entered by a person.
_MAX_NAME_CHARS: Final = 200
_MAX_TEXT_CHARS: Final = 500


class PauseExit(ExitCode):
    """Exit codes of ``ergon pause``, ``resume`` and ``paused`` and their meanings."""

    OK = 0, "done"
    FAILED = 1, "the database did not answer, or the name to resume was not paused"
    USAGE = 2, "the command line or the configuration is invalid"
    WAITING = 3, "paused, but some workers still had work in flight when the wait expired"


class _PauseStore:
    """The pauses of one database."""

    def __init__(self, dsn: str) -> None:
        # Imported on demand: the libraries are an optional extra.
        extras.require_psycopg()
        self._pauses = importlib.import_module("ergon_framework.connectors.postgres.pauses")
        self._pool = importlib.import_module("ergon_framework.database.pool").ConnectionPool(dsn)

    def pause(self, name: str, *, actor: str, reason: str) -> None:
        self._pool.run(self._pauses.pause(name, actor=actor, reason=reason), timeout_seconds=_QUERY_TIMEOUT_SECONDS)

    def resume(self, name: str, *, actor: str, reason: str) -> bool:
        was_paused: bool = self._pool.run(
            self._pauses.resume(name, actor=actor, reason=reason), timeout_seconds=_QUERY_TIMEOUT_SECONDS
        )
        return was_paused

    def list_pauses(self) -> tuple[Sequence[PauseRecord], Sequence[WorkerLoopState]]:
        pauses_and_loops: tuple[Sequence[PauseRecord], Sequence[WorkerLoopState]] = self._pool.run(
            self._pauses.list_pauses(), timeout_seconds=_QUERY_TIMEOUT_SECONDS
        )
        return pauses_and_loops

    def close(self) -> None:
        self._pool.close()


@dataclass(frozen=True, kw_only=True)
class PauseRequest:
    """A pause: its name, reason and actor, and how long to wait for the workers."""

    name: str
    reason: str
    actor: str
    force: bool
    wait: float


def pause_loops(request: PauseRequest, *, config: Path | None, as_json: bool) -> PauseExit:
    """Pause as *request* says; with a wait, return when all workers have finished or the wait has expired."""

    def work(store: _PauseStore) -> PauseExit:
        target, wait = _resolve_name(request.name), request.wait
        if not (request.force or ":" in request.name):
            _reject_unknown(target, store)
        store.pause(target, actor=request.actor[:_MAX_TEXT_CHARS], reason=request.reason[:_MAX_TEXT_CHARS])
        deadline = time.monotonic() + wait
        while True:
            _, fleet = store.list_pauses()
            matching = [each for each in fleet if each.matches(target)]
            # Also true without any worker: there is nothing to wait for then.
            all_finished = all(each.applied is not None and each.in_flight == 0 for each in matching)
            if all_finished or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_INTERVAL_SECONDS)
        code = PauseExit.WAITING if wait and not all_finished else PauseExit.OK
        if as_json:
            worker_rows = [asdict(each) for each in matching]
            _print_json({"name": target, "finished": all_finished, "workers": worker_rows, "exit_code": int(code)})
        else:
            print_rows(f"{sanitize(target, _MAX_TEXT_CHARS)} is paused", list(_build_rows(matching)))
        return code

    return _run_with_store(work, config=config, as_json=as_json)


def resume_loops(name: str, *, actor: str, reason: str, config: Path | None, as_json: bool) -> PauseExit:
    """Resume the task or queue called *name*."""

    def work(store: _PauseStore) -> PauseExit:
        target = _resolve_name(name)
        was_paused = store.resume(target, actor=actor[:_MAX_TEXT_CHARS], reason=reason[:_MAX_TEXT_CHARS])
        code = PauseExit.OK if was_paused else PauseExit.FAILED
        if as_json:
            _print_json({"name": target, "resumed": was_paused, "exit_code": int(code)})
        elif was_paused:
            typer.echo(
                f"{sanitize(target, _MAX_TEXT_CHARS)} is resumed; its workers fetch again within about two seconds"
            )
        else:
            paused_names = ", ".join(sanitize(one.name, _MAX_TEXT_CHARS) for one in store.list_pauses()[0]) or "none"
            _print_stderr(f"{sanitize(target, _MAX_TEXT_CHARS)!r} is not paused (paused: {paused_names})")
        return code

    return _run_with_store(work, config=config, as_json=as_json)


def list_paused(*, config: Path | None, as_json: bool) -> PauseExit:
    """Show the pauses and the workers that have applied them."""

    def work(store: _PauseStore) -> PauseExit:
        pauses, fleet = store.list_pauses()
        if as_json:
            _print_json({"paused": [asdict(record) for record in pauses], "workers": [asdict(each) for each in fleet]})
            return PauseExit.OK
        if not pauses:
            typer.echo("nothing is paused")
        for record in pauses:
            rows = [("since", format_time(record.at)), ("actor", sanitize(record.actor, _MAX_TEXT_CHARS))]
            rows += [("reason", sanitize(record.reason, _MAX_TEXT_CHARS))] if record.reason else []
            print_rows(
                sanitize(record.name, _MAX_TEXT_CHARS),
                [*rows, *_build_rows([each for each in fleet if each.matches(record.name)])],
            )
        return PauseExit.OK

    return _run_with_store(work, config=config, as_json=as_json)


def _resolve_name(name: str) -> str:
    """Return the name of the task that MODULE:TASK refers to; return any other name unchanged."""
    resolved = load_task(name).name if ":" in name else name
    if not 0 < len(resolved) <= _MAX_NAME_CHARS or not resolved.isprintable():
        raise ConfigurationError(f"a name must have 1 to {_MAX_NAME_CHARS} printable characters, got {len(resolved)}")
    return resolved


def _reject_unknown(name: str, store: _PauseStore) -> None:
    """Reject a name that neither a running worker nor an earlier pause has: it is probably mistyped."""
    pauses, fleet = store.list_pauses()
    known_names = {part for each in fleet for part in (each.task, each.queue)} | {one.name for one in pauses}
    if name in known_names:
        return
    suggestions = [repr(sanitize(one, _MAX_TEXT_CHARS)) for one in get_close_matches(name, sorted(known_names), n=3)]
    others = [repr(sanitize(one, _MAX_TEXT_CHARS)) for one in sorted(known_names)]
    hint = f"nearest: {' or '.join(suggestions)}" if suggestions else f"running: {', '.join(others) or 'none'}"
    raise ConfigurationError(
        f"no running worker matches {sanitize(name, _MAX_TEXT_CHARS)!r} ({hint}); to pause a name before its first "
        "worker starts, pass --force"
    )


# -- output -----------------------------------------------------------------------------------------


def _build_rows(workers: Sequence[WorkerLoopState]) -> Iterator[tuple[str, str]]:
    if not workers:
        yield "workers", "none running"
    for worker in workers:
        pause_text = "pause not applied yet" if worker.applied is None else "pause applied"
        state = f"{pause_text}, {worker.in_flight} in flight"
        yield sanitize(f"{worker.task} at {worker.host}:{worker.pid}", _MAX_TEXT_CHARS), state


def _run_with_store(work: Callable[[_PauseStore], PauseExit], *, config: Path | None, as_json: bool) -> PauseExit:
    configure_logging("WARNING")
    try:
        with _open_store(database_dsn(config)) as store:
            return work(store)
    except ErgonError as error:
        code = PauseExit.USAGE if isinstance(error, ConfigurationError) else PauseExit.FAILED
        if as_json:
            _print_json({"error": error_message(error), "exit_code": int(code)})
        else:
            _print_stderr(explain_error(error))
        return code


@contextmanager
def _open_store(dsn: str) -> Iterator[_PauseStore]:
    store = _PauseStore(dsn)
    try:
        yield store
    finally:
        store.close()


def _print_json(payload: dict[str, Any]) -> None:
    typer.echo(json.dumps(payload))


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)


# -- commands ---------------------------------------------------------------------------------------

paused = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@paused.command("paused")
def paused_(
    *,
    config: Config = None,
    json: Json = False,
) -> None:
    """List paused tasks and queues with operator and reason, and the state of their workers.

    Exit codes: 0 listed, 1 database unavailable, 2 invalid option or configuration.

    Example: ergon paused
    """
    raise typer.Exit(list_paused(config=config, as_json=json))


resume = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@resume.command("resume")
def resume_(
    name: Annotated[str, typer.Argument(metavar="TASK|QUEUE", help="Paused task or queue.")],
    *,
    reason: Reason = "",
    actor: Actor = "",
    config: Config = None,
    json: Json = False,
) -> None:
    """Resume a paused task or queue on all workers.

    Exit codes: 0 resumed, 1 the name is not paused, or the database is unavailable (see the message), 2 invalid option
    or configuration.

    Example: ergon resume charge
    """
    raise typer.Exit(resume_loops(name, actor=resolve_actor_name(actor), reason=reason, config=config, as_json=json))


pause = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@pause.command("pause")
def pause_(
    name: Annotated[
        str, typer.Argument(metavar="TASK|QUEUE", help="Task or queue, for example charge, orders or app:charge.")
    ],
    *,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Reason to record; shown by the readiness probe and ergon paused.")
    ] = "",
    actor: Actor = "",
    force: Annotated[bool, typer.Option("--force", help="Pause even if no running worker matches the name.")] = False,
    wait: Annotated[
        float,
        duration_option(
            "Maximum time to wait for work in flight to finish.",
            minimum=0,
            maximum=86_400,
            show_default="do not wait",
        ),
    ] = "0s",  # type: ignore[assignment]  # typer parses the default too
    config: Config = None,
    json: Json = False,
) -> None:
    """Pause a task or queue on all workers.

    Every worker that ergon run started with the same database applies the pause within about two seconds: it stops
    fetching, finishes its work in flight, and reports that it is not ready. The pause also applies to workers started
    later, and lasts until ergon resume.

    The pause applies to every task and queue of this name. A name that matches no running worker is rejected, with
    suggestions, unless --force is given.

    Exit codes: 0 paused, 1 database unavailable, 2 invalid option or configuration, or no running worker matches, 3
    some workers still had work in flight when --wait expired (only with --wait).

    Example: ergon pause charge --reason "INC-7: duplicate charges" --wait 30s
    """
    request = PauseRequest(name=name, reason=reason, actor=resolve_actor_name(actor), force=force, wait=wait)
    raise typer.Exit(pause_loops(request, config=config, as_json=json))
