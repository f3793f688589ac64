"""The generated pages equal the current output of the program."""

from __future__ import annotations

import re

import pytest

from tools.reference import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_as_the_program_writes_it(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text == PAGES[name](), f"docs/reference/{name} is stale; run: make reference"


def test_every_command_has_an_example():
    parts = re.split(r"^##+ (ergon .*)$", (FOLDER / "cli.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    commands = {name: text for name, text in sections.items() if "| --- |" in text}
    assert len(commands) > 40
    assert [name for name, text in commands.items() if not re.search(rf"^Example: `.*{name}", text, re.MULTILINE)] == []


def test_every_policy_key_has_a_meaning():
    rows = re.findall(
        r"^\| `(\S+)` \| .+ \| (.*) \|$", (FOLDER / "policies.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) > 100
    assert [key for key, meaning in rows if not meaning] == []
