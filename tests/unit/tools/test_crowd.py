"""Which failures are rerun, and which count immediately."""

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
TEST_TEMPLATE = """
from pathlib import Path
import pytest

{marker}
def test_it():
    tries = Path({tally!r})
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    assert len(tries.read_text()) >= {good}, "too early"
"""


@pytest.fixture
def run_probe(tmp_path):
    def run_probe(*, good, crowded, deaths=(), marker=""):
        """Run a test that passes from the `good`th time on; return the exit code, the number of runs and the output."""
        folder = tmp_path / "tests"
        folder.mkdir(parents=True)
        tally = tmp_path / "tally"
        (folder / "test_it.py").write_text(
            TEST_TEMPLATE.format(tally=str(tally), good=good, marker=marker), encoding="utf-8"
        )
        (tmp_path / "conftest.py").write_text(
            f"from tests import crowd\ncrowd.Gauge.crowded = lambda self: {crowded}\n"
            f"crowd.Gauge.deaths = lambda self: {list(deaths)}\n",
            encoding="utf-8",
        )
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n", encoding="utf-8")
        process = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *PLUGINS, "-p", "no:randomly", "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return process.returncode, len(tally.read_text()), process.stdout

    return run_probe


def test_a_failure_under_load_is_rerun_and_reported_at_the_end(run_probe):
    code, runs, output = run_probe(good=3, crowded=True)
    assert (code, runs) == (0, 3)
    assert "rerun, because processors were busy or a server had exited: 2" in output
    assert "test_it: call: AssertionError: too early" in output


def test_a_failure_next_to_a_crashed_server_is_rerun_and_reported_with_the_final_output(run_probe):
    code, runs, output = run_probe(good=2, crowded=False, deaths=["the pooler: FATAL bad state"])
    assert (code, runs) == (0, 2)
    assert "too early; the pooler: FATAL bad state" in output


def test_only_server_crashes_during_the_test_count(monkeypatch):
    monkeypatch.setattr(crowd, "DEATHS", ["an old one"])
    gauge = crowd.Gauge()
    assert gauge.deaths() == []
    crowd.DEATHS.append("a new one")
    assert gauge.deaths() == ["a new one"]


def test_a_test_that_fails_in_every_run_fails(run_probe):
    code, runs, output = run_probe(good=100, crowded=True)
    assert (code, runs) == (1, crowd.TRIES)
    assert "1 failed" in output


def test_a_failure_on_an_idle_machine_counts_immediately(run_probe):
    code, runs, output = run_probe(good=2, crowded=False)
    assert (code, runs) == (1, 1)
    assert "rerun, because" not in output


@pytest.mark.parametrize("waited, crowded", [(0.0, False), (0.0001, False), (10.0, True)])
def test_a_machine_is_overloaded_by_its_share_of_waiting_time(monkeypatch, waited, crowded):
    wait_times = iter([5.0, 5.0 + waited])
    monkeypatch.setattr(crowd, "_waited", lambda: next(wait_times))
    gauge = crowd.Gauge()
    time.sleep(0.01)
    assert gauge.crowded() is crowded


@pytest.mark.spec("DX-46")
@pytest.mark.parametrize("marker", ["@pytest.mark.invariant", '@pytest.mark.spec("CON-21")'])
def test_a_failed_invariant_is_never_rerun_and_has_its_own_exit_code(run_probe, marker):
    code, runs, output = run_probe(good=2, crowded=True, deaths=["the pooler"], marker=marker)
    assert (code, runs) == (invariants.EXIT_CODE, 1)
    assert "rerun, because" not in output


@pytest.mark.spec("DX-46")
def test_the_requirements_of_invariants_exist():
    requirement_ids = re.findall(
        r"^- \*\*([A-Z]+-\d+)\*\*", "".join(map(Path.read_text, ROOT.glob("docs/spec/*.md"))), re.MULTILINE
    )
    assert set(requirement_ids) >= invariants.REQUIREMENTS


@pytest.mark.spec("DX-46")
def test_only_exit_code_one_starts_a_second_run_of_the_failed_tests():
    assert "[ $$? -eq 1 ] &&" in (ROOT / "Makefile").read_text(encoding="utf-8")
