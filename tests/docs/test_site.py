"""The site: every page is in its menu, and links lead where they led in the checkout."""

from __future__ import annotations

import pytest

from tools.site import ROOT, astray, gather, navigated


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
    assert astray(ROOT) == []


def test_what_is_wrong_with_a_menu_is_told(checkout):
    assert astray(checkout) == []
    menu = checkout / "mkdocs.yml"
    menu.write_text(menu.read_text(encoding="utf-8").replace("guides/two.md", "guides/one.md"), encoding="utf-8")
    (checkout / "docs/adr/0002-two.md").write_text("# 0002: Two", encoding="utf-8")
    assert astray(checkout) == [
        "guides/two.md: is not in the menu of mkdocs.yml",
        "guides/one.md: is in the menu twice",
        "adr/0002-two.md: is not in adr/README.md",
    ]
    menu.write_text("\nnav:\n  - a: nowhere.md\n", encoding="utf-8")
    assert "nowhere.md: is in the menu, and there is no such page" in astray(checkout)


def test_only_the_menu_counts():
    assert navigated("extra:\n  - not.md\n\nnav:\n  - A: a.md\n  - b.md\n\nlater:\n  - c.md\n") == ["a.md", "b.md"]


def test_links_lead_where_they_led_and_code_stays(checkout, tmp_path):
    into = tmp_path / "site"
    assert gather(checkout, into) == 5
    said = {path: (into / path).read_text(encoding="utf-8") for path in ("index.md", "guides/one.md", "guides/two.md")}
    assert said == {
        "index.md": "[guide](guides/one.md#b) [rules](deploy/rules.yml) code [far](https://example.org)",
        "guides/one.md": "[up](../index.md) [two](two.md) `[no](../../README.md)`\n```text\n[no](two.md)\n```\n",
        "guides/two.md": "[schema](../shape.json) `code` [here](#a)",
    }
    assert (into / "shape.json").exists()
    assert (into / "deploy/rules.yml").exists()
