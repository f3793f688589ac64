"""The two variants: every test of this folder that requests ``variant`` runs once on threads and once on asyncio."""

from __future__ import annotations

import pytest

from tests.both_drivers.harness import VARIANTS, World


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture
def build(variant):
    """Return a function that makes worlds of one variant; every world is closed after the test."""
    worlds = []

    def make_world(**behaviour):
        worlds.append(World(variant, **behaviour))
        return worlds[-1]

    yield make_world
    for world in worlds:
        world.close()
