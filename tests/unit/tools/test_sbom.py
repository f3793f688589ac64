"""The bill of materials names all that runs, with the hashes that are pinned."""

from __future__ import annotations

import json

import pytest

from tools import sbom


def test_a_pin_has_its_version_and_all_its_hashes():
    text = f"One_Two==1.0 ; python_version < '3.12' \\\n    --hash=sha256:{'b' * 64} \\\n    --hash=sha256:{'a' * 64}\n"
    text += f"    # via x\nthree==2 \\\n    --hash=sha256:{'c' * 64}\n"
    assert sbom.pins(text) == {("one-two", "1.0"): ["a" * 64, "b" * 64], ("three", "2"): ["c" * 64]}


def test_the_core_and_every_extra_are_in_it_with_hashes_and_no_tool_is():
    found = {component["name"]: component for component in sbom.document()["components"]}
    assert {"pydantic", "pydantic-core", "opentelemetry-api", "psycopg", "psycopg-binary", "typer", "hiredis"} <= set(
        found
    )
    assert {"pytest", "ruff", "mypy", "hypothesis"}.isdisjoint(found)
    assert all(component["hashes"] for component in found.values())
    assert [name for name, component in found.items() if "licenses" not in component] == []


def test_whatever_is_needed_is_listed():
    told = sbom.document()
    known = {component["bom-ref"] for component in [told["metadata"]["component"], *told["components"]]}
    assert {entry["ref"] for entry in told["dependencies"]} == known
    assert {other for entry in told["dependencies"] for other in entry["dependsOn"]} <= known


def test_two_runs_give_the_same_bytes():
    assert json.dumps(sbom.document()) == json.dumps(sbom.document())


def test_what_is_not_pinned_as_it_is_installed_is_refused(monkeypatch):
    monkeypatch.setattr(sbom, "pins", lambda text: {})
    with pytest.raises(sbom.Unpinned, match="make constraints"):
        sbom.document()
