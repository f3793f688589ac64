"""Count what makes names and texts hard to read; exit with 1 where a limit is exceeded.

``python tools/check_names.py`` prints one line of JSON; with ``--list`` also each name, module, path and line that
counts. A count without a limit in `LIMITS` is only reported.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "src" / "ergon_framework"

#: The largest allowed value of each count.
LIMITS: Final = {
    "participle_percent": 3.0,
    "repeated_class_names": 15,
    "single_importer_percent": 12.0,
    "document_import_paths": 16,
    "forbidden_words": 0,
}

#: Past participles that do not end in "ed".
# fmt: off
_IRREGULAR: Final = frozenset((
    "begun", "bound", "bought", "brought", "built", "buried", "caught", "chosen", "come",
    "cut", "done", "drawn", "driven", "fallen", "felt", "found", "given", "gone",
    "got", "grown", "heard", "held", "hidden", "kept", "known", "laid", "led",
    "left", "lent", "lost", "made", "meant", "met", "paid", "put", "read",
    "run", "said", "seen", "sent", "set", "shown", "showed", "shut", "sold",
    "spent", "split", "sprung", "stood", "struck", "sung", "taken", "taught", "thought",
    "thrown", "told", "torn", "understood", "woken", "won", "worn", "wound", "written",
))
#: Verbs in the imperative that look like participles.
_VERBS: Final = frozenset((
    "bind", "come", "cut", "embed", "exceed", "feed", "need", "proceed", "put",
    "read", "run", "seed", "set", "shut", "shed", "speed", "split",
))
_WORDS: Final = (
    "whoever", "nobody", "somebody", "anew", "is told", "is asked again", "burial", "buried", "grave",
    "examinee", "books", "the house", "put aside", "put off", "given back",
)
# fmt: on
#: `make exam` is the name of a target.
_FORBIDDEN: Final = re.compile(
    rf"\b(?:{'|'.join(map(re.escape, _WORDS))})\b|(?<!`make )\bexam\b|(?<!there )\bis no\b(?! longer)", re.IGNORECASE
)
_TEXT_FOLDERS: Final = ("src", "tests", "docs", "tools", "examples", "bench")
_TEXT_SUFFIXES: Final = frozenset(
    {".py", ".md", ".toml", ".json", ".yml", ".yaml", ".sh", ".txt", ".sql", ".proto", ".html"}
)
_EXEMPT: Final = ("docs/adr/", "tools/check_names.py")

_IMPORT: Final = re.compile(
    r"^\s*(?:>>> )?(?:from (ergon_framework[\w.]*) import|import (ergon_framework[\w.]*))", re.MULTILINE
)


def count_names() -> dict[str, list[str]]:
    """Return, by count, the places that it counts; functions and modules are there for the percentages."""
    found: dict[str, list[str]] = defaultdict(list)
    class_places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem.endswith("_pb2"):
            continue
        relative = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                class_places[node.name].append(f"{relative}:{node.lineno}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found["functions"].append(node.name)
                if _is_participle(node):
                    found["participles"].append(f"{relative}:{node.lineno} {node.name}")
    for name, places in sorted(class_places.items()):
        if len(places) > 1:
            found["repeated_class_names"].append(f"{name}: {', '.join(places)}")
    return found


def find_single_importers() -> tuple[list[str], int]:
    """Return the modules that exactly one module imports, which is in the same folder, and the number of modules.

    What a package exports from its ``__init__`` is for its users, so such a module does not count.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    modules = {_module_name(path): path for path in PACKAGE.rglob("*.py")}
    for importer, path in modules.items():
        for imported in _iter_imports(path, modules):
            if imported != importer:
                importers[imported].add(importer)
    single = []
    for name, path in sorted(modules.items()):
        if path.name == "__init__.py" or len(importers[name]) != 1:
            continue
        [only] = importers[name]
        if modules[only].parent == path.parent and modules[only].name != "__init__.py":
            single.append(f"{name} (by {only})")
    return single, len(modules)


def find_document_imports() -> Counter[str]:
    """Return the module paths that documents, examples and templates import, with the number of imports."""
    paths: Counter[str] = Counter()
    files = [
        ROOT / "README.md",
        *_iter_files("docs"),
        *_iter_files("examples"),
        *(PACKAGE / "cli" / "templates").rglob("*"),
    ]
    for path in files:
        if path.is_file() and path.suffix in {".md", ".py"} and not _is_exempt(path):
            paths.update(match[1] or match[2] for match in _IMPORT.finditer(path.read_text()))
    return paths


def find_words() -> list[str]:
    """Return the lines that contain a forbidden word."""
    lines = []
    for path in [ROOT / "README.md", *(file for folder in _TEXT_FOLDERS for file in _iter_files(folder))]:
        if path.suffix not in _TEXT_SUFFIXES or _is_exempt(path):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            lines += [f"{path.relative_to(ROOT)}:{number} {match[0]}" for match in _FORBIDDEN.finditer(line)]
    return lines


def _is_participle(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if any(name == "property" or name.endswith((".setter", "cached_property")) for name in decorators):
        return False
    first = node.name.strip("_").split("_")[0]
    return first not in _VERBS and (first in _IRREGULAR or (first.endswith("ed") and len(first) > len("need")))


def _iter_imports(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


def _iter_files(folder: str) -> Iterator[Path]:
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file() and not {"node_modules", "target", "__pycache__", ".venv"} & set(path.parts):
            yield path


def _is_exempt(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(_EXEMPT)


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def main() -> int:
    """Print the counts; return 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each place that counts")
    options = parser.parse_args()
    names = count_names()
    single, module_count = find_single_importers()
    imports, words = find_document_imports(), find_words()
    counts = {
        "functions": len(names["functions"]),
        "participle_percent": round(100 * len(names["participles"]) / len(names["functions"]), 1),
        "repeated_class_names": len(names["repeated_class_names"]),
        "modules": module_count,
        "single_importer_percent": round(100 * len(single) / module_count, 1),
        "document_import_paths": len(imports),
        "forbidden_words": len(words),
    }
    if options.list:
        for place in [*names["participles"], *names["repeated_class_names"], *single, *imports, *words]:
            print(place)
    exceeded = {name: limit for name, limit in LIMITS.items() if counts[name] > limit}
    print(json.dumps({**counts, "exceeded": exceeded}))
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
