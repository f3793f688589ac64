"""What ``ergon pause``, ``resume`` and ``paused`` do: write an operator's word down, and show who has heard it."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from ergon_framework.cli.dlq_view import clean, told
from ergon_framework.cli.logs import configure
from ergon_framework.cli.summary import tell
from ergon_framework.cli.telling import explained
from ergon_framework.errors import ConfigurationError, ErgonError, text
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.loading import load_task
from ergon_framework.runner.settings import database
from ergon_framework.schema import libraries

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.pauses import Fetching, Paused

#: Seconds that one question may take, and between two looks at the fleet.
_WITHIN: Final = 15.0
_LOOK: Final = 0.2
#: The longest name, as the table says, and the longest text of a person's.
_NAME: Final = 200
_WORDS: Final = 500


class PauseExit(ExitCode):
    """Every exit code of ``ergon pause``, ``resume`` and ``paused`` with what it means."""

    OK = 0, "done"
    FAILED = 1, "the database did not answer, or what was to be resumed was not paused"
    USAGE = 2, "the command line or the configuration is wrong"
    WAITING = 3, "it is paused, and not all had finished in time"


class _Desk:
    """The pauses of one database."""

    def __init__(self, dsn: str) -> None:
        # Loaded when it is needed: not everybody has its libraries.
        libraries.needed()
        self._pauses = importlib.import_module("ergon_framework.connectors.postgres.pauses")
        self._lines = importlib.import_module("ergon_framework.schema.lines").Lines(dsn)

    def pause(self, name: str, *, by: str, because: str) -> None:
        self._lines.run(self._pauses.pause(name, by=by, because=because), within=_WITHIN)

    def resume(self, name: str, *, by: str, because: str) -> bool:
        done: bool = self._lines.run(self._pauses.resume(name, by=by, because=because), within=_WITHIN)
        return done

    def survey(self) -> tuple[Sequence[Paused], Sequence[Fetching]]:
        found: tuple[Sequence[Paused], Sequence[Fetching]] = self._lines.run(self._pauses.survey(), within=_WITHIN)
        return found

    def close(self) -> None:
        self._lines.close()


@dataclass(frozen=True, kw_only=True)
class Pause:
    """A pause: its name, reason and actor, and how long to wait for the workers."""

    name: str
    reason: str
    actor: str
    force: bool
    wait: float


def paused_now(order: Pause, *, config: Path | None, as_json: bool) -> PauseExit:
    """Pause as *order* says; with a wait, return when all workers have finished or the wait is over."""

    def work(desk: _Desk) -> PauseExit:
        meant, wait = _meant(order.name), order.wait
        if not (order.force or ":" in order.name):
            _refuse_unknown(meant, desk)
        desk.pause(meant, by=order.actor[:_WORDS], because=order.reason[:_WORDS])
        until = time.monotonic() + wait
        while True:
            _, fleet = desk.survey()
            mine = [each for each in fleet if each.is_called(meant)]
            done = all(each.obeys is not None and each.in_hand == 0 for each in mine)
            if done or time.monotonic() >= until:
                break
            time.sleep(_LOOK)
        code = PauseExit.WAITING if wait and not done else PauseExit.OK
        if as_json:
            workers = [asdict(each) for each in mine]
            _print({"name": meant, "finished": done, "workers": workers, "exit_code": int(code)})
        else:
            tell(f"{clean(meant, _WORDS)} is paused", list(_rows(mine)))
        return code

    return _with(work, config=config, as_json=as_json)


def resumed(name: str, *, actor: str, reason: str, config: Path | None, as_json: bool) -> PauseExit:
    """Resume what is called *name*."""

    def work(desk: _Desk) -> PauseExit:
        meant = _meant(name)
        done = desk.resume(meant, by=actor[:_WORDS], because=reason[:_WORDS])
        code = PauseExit.OK if done else PauseExit.FAILED
        if as_json:
            _print({"name": meant, "resumed": done, "exit_code": int(code)})
        elif done:
            typer.echo(f"{clean(meant, _WORDS)} is resumed; its workers fetch again within a second or two")
        else:
            known = ", ".join(clean(one.name, _WORDS) for one in desk.survey()[0]) or "nothing"
            _say(f"{clean(meant, _WORDS)!r} is not paused; paused is: {known}")
        return code

    return _with(work, config=config, as_json=as_json)


def listed(*, config: Path | None, as_json: bool) -> PauseExit:
    """Show what is paused and who has heard it."""

    def work(desk: _Desk) -> PauseExit:
        pauses, fleet = desk.survey()
        if as_json:
            _print({"paused": [asdict(one) for one in pauses], "workers": [asdict(each) for each in fleet]})
            return PauseExit.OK
        if not pauses:
            typer.echo("nothing is paused")
        for one in pauses:
            rows = [("since", told(one.at)), ("by", clean(one.by, _WORDS))]
            rows += [("reason", clean(one.because, _WORDS))] if one.because else []
            tell(clean(one.name, _WORDS), [*rows, *_rows([each for each in fleet if each.is_called(one.name)])])
        return PauseExit.OK

    return _with(work, config=config, as_json=as_json)


def _meant(name: str) -> str:
    """The name of the task that MODULE:TASK stands for; any other name as it is."""
    meant = load_task(name).name if ":" in name else name
    if not 0 < len(meant) <= _NAME or not meant.isprintable():
        raise ConfigurationError(f"a name has 1 to {_NAME} characters that can be printed, not {len(meant)}")
    return meant


def _refuse_unknown(name: str, desk: _Desk) -> None:
    """Refuse a name that neither a running worker nor an earlier pause has: it is probably mistyped."""
    pauses, fleet = desk.survey()
    known = {part for each in fleet for part in (each.task, each.queue)} | {one.name for one in pauses}
    if name in known:
        return
    near = [repr(clean(one, _WORDS)) for one in get_close_matches(name, sorted(known), n=3)]
    others = [repr(clean(one, _WORDS)) for one in sorted(known)]
    if near:
        hint = f"the nearest is {' or '.join(near)}"
    else:
        hint = f"the running ones are {', '.join(others)}" if others else "no worker is running"
    raise ConfigurationError(
        f"no running task or queue is called {clean(name, _WORDS)!r}: {hint}; to pause a name before its first worker "
        "starts, add --force"
    )


# -- what is said ---------------------------------------------------------------------------------------


def _rows(workers: Sequence[Fetching]) -> Iterator[tuple[str, str]]:
    if not workers:
        yield "workers", "none that is running"
    for each in workers:
        held = f"has {each.in_hand} in hand" if each.in_hand else "has nothing in hand"
        state = f"does not fetch, {held}" if each.obeys is not None else f"has not stopped yet, {held}"
        yield clean(f"{each.task} at {each.host}:{each.pid}", _WORDS), state


def _with(work: Callable[[_Desk], PauseExit], *, config: Path | None, as_json: bool) -> PauseExit:
    configure("WARNING")
    try:
        with _opened(database(config)) as desk:
            return work(desk)
    except ErgonError as error:
        code = PauseExit.USAGE if isinstance(error, ConfigurationError) else PauseExit.FAILED
        if as_json:
            _print({"error": text(error), "exit_code": int(code)})
        else:
            _say(explained(error))
        return code


@contextmanager
def _opened(dsn: str) -> Iterator[_Desk]:
    desk = _Desk(dsn)
    try:
        yield desk
    finally:
        desk.close()


def _print(line: dict[str, Any]) -> None:
    typer.echo(json.dumps(line))


def _say(words: str) -> None:
    typer.echo(f"ergon: {words}", err=True)
