"""What the documents must say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: One word or phrase for each thing that the documents say the system does not do.
NON_GOALS = (
    "deduplication",
    "exactly-once|exactly once",
    "storage|database",
    "sharding",
    "partition",
    "consumer groups",
    "schema",
    "idempotency",
    "broker",
    "workflow engine",
)


@pytest.mark.spec("CON-49")
@pytest.mark.parametrize("document", ["README.md", "docs/lifecycle.md"])
@pytest.mark.parametrize("thing", NON_GOALS)
def test_the_non_goals_are_listed(document: str, thing: str) -> None:
    listed = _section(document, "on-goals")
    assert re.search(thing, listed, re.IGNORECASE), f"{document} does not say that it is no goal: {thing}"


@pytest.mark.spec("CON-49")
@pytest.mark.parametrize("document", ["README.md", "docs/lifecycle.md"])
def test_mutual_exclusion_is_told_from_deduplication(document: str) -> None:
    listed = " ".join(_section(document, "on-goals").lower().split())
    assert "inbox" in listed
    assert "mutual exclusion" in listed


def _section(document: str, title: str) -> str:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.search(rf"^##[^\n]*{title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{document} has no section on {title}"
    return found.group(1)
