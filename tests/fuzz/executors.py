"""Fuzzes both directions of the executor protocol: executors.py --seconds 600 --keep; driver.py says the rest."""

from __future__ import annotations

from tests.fuzz.driver import Fuzzed
from tests.fuzz.grammar import seeds

LIVE = {"processes": "tests.fuzz.executor_process"}

if __name__ == "__main__":
    Fuzzed("executors", "tests.fuzz.target", ("requests", "outcomes"), seeds, live=LIVE).main()
