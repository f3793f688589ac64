"""Type checkers accept the programs of `valid`, and report each marked line of `invalid`, and no other line.

A mark is a comment ``# E: REGEX`` at the end of a line.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent
PROGRAMS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*valid/*.py"))
_MARK = re.compile(r"# E: (.+)$")
_REPORT = re.compile(r"^(?P<path>[^:]+):(?P<line>\d+): error: (?P<text>.*)$", re.MULTILINE)


def run_mypy(cache: Path) -> dict[tuple[str, int], str]:
    """Return the messages of mypy by program and line."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--no-pretty", "--follow-imports=silent"]
    process = subprocess.run(
        [*command, "--cache-dir", str(cache), *(str(FOLDER / name) for name in PROGRAMS)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode in {0, 1}, process.stdout + process.stderr
    messages: dict[tuple[str, int], str] = {}
    for report in _REPORT.finditer(process.stdout):
        place = ((ROOT / report["path"]).relative_to(FOLDER).as_posix(), int(report["line"]))
        messages[place] = messages.get(place, "") + report["text"] + "\n"
    return messages


def read_marks() -> dict[tuple[str, int], str]:
    return {
        (name, number): mark[1]
        for name in PROGRAMS
        for number, line in enumerate((FOLDER / name).read_text(encoding="utf-8").splitlines(), 1)
        if (mark := _MARK.search(line))
    }


def test_mypy_reports_exactly_the_marked_lines_with_their_messages(tmp_path):
    marks = read_marks()
    assert len(marks) >= 30
    assert {name for name, _ in marks} == {name for name in PROGRAMS if name.startswith("invalid/")}
    messages = run_mypy(tmp_path)
    assert {place: text for place, text in messages.items() if place not in marks} == {}
    assert {
        place: messages.get(place) for place, mark in marks.items() if not re.search(mark, messages.get(place, ""))
    } == {}
