"""A handler call that has not started is not a result."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ergon_framework.engine.effects import reject_unstarted_coroutine


async def coroutine() -> None: ...


def generator() -> Any:
    yield


async def stream() -> Any:
    yield


@pytest.mark.parametrize("value", [None, 0, [], coroutine, object()])
def test_a_plain_value_is_returned_unchanged(value: Any) -> None:
    assert reject_unstarted_coroutine(value) is value


@pytest.mark.parametrize("create, name", [(coroutine, "coroutine"), (generator, "generator")])
def test_an_unstarted_coroutine_or_generator_is_rejected_and_closed(create: Any, name: str) -> None:
    unstarted = create()
    with pytest.raises(TypeError, match=f"returned a {name} instead of a result"):
        reject_unstarted_coroutine(unstarted)
    state = inspect.getcoroutinestate if name == "coroutine" else inspect.getgeneratorstate
    assert state(unstarted) in {inspect.CORO_CLOSED, inspect.GEN_CLOSED}


def test_an_async_generator_is_rejected() -> None:
    with pytest.raises(TypeError, match="returned a async_generator instead of a result"):
        reject_unstarted_coroutine(stream())
