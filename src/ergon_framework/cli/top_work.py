"""What ``ergon top`` does: look again and again, and show each frame in the place of the one before."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import typer

from ergon_framework.cli import top_view as view
from ergon_framework.cli.logs import configure
from ergon_framework.cli.top_frame import Frame, frame
from ergon_framework.cli.top_sources import Sources
from ergon_framework.errors import ConfigurationError, text
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.settings import Settings, settings

#: A page of its own, without a cursor; the end of a line and of a page that are not written over; and back.
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_HOME: Final = "\x1b[H"
_REST_OF_LINE: Final = "\x1b[K"
_REST: Final = "\x1b[J"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
#: What is shown of it where nobody says how wide the place is.
_WIDTH: Final = 100


class TopExit(ExitCode):
    """Every exit code of ``ergon top`` with what it means."""

    OK = 0, "shown"
    FAILED = 1, "nothing that was asked has answered"
    USAGE = 2, "the command line or the configuration is wrong"


def watched(urls: Sequence[str], *, interval: float, once: bool, config: Path | None, as_json: bool) -> TopExit:
    """Show the fleet, until somebody has seen enough of it."""
    configure("ERROR")
    try:
        found = settings(config)
        sources = Sources(urls or _probes(found), found.postgres.dsn)
    except ConfigurationError as error:
        if as_json:
            typer.echo(json.dumps({"error": text(error), "exit_code": int(TopExit.USAGE)}))
        else:
            typer.echo(f"ergon: {text(error)}", err=True)
        return TopExit.USAGE
    with closing(sources):
        frames = _frames(sources, interval)
        if once or as_json or not sys.stdout.isatty():
            shown = next(frames)
            _print(shown, as_json=as_json)
            return TopExit.FAILED if len(shown.unreached) == shown.asked else TopExit.OK
        with _page() as place:
            for each in frames:
                place(each)
    return TopExit.OK


def _probes(found: Settings) -> Sequence[str]:
    probes = found.run.probes
    host = f"[{probes.host}]" if ":" in probes.host else probes.host
    return [f"http://{host}:{probes.port}"] if probes.port else []


def _frames(sources: Sources, interval: float) -> Iterator[Frame]:
    before = sources.look()
    while True:
        time.sleep(interval)
        now = sources.look()
        yield frame(before, now)
        before = now


def _print(shown: Frame, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(shown.told()))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _width()
    for line in view.lines(shown, width=width):
        typer.echo(line)


def _width() -> int:
    """As wide as COLUMNS says: what goes into a file has no width of its own."""
    return shutil.get_terminal_size((_WIDTH, 0)).columns


@contextmanager
def _page() -> Iterator[Any]:
    """Shows frames on a page of the terminal's own, which is as it was afterwards; Ctrl-C and SIGTERM end it."""

    def place(each: Frame) -> None:
        size = shutil.get_terminal_size()
        # One line less: what is written into the last corner would move all the others.
        shown = view.lines(each, width=size.columns, height=max(2, size.lines - 1))
        written = "".join(f"{line}{_REST_OF_LINE}\n" for line in shown)
        sys.stdout.write(f"{_HOME}{written}{_REST}")
        sys.stdout.flush()

    def left(*_: object) -> None:
        raise KeyboardInterrupt

    # Of both: whoever was started in the background of a script has been told to ignore the first.
    before = {number: signal.signal(number, left) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.stdout.write(f"{_ENTER}{_HOME}looking …{_REST}")
    sys.stdout.flush()
    try:
        yield place
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
