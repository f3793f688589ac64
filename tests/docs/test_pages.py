"""Messages name no file that is missing from a wheel: they name pages as the site menu does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ergon_framework.diagnostics import DocPage
from ergon_framework.facts.replica_state import ReplicaProblem, ReplicaStatus

ROOT = Path(__file__).parents[2]
MENU = dict(re.findall(r"^ +- ([^:\n]+): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
DOCUMENT = re.compile(r"\bdocs/\S+\.md")


def list_strings(path):
    """Return all strings of a program except the docstrings of its modules, which readers of the code see."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module_docstring = ast.get_docstring(tree, clean=False)
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in texts if text != module_docstring]


@pytest.mark.parametrize("page", DocPage)
def test_a_page_that_a_message_names_is_in_the_menu(page):
    assert (ROOT / "docs" / MENU[page.value]).is_file()


def test_no_message_names_a_file_of_the_repository():
    files = sorted((ROOT / "src").rglob("*.py"))
    assert files
    assert [(path.name, text) for path in files for text in list_strings(path) if DOCUMENT.search(text)] == []


@pytest.mark.parametrize("status", [status for status in ReplicaStatus if status.needs_operator])
def test_the_runbook_sections_that_a_halted_replica_names_exist(status):
    action = ReplicaProblem(status, RuntimeError()).action
    sections = re.findall(r"'([^']+)' in " + re.escape(DocPage.FACTS_RUNBOOK.label), action)
    runbook = (ROOT / "docs" / MENU[DocPage.FACTS_RUNBOOK.value]).read_text(encoding="utf-8")
    assert all(f"\n## {section}\n" in runbook for section in sections), action
    assert sections
