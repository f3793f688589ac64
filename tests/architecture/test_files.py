"""No file of the project contains a path of a machine or a host of a registry."""

from __future__ import annotations

import pytest

from tools.hygiene import ROOT, find_forbidden


def test_no_file_names_a_machine_or_a_registry():
    assert find_forbidden(ROOT) == []


@pytest.mark.parametrize(
    "text, expected_count",
    [
        ("see /" + "tmp/report", 1),
        ('open("/' + 'root/.x")', 1),
        ("cd /" + "work", 1),
        ("https://py" + "pi.org/simple", 1),
        ("files.python" + "hosted.org", 1),
        ("retry/work and work/tmp", 0),
        ("tmp_path / 'work'", 0),
        ("/workers and /option", 0),
    ],
)
def test_a_local_path_is_caught_and_an_ordinary_word_is_not(tmp_path, text, expected_count):
    (tmp_path / "notes.md").write_text(f"first\n{text}\n", encoding="utf-8")
    assert len(find_forbidden(tmp_path)) == expected_count
    assert all(line.startswith("notes.md:2: ") for line in find_forbidden(tmp_path))


def test_a_file_that_is_not_text_is_skipped(tmp_path):
    (tmp_path / "picture").write_bytes(b"\xff\xfe /" + b"tmp/x")
    assert find_forbidden(tmp_path) == []
