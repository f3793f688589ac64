"""Tests, folders and targets that a document names as its proof exist."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_snippets import DOCUMENTS, ROOT

NAMED_PROOF = re.compile(r"`((?:tests|tools|bench|examples|constraints|deploy|reference)/[\w./-]*)(?:::(\w+))?`")
#: What ``ergon new`` writes is named by its path in the new project.
TEMPLATES = ROOT / "src" / "ergon_framework" / "cli" / "templates"
TARGET = re.compile(r"`make ([a-z-]+)[^`]*`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_test_and_target_that_a_document_names_exists(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for path, test in NAMED_PROOF.findall(text):
        is_written = any(TEMPLATES.glob(f"*/{path}.tmpl"))
        assert is_written or (ROOT / path).exists(), f"{document} names {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{document} names {test}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(TARGET.findall(text)) <= targets
