"""The module paths that the source documents name."""

from __future__ import annotations

import importlib

import pytest

PACKAGE = "ergon_framework.task"


@pytest.mark.parametrize(
    "path, origins",
    [
        ("exceptions", ["worker.exceptions"]),
        ("mixins.consumer", ["task.consumer"]),
        ("mixins.producer", ["task.producer"]),
        ("mixins.policies", ["worker.policies"]),
        ("mixins.utils", ["task.context"]),
    ],
)
def test_a_documented_path_exports_the_objects_of_the_module_that_defines_them(path, origins):
    module = importlib.import_module(f"{PACKAGE}.{path}")
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name).__module__.removeprefix("ergon_framework.") in origins
