"""Every promise of the threat model names a test or a command that exists."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.test_snippets import ROOT

PAGE = ROOT / "docs" / "security.md"
HEADER = "| threat | promise | proof |"
PROOF = re.compile(r"`(tests/[\w./-]+\.py(?:::\w+)?|make [a-z-]+)`")
#: Classes of attacks that the page must cover.
CLASSES = (
    "Deserialization",
    "Injection",
    "Denial of service",
    "Spoofing and revocation",
    "Confused deputy",
    "Tampering",
    "Information disclosure",
    "Supply chain",
    "Privilege",
)


def read_promises() -> list[list[str]]:
    """Return the rows of all tables of promises, as cells."""
    rows, inside = [], False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line == HEADER:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("| ---"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


@pytest.mark.spec("SEC-27")
def test_every_promise_names_a_test_or_a_command():
    promises = read_promises()
    assert len(promises) >= 40
    for cells in promises:
        assert len(cells) == 3, f"a row has {len(cells)} cells: {cells[0]}"
        proofs = PROOF.findall(cells[2])
        assert proofs, f"no proof: {cells[0]}"
        assert PROOF.sub("", cells[2]).strip(" ,") == "", f"a proof is a node id or a make target: {cells[2]}"


@pytest.mark.spec("SEC-27")
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_attacks_has_promises(name):
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^### {name}\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    assert section, f"there is no section {name}"
    assert HEADER in section[1]


@pytest.mark.spec("SEC-27")
def test_every_test_and_command_that_proves_a_promise_exists():
    proofs = {proof for cells in read_promises() for proof in PROOF.findall(cells[2])}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {proof.removeprefix("make ") for proof in proofs if proof.startswith("make ")} <= targets
    nodes = sorted(proof for proof in proofs if not proof.startswith("make "))
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *nodes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout[-3000:] + collected.stderr[-3000:]
