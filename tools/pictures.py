"""Draw docs/pictures/: `ergon top`, and every panel of every dashboard, measured with real workers under load.

`make pictures` redraws them: it starts a PostgreSQL, workers of every kind and a Prometheus that scrapes them,
waits, and runs each panel's queries. No value is invented; a panel without data says so.
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

#: The size of a panel with its frame, the number of columns, and the position of the plot in the frame.
WIDTH, HEIGHT, COLUMNS = 300, 190, 3
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 40, 24, 250, 90
#: How many lines of a panel are named; a tenth one would look like the first.
MAX_NAMED_LINES = 5
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
#: Suffixes for the values of a unit, by size: labels have room for seven characters.
UNITS = {
    "s": ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs")),
    "bytes": ((1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1.0, " B")),
    "": ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, "")),
}
FONT = "font-family='DejaVu Sans Mono, Menlo, Consolas, monospace'"
LINE_HEIGHT, CHARACTER_WIDTH = 16, 7.3
#: Seconds from one point of a line to the next.
STEP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name and its points; seconds since the beginning, and values."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Picture:
    """One panel with its lines, over a number of seconds."""

    title: str
    unit: str
    series: Sequence[Series]
    seconds: float


def draw_text(lines: Sequence[str]) -> str:
    """Draw the lines of a terminal."""
    width = round(max(map(len, lines)) * CHARACTER_WIDTH) + 24
    height = len(lines) * LINE_HEIGHT + 20
    text = "\n".join(
        f"<text x='12' y='{18 + number * LINE_HEIGHT}' xml:space='preserve'>{escape(line)}</text>"
        for number, line in enumerate(lines)
    )
    body = f"<g {FONT} font-size='12' fill='#e6e6e6'>\n{text}\n</g>"
    return _wrap_svg(width, height, f"<rect width='{width}' height='{height}' rx='6' fill='#1e1e1e'/>\n{body}")


def draw_board(pictures: Sequence[Picture]) -> str:
    """Draw all panels of a dashboard in rows and columns."""
    rows = math.ceil(len(pictures) / COLUMNS)
    width, height = COLUMNS * WIDTH, rows * HEIGHT
    parts = [f"<rect width='{width}' height='{height}' fill='white'/>"]
    for number, picture in enumerate(pictures):
        x, y = number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT
        parts.append(f"<g transform='translate({x},{y})'>\n{_draw_panel(picture)}\n</g>")
    return _wrap_svg(width, height, f"<g {FONT} font-size='9' fill='#333'>\n" + "\n".join(parts) + "\n</g>")


def _wrap_svg(width: int, height: int, body: str) -> str:
    view_box = f"viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {view_box}>\n{body}\n</svg>\n"


def _draw_panel(picture: Picture) -> str:
    parts = [
        f"<rect x='3' y='3' width='{WIDTH - 6}' height='{HEIGHT - 6}' fill='none' stroke='#ccc'/>",
        f"<text x='10' y='17' font-size='11' font-weight='bold'>{escape(picture.title)}</text>",
    ]
    values = [value for series in picture.series for _, value in series.points if math.isfinite(value)]
    if not values:
        return "\n".join([*parts, f"<text x='{LEFT}' y='{TOP + PLOT_HEIGHT // 2}'>no data</text>"])
    highest = max(*values, 0.0) or 1.0
    base = TOP + PLOT_HEIGHT
    for share in (0.0, 0.5, 1.0):
        y = round(base - share * PLOT_HEIGHT)
        parts.append(f"<line x1='{LEFT}' x2='{LEFT + PLOT_WIDTH}' y1='{y}' y2='{y}' stroke='#eee'/>")
        label = _format_value(highest * share, picture.unit)
        parts.append(f"<text x='{LEFT - 3}' y='{y + 3}' text-anchor='end'>{label}</text>")
    ranked = sorted(picture.series, key=lambda series: (-_last_value(series), series.name))
    for number, series in enumerate(ranked):
        parts += _draw_line(series, COLOURS[number % len(COLOURS)], highest, picture.seconds)
    for number, series in enumerate(ranked[:MAX_NAMED_LINES]):
        y = base + 14 + number * 11
        parts.append(f"<rect x='{LEFT}' y='{y - 6}' width='7' height='7' fill='{COLOURS[number % len(COLOURS)]}'/>")
        parts.append(f"<text x='{LEFT + 11}' y='{y}'>{escape(_shorten(series.name))}</text>")
    if len(ranked) > MAX_NAMED_LINES:
        parts.append(f"<text x='{LEFT + PLOT_WIDTH}' y='17' text-anchor='end'>+{len(ranked) - MAX_NAMED_LINES}</text>")
    return "\n".join(parts)


def _draw_line(series: Series, colour: str, highest: float, seconds: float) -> Iterator[str]:
    """Yield the segments of a line: where there is no number the line has a gap."""
    for segment in _split_segments(series.points):
        points = " ".join(
            f"{LEFT + moment / seconds * PLOT_WIDTH:.0f},"
            f"{TOP + PLOT_HEIGHT - max(value, 0.0) / highest * PLOT_HEIGHT:.0f}"
            for moment, value in segment
        )
        yield f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.3'/>"


def _split_segments(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    segment: list[tuple[float, float]] = []
    for moment, value in points:
        if math.isfinite(value):
            segment.append((moment, value))
        elif segment:
            yield segment
            segment = []
    if segment:
        yield segment


def _last_value(series: Series) -> float:
    value = series.points[-1][1] if series.points else 0.0
    return value if math.isfinite(value) else 0.0


def _shorten(name: str, max_chars: int = 44) -> str:
    return name if len(name) <= max_chars else f"{name[: max_chars - 1]}…"


def _format_value(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    sizes = UNITS.get(unit, UNITS[""])
    size, suffix = next((entry for entry in sizes if value >= entry[0]), sizes[-1])
    return f"{value / size:.3g}{suffix}" if value else "0"


def render_legend(template: str, labels: Mapping[str, str]) -> str:
    """Return *template* with the labels of a series in Grafana's placeholders."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), template).strip() or "all"


