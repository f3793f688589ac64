"""Print each requirement with the tests that prove it; fail where a finished group has one without a test.

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

REQUIREMENT = re.compile(r"^- \*\*([A-Z]{2,4}-\d+)\*\*\s+(.+)$", re.MULTILINE)
FINISHED_GROUPS = re.compile(r"^Finished groups:(.*)$", re.MULTILINE)


class Collector:
    """Records, while pytest collects, which test proves which requirement."""

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


def read_requirements(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the text of each requirement in *folder*, and the problems of the files."""
    texts: dict[str, str] = {}
    problems = []
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        for name, text in REQUIREMENT.findall(path.read_text(encoding="utf-8")):
            if name in texts:
                problems.append(f"{name}: stands twice, again in {path.name}")
            texts[name] = text
    return texts, problems


def read_finished(folder: Path) -> list[str]:
    """Return the groups that claim to be complete, and single requirements of groups that are not."""
    readme = folder / "README.md"
    match = FINISHED_GROUPS.search(readme.read_text(encoding="utf-8")) if readme.exists() else None
    return re.findall(r"[A-Z]{2,4}(?:-\d+)?\b", match.group(1)) if match else []


def collect(root: Path) -> Collector:
    """Return the collected tests below *root*; exit if they cannot be collected."""
    collector = Collector()
    output = io.StringIO()
    os.chdir(root)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(root)], [collector])
    if code not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        sys.exit(output.getvalue() + "the tests cannot be collected")
    return collector


def find_problems(requirements: dict[str, str], proofs: dict[str, set[str]], *, finished: list[str]) -> list[str]:
    """Return every mismatch between the requirements and the tests."""
    names = {name.partition("-")[0] for name in requirements} | requirements.keys()
    problems = [f"{group}: is listed as finished but has no requirement" for group in finished if group not in names]
    problems += [
        f"{name}: has no test, and {group} is listed as finished"
        for name in requirements
        for group in (name, name.partition("-")[0])
        if group in finished and not proofs.get(name)
    ]
    problems += [
        f"{name}: no such requirement, but {min(tests)} names it"
        for name, tests in sorted(proofs.items())
        if name not in requirements
    ]
    return problems


def print_requirements(requirements: dict[str, str], proofs: dict[str, set[str]]) -> None:
    for name, text in requirements.items():
        # Cases of one parametrised test are listed as one proof.
        tests = sorted({test.partition("[")[0] for test in proofs.get(name, ())})
        print(f"{name} {text[:100]}")
        print("".join(f"    {test}\n" for test in tests) or "    (no test)\n", end="")


def main(root: Path) -> int:
    folder = root / "docs" / "spec"
    requirements, problems = read_requirements(folder)
    finished = read_finished(folder)
    collector = collect(root)
    print_requirements(requirements, collector.proofs)
    problems += collector.malformed + find_problems(requirements, collector.proofs, finished=finished)
    proven_count = sum(1 for name in requirements if collector.proofs.get(name))
    print(
        f"{proven_count} of {len(requirements)} requirements have a test; finished groups: "
        f"{', '.join(finished) or 'none'}"
    )
    print("".join(f"spec: {problem}\n" for problem in problems), end="", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
