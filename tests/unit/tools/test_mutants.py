"""`make mutants`: which mutants are created, how they are counted, and that a failing test kills one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools import mutants
from tools.mutation.operators import mutants_of
from tools.mutation.runner import Verdict

SOURCE = '''
"""A module."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import json


def wait(seconds: float, more: bool = False) -> float:
    """Waits."""
    if seconds < 0:
        raise ValueError("seconds are 0 or more")
    log.warning("waits", extra={"more": more})
    return seconds + 1 if more else seconds
'''


@pytest.fixture
def find_changes(tmp_path):
    def find(source):
        path = tmp_path / "module.py"
        path.write_text(source, encoding="utf-8")
        return {mutant.change.rpartition(": ")[2]: mutant for mutant in mutants_of(path)}

    return find


def test_computations_and_decisions_are_mutated_and_messages_are_not(find_changes):
    assert set(find_changes(SOURCE)) == {
        "False -> True",
        "seconds < 0 -> True",
        "seconds < 0 -> False",
        "seconds < 0 -> seconds <= 0",
        "0 -> 1",
        "raise ValueError('seconds are 0 or more') -> nothing",
        "more -> True",
        "more -> False",
        "seconds + 1 -> seconds - 1",
        "1 -> 2",
        "return seconds + 1 if more else seconds -> return None",
    }


def test_only_code_inside_a_function_can_be_patched_at_run_time(find_changes):
    mutants_by_change = find_changes(SOURCE)
    assert not mutants_by_change["False -> True"].inside
    assert mutants_by_change["0 -> 1"].inside


def test_a_script_whose_result_is_dropped_is_still_a_script(find_changes):
    mutant = find_changes("def script():\n    return (yield from other())\n")[
        "return (yield from other()) -> its value is None"
    ]
    namespace = {"other": lambda: iter((1, 2))}
    exec(mutant.code(), namespace)
    assert list(namespace["script"]()) == [1, 2]


def test_equal_changes_get_different_names(find_changes):
    assert list(find_changes("def both():\n    go()\n    go()\n")) == ["go() -> nothing", "go() -> nothing #2"]


@pytest.fixture
def verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text("def calls():\n    a()\n    b()\n    c()\n    d()\n", encoding="utf-8")
    outcomes = ("killed", "killed", "timeout", "survived")
    return [Verdict(mutant, outcome, "test") for mutant, outcome in zip(mutants_of(path), outcomes, strict=True)]


def test_an_equivalent_mutant_is_not_counted(verdicts):
    assert mutants.summarize(verdicts, {})["score"] == 0.75
    totals = mutants.summarize(verdicts, {("module.py", "calls", "d() -> nothing"): "no test can tell"})
    assert (totals["score"], totals["survived"], totals["equivalent"]) == (1.0, 0, 1)
    assert totals["by_time"] == pytest.approx(1 / 3, abs=0.001)


def test_the_list_may_name_only_existing_mutants_that_survive(verdicts):
    equivalents = {("module.py", "calls", f"{name}() -> nothing"): "because" for name in ("a", "d", "gone")}
    problems = mutants.find_stale(verdicts, equivalents, {"module.py"})
    assert [line.rpartition(" | ")[2] for line in problems] == ["gone() -> nothing", "a() -> nothing"]


def test_the_thresholds_decide_the_exit_code(verdicts, capsys):
    assert mutants.report(verdicts, {}, files=set()) == 1
    assert mutants.report([verdict for verdict in verdicts if verdict.word == "killed"], {}, files=set()) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"mutants": 2, "killed": 2, ')


PROJECT_FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    "ergon_framework/__init__.py": "",
    "ergon_framework/sums.py": "STEP = 1\n\n\ndef up(n):\n    return n + STEP\n\n\ndef down(n):\n    return n - STEP\n",
    "tests/test_sums.py": "from ergon_framework.sums import up\n\n\ndef test_up():\n    assert up(2) == 3\n",
}
RUN_PROGRAM = """
import sys
from pathlib import Path
from tools.mutation.operators import mutants_of
from tools.mutation.runner import Runner
path = Path("ergon_framework/sums.py").resolve()
found = []
runner = Runner(paths=[path], tests=["tests"], workers=1, patience=5)
runner.run(lambda runner: runner.ask(mutants_of(path), found.append))
for one in found:
    print(one.word, one.mutant.change)
"""


def test_a_mutant_is_killed_by_the_test_that_runs_its_line(tmp_path):
    for name, text in PROJECT_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    path = [str(tmp_path), str(mutants.ROOT)]
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{RUN_PROGRAM}"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert process.stdout.splitlines() == [
        "killed STEP = 1: 1 -> 2",
        "killed return n + STEP -> return None",
        "killed return n + STEP: n + STEP -> n - STEP",
        "survived return n - STEP -> return None",
        "survived return n - STEP: n - STEP -> n + STEP",
    ]
