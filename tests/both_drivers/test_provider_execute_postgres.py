"""The stories of execute with provider state in PostgreSQL, in virtual time: the database uses the story's clock."""

from __future__ import annotations

import inspect

import pytest

from tests.both_drivers import provider_harness, test_provider_execute
from tests.servers.controlled import ControlledProviderState, create_controlled_database

# Tests that pass their own provider state, to make it fail, are excluded.
globals().update(
    {
        name: story
        for name, story in vars(test_provider_execute).items()
        if name.startswith("test_")
        and "variant" in inspect.signature(story).parameters
        and "state_store=" not in inspect.getsource(story)
    }
)


class SynchronousSteeredState(ControlledProviderState):
    """Calls the database in place: a virtual clock does not wait for a real server."""

    may_block = False


@pytest.fixture(scope="module")
def postgres_state(postgres):
    state_store = SynchronousSteeredState(create_controlled_database(postgres))
    yield state_store
    state_store.close()


@pytest.fixture(autouse=True)
def use_postgres(postgres_state, monkeypatch):
    monkeypatch.setattr(provider_harness, "MemoryProviderState", postgres_state.empty)
