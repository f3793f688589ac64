"""The bill of materials names every runtime dependency, with the pinned hashes."""

from __future__ import annotations

import json

import pytest

from tools import sbom


def test_a_pin_has_its_version_and_all_its_hashes():
    text = f"One_Two==1.0 ; python_version < '3.12' \\\n    --hash=sha256:{'b' * 64} \\\n    --hash=sha256:{'a' * 64}\n"
    text += f"    # via x\nthree==2 \\\n    --hash=sha256:{'c' * 64}\n"
    assert sbom.parse_pins(text) == {("one-two", "1.0"): ["a" * 64, "b" * 64], ("three", "2"): ["c" * 64]}


def test_the_core_and_every_extra_are_in_it_with_hashes_and_no_tool_is():
    components = {component["name"]: component for component in sbom.build_document()["components"]}
    assert {"pydantic", "pydantic-core", "opentelemetry-api", "psycopg", "psycopg-binary", "typer", "hiredis"} <= set(
        components
    )
    assert {"pytest", "ruff", "mypy", "hypothesis"}.isdisjoint(components)
    assert all(component["hashes"] for component in components.values())
    assert [name for name, component in components.items() if "licenses" not in component] == []


def test_every_referenced_component_is_listed():
    document = sbom.build_document()
    references = {component["bom-ref"] for component in [document["metadata"]["component"], *document["components"]]}
    assert {entry["ref"] for entry in document["dependencies"]} == references
    assert {other for entry in document["dependencies"] for other in entry["dependsOn"]} <= references


def test_two_runs_give_the_same_bytes():
    assert json.dumps(sbom.build_document()) == json.dumps(sbom.build_document())


def test_what_is_not_pinned_as_it_is_installed_is_refused(monkeypatch):
    monkeypatch.setattr(sbom, "parse_pins", lambda text: {})
    with pytest.raises(sbom.UnpinnedError, match="make constraints"):
        sbom.build_document()
