"""Every finding of a scanner is listed with its number and a reason, and every entry has a finding."""

from __future__ import annotations

import tomllib

import pytest

from tools.scan import ROOT, SCANNERS, find_problems

ENTRY = {"rule": "B1", "file": "src/*.py", "number": 2, "reason": "because"}
FINDINGS = [("B1", "src/a.py"), ("B1", "src/b.py")]


@pytest.mark.parametrize(
    "findings, entries, problems",
    [
        (FINDINGS, [ENTRY], []),
        (FINDINGS[:1], [ENTRY], ["src/*.py: B1 was found 1 times, 2 listed"]),
        ([], [ENTRY], ["src/*.py: B1 was found 0 times, 2 listed"]),
        ([*FINDINGS, ("B2", "src/a.py")], [ENTRY], ["src/a.py: B2, 1 times, is not in tools/scan.toml"]),
        (FINDINGS, [ENTRY | {"reason": " "}], ["src/*.py: B1 is listed without a reason"]),
        (FINDINGS, [], [f"{path}: B1, 1 times, is not in tools/scan.toml" for _, path in FINDINGS]),
        ([], [{"rule": "B1", "file": "x", "reason": "y"}], ["x: B1 was found 0 times, some listed"]),
    ],
)
def test_the_list_and_the_findings_are_compared(findings, entries, problems):
    assert find_problems(findings, entries) == problems


def test_every_entry_of_the_list_has_a_reason_and_a_known_scanner():
    entries_by_scanner = tomllib.loads((ROOT / "tools" / "scan.toml").read_text(encoding="utf-8"))
    assert entries_by_scanner.keys() <= SCANNERS.keys() | {"left-out"}
    assert all(
        entry["reason"].strip() and entry["file"] for entries in entries_by_scanner.values() for entry in entries
    )
    assert all(entry["rule"] for name in SCANNERS for entry in entries_by_scanner.get(name, []))


def test_every_excluded_file_exists():
    entries_by_scanner = tomllib.loads((ROOT / "tools" / "scan.toml").read_text(encoding="utf-8"))
    assert [entry["file"] for entry in entries_by_scanner["left-out"] if not list(ROOT.glob(entry["file"]))] == []
