"""The same stories of execute over books in PostgreSQL, in virtual time: the database goes by the story's clock."""

from __future__ import annotations

import inspect

import pytest

from tests.servers.steered import SteeredBooks, steered_database
from tests.twins import providing, test_provider_execute

# Those that bring their own books, to have them misbehave, are about no others.
globals().update(
    {
        name: story
        for name, story in vars(test_provider_execute).items()
        if name.startswith("test_")
        and "flavour" in inspect.signature(story).parameters
        and "books=" not in inspect.getsource(story)
    }
)


class AtOnce(SteeredBooks):
    """Visited in place: a virtual clock does not wait for a real server."""

    waits = False


@pytest.fixture(scope="module")
def kept(postgres):
    books = AtOnce(steered_database(postgres))
    yield books
    books.close()


@pytest.fixture(autouse=True)
def in_postgres(kept, monkeypatch):
    monkeypatch.setattr(providing, "MemoryBooks", kept.empty)
