"""The package root: explicit names, frozen in a snapshot; `python tools/snapshot.py` writes a new one."""

from __future__ import annotations

import ast
from pathlib import Path

import ergon_framework
from tools.snapshot import PUBLIC_API, render_public_api


def test_the_public_names_are_those_of_the_snapshot():
    assert render_public_api() == PUBLIC_API.read_text(encoding="utf-8"), (
        "run python tools/snapshot.py if this is meant"
    )


def test_every_public_name_is_imported_eagerly():
    present = vars(ergon_framework)
    assert [name for name in ergon_framework.__all__ if name not in present] == []
    assert len(set(ergon_framework.__all__)) == len(ergon_framework.__all__)


def test_the_package_root_is_small_and_not_lazy():
    tree = ast.parse(Path(str(ergon_framework.__file__)).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert "__getattr__" not in functions
    assert 15 <= len(ergon_framework.__all__) <= 35
