"""Messages send nobody to a file that a wheel does not bring: they name pages as the menu of the site does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ergon_framework.facts.replica import Status, Trouble
from ergon_framework.finding import Page

ROOT = Path(__file__).parents[2]
MENU = dict(re.findall(r"^ +- ([^:\n]+): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
DOCUMENT = re.compile(r"\bdocs/\S+\.md")


def said(path):
    """All texts of a program but what its modules say of themselves, which is for whoever reads the code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = ast.get_docstring(tree, clean=False)
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in texts if text != own]


@pytest.mark.parametrize("page", Page)
def test_a_page_that_a_message_names_is_in_the_menu(page):
    assert (ROOT / "docs" / MENU[page.value]).is_file()


def test_no_message_names_a_file_of_the_repository():
    files = sorted((ROOT / "src").rglob("*.py"))
    assert files
    assert [(path.name, text) for path in files for text in said(path) if DOCUMENT.search(text)] == []


@pytest.mark.parametrize("status", [status for status in Status if status.halted])
def test_what_a_halted_replica_is_told_to_read_is_there(status):
    action = Trouble(status, RuntimeError()).action
    sections = re.findall(r"'([^']+)' in " + re.escape(Page.FACTS_RUNBOOK.named), action)
    runbook = (ROOT / "docs" / MENU[Page.FACTS_RUNBOOK.value]).read_text(encoding="utf-8")
    assert all(f"\n## {section}\n" in runbook for section in sections), action
    assert sections
