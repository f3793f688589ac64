"""`make spec` fails on a requirement without proof and on a proof without requirement."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "spec.py"
CONFIG = '[tool.pytest.ini_options]\naddopts = ["--strict-markers"]\nmarkers = ["spec(*ids): proof"]\n'
TESTS = """
import pytest

@pytest.mark.spec("CON-01", "CON-02")
@pytest.mark.spec("PRO-01")
def test_stacked(): ...

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.spec("CON-03"))])
def test_cases(n): ...

@pytest.mark.spec("CON-04")
class TestGroup:
    def test_inside(self): ...
"""
ITEMS = "".join(f"- **CON-0{n}** rule {n}\n" for n in (1, 2, 3, 4))


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "docs" / "spec").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "test_rules.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "docs" / "spec" / "con.md").write_text("# CON\n" + ITEMS, encoding="utf-8")
    (tmp_path / "docs" / "spec" / "pro.md").write_text("- **PRO-01** one\n- **PRO-02** two\n", encoding="utf-8")
    (tmp_path / "docs" / "spec" / "README.md").write_text("Finished groups: CON\n", encoding="utf-8")
    return tmp_path


def run_tool(tree):
    # Without the plugins that are installed, which take four times as long to import as all else.
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, str(TOOL), str(tree)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environ)


def append_text(path, text):
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def test_every_requirement_is_printed_with_its_tests(tree):
    result = run_tool(tree)
    assert result.returncode == 0, result.stderr
    assert "CON-03 rule 3\n    test_rules.py::test_cases\n" in result.stdout
    assert "CON-04 rule 4\n    test_rules.py::TestGroup::test_inside\n" in result.stdout
    assert "PRO-02 two\n    (no test)\n" in result.stdout
    assert "5 of 6 requirements have a test; finished groups: CON" in result.stdout


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("docs/spec/con.md", "- **CON-05** new\n", "CON-05: has no test"),
        ("docs/spec/con.md", "- **CON-01** again\n", "CON-01: stands twice"),
        ("docs/spec/README.md", "\nFinished", None),
        ("test_rules.py", "@pytest.mark.spec('CON-99')\ndef test_x(): ...\n", "CON-99: no such requirement"),
        ("test_rules.py", "@pytest.mark.spec()\ndef test_x(): ...\n", "a spec marker takes ids"),
        ("test_rules.py", "@pytest.mark.spek('CON-01')\ndef test_x(): ...\n", "cannot be collected"),
    ],
)
def test_a_requirement_or_marker_that_does_not_match_fails(tree, file, text, message):
    append_text(tree / file, text)
    result = run_tool(tree)
    assert result.returncode == (0 if message is None else 1)
    assert (message or "") in result.stderr


def test_a_finished_group_without_requirements_fails(tree):
    (tree / "docs" / "spec" / "README.md").write_text("Finished groups: CON, FAC\n", encoding="utf-8")
    result = run_tool(tree)
    assert result.returncode == 1
    assert "FAC: is listed as finished but has no requirement" in result.stderr


def test_a_single_requirement_may_be_finished_before_its_group(tree):
    text = "- **FAC-01** proven\n- **FAC-02** open\n"
    (tree / "docs" / "spec" / "fac.md").write_text(text, encoding="utf-8")
    append_text(tree / "test_rules.py", "@pytest.mark.spec('FAC-01')\ndef test_fact(): ...\n")
    (tree / "docs" / "spec" / "README.md").write_text("Finished groups: CON, FAC-01\n", encoding="utf-8")
    assert run_tool(tree).returncode == 0
    (tree / "docs" / "spec" / "README.md").write_text("Finished groups: CON, FAC-02\n", encoding="utf-8")
    assert "FAC-02: has no test, and FAC-02 is listed as finished" in run_tool(tree).stderr
