"""Print the lowest allowed version of every direct dependency, for `uv pip compile`: `python tools/lowest.py`.

Dependencies of the package and its extras are printed at their lower bounds, the tools of the tests as pinned
in constraints/dev.txt. The result is pinned in constraints/lowest.txt, and `make lowest` tests it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
#: The extra with the tools of this project; its lower bounds are not promised to users.
TOOLS: Final = "dev"
#: Tools that no unit test needs; some need newer versions of a dependency than its lower bound.
UNUSED: Final = frozenset(
    {
        "aio-pika",
        "asyncpg",
        "build",
        "django",
        "ergon-framework",
        "mutmut",
        "procrastinate",
        "schemathesis",
        "sentry-sdk",
    }
)
#: Tools that need the version of a dependency with the same number.
PAIRED: Final = frozenset({"grpcio-tools"})


class UnboundedError(Exception):
    """A requirement has no lower bound."""


def list_lowest(project: str) -> Iterator[Requirement]:
    """Return each dependency of the package and its extras at its lower bound; *project* is pyproject.toml."""
    table = tomllib.loads(project)["project"]
    extras = (texts for extra, texts in table["optional-dependencies"].items() if extra != TOOLS)
    paired = (text for text in table["optional-dependencies"][TOOLS] if Requirement(text).name in PAIRED)
    for text in dict.fromkeys([*table["dependencies"], *(text for texts in extras for text in texts), *paired]):
        requirement = Requirement(text)
        bounds = [specifier.version for specifier in requirement.specifier if specifier.operator == ">="]
        if len(bounds) != 1:
            raise UnboundedError(f"{text!r} has no lower bound; write {requirement.name}>=VERSION")
        name = requirement.name + (f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else "")
        yield Requirement(f"{name}=={bounds[0]}")


def list_pins(constraints: str) -> Iterator[Requirement]:
    """Return what the text of a constraints file pins."""
    for match in re.finditer(r"^([\w.-]+==[^\s\\]+(?: ; [^\\\n]+)?)", constraints, re.MULTILINE):
        yield Requirement(match[1])


def list_tools(project: str, constraints: str) -> Iterator[Requirement]:
    """Return the tools that unit tests need, as *constraints* pins them."""
    names = {canonicalize_name(Requirement(text).name) for text in _read_tools(project)}
    lowest = {canonicalize_name(requirement.name) for requirement in list_lowest(project)}
    for pin in list_pins(constraints):
        if canonicalize_name(pin.name) in names - lowest - UNUSED:
            yield pin


def _read_tools(project: str) -> list[str]:
    tools: list[str] = tomllib.loads(project)["project"]["optional-dependencies"][TOOLS]
    return tools


if __name__ == "__main__":
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dev = (ROOT / "constraints" / "dev.txt").read_text(encoding="utf-8")
    for requirement in (*list_lowest(pyproject), *list_tools(pyproject, dev)):
        print(requirement)
