"""Fuzzes what the facts service is asked, and what its clients are answered: facts.py --seconds 600 --keep."""

from __future__ import annotations

from tests.fuzz.driver import Fuzzed
from tests.fuzz.facts_grammar import seeds

LIVE = {"facts-network": "tests.fuzz.facts_network"}

if __name__ == "__main__":
    Fuzzed("facts", "tests.fuzz.facts_target", ("facts-requests", "facts-answers"), seeds, live=LIVE).main()
