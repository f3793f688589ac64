"""Draws docs/pictures/: `ergon top`, and every panel of every dashboard, as real workers under load have made them.

`make pictures` draws them anew: it starts a PostgreSQL, workers of every kind and a Prometheus that looks at them,
waits, and asks each panel's queries. Nothing in a picture is made up; a panel without data says so.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"

#: A panel with its frame, how many stand side by side, and where in it the lines are.
WIDTH, HEIGHT, COLUMNS = 300, 190, 3
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 40, 24, 250, 90
#: How many lines of a panel are named; a tenth one would look like the first.
NAMED = 5
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
#: In which words a figure of a unit is shown, by its size: labels have room for seven letters.
UNITS = {
    "s": ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs")),
    "bytes": ((1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1.0, " B")),
    "": ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, "")),
}
FONT = "font-family='DejaVu Sans Mono, Menlo, Consolas, monospace'"
LINE, CHARACTER = 16, 7.3
#: Seconds from one point of a line to the next.
STEP = 2.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line: what it is called, and its points; seconds since the beginning, and values."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Picture:
    """One panel with its lines, over so many seconds."""

    title: str
    unit: str
    series: Sequence[Series]
    seconds: float


def text_picture(lines: Sequence[str]) -> str:
    """Lines of a terminal."""
    width = round(max(map(len, lines)) * CHARACTER) + 24
    height = len(lines) * LINE + 20
    written = "\n".join(
        f"<text x='12' y='{18 + number * LINE}' xml:space='preserve'>{escape(line)}</text>"
        for number, line in enumerate(lines)
    )
    body = f"<g {FONT} font-size='12' fill='#e6e6e6'>\n{written}\n</g>"
    return _svg(width, height, f"<rect width='{width}' height='{height}' rx='6' fill='#1e1e1e'/>\n{body}")


def board_picture(pictures: Sequence[Picture]) -> str:
    """All panels of a dashboard, side by side and below each other."""
    rows = math.ceil(len(pictures) / COLUMNS)
    width, height = COLUMNS * WIDTH, rows * HEIGHT
    parts = [f"<rect width='{width}' height='{height}' fill='white'/>"]
    for number, picture in enumerate(pictures):
        x, y = number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT
        parts.append(f"<g transform='translate({x},{y})'>\n{_panel(picture)}\n</g>")
    return _svg(width, height, f"<g {FONT} font-size='9' fill='#333'>\n" + "\n".join(parts) + "\n</g>")


def _svg(width: int, height: int, body: str) -> str:
    place = f"viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {place}>\n{body}\n</svg>\n"


def _panel(picture: Picture) -> str:
    parts = [
        f"<rect x='3' y='3' width='{WIDTH - 6}' height='{HEIGHT - 6}' fill='none' stroke='#ccc'/>",
        f"<text x='10' y='17' font-size='11' font-weight='bold'>{escape(picture.title)}</text>",
    ]
    values = [value for each in picture.series for _, value in each.points if math.isfinite(value)]
    if not values:
        return "\n".join([*parts, f"<text x='{LEFT}' y='{TOP + PLOT_HEIGHT // 2}'>no data</text>"])
    highest = max(*values, 0.0) or 1.0
    base = TOP + PLOT_HEIGHT
    for share in (0.0, 0.5, 1.0):
        y = round(base - share * PLOT_HEIGHT)
        parts.append(f"<line x1='{LEFT}' x2='{LEFT + PLOT_WIDTH}' y1='{y}' y2='{y}' stroke='#eee'/>")
        label = _figure(highest * share, picture.unit)
        parts.append(f"<text x='{LEFT - 3}' y='{y + 3}' text-anchor='end'>{label}</text>")
    ranked = sorted(picture.series, key=lambda each: (-_last(each), each.name))
    for number, each in enumerate(ranked):
        parts += _line(each, COLOURS[number % len(COLOURS)], highest, picture.seconds)
    for number, each in enumerate(ranked[:NAMED]):
        y = base + 14 + number * 11
        parts.append(f"<rect x='{LEFT}' y='{y - 6}' width='7' height='7' fill='{COLOURS[number % len(COLOURS)]}'/>")
        parts.append(f"<text x='{LEFT + 11}' y='{y}'>{escape(_short(each.name))}</text>")
    if len(ranked) > NAMED:
        parts.append(f"<text x='{LEFT + PLOT_WIDTH}' y='17' text-anchor='end'>+{len(ranked) - NAMED}</text>")
    return "\n".join(parts)


def _line(series: Series, colour: str, highest: float, seconds: float) -> Iterator[str]:
    """Its pieces: where there is no number the line has a gap."""
    for piece in _pieces(series.points):
        points = " ".join(
            f"{LEFT + at / seconds * PLOT_WIDTH:.0f},{TOP + PLOT_HEIGHT - max(value, 0.0) / highest * PLOT_HEIGHT:.0f}"
            for at, value in piece
        )
        yield f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.3'/>"


def _pieces(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    piece: list[tuple[float, float]] = []
    for at, value in points:
        if math.isfinite(value):
            piece.append((at, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _last(series: Series) -> float:
    value = series.points[-1][1] if series.points else 0.0
    return value if math.isfinite(value) else 0.0


def _short(name: str, most: int = 44) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _figure(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    sizes = UNITS.get(unit, UNITS[""])
    size, word = next((each for each in sizes if value >= each[0]), sizes[-1])
    return f"{value / size:.3g}{word}" if value else "0"


def legend(words: str, labels: Mapping[str, str]) -> str:
    """*words* with the labels of a series in the places that Grafana has for them."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), words).strip() or "all"


