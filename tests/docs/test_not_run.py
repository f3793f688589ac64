"""Blocks of documents that no test runs are listed, with the reason."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.docs.snippets import FENCE, LANGUAGES, TITLE
from tests.docs.test_snippets import DOCUMENTS, ROOT

LISTED_BLOCKS = tomllib.loads(Path(__file__).with_name("not_run.toml").read_text(encoding="utf-8"))


def find_blocks_not_run(text: str) -> list[str]:
    """Return the first lines of the blocks of *text* that are neither run, nor files, nor diagrams."""
    blocks = []
    for match in FENCE.finditer(text):
        info = match["info"].split()
        if not TITLE.search(match["info"]) and info[:1] not in [[language] for language in (*LANGUAGES, "mermaid")]:
            blocks.append(match["body"].partition("\n")[0].removeprefix(match["indent"]))
    return blocks


@pytest.mark.spec("RUN-05")
@pytest.mark.parametrize("name", sorted({*DOCUMENTS, *LISTED_BLOCKS}))
def test_every_block_that_is_not_run_is_listed_with_its_reason(name):
    blocks = find_blocks_not_run((ROOT / name).read_text(encoding="utf-8"))
    assert sorted(blocks) == sorted(LISTED_BLOCKS.get(name, {}))
    assert all(reason.strip() for reason in LISTED_BLOCKS.get(name, {}).values())


def test_a_block_in_another_language_is_found_and_one_that_runs_is_not():
    text = "```python\na\n```\n```mermaid\nb\n```\n```yaml\nc\nd\n```\n```\ne\n```\n"
    text += '```toml title="f.toml"\nf\n```\n1. item\n\n   ```sh\n   g\n   ```\n'
    assert find_blocks_not_run(text) == ["c", "e", "g"]
