"""Check the documents without building them: every relative link leads to a file, every anchor to a heading."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def list_documents(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("changelog.d/*.md")])


def strip_code(path: Path) -> str:
    """Return the text of *path* without its code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def list_anchors(path: Path) -> set[str]:
    """Return the anchors of *path*, named as the usual renderers name them."""
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in HEADING.findall(strip_code(path))]
    return {re.sub(r"\s", "-", heading) for heading in plain}


def find_broken_links(root: Path) -> list[str]:
    """Return every broken link below *root*; links to other sites are not checked."""
    broken_links = []
    for path in list_documents(root):
        for pair in LINK.findall(CODE.sub("", strip_code(path))):
            link = pair[0] or pair[1]
            if re.match(r"[a-z][a-z+.-]*:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.is_relative_to(root.resolve()) or not target.exists():
                broken_links.append(f"{path.relative_to(root)}: {link} leads to no file")
            elif anchor and target.suffix == ".md" and anchor not in list_anchors(target):
                broken_links.append(f"{path.relative_to(root)}: {link} leads to no heading")
    return broken_links


if __name__ == "__main__":
    problems = find_broken_links(ROOT)
    print("\n".join(problems) or f"{len(list_documents(ROOT))} documents, every link leads somewhere")
    sys.exit(bool(problems))
