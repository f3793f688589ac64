"""What may stand in no file of the project: paths of one machine, and hosts of package registries."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Written in pieces, so that this file passes its own check.
FOLDERS = "|".join(("wo" + "rk", "tm" + "p", "ro" + "ot", "ho" + "me", "op" + "t"))
HOSTS = "|".join(("py" + r"pi\.org", "python" + r"hosted\.org", "npm" + r"js\.(?:org|com)", "crates" + r"\.io"))
FORBIDDEN = re.compile(rf"(?<![\w.~)}}>])/(?:{FOLDERS})(?=[/\s\"'`:,;)]|$)|\b(?:{HOSTS})\b", re.MULTILINE)

SKIPPED = {".git", "__pycache__", "dist", "build", "mutants", "htmlcov", "site", "node_modules", "LICENSE"}


def files(root: Path) -> Iterator[Path]:
    """Every file below *root* that belongs to the project; hidden folders but .ci are somebody's cache."""
    for folder, children, names in os.walk(root):
        children[:] = sorted(c for c in children if c not in SKIPPED and (c == ".ci" or not c.startswith(".")))
        # .git is a file in a worktree, .coverage* are measurements: what is hidden is not ours, .gitignore excepted.
        yield from (
            Path(folder, name)
            for name in sorted(names)
            if name not in SKIPPED and (name == ".gitignore" or not name.startswith("."))
        )


def traces(root: Path) -> list[str]:
    """Each forbidden word below *root* with its file and line; a file that is not text has none."""
    found = []
    for path in files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for hit in FORBIDDEN.finditer(text):
            line = text.count("\n", 0, hit.start()) + 1
            found.append(f"{path.relative_to(root)}:{line}: {hit.group()}")
    return found


if __name__ == "__main__":
    problems = traces(ROOT)
    print("\n".join(problems) or "no trace of a machine or a registry")
    sys.exit(bool(problems))
