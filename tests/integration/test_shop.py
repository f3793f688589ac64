"""The example of a shop and its headquarters, with real servers and real processes; few orders, and no chaos."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "shop" / "demo.py"


def demo(*options):
    """The exit code, the books as they were printed, and the last line."""
    words = [sys.executable, str(DEMO), "--patience", "60", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=220, check=False)
    if kept := re.search(r"are kept in (/\S*/ergon-shop-\S+)", done.stderr):
        shutil.rmtree(kept[1], ignore_errors=True)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.spec("RUN-01")
def test_twenty_orders_go_from_the_queue_to_the_ledger_once_or_are_dead_letters_that_say_why():
    code, said, told = demo("--orders", "20")
    assert code == 0, said
    assert told["ok"]
    assert (told["orders"], told["charges"], told["facts"], told["entries"]) == (20, 18, 17, 17)
    assert told["dead_letters"] == {"declined": 1, "undecodable": 1, "executor_error": 1}
    assert "The books balance." in said


@pytest.mark.spec("RUN-01")
def test_a_bank_that_ignores_keys_is_found_in_the_books():
    # Half of its answers go wrong, so that with or without luck some orders are charged twice.
    code, said, told = demo("--orders", "20", "--trouble", "0.5", "--forgetful-bank")
    assert code == 1
    assert not told["ok"]
    assert told["charges"] > 18
    assert any("charges at the bank" in wrong for wrong in told["wrong"]), said
    assert "The books do NOT balance" in said
