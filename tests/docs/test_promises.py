"""Statements that the documents must contain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: One word or phrase for each non-goal that the documents state.
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
@pytest.mark.parametrize("non_goal", NON_GOALS)
def test_the_non_goals_are_listed(document: str, non_goal: str) -> None:
    section = _read_section(document, "on-goals")
    assert re.search(non_goal, section, re.IGNORECASE), f"{document} does not list the non-goal {non_goal}"


@pytest.mark.spec("CON-49")
@pytest.mark.parametrize("document", ["README.md", "docs/lifecycle.md"])
def test_mutual_exclusion_is_distinguished_from_deduplication(document: str) -> None:
    section = " ".join(_read_section(document, "on-goals").lower().split())
    assert "inbox" in section
    assert "mutual exclusion" in section


def _read_section(document: str, title: str) -> str:
    text = (ROOT / document).read_text(encoding="utf-8")
    match = re.search(rf"^##[^\n]*{title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"{document} has no section on {title}"
    return match.group(1)
