"""Checks the documents without building them: every relative link leads to a file, every anchor to a heading."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def documents(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("changelog.d/*.md")])


def prose(path: Path) -> str:
    """The text of *path* without its code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The anchors that a reader of *path* can jump to, named as the usual renderers name them."""
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in HEADING.findall(prose(path))]
    return {re.sub(r"\s", "-", heading) for heading in plain}


def broken(root: Path) -> list[str]:
    """Every link below *root* that leads nowhere; addresses elsewhere are not asked."""
    found = []
    for path in documents(root):
        for pair in LINK.findall(CODE.sub("", prose(path))):
            link = pair[0] or pair[1]
            if re.match(r"[a-z][a-z+.-]*:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.is_relative_to(root.resolve()) or not target.exists():
                found.append(f"{path.relative_to(root)}: {link} leads to no file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                found.append(f"{path.relative_to(root)}: {link} leads to no heading")
    return found


if __name__ == "__main__":
    problems = broken(ROOT)
    print("\n".join(problems) or f"{len(documents(ROOT))} documents, every link leads somewhere")
    sys.exit(bool(problems))
