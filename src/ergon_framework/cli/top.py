"""``ergon top``: sample the fleet periodically, and draw each frame over the previous one.

The fleet is all runs of workers that are queried, and the database. A sample has the answers of these sources at one
time; a frame shows the activity between two samples.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ergon_framework.cli import top_view as view
from ergon_framework.cli.options import Config, duration_option
from ergon_framework.cli.output import configure_logging
from ergon_framework.cli.top_sources import Sources
from ergon_framework.cli.top_view import Frame, build_frame
from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.runner.exit import ExitCode
from ergon_framework.runner.settings import Settings, load_settings

#: Escape sequences: alternate screen without a cursor, cursor to the top, clear line and rest of screen, and back.
_ENTER_SCREEN: Final = "\x1b[?1049h\x1b[?25l"
_CURSOR_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_SCREEN: Final = "\x1b[J"
_LEAVE_SCREEN: Final = "\x1b[?25h\x1b[?1049l"
#: Width used when the width of the output is unknown.
_DEFAULT_COLUMNS: Final = 100


class TopExit(ExitCode):
    """Exit codes of ``ergon top`` and their meanings."""

    OK = 0, "shown"
    FAILED = 1, "no source responded"
    USAGE = 2, "the command line or the configuration is invalid"


def run_top(urls: Sequence[str], *, interval: float, once: bool, config: Path | None, as_json: bool) -> TopExit:
    """Show the fleet until the operator stops the command."""
    configure_logging("ERROR")
    try:
        settings = load_settings(config)
        sources = Sources(urls or _list_probe_urls(settings), settings.postgres.dsn)
    except ConfigurationError as error:
        if as_json:
            typer.echo(json.dumps({"error": error_message(error), "exit_code": int(TopExit.USAGE)}))
        else:
            typer.echo(f"ergon: {error_message(error)}", err=True)
        return TopExit.USAGE
    with closing(sources):
        frames = _iter_frames(sources, interval)
        if once or as_json or not sys.stdout.isatty():
            first_frame = next(frames)
            _print_frame(first_frame, as_json=as_json)
            return TopExit.FAILED if len(first_frame.unavailable) == first_frame.sources else TopExit.OK
        with _open_screen() as draw:
            for frame in frames:
                draw(frame)
    return TopExit.OK


def _list_probe_urls(settings: Settings) -> Sequence[str]:
    probes = settings.run.probes
    host = f"[{probes.host}]" if ":" in probes.host else probes.host
    return [f"http://{host}:{probes.port}"] if probes.port else []


def _iter_frames(sources: Sources, interval: float) -> Iterator[Frame]:
    previous = sources.sample()
    while True:
        time.sleep(interval)
        current = sources.sample()
        yield build_frame(previous, current)
        previous = current


def _print_frame(frame: Frame, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(frame.to_dict()))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _get_width()
    for line in view.render_lines(frame, width=width):
        typer.echo(line)


def _get_width() -> int:
    """Return the width from COLUMNS: output to a file has no width of its own."""
    return shutil.get_terminal_size((_DEFAULT_COLUMNS, 0)).columns


@contextmanager
def _open_screen() -> Iterator[Any]:
    """Yield a function that draws frames on the alternate screen; Ctrl-C and SIGTERM end it and restore the screen."""

    def draw(frame: Frame) -> None:
        size = shutil.get_terminal_size()
        # One line less than the screen: writing into the last corner would scroll it.
        rendered = view.render_lines(frame, width=size.columns, height=max(2, size.lines - 1))
        output = "".join(f"{line}{_CLEAR_LINE}\n" for line in rendered)
        sys.stdout.write(f"{_CURSOR_HOME}{output}{_CLEAR_SCREEN}")
        sys.stdout.flush()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # Both signals: a process started in the background of a script ignores SIGINT.
    previous_handlers = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    sys.stdout.write(f"{_ENTER_SCREEN}{_CURSOR_HOME}loading …{_CLEAR_SCREEN}")
    sys.stdout.flush()
    try:
        yield draw
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_LEAVE_SCREEN)
        sys.stdout.flush()
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler or signal.SIG_DFL)


# -- command ----------------------------------------------------------------------------------------

top = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@top.command("top")
def top_(
    *,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            show_default="address of run.probes, if it has a port",
            help="Probe address of a worker, for example http://localhost:9100; repeatable.",
        ),
    ] = None,
    interval: Annotated[float, duration_option("Refresh interval.", minimum=0.2, maximum=60)] = "2s",  # type: ignore[assignment]  # typer parses the default too
    one_frame: Annotated[
        bool, typer.Option("--one-frame", help="Print one frame after one interval and exit.")
    ] = False,
    config: Config = None,
    json: Annotated[bool, typer.Option("--json", help="Print one frame as one line of JSON.")] = False,
) -> None:
    """Show fleet activity: throughput, outcomes, retries, handler slots, queues, breakers, replication, processes.

    Counters come from /metrics of the workers; queue depths, pauses and open breakers come from the database, if one is
    configured. Unavailable sources are listed. If stdout is not a terminal, one frame is printed.

    Exit codes: 0 shown, 1 no source responded, 2 invalid option or configuration.

    Example: ergon top --url http://localhost:9100 --url http://localhost:9101
    """
    raise typer.Exit(run_top(url or (), interval=interval, once=one_frame, config=config, as_json=json))
