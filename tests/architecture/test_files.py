"""The project speaks only of itself: no path of a machine, no host of a registry, in any file."""

from __future__ import annotations

import pytest

from tools.hygiene import ROOT, traces


def test_no_file_names_a_machine_or_a_registry():
    assert traces(ROOT) == []


@pytest.mark.parametrize(
    "text, caught",
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
def test_a_trace_is_caught_and_a_word_is_not(tmp_path, text, caught):
    (tmp_path / "notes.md").write_text(f"first\n{text}\n", encoding="utf-8")
    assert len(traces(tmp_path)) == caught
    assert all(line.startswith("notes.md:2: ") for line in traces(tmp_path))


def test_a_file_that_is_not_text_is_passed_over(tmp_path):
    (tmp_path / "picture").write_bytes(b"\xff\xfe /" + b"tmp/x")
    assert traces(tmp_path) == []
