"""The engine itself carries the caller's context into every body: CON-18, PRO-21, DX-16."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from typing import Any

import pytest
from opentelemetry import baggage, context

from ergon_framework import ConsumerPolicy, MemoryConnector, ProducerPolicy, Transaction, consumer, producer, scope
from ergon_framework.task.mixins import utils

pytestmark = pytest.mark.spec("CON-18", "PRO-21", "DX-16")

caller: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="unset")
SIDES = ("consume", "produce")


@pytest.fixture(autouse=True)
def _callers_context():
    variable, attached = caller.set("the caller's"), context.attach(baggage.set_baggage("tenant", "acme"))
    yield
    context.detach(attached)
    caller.reset(variable)


class Bodies:
    """Notes what each body sees; the first attempt at process or produce stays beyond its time."""

    def __init__(self, *, fail: bool = False) -> None:
        self.seen: list[tuple[str, int, str, Any]] = []
        self._fail = fail

    def note(self) -> tuple[str, int]:
        below = scope.current()
        self.seen.append((below.step, below.attempt, caller.get(), baggage.get_baggage("tenant")))
        caller.set("changed by a body")
        return below.step, below.attempt

    def end(self, step: str) -> None:
        if self._fail and step in ("process", "produce"):
            raise ValueError("down")


def run(side: str, flavour: str, bodies: Bodies) -> None:
    """One transaction whose first attempt times out, under the public API."""

    def body(payload: Any) -> str:
        step, attempt = bodies.note()
        while attempt == 0 and not scope.current().cancelled:
            utils.run_with_timeout(lambda: None, 1.0)
        bodies.end(step)
        return "done"

    async def body_async(payload: Any) -> str:
        step, attempt = bodies.note()
        if attempt == 0:
            await asyncio.Event().wait()
        bodies.end(step)
        return "done"

    def handler(payload: Any, more: Any) -> None:
        bodies.note()

    async def handler_async(payload: Any, more: Any) -> None:
        bodies.note()

    threads = flavour == "threads"
    retry = {"retry": {"timeout": 0.05, "max_attempts": 2, "backoff": 0.0}}
    queue = MemoryConnector("orders")
    if side == "consume":
        queue.dispatch([Transaction("a", {})])
        make: Any = consumer(queue, policy=ConsumerPolicy.load({"steps": {"process": retry}}))
    else:
        make = producer(queue, policy=ProducerPolicy.load({"steps": {"produce": retry}}))
    task = make(body if threads else body_async)
    task.on_success(handler if threads else handler_async)
    task.on_failure(handler if threads else handler_async)

    def call() -> Any:
        return task.consume_transactions() if side == "consume" else task.produce_transactions([Transaction("a", {})])

    async def main() -> None:
        await call()

    if inspect.iscoroutinefunction(task.produce_transactions if side == "produce" else task.consume_transactions):
        asyncio.run(main())
    else:
        call()


@pytest.mark.parametrize("side", SIDES)
def test_every_body_runs_in_a_copy_of_the_callers_context_also_after_a_timeout(side, flavour):
    first = "process" if side == "consume" else "produce"
    bodies = Bodies()
    run(side, flavour, bodies)
    same = ("the caller's", "acme")
    assert bodies.seen == [(first, 0, *same), (first, 1, *same), ("success", 0, *same)]
    assert caller.get() == "the caller's"


@pytest.mark.parametrize("side", SIDES)
def test_so_does_the_exception_handler(side, flavour):
    first = "process" if side == "consume" else "produce"
    bodies = Bodies(fail=True)
    run(side, flavour, bodies)
    same = ("the caller's", "acme")
    assert bodies.seen == [(first, 0, *same), (first, 1, *same), ("exception", 0, *same)]


def test_the_helpers_carry_the_same_context():
    def seen() -> tuple[str, Any]:
        return caller.get(), baggage.get_baggage("tenant")

    async def seen_async() -> tuple[str, Any]:
        return seen()

    async def main() -> list[Any]:
        return [await utils.with_context_async(seen_async)(), await utils.run_with_timeout_async(seen_async, 5.0)]

    same = ("the caller's", "acme")
    assert [utils.with_context(seen)(), utils.run_with_timeout(seen, 5.0), *asyncio.run(main())] == [same] * 4
