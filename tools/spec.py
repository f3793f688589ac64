"""Prints each requirement with the tests that prove it; fails where a finished group has one without a test.

Requirements are list items `- **CON-01** …` in docs/spec/*.md; docs/spec/README.md has the line
`Finished groups: CON, PRO`. Tests name what they prove with `@pytest.mark.spec("CON-01")`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ITEM = re.compile(r"^- \*\*([A-Z]{2,4}-\d+)\*\*\s+(.+)$", re.MULTILINE)
FINISHED = re.compile(r"^Finished groups:(.*)$", re.MULTILINE)


class Collector:
    """Remembers, while pytest collects, which test proves which requirement."""

    def __init__(self) -> None:
        self.proofs: dict[str, set[str]] = defaultdict(set)
        self.malformed: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("spec"):
                if not mark.args or mark.kwargs or not all(isinstance(name, str) for name in mark.args):
                    self.malformed.append(f"{item.nodeid}: a spec marker takes ids, not {mark.args} {mark.kwargs}")
                    continue
                for name in mark.args:
                    self.proofs[name].add(item.nodeid)


def requirements(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The text of each requirement in *folder*, and what is wrong with the files."""
    found: dict[str, str] = {}
    problems = []
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        for name, text in ITEM.findall(path.read_text(encoding="utf-8")):
            if name in found:
                problems.append(f"{name}: stands twice, again in {path.name}")
            found[name] = text
    return found, problems


def finished(folder: Path) -> list[str]:
    """The groups that claim to be complete, and single requirements of groups that are not."""
    readme = folder / "README.md"
    match = FINISHED.search(readme.read_text(encoding="utf-8")) if readme.exists() else None
    return re.findall(r"[A-Z]{2,4}(?:-\d+)?\b", match.group(1)) if match else []


def collect(root: Path) -> Collector:
    """What pytest finds below *root*; ends the program if it cannot collect."""
    collector = Collector()
    said = io.StringIO()
    os.chdir(root)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(root)], [collector])
    if code not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        sys.exit(said.getvalue() + "the tests cannot be collected")
    return collector


def judge(known: dict[str, str], proofs: dict[str, set[str]], *, done: list[str]) -> list[str]:
    """Every reason why the requirements and the tests do not fit together."""
    listed = {name.partition("-")[0] for name in known} | known.keys()
    problems = [f"{group}: is listed as finished but has no requirement" for group in done if group not in listed]
    problems += [
        f"{name}: has no test, and {group} is listed as finished"
        for name in known
        for group in (name, name.partition("-")[0])
        if group in done and not proofs.get(name)
    ]
    problems += [
        f"{name}: no such requirement, but {min(tests)} names it"
        for name, tests in sorted(proofs.items())
        if name not in known
    ]
    return problems


def show(known: dict[str, str], proofs: dict[str, set[str]]) -> None:
    for name, text in known.items():
        # Cases of one parametrised test are one proof to a reader.
        tests = sorted({test.partition("[")[0] for test in proofs.get(name, ())})
        print(f"{name} {text[:100]}")
        print("".join(f"    {test}\n" for test in tests) or "    (no test)\n", end="")


def main(root: Path) -> int:
    folder = root / "docs" / "spec"
    known, problems = requirements(folder)
    done = finished(folder)
    collector = collect(root)
    show(known, collector.proofs)
    problems += collector.malformed + judge(known, collector.proofs, done=done)
    proven = sum(1 for name in known if collector.proofs.get(name))
    print(f"{proven} of {len(known)} requirements have a test; finished groups: {', '.join(done) or 'none'}")
    print("".join(f"spec: {problem}\n" for problem in problems), end="", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
