"""The two flavours: every test of this folder that asks for them runs once on threads and once on asyncio."""

from __future__ import annotations

import pytest

from tests.twins.world import FLAVOURS, World


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return request.param


@pytest.fixture
def build(flavour):
    """Makes worlds of one flavour from one description, and leaves none of them running."""
    worlds = []

    def make(**behaviour):
        worlds.append(World(flavour, **behaviour))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