def pictured(board: Mapping[str, Any], server: Any, *, seconds: float) -> Iterator[Picture]:
    """Each panel of *board* with what *server*, a Prometheus, answers for the last *seconds*."""
    from tests.unit.tools.queries import filled  # noqa: PLC0415 - the tests' own, and they need the checkout on the path

    end = time.time()
    for panel in board["panels"]:
        series = [
            Series(
                legend(target.get("legendFormat", ""), found["metric"]),
                [(float(at) - end + seconds, float(value)) for at, value in found["values"]],
            )
            for target in panel["targets"]
            for found in server.ask_range(filled(target["expr"]), start=end - seconds, end=end, step=STEP)
        ]
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
        yield Picture(panel["title"], unit, series, seconds)


def main() -> None:
    """Start everything, wait, draw, and end everything."""
    sys.path.insert(0, str(ROOT))
    from tests.integration.observing import World  # noqa: PLC0415 - as above
    from tests.integration.running import ERGON  # noqa: PLC0415
    from tests.servers.databases import migrated  # noqa: PLC0415
    from tests.servers.postgres import PrivatePostgres  # noqa: PLC0415
    from tests.servers.prometheus import PrivatePrometheus  # noqa: PLC0415
    from tests.unit.tools.queries import ALERTS, boards  # noqa: PLC0415

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="how long to watch before drawing")
    options.add_argument("--into", type=Path, default=FOLDER, help="where the pictures go")
    given = options.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    postgres = PrivatePostgres(tempfile.mkdtemp(prefix="ergon-postgres-"), fsync=False)
    try:
        postgres.start()
        dsn = migrated(postgres)
        with tempfile.TemporaryDirectory() as folder, World(Path(folder) / "world", dsn) as world:
            targets = [f"127.0.0.1:{port}" for port in world.ports]
            server = PrivatePrometheus(Path(folder) / "prometheus", targets, rules=ALERTS)
            try:
                server.start()
                time.sleep(given.seconds)
                top = [*ERGON, "top", "--once", *(word for target in targets for word in ("--url", target))]
                environment = {**os.environ, "ERGON_POSTGRES__DSN": dsn, "COLUMNS": "100"}
                shown = subprocess.run(top, env=environment, check=True, capture_output=True, text=True, timeout=60)
                drawn = {"top": text_picture(shown.stdout.rstrip("\n").split("\n"))}
                for name, board in sorted(boards().items()):
                    drawn[name] = board_picture(list(pictured(board, server, seconds=given.seconds)))
            finally:
                server.stop()
    finally:
        postgres.kill()
        shutil.rmtree(postgres.folder, ignore_errors=True)
    for name, picture in drawn.items():
        (given.into / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(f"{name}.svg: {len(picture.encode()):,} bytes")


if __name__ == "__main__":
    main()
