"""Gathers the pages of the documentation site in one folder: `python tools/site.py FOLDER`, then zensical builds them.

The documents are written to be read in the checkout, where README leads into docs/ and docs/ to files beside it. In
the site README is the first page, so its links are written anew; a link to a file that is no page loses its address.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.docs import CODE, FENCE, ROOT

#: Pages that are not below docs/, and what they are called in the site.
BESIDE: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "measurements.md",
}
#: Files for a reader to take with him; those of other folders are read in a checkout.
TAKEN: Final = "deploy"
#: Too many for a menu: each decision is reached from their list.
NUMBERED: Final = re.compile(r"adr/\d{4}-[^/]+\.md")
NAVIGATED: Final = re.compile(r"^ *- .*?([\w./-]+\.md)$", re.MULTILINE)
INLINE: Final = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<link>[^)\s]+)\)")


def pages(root: Path) -> dict[Path, str]:
    """Every page with the place that it has in the site."""
    docs = root / "docs"
    found = {path: path.relative_to(docs).as_posix() for path in sorted(docs.glob("**/*.md"))}
    return found | {root / name: place for name, place in BESIDE.items() if (root / name).exists()}


def navigated(text: str) -> list[str]:
    """The pages that the menu in mkdocs.yml, whose text this is, names."""
    return NAVIGATED.findall(text.partition("\nnav:\n")[2].partition("\n\n")[0])


def astray(root: Path) -> list[str]:
    """What is wrong with the menu: a page that it leaves out, names twice, or does not find."""
    named = navigated((root / "mkdocs.yml").read_text(encoding="utf-8"))
    places = set(pages(root).values())
    found = [f"{place}: is not in the menu of mkdocs.yml" for place in sorted(places - set(named))]
    found = [line for line in found if not NUMBERED.match(line)]
    found += [f"{place}: is in the menu twice" for place in sorted({n for n in named if named.count(n) > 1})]
    found += [f"{place}: is in the menu, and there is no such page" for place in sorted(set(named) - places)]
    listed = (root / "docs/adr/README.md").read_text(encoding="utf-8")
    return found + [
        f"{p}: is not in adr/README.md" for p in sorted(places) if NUMBERED.match(p) and p[4:] not in listed
    ]


def rewritten(path: Path, *, root: Path, places: dict[Path, str]) -> str:
    """The text of *path* with links as they are in the site; code stays as it is."""
    text = path.read_text(encoding="utf-8")
    kept = re.compile(f"{FENCE.pattern}|{CODE.pattern}", FENCE.flags)
    # A link may hold code and code may look like a link: what is kept is put away, and put back at the end.
    away = [match.group() for match in kept.finditer(text)]
    numbers = iter(range(len(away)))
    text = kept.sub(lambda _: f"\0{next(numbers)}\0", text)
    text = INLINE.sub(lambda match: _link(match, path, root, places), text)
    return re.sub(r"\0(\d+)\0", lambda match: away[int(match[1])], text)


def _link(match: re.Match[str], path: Path, root: Path, places: dict[Path, str]) -> str:
    name, mark, anchor = match["link"].partition("#")
    if not name or re.match(r"[a-z][a-z+.-]*:", name):
        return match.group()
    target = (path.parent / name).resolve()
    here = Path(places[path]).parent
    if target in places:
        return f"[{match['text']}]({os.path.relpath(places[target], here)}{mark}{anchor})"
    if target.is_file() and target.is_relative_to(root / "docs"):
        return match.group()
    if target.is_file() and target.is_relative_to(root / TAKEN):
        return f"[{match['text']}]({os.path.relpath(target.relative_to(root), here)})"
    return match["text"]


def gather(root: Path, into: Path) -> int:
    """Write every page and every other file of docs/ into *into*, which is made anew; how many pages there are."""
    root = root.resolve()
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(root / "docs", into, ignore=shutil.ignore_patterns("*.md"))
    shutil.copytree(root / TAKEN, into / TAKEN)
    places = pages(root)
    for path, place in places.items():
        (into / place).parent.mkdir(parents=True, exist_ok=True)
        (into / place).write_text(rewritten(path, root=root, places=places), encoding="utf-8")
    return len(places)


if __name__ == "__main__":
    problems = astray(ROOT)
    print("\n".join(problems) or f"{gather(ROOT, Path(sys.argv[1]))} pages, each in the menu")
    sys.exit(bool(problems))
