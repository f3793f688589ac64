"""Fuzzes the requests to the facts service and the answers to its clients: facts.py --seconds 600 --keep."""

from __future__ import annotations

from tests.fuzz.driver import FuzzDriver
from tests.fuzz.facts_grammar import make_seeds

LIVE_DIRECTIONS = {"facts-network": "tests.fuzz.facts_network"}

if __name__ == "__main__":
    FuzzDriver(
        "facts", "tests.fuzz.facts_target", ("facts-requests", "facts-answers"), make_seeds, live=LIVE_DIRECTIONS
    ).main()
