"""The site: every page is in its menu, and links keep their targets of the checkout."""

from __future__ import annotations

import pytest

from tools.site import ROOT, find_menu_problems, gather, list_menu


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    for name, text in {
        "README.md": "[guide](docs/guides/one.md#b) [rules](deploy/rules.yml) [code](src/x.py) [far](https://example.org)",
        "docs/guides/one.md": "[up](../../README.md) [two](two.md) `[no](../../README.md)`\n"
        "```text\n[no](two.md)\n```\n",
        "docs/guides/two.md": "[schema](../shape.json) [`code`](../../src/x.py) [here](#a)",
        "docs/shape.json": "{}",
        "docs/adr/README.md": "[0001](0001-one.md)",
        "docs/adr/0001-one.md": "# 0001: One",
        "deploy/rules.yml": "",
        "src/x.py": "",
        "mkdocs.yml": "site_name: x\n\nnav:\n  - Start: index.md\n  - Guides:\n      - guides/one.md\n"
        "      - Two: guides/two.md\n  - adr/README.md\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_every_page_is_in_the_menu_once():
    assert find_menu_problems(ROOT) == []


def test_menu_errors_are_reported(checkout):
    assert find_menu_problems(checkout) == []
    menu = checkout / "mkdocs.yml"
    menu.write_text(menu.read_text(encoding="utf-8").replace("guides/two.md", "guides/one.md"), encoding="utf-8")
    (checkout / "docs/adr/0002-two.md").write_text("# 0002: Two", encoding="utf-8")
    assert find_menu_problems(checkout) == [
        "guides/two.md: is not in the menu of mkdocs.yml",
        "guides/one.md: is in the menu twice",
        "adr/0002-two.md: is not in adr/README.md",
    ]
    menu.write_text("\nnav:\n  - a: nowhere.md\n", encoding="utf-8")
    assert "nowhere.md: is in the menu, and there is no such page" in find_menu_problems(checkout)


def test_only_the_menu_counts():
    assert list_menu("extra:\n  - not.md\n\nnav:\n  - A: a.md\n  - b.md\n\nlater:\n  - c.md\n") == ["a.md", "b.md"]


def test_links_keep_their_targets_and_code_is_unchanged(checkout, tmp_path):
    destination = tmp_path / "site"
    assert gather(checkout, destination) == 5
    texts = {
        path: (destination / path).read_text(encoding="utf-8")
        for path in ("index.md", "guides/one.md", "guides/two.md")
    }
    assert texts == {
        "index.md": "[guide](guides/one.md#b) [rules](deploy/rules.yml) code [far](https://example.org)",
        "guides/one.md": "[up](../index.md) [two](two.md) `[no](../../README.md)`\n```text\n[no](two.md)\n```\n",
        "guides/two.md": "[schema](../shape.json) `code` [here](#a)",
    }
    assert (destination / "shape.json").exists()
    assert (destination / "deploy/rules.yml").exists()
