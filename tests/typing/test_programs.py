"""mypy accepts the programs of `valid`, and reports each marked line of `invalid`, and no other line.

A mark is a comment ``# E: REGEX`` at the end of a line; ``run_pyright.py`` checks them with pyright. A program
of `declared` passes the type checkers, and each of its functions raises a ConfigurationError at its line with a comment
``# D: REGEX``.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from ergon_framework import ConfigurationError

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
PROGRAMS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*/*.py"))
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
    assert len(marks) >= 60
    assert {name for name, _ in marks} == {name for name in PROGRAMS if "/invalid/" in name}
    messages = run_mypy(tmp_path)
    assert {place: text for place, text in messages.items() if place not in marks} == {}
    assert {
        place: messages.get(place) for place, mark in marks.items() if not re.search(mark, messages.get(place, ""))
    } == {}


def load_program(name):
    spec = importlib.util.spec_from_file_location("declared_program", FOLDER / name)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


DECLARED = [name for name in PROGRAMS if "/declared/" in name]


@pytest.mark.parametrize("name", DECLARED)
def test_a_wrong_declaration_is_refused_where_it_is_written(name):
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    program = load_program(name)
    functions = [
        each
        for _, each in inspect.getmembers(program, inspect.isfunction)
        if each.__module__ == "declared_program" and not inspect.signature(each).parameters
    ]
    assert len(functions) >= 10
    for function in functions:
        with pytest.raises(ConfigurationError) as caught:
            function()
        line = [frame.lineno for frame in traceback.extract_tb(caught.tb) if frame.filename == str(FOLDER / name)][-1]
        mark = re.search(r"# D: (.+)$", lines[line - 1])
        assert mark is not None, (function.__name__, line)
        assert re.search(mark[1], str(caught.value)), function.__name__