def query_pictures(board: Mapping[str, Any], server: Any, *, seconds: float) -> Iterator[Picture]:
    """Yield each panel of *board* with the answers of *server*, a Prometheus, for the last *seconds*."""
    from tests.unit.tools.queries import fill_variables  # noqa: PLC0415 - the tests' own, and they need the checkout on the path

    end = time.time()
    for panel in board["panels"]:
        series = [
            Series(
                render_legend(target.get("legendFormat", ""), result["metric"]),
                [(float(moment) - end + seconds, float(value)) for moment, value in result["values"]],
            )
            for target in panel["targets"]
            for result in server.ask_range(
                fill_variables(target["expr"]), start=end - seconds, end=end, step=STEP_SECONDS
            )
        ]
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
        yield Picture(panel["title"], unit, series, seconds)


def main() -> None:
    """Start everything, wait, draw, and stop everything."""
    sys.path.insert(0, str(ROOT))
    from tests.integration.observing import ObservedSystem  # noqa: PLC0415 - as above
    from tests.integration.running import ERGON  # noqa: PLC0415
    from tests.servers.databases import create_migrated_database  # noqa: PLC0415
    from tests.servers.postgres import PrivatePostgres  # noqa: PLC0415
    from tests.servers.prometheus import PrivatePrometheus  # noqa: PLC0415
    from tests.unit.tools.queries import ALERTS_FILE, load_dashboards  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to watch before drawing")
    parser.add_argument("--into", type=Path, default=FOLDER, help="where the pictures go")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    postgres = PrivatePostgres(tempfile.mkdtemp(prefix="ergon-postgres-"), fsync=False)
    try:
        postgres.start()
        dsn = create_migrated_database(postgres)
        with tempfile.TemporaryDirectory() as folder, ObservedSystem(Path(folder) / "world", dsn) as world:
            targets = [f"127.0.0.1:{port}" for port in world.ports]
            server = PrivatePrometheus(Path(folder) / "prometheus", targets, rules=ALERTS_FILE)
            try:
                server.start()
                time.sleep(options.seconds)
                top = [*ERGON, "top", "--once", *(argument for target in targets for argument in ("--url", target))]
                environment = {**os.environ, "ERGON_POSTGRES__DSN": dsn, "COLUMNS": "100"}
                completed = subprocess.run(top, env=environment, check=True, capture_output=True, text=True, timeout=60)
                pictures = {"top": draw_text(completed.stdout.rstrip("\n").split("\n"))}
                for name, board in sorted(load_dashboards().items()):
                    pictures[name] = draw_board(list(query_pictures(board, server, seconds=options.seconds)))
            finally:
                server.stop()
    finally:
        postgres.kill()
        shutil.rmtree(postgres.folder, ignore_errors=True)
    for name, picture in pictures.items():
        (options.into / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(f"{name}.svg: {len(picture.encode()):,} bytes")


if __name__ == "__main__":
    main()
