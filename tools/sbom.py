"""Write the runtime dependencies of the package as CycloneDX JSON: `python tools/sbom.py FILE`.

Each component is installed here and pinned in constraints/dev.txt, which has its hashes: those of every file in which
that version is published. It contains no time and no random number, so two runs give the same bytes.
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
PACKAGE_NAME: Final = "ergon-framework"
#: Extras that are tools of this project, not dependencies of users.
TOOL_EXTRAS: Final = frozenset({"dev", "testing"})
PIN_PATTERN: Final = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>[^\s;\\]+)[^\n]*\n(?P<hashes>(?:\s+--hash=\S+[^\n]*\n?)+)", re.MULTILINE
)


class UnpinnedError(Exception):
    """A dependency is not pinned at its installed version."""


def parse_pins(text: str) -> dict[tuple[str, str], list[str]]:
    """Return the hashes of each pinned name and version."""
    return {
        (canonicalize_name(match["name"]), match["version"]): sorted(
            re.findall(r"sha256:([0-9a-f]{64})", match["hashes"])
        )
        for match in PIN_PATTERN.finditer(text)
    }


def iter_requirements(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the requirements of the installed *name* with *extras* on this interpreter."""
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in (extras or {""})]
        if requirement.marker is None or any(requirement.marker.evaluate(environment) for environment in environments):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def collect_dependencies(name: str, extras: frozenset[str]) -> dict[str, set[str]]:
    """Return every dependency of *name*, and the direct dependencies of each."""
    dependencies: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = [(name, extras)]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        requirements = list(iter_requirements(*current))
        dependencies.setdefault(current[0], set()).update(other for other, _ in requirements if other != current[0])
        pending += requirements
    return dependencies


def build_component(library: Distribution, hashes: list[str]) -> dict[str, Any]:
    """Return one library as a CycloneDX component."""
    name = canonicalize_name(library.metadata["Name"])
    result: dict[str, Any] = {
        "type": "library",
        "bom-ref": to_purl(name),
        "name": name,
        "version": library.version,
        "purl": to_purl(name),
        "hashes": [{"alg": "SHA-256", "content": content} for content in hashes],
    }
    licence = library.metadata.get("License-Expression")
    if licence:
        result["licenses"] = [{"expression": licence}]
    elif licence_name := _find_licence(library):
        result["licenses"] = [{"license": {"name": licence_name}}]
    return result


def _find_licence(library: Distribution) -> str:
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in library.metadata.get_all("Classifier") or ()
        if line.startswith("License :: ") and line.count(" :: ") > 1
    ]
    # Some libraries put the whole text of their licence into this field.
    return ", ".join(classifiers) or (library.metadata.get("License") or "").partition("\n")[0][:80]


def to_purl(name: str) -> str:
    return f"pkg:pypi/{name}@{distribution(name).version}"


def build_document() -> dict[str, Any]:
    """Return the whole bill of materials."""
    hashes_by_pin = parse_pins((ROOT / "constraints" / "dev.txt").read_text(encoding="utf-8"))
    package = distribution(PACKAGE_NAME)
    extras = frozenset(package.metadata.get_all("Provides-Extra") or ()) - TOOL_EXTRAS
    tree = collect_dependencies(PACKAGE_NAME, extras)
    components = []
    for name in sorted(tree.keys() - {PACKAGE_NAME}):
        try:
            library = distribution(name)
            hashes = hashes_by_pin[name, library.version]
        except (PackageNotFoundError, KeyError) as error:
            raise UnpinnedError(
                f"{name} is needed and not pinned as it is installed; run: make constraints venv"
            ) from error
        components.append(build_component(library, hashes))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": to_purl(PACKAGE_NAME),
                "name": PACKAGE_NAME,
                "version": package.version,
                "purl": to_purl(PACKAGE_NAME),
                "licenses": [{"expression": package.metadata["License-Expression"]}],
            }
        },
        "components": components,
        "dependencies": [
            {"ref": to_purl(name), "dependsOn": sorted(map(to_purl, tree[name]))} for name in sorted(tree)
        ],
    }


if __name__ == "__main__":
    target = Path(sys.argv[1])
    result = build_document()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{target}: {len(result['components'])} components")
