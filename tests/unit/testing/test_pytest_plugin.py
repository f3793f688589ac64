"""The plugin for pytest: there for those who ask, and nothing to everybody else."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

USES = """
from ergon_framework import Transaction, consumer, queue

@consumer(queue("orders"))
def work(order): ...

def test_the_trial(ergon_trial):
    trial = ergon_trial(work)
    trial.send(Transaction("order-1"))
    assert trial.run().ends == {"order-1": "acked"}

def test_the_chaos(ergon_chaos, ergon_trial):
    def make(effects):
        trial = ergon_trial(work)
        trial.send(Transaction("order-1"))
        return trial
    assert ergon_chaos(make, runs=3).runs == 3
"""
DOES_NOT = """
import sys

def test_nothing_of_it_is_there():
    assert [name for name in sys.modules if name.startswith(("ergon_framework", "pydantic"))] == []
    assert "ergon_pytest" in sys.modules
"""


@pytest.mark.parametrize("text, passed", [(USES, 2), (DOES_NOT, 1)])
def test_a_run_has_the_fixtures_and_pays_for_them_only_if_it_uses_them(text, passed, tmp_path):
    (tmp_path / "test_it.py").write_text(text, encoding="utf-8")
    # As a user has it: what is installed registers itself, and other plugins of this environment are not there.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "error",
        "-p",
        "ergon_pytest",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
    ]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert f"{passed} passed" in done.stdout, done.stdout + done.stderr


def test_it_registers_itself():
    (found,) = [entry for entry in entry_points(group="pytest11") if entry.name == "ergon"]
    assert found.value == "ergon_pytest"
