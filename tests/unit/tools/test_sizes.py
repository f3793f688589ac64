"""Every extra is measured."""

from __future__ import annotations

from importlib.metadata import distribution
from importlib.util import find_spec

import pytest

from tools.sizes import MODULES


def test_every_extra_is_measured():
    extras = set(distribution("ergon-framework").metadata.get_all("Provides-Extra"))
    assert set(MODULES) == {"", *extras} - {"dev"}


@pytest.mark.parametrize("module", MODULES.values())
def test_every_measured_module_exists(module):
    assert find_spec(module)
