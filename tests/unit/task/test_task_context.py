"""The four helpers carry the context wherever they take the work."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from ergon_framework.task.context import (
    run_with_timeout,
    run_with_timeout_async,
    with_context,
    with_context_async,
)

variable = contextvars.ContextVar("variable", default="unset")


@pytest.fixture(autouse=True)
def _set_variable():
    token = variable.set("caller's")
    yield
    variable.reset(token)


@pytest.mark.spec("CON-18", "DX-16")
def test_with_context_carries_the_current_context_to_another_thread() -> None:
    seen: list[str] = []

    def note() -> None:
        seen.append(variable.get())
        variable.set("thread's")

    wrapped = with_context(note)
    variable.set("later")
    for _ in range(2):
        thread = threading.Thread(target=wrapped)
        thread.start()
        thread.join(5)
    assert seen == ["caller's", "caller's"], "each call has a copy of its own"
    other = contextvars.Context()
    assert with_context(variable.get, other)() == "unset"


@pytest.mark.spec("CON-18", "DX-16")
def test_with_context_async_carries_the_context_to_another_task() -> None:
    async def note() -> str:
        await asyncio.sleep(0)
        return variable.get()

    async def main() -> tuple[str, str]:
        wrapped = with_context_async(note)
        variable.set("later")
        return await wrapped(), await with_context_async(note, contextvars.Context())()

    assert asyncio.run(main()) == ("caller's", "unset")


@pytest.mark.spec("CON-18", "CON-37")
def test_run_with_timeout_carries_the_context_and_gives_up_in_time() -> None:
    release = threading.Event()
    assert run_with_timeout(variable.get, 5.0) == "caller's"
    assert run_with_timeout(variable.get, None) == "caller's"
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(divmod, 5.0, 1, 0)
    with pytest.raises(TimeoutError, match=r"call timed out after 0.01 s"):
        run_with_timeout(release.wait, 0.01, 10)
    release.set()


@pytest.mark.spec("CON-18", "CON-37")
def test_run_with_timeout_async_carries_the_context_and_cancels_in_time() -> None:
    events: list[str] = []

    async def value() -> str:
        return variable.get()

    async def hang() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            events.append("left")

    async def main() -> None:
        assert await run_with_timeout_async(value, 5.0) == "caller's"
        assert await run_with_timeout_async(value, None) == "caller's"
        with pytest.raises(TimeoutError):
            await run_with_timeout_async(hang, 0.01)

    asyncio.run(main())
    assert events == ["left"]
