"""The pytest plugin: available to runs that use it, without cost for the others."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

TESTS_WITH_PLUGIN = """
from ergon_framework import Transaction, consumer, queue

@consumer(queue("orders"))
def work(order): ...

def test_the_trial(ergon_trial):
    trial = ergon_trial(work)
    trial.send(Transaction(id="order-1"))
    assert trial.run().final_states == {"order-1": "acked"}

def test_the_chaos(ergon_chaos, ergon_trial):
    def make(effects):
        trial = ergon_trial(work)
        trial.send(Transaction(id="order-1"))
        return trial
    assert ergon_chaos(make, runs=3).runs == 3
"""
TESTS_WITHOUT_PLUGIN = """
import sys

def test_nothing_of_it_is_there():
    assert [name for name in sys.modules if name.startswith(("ergon_framework", "pydantic"))] == []
    assert "ergon_pytest" in sys.modules
"""


@pytest.mark.parametrize("text, passed", [(TESTS_WITH_PLUGIN, 2), (TESTS_WITHOUT_PLUGIN, 1)])
def test_a_run_has_the_fixtures_and_imports_the_framework_only_if_it_uses_them(text, passed, tmp_path):
    (tmp_path / "test_it.py").write_text(text, encoding="utf-8")
    # As for a user: the installed plugin registers itself, and other plugins of this environment are disabled.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
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
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert f"{passed} passed" in process.stdout, process.stdout + process.stderr


def test_the_plugin_registers_itself():
    (entry_point,) = [entry for entry in entry_points(group="pytest11") if entry.name == "ergon"]
    assert entry_point.value == "ergon_pytest"
