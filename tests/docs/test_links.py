"""Every link in the documents has a target."""

from __future__ import annotations

from tools.docs import ROOT, find_broken_links


def test_every_link_leads_somewhere():
    assert find_broken_links(ROOT) == []


def test_a_link_that_leads_nowhere_is_caught(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text("# The `one` Heading!\n```text\n# no heading\n```\n", encoding="utf-8")
    (tmp_path / "a.md").write_text(
        "[good](docs/b.md) [good](docs/b.md#the-one-heading) [far](https://example.org/x) `[code](x)`\n"
        "[gone](docs/c.md) [gone](docs/b.md#no-heading) [out](../up.md)\n\n[name]: docs/d.md\n",
        encoding="utf-8",
    )
    assert find_broken_links(tmp_path) == [
        "a.md: docs/c.md leads to no file",
        "a.md: docs/b.md#no-heading leads to no heading",
        "a.md: ../up.md leads to no file",
        "a.md: docs/d.md leads to no file",
    ]
