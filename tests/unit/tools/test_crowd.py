"""Whose failure is asked again, and whose counts at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import crowd, invariants

PLUGINS = ["-p", "tests.invariants", "-p", "tests.crowd"]
ROOT = Path(__file__).parents[3]
COUNTED = """
from pathlib import Path
import pytest

{marker}
def test_it():
    tries = Path({tally!r})
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    assert len(tries.read_text()) >= {good}, "too early"
"""


@pytest.fixture
def ask(tmp_path):
    def ask(*, good, crowded, deaths=(), marker=""):
        """Asks a test that passes from the `good`th time on: the exit code, how often it was asked, the output."""
        place = tmp_path / "tests"
        place.mkdir(parents=True)
        tally = tmp_path / "tally"
        (place / "test_it.py").write_text(COUNTED.format(tally=str(tally), good=good, marker=marker), encoding="utf-8")
        (tmp_path / "conftest.py").write_text(
            f"from tests import crowd\ncrowd.Gauge.crowded = lambda self: {crowded}\n"
            f"crowd.Gauge.deaths = lambda self: {list(deaths)}\n",
            encoding="utf-8",
        )
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n", encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *PLUGINS, "-p", "no:randomly", "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, len(tally.read_text()), done.stdout

    return ask


def test_a_failure_in_a_crowd_is_asked_again_and_said_at_the_end(ask):
    code, asked, output = ask(good=3, crowded=True)
    assert (code, asked) == (0, 3)
    assert "asked again, because processors were taken or a server had died: 2" in output
    assert "test_it: call: AssertionError: too early" in output


def test_a_failure_beside_a_server_that_died_is_asked_again_with_its_last_words(ask):
    code, asked, output = ask(good=2, crowded=False, deaths=["the pooler: FATAL bad state"])
    assert (code, asked) == (0, 2)
    assert "too early; the pooler: FATAL bad state" in output


def test_only_deaths_during_the_test_count(monkeypatch):
    monkeypatch.setattr(crowd, "DEATHS", ["an old one"])
    gauge = crowd.Gauge()
    assert gauge.deaths() == []
    crowd.DEATHS.append("a new one")
    assert gauge.deaths() == ["a new one"]


def test_what_fails_every_time_is_red(ask):
    code, asked, output = ask(good=100, crowded=True)
    assert (code, asked) == (1, crowd.TRIES)
    assert "1 failed" in output


def test_a_failure_on_a_calm_machine_counts_at_once(ask):
    code, asked, output = ask(good=2, crowded=False)
    assert (code, asked) == (1, 1)
    assert "asked again" not in output


@pytest.mark.parametrize("waited, crowded", [(0.0, False), (0.0001, False), (10.0, True)])
def test_a_crowd_is_a_share_of_the_time(monkeypatch, waited, crowded):
    told = iter([5.0, 5.0 + waited])
    monkeypatch.setattr(crowd, "_waited", lambda: next(told))
    gauge = crowd.Gauge()
    time.sleep(0.01)
    assert gauge.crowded() is crowded


@pytest.mark.spec("DX-46")
@pytest.mark.parametrize("marker", ["@pytest.mark.invariant", '@pytest.mark.spec("CON-21")'])
def test_a_failed_invariant_is_never_run_again_and_has_an_exit_code_of_its_own(ask, marker):
    code, asked, output = ask(good=2, crowded=True, deaths=["the pooler"], marker=marker)
    assert (code, asked) == (invariants.EXIT_CODE, 1)
    assert "asked again" not in output


@pytest.mark.spec("DX-46")
def test_the_requirements_of_invariants_exist():
    known = re.findall(
        r"^- \*\*([A-Z]+-\d+)\*\*", "".join(map(Path.read_text, ROOT.glob("docs/spec/*.md"))), re.MULTILINE
    )
    assert set(known) >= invariants.REQUIREMENTS


@pytest.mark.spec("DX-46")
def test_only_exit_code_one_starts_a_second_run_of_what_failed():
    assert "[ $$? -eq 1 ] &&" in (ROOT / "Makefile").read_text(encoding="utf-8")
