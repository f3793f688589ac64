"""Fuzzes both directions of the executor protocol: executors.py --seconds 600 --keep; see driver.py."""

from __future__ import annotations

from tests.fuzz.driver import FuzzDriver
from tests.fuzz.grammar import make_seeds

LIVE_DIRECTIONS = {"processes": "tests.fuzz.executor_process"}

if __name__ == "__main__":
    FuzzDriver("executors", "tests.fuzz.target", ("requests", "outcomes"), make_seeds, live=LIVE_DIRECTIONS).main()
