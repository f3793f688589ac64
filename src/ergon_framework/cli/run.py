"""``ergon run``: load the task, run it in this process, say how it ended."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from signal import Signals
from typing import Any

import typer

from ergon_framework.cli.logs import configure
from ergon_framework.cli.summary import as_line, show
from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.leaving import flush, guard, leave
from ergon_framework.runner.loading import load_policy, load_task
from ergon_framework.runner.process import Ended, Process, Runnable
from ergon_framework.task.mixins.policies import ConsumerPolicy


class LogLevel(StrEnum):
    """What the standard library calls its levels."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def run_task(
    name: str,
    *,
    streaming: bool | None,
    limit: int | None,
    policy: Path | None,
    log_level: LogLevel,
    as_json: bool,
) -> int:
    """Run the task called *name*; the exit code. Does not return if a handler is still running at the end."""
    configure(log_level.upper())
    # A console script finds its own folder there; people expect theirs, as with python -m.
    sys.path.insert(0, str(Path.cwd()))
    try:
        task = load_task(name)
        rules = _policy(task, policy, streaming=streaming, limit=limit)
    except ConfigurationError as error:
        typer.echo(f"ergon: {error}", err=True)
        return Exit.USAGE
    ended = Process(task, rules, on_signal=_telling(rules)).run()
    guard(ended)
    _tell(ended)
    if as_json:
        typer.echo(as_line(task.name, ended))
    else:
        show(task.name, ended)
    flush(ended)
    return leave(ended)


def _policy(task: Runnable, path: Path | None, *, streaming: bool | None, limit: int | None) -> ConsumerPolicy:
    own = task.policy if isinstance(task.policy, ConsumerPolicy) else ConsumerPolicy()
    policy = own if path is None else load_policy(path)
    changes: dict[str, Any] = {"streaming": streaming, "limit": limit}
    given = {key: value for key, value in changes.items() if value is not None}
    return policy.model_copy(update={"loop": policy.loop.model_copy(update=given)}) if given else policy


def _telling(policy: ConsumerPolicy) -> Callable[[Signals, int], None]:
    def told(signal: Signals, times: int) -> None:
        if times == 1:
            grace = f"running work has {policy.loop.drain_timeout:g} s to finish; a second signal ends it at once"
            typer.echo(f"ergon: {signal.name}: {grace}", err=True)
        else:
            typer.echo(f"ergon: {signal.name}: ending now", err=True)

    return told


def _tell(ended: Ended) -> None:
    """Say what went wrong: an error of ours explains itself, any other needs its traceback."""
    if ended.forced:
        typer.echo(f"ergon: {Exit.FORCED.meaning}", err=True)
    elif isinstance(ended.error, ErgonError):
        typer.echo(f"ergon: {ended.error}", err=True)
    elif ended.error is not None:
        typer.echo("".join(traceback.format_exception(ended.error)).rstrip(), err=True)
