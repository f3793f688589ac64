"""The public names of each public package, frozen in a snapshot; `python tools/snapshot.py` writes a new one."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import ergon_framework
from ergon_framework._util.exports import lazy_exports
from ergon_framework.errors import MissingExtraError
from tests.architecture.rules import PACKAGE
from tools.snapshot import PUBLIC_API, ROOT, list_public_names, render_public_api

#: An import statement in a document, an example or a template.
IMPORT = re.compile(
    rf"^\s*(?:from ({PACKAGE}[\w.]*) import (\([^)]*\)|[^\n;#]+)|import ({PACKAGE}[\w.]*))", re.MULTILINE
)
FOLDERS = ("docs", "examples", f"src/{PACKAGE}/cli/templates")
MAX_PACKAGES, MAX_NAMES = 16, 204


def find_private_imports(text: str) -> list[str]:
    """Return the imports of names that no public package exports."""
    public_names = list_public_names()
    private = []
    for match in IMPORT.finditer(text):
        package, names, module = match.groups()
        imported = [name.split(" as ")[0].strip() for name in (names or "").strip("()\n ").split(",")]
        private += [f"{package}.{name}" for name in imported if name and name not in public_names.get(package, ())]
        private += [module] if module and module != PACKAGE else []
    return private


def list_documents() -> list[Path]:
    files = [ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    return [path for path in files if path.suffix in {".md", ".py", ".tmpl"} and "adr" not in path.parts]


def test_the_public_names_are_those_of_the_snapshot():
    assert render_public_api() == PUBLIC_API.read_text(encoding="utf-8"), (
        "run python tools/snapshot.py if this is meant"
    )


def test_the_public_api_is_small():
    names = list_public_names()
    assert len(names) <= MAX_PACKAGES
    assert sum(map(len, names.values())) <= MAX_NAMES


def test_documents_examples_and_templates_import_public_names_only():
    documents = list_documents()
    assert len(documents) > 50
    assert {str(path): private for path in documents if (private := find_private_imports(path.read_text()))} == {}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("from ergon_framework import consumer, queue as q", []),
        ("    from ergon_framework.facts import (\n    Fact,\n    Facts,\n)", []),
        ("import ergon_framework", []),
        ("import ergon_framework.errors", ["ergon_framework.errors"]),
        ("from ergon_framework.facts import Fact, Nothing", ["ergon_framework.facts.Nothing"]),
        ("from ergon_framework.facts.model import Fact", ["ergon_framework.facts.model.Fact"]),
    ],
)
def test_an_import_of_a_private_name_is_caught(text, expected):
    assert find_private_imports(text) == expected


@pytest.mark.parametrize("package", list_public_names())
def test_every_public_name_can_be_imported_and_completed(package):
    module = import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    typed = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(module.__all__) <= typed, "an editor completes only names that are imported for type checkers"


def test_every_name_of_the_root_is_imported_eagerly():
    assert [name for name in ergon_framework.__all__ if name not in vars(ergon_framework)] == []


def test_a_name_whose_extra_is_missing_names_the_extra_on_its_first_use():
    load = lazy_exports(
        "ergon_framework.jobs", {"client": ("JobClient",)}, extras={"client": ("postgres", "no_driver")}
    )
    with pytest.raises(MissingExtraError, match=r"ergon-framework\[postgres\]"):
        load("JobClient")
