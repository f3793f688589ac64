"""Write the snapshot of names that must not change by accident: `python tools/snapshot.py`, then review the diff."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from tests.architecture.rules import PACKAGE, PUBLIC_PACKAGES  # noqa: E402 - this file is also run as a script

PUBLIC_API = ROOT / "tests" / "architecture" / "public_api.txt"


def list_public_names() -> dict[str, list[str]]:
    """Return the public names of each public package."""
    paths = [f"{PACKAGE}.{package}".rstrip(".") for package in PUBLIC_PACKAGES]
    return {path: sorted(import_module(path).__all__) for path in paths}


def render_public_api() -> str:
    """Return the public packages, each with its names, one a line."""
    return "".join("\n    ".join([package, *names]) + "\n" for package, names in list_public_names().items())


if __name__ == "__main__":
    PUBLIC_API.write_text(render_public_api(), encoding="utf-8")
    names_by_package = list_public_names()
    print(f"{PUBLIC_API.name}: {sum(map(len, names_by_package.values()))} names in {len(names_by_package)} packages")
