"""The guide shows the current files of the example."""

from __future__ import annotations

import pytest

from tests.docs.snippets import find_snippets
from tests.docs.test_snippets import ROOT

PURCHASES = ROOT / "examples" / "purchases"
GUIDE = ROOT / "docs" / "guides" / "postgres.md"


@pytest.mark.parametrize("name", sorted(path.name for path in PURCHASES.iterdir() if path.is_file()))
def test_the_guide_shows_the_file_as_it_is_in_the_example(name):
    text_by_title = {snippet.title: snippet.text for snippet in find_snippets(GUIDE.read_text(encoding="utf-8"))}
    assert text_by_title[name] == (PURCHASES / name).read_text(encoding="utf-8")
