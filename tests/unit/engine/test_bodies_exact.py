"""A body that has not even begun is no result."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ergon_framework.engine.drivers.bodies import checked


async def coroutine() -> None: ...


def generator() -> Any:
    yield


async def stream() -> Any:
    yield


@pytest.mark.parametrize("value", [None, 0, [], coroutine, object()])
def test_a_value_is_itself(value: Any) -> None:
    assert checked(value) is value


@pytest.mark.parametrize("make, name", [(coroutine, "coroutine"), (generator, "generator")])
def test_what_has_not_begun_is_refused_and_closed(make: Any, name: str) -> None:
    body = make()
    with pytest.raises(TypeError, match=f"returned a {name} in place of a result"):
        checked(body)
    state = inspect.getcoroutinestate if name == "coroutine" else inspect.getgeneratorstate
    assert state(body) in {inspect.CORO_CLOSED, inspect.GEN_CLOSED}


def test_a_stream_is_refused_too() -> None:
    with pytest.raises(TypeError, match="returned a async_generator in place of a result"):
        checked(stream())
