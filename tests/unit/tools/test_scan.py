"""What a scanner finds is listed with its number and a reason, and nothing is listed that was not found."""

from __future__ import annotations

import tomllib

import pytest

from tools.scan import ROOT, SCANNERS, judged

LINE = {"rule": "B1", "file": "src/*.py", "number": 2, "reason": "because"}
FOUND = [("B1", "src/a.py"), ("B1", "src/b.py")]


@pytest.mark.parametrize(
    "found, listed, said",
    [
        (FOUND, [LINE], []),
        (FOUND[:1], [LINE], ["src/*.py: B1 was found 1 times, 2 listed"]),
        ([], [LINE], ["src/*.py: B1 was found 0 times, 2 listed"]),
        ([*FOUND, ("B2", "src/a.py")], [LINE], ["src/a.py: B2, 1 times, is not in tools/scan.toml"]),
        (FOUND, [LINE | {"reason": " "}], ["src/*.py: B1 is listed without a reason"]),
        (FOUND, [], [f"{path}: B1, 1 times, is not in tools/scan.toml" for _, path in FOUND]),
        ([], [{"rule": "B1", "file": "x", "reason": "y"}], ["x: B1 was found 0 times, some listed"]),
    ],
)
def test_the_list_and_the_findings_are_held_against_each_other(found, listed, said):
    assert judged(found, listed) == said


def test_the_list_has_a_reason_everywhere_and_knows_the_scanners():
    known = tomllib.loads((ROOT / "tools" / "scan.toml").read_text(encoding="utf-8"))
    assert known.keys() <= SCANNERS.keys() | {"left-out"}
    assert all(line["reason"].strip() and line["file"] for lines in known.values() for line in lines)
    assert all(line["rule"] for name in SCANNERS for line in known.get(name, []))


def test_what_is_not_read_is_there():
    known = tomllib.loads((ROOT / "tools" / "scan.toml").read_text(encoding="utf-8"))
    assert [line["file"] for line in known["left-out"] if not list(ROOT.glob(line["file"]))] == []
