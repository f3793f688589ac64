"""Find text that no file of the project may contain: paths of one machine, and hosts of package registries."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Split, so that this file passes its own check.
FOLDERS = "|".join(("wo" + "rk", "tm" + "p", "ro" + "ot", "ho" + "me", "op" + "t"))
HOSTS = "|".join(("py" + r"pi\.org", "python" + r"hosted\.org", "npm" + r"js\.(?:org|com)", "crates" + r"\.io"))
FORBIDDEN = re.compile(rf"(?<![\w.~)}}>])/(?:{FOLDERS})(?=[/\s\"'`:,;)]|$)|\b(?:{HOSTS})\b", re.MULTILINE)

SKIPPED = {".git", "__pycache__", "dist", "build", "mutants", "htmlcov", "site", "node_modules", "LICENSE"}


def list_files(root: Path) -> Iterator[Path]:
    """Yield every file below *root* that belongs to the project; hidden folders except .ci are caches."""
    for folder, children, names in os.walk(root):
        children[:] = sorted(c for c in children if c not in SKIPPED and (c == ".ci" or not c.startswith(".")))
        # .git is a file in a worktree, .coverage* are measurements: hidden files are skipped, except .gitignore.
        yield from (
            Path(folder, name)
            for name in sorted(names)
            if name not in SKIPPED and (name == ".gitignore" or not name.startswith("."))
        )


def find_forbidden(root: Path) -> list[str]:
    """Return each forbidden word below *root* with its file and line; a file that is not text has none."""
    findings = []
    for path in list_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for match in FORBIDDEN.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            findings.append(f"{path.relative_to(root)}:{line}: {match.group()}")
    return findings


if __name__ == "__main__":
    problems = find_forbidden(ROOT)
    print("\n".join(problems) or "no trace of a machine or a registry")
    sys.exit(bool(problems))
