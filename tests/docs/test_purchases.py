"""The guide shows the example as it is."""

from __future__ import annotations

import pytest

from tests.docs.snippets import snippets
from tests.docs.test_snippets import ROOT

PURCHASES = ROOT / "examples" / "purchases"
GUIDE = ROOT / "docs" / "guides" / "postgres.md"


@pytest.mark.parametrize("name", sorted(path.name for path in PURCHASES.iterdir() if path.is_file()))
def test_the_guide_shows_the_file_as_it_is_in_the_example(name):
    shown = {snippet.title: snippet.text for snippet in snippets(GUIDE.read_text(encoding="utf-8"))}
    assert shown[name] == (PURCHASES / name).read_text(encoding="utf-8")
