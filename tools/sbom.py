"""Writes what the package needs when it runs, as CycloneDX JSON: `python tools/sbom.py FILE`.

Each component is installed here and pinned in constraints/dev.txt, from where its hashes come: those of every file in
which that version is published. No time and no random number is in it, so two runs give the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
NAME: Final = "ergon-framework"
#: Extras that are tools of this project, and not for those who run it.
TOOLS: Final = frozenset({"dev", "testing"})
PINNED: Final = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>[^\s;\\]+)[^\n]*\n(?P<hashes>(?:\s+--hash=\S+[^\n]*\n?)+)", re.MULTILINE
)


class Unpinned(Exception):
    """What is needed is not pinned as it is installed."""


def pins(text: str) -> dict[tuple[str, str], list[str]]:
    """The hashes of each pinned name and version."""
    return {
        (canonicalize_name(match["name"]), match["version"]): sorted(
            re.findall(r"sha256:([0-9a-f]{64})", match["hashes"])
        )
        for match in PINNED.finditer(text)
    }


def needed(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """What the installed *name* with *extras* needs on this interpreter."""
    for line in distribution(name).requires or ():
        wanted = Requirement(line)
        environments = [{"extra": extra} for extra in (extras or {""})]
        if wanted.marker is None or any(wanted.marker.evaluate(environment) for environment in environments):
            yield canonicalize_name(wanted.name), frozenset(wanted.extras)


def closure(name: str, extras: frozenset[str]) -> dict[str, set[str]]:
    """Everything below *name*, and what each needs itself."""
    found: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(name, extras)]
    while waiting:
        asked = waiting.pop()
        if asked in seen:
            continue
        seen.add(asked)
        below = list(needed(*asked))
        found.setdefault(asked[0], set()).update(other for other, _ in below if other != asked[0])
        waiting += below
    return found


def component(found: Distribution, hashes: list[str]) -> dict[str, Any]:
    """One library as CycloneDX names it."""
    name = canonicalize_name(found.metadata["Name"])
    told: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference(name),
        "name": name,
        "version": found.version,
        "purl": reference(name),
        "hashes": [{"alg": "SHA-256", "content": content} for content in hashes],
    }
    licence = found.metadata.get("License-Expression")
    if licence:
        told["licenses"] = [{"expression": licence}]
    elif named := _licence(found):
        told["licenses"] = [{"license": {"name": named}}]
    return told


def _licence(found: Distribution) -> str:
    classified = [
        line.rpartition(" :: ")[2]
        for line in found.metadata.get_all("Classifier") or ()
        if line.startswith("License :: ") and line.count(" :: ") > 1
    ]
    # Some put the whole text of their licence into this field.
    return ", ".join(classified) or (found.metadata.get("License") or "").partition("\n")[0][:80]


def reference(name: str) -> str:
    return f"pkg:pypi/{name}@{distribution(name).version}"


def document() -> dict[str, Any]:
    """The whole bill of materials."""
    pinned = pins((ROOT / "constraints" / "dev.txt").read_text(encoding="utf-8"))
    own = distribution(NAME)
    extras = frozenset(own.metadata.get_all("Provides-Extra") or ()) - TOOLS
    tree = closure(NAME, extras)
    components = []
    for name in sorted(tree.keys() - {NAME}):
        try:
            found = distribution(name)
            hashes = pinned[name, found.version]
        except (PackageNotFoundError, KeyError) as error:
            raise Unpinned(f"{name} is needed and not pinned as it is installed; run: make constraints venv") from error
        components.append(component(found, hashes))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": reference(NAME),
                "name": NAME,
                "version": own.version,
                "purl": reference(NAME),
                "licenses": [{"expression": own.metadata["License-Expression"]}],
            }
        },
        "components": components,
        "dependencies": [
            {"ref": reference(name), "dependsOn": sorted(map(reference, tree[name]))} for name in sorted(tree)
        ],
    }


if __name__ == "__main__":
    target = Path(sys.argv[1])
    told = document()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(f"{target}: {len(told['components'])} components")
