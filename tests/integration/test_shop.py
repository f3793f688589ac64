"""Check the example of a shop and its headquarters, with real servers and processes; few orders, and no chaos."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEMO_PATH = Path(__file__).parents[2] / "examples" / "shop" / "demo.py"


def run_demo(*options):
    """Return the exit code, the output, and the JSON object of its last line."""
    command = [sys.executable, str(DEMO_PATH), "--patience", "60", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    if kept := re.search(r"are kept in (/\S*/ergon-shop-\S+)", result.stderr):
        shutil.rmtree(kept[1], ignore_errors=True)
    assert result.stdout, result.stderr[-3000:]
    return result.returncode, result.stdout, json.loads(result.stdout.splitlines()[-1])


@pytest.mark.spec("RUN-01")
def test_twenty_orders_are_in_the_ledger_once_or_are_dead_letters_with_a_reason():
    code, output, report = run_demo("--orders", "20")
    assert code == 0, output
    assert report["ok"]
    assert (report["orders"], report["charges"], report["facts"], report["entries"]) == (20, 18, 17, 17)
    assert report["dead_letters"] == {"declined": 1, "undecodable": 1, "executor_error": 1}
    assert "The records balance." in output


@pytest.mark.spec("RUN-01")
def test_charges_of_a_bank_that_ignores_keys_are_reported():
    # Half of its responses fail, so some orders are charged twice whatever the random numbers.
    code, output, report = run_demo("--orders", "20", "--trouble", "0.5", "--forgetful-bank")
    assert code == 1
    assert not report["ok"]
    assert report["charges"] > 18
    assert any("charges at the bank" in problem for problem in report["wrong"]), output
    assert "The records do NOT balance" in output
