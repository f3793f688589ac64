"""Collect the pages of the documentation site in one folder: `python tools/site.py FOLDER`, then zensical builds them.

The documents are written for the checkout, where README leads into docs/ and docs/ to files next to it. In the site
README is the first page, so its links are rewritten; a link to a file that is not a page loses its target.
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

#: Pages outside docs/, and their names in the site.
EXTRA_PAGES: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "measurements.md",
}
#: The folder of files that readers may download; other folders are read in a checkout.
DOWNLOAD_FOLDER: Final = "deploy"
#: Too many for a menu: each decision is reached from their list.
DECISION_PAGE: Final = re.compile(r"adr/\d{4}-[^/]+\.md")
MENU_ENTRY: Final = re.compile(r"^ *- .*?([\w./-]+\.md)$", re.MULTILINE)
INLINE_LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<link>[^)\s]+)\)")


def list_pages(root: Path) -> dict[Path, str]:
    """Return every page with its path in the site."""
    docs = root / "docs"
    site_paths = {path: path.relative_to(docs).as_posix() for path in sorted(docs.glob("**/*.md"))}
    return site_paths | {root / name: site_path for name, site_path in EXTRA_PAGES.items() if (root / name).exists()}


def list_menu(text: str) -> list[str]:
    """Return the pages in the menu of mkdocs.yml, whose text is *text*."""
    return MENU_ENTRY.findall(text.partition("\nnav:\n")[2].partition("\n\n")[0])


def find_menu_problems(root: Path) -> list[str]:
    """Return the problems of the menu: a page that is missing, listed twice, or unknown."""
    menu = list_menu((root / "mkdocs.yml").read_text(encoding="utf-8"))
    site_paths = set(list_pages(root).values())
    problems = [f"{site_path}: is not in the menu of mkdocs.yml" for site_path in sorted(site_paths - set(menu))]
    problems = [line for line in problems if not DECISION_PAGE.match(line)]
    problems += [
        f"{site_path}: is in the menu twice" for site_path in sorted({entry for entry in menu if menu.count(entry) > 1})
    ]
    problems += [
        f"{site_path}: is in the menu, and there is no such page" for site_path in sorted(set(menu) - site_paths)
    ]
    decisions = (root / "docs/adr/README.md").read_text(encoding="utf-8")
    return problems + [
        f"{page}: is not in adr/README.md"
        for page in sorted(site_paths)
        if DECISION_PAGE.match(page) and page[4:] not in decisions
    ]


def rewrite_links(path: Path, *, root: Path, site_paths: dict[Path, str]) -> str:
    """Return the text of *path* with the links of the site; code is not changed."""
    text = path.read_text(encoding="utf-8")
    code_pattern = re.compile(f"{FENCE.pattern}|{CODE.pattern}", FENCE.flags)
    # A link may hold code and code may look like a link: code is cut out first and restored at the end.
    code_parts = [match.group() for match in code_pattern.finditer(text)]
    numbers = iter(range(len(code_parts)))
    text = code_pattern.sub(lambda _: f"\0{next(numbers)}\0", text)
    text = INLINE_LINK.sub(lambda match: _rewrite_link(match, path, root, site_paths), text)
    return re.sub(r"\0(\d+)\0", lambda match: code_parts[int(match[1])], text)


def _rewrite_link(match: re.Match[str], path: Path, root: Path, site_paths: dict[Path, str]) -> str:
    name, mark, anchor = match["link"].partition("#")
    if not name or re.match(r"[a-z][a-z+.-]*:", name):
        return match.group()
    target = (path.parent / name).resolve()
    folder = Path(site_paths[path]).parent
    if target in site_paths:
        return f"[{match['text']}]({os.path.relpath(site_paths[target], folder)}{mark}{anchor})"
    if target.is_file() and target.is_relative_to(root / "docs"):
        return match.group()
    if target.is_file() and target.is_relative_to(root / DOWNLOAD_FOLDER):
        return f"[{match['text']}]({os.path.relpath(target.relative_to(root), folder)})"
    return match["text"]


def gather(root: Path, into: Path) -> int:
    """Write every page and every other file of docs/ into the recreated folder *into*; return the number of pages."""
    root = root.resolve()
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(root / "docs", into, ignore=shutil.ignore_patterns("*.md"))
    shutil.copytree(root / DOWNLOAD_FOLDER, into / DOWNLOAD_FOLDER)
    site_paths = list_pages(root)
    for path, site_path in site_paths.items():
        (into / site_path).parent.mkdir(parents=True, exist_ok=True)
        (into / site_path).write_text(rewrite_links(path, root=root, site_paths=site_paths), encoding="utf-8")
    return len(site_paths)


if __name__ == "__main__":
    problems = find_menu_problems(ROOT)
    print("\n".join(problems) or f"{gather(ROOT, Path(sys.argv[1]))} pages, each in the menu")
    sys.exit(bool(problems))
