"""The lowest allowed versions: `make lowest` installs the lower bounds of pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import lowest

ROOT = Path(__file__).parents[3]
#: The first version without a vulnerability that concerns its use here, as listed in docs/dependencies.md.
FIRST_SAFE_VERSIONS = {
    "cryptography": "50.0.0",
    "grpcio": "1.84.0",
    "protobuf": "6.33.5",
    "pyjwt": "2.15.1",
    "pytest": "9.0.3",
    "starlette": "1.3.1",
}


def read_file(*path: str) -> str:
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


@pytest.mark.spec("SEC-17")
def test_every_dependency_is_tested_at_its_lower_bound():
    pinned = {canonicalize_name(each.name): each for each in lowest.list_pins(read_file("constraints", "lowest.txt"))}
    for requirement in lowest.list_lowest(read_file("pyproject.toml")):
        (bound,) = requirement.specifier
        (pin,) = pinned[canonicalize_name(requirement.name)].specifier
        assert Version(pin.version) == Version(bound.version), f"{requirement.name}: run make constraints"


@pytest.mark.spec("SEC-17")
def test_no_lower_bound_admits_a_known_vulnerability():
    bounds = {
        canonicalize_name(each.name): Version(next(iter(each.specifier)).version)
        for each in lowest.list_lowest(read_file("pyproject.toml"))
    }
    assert {name for name, safe in FIRST_SAFE_VERSIONS.items() if bounds[name] < Version(safe)} == set()
    for name in FIRST_SAFE_VERSIONS:
        assert f"| `{name}` |" in read_file("docs", "dependencies.md")


@pytest.mark.spec("SEC-17")
def test_ci_installs_the_lowest_versions():
    assert "make lowest" in read_file(".ci", "run")


@pytest.mark.spec("SEC-17")
def test_a_dependency_without_a_lower_bound_is_rejected():
    project = '[project]\ndependencies = ["pydantic<3"]\n[project.optional-dependencies]\ndev = []\n'
    with pytest.raises(lowest.UnboundedError, match="write pydantic>=VERSION"):
        list(lowest.list_lowest(project))
