"""The engine carries the caller's context into every handler call: CON-18, PRO-21, DX-16."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from typing import Any

import pytest
from opentelemetry import baggage, context

from ergon_framework import ConsumerPolicy, MemoryConnector, ProducerPolicy, Transaction, consumer, producer, scope
from ergon_framework.task import context as utils

pytestmark = pytest.mark.spec("CON-18", "PRO-21", "DX-16")

caller: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="unset")
SIDES = ("consume", "produce")


@pytest.fixture(autouse=True)
def _set_caller_context():
    variable, attached = caller.set("the caller's"), context.attach(baggage.set_baggage("tenant", "acme"))
    yield
    context.detach(attached)
    caller.reset(variable)


class HandlerRecorder:
    """Records what each handler call sees; the first attempt at process or produce exceeds its timeout."""

    def __init__(self, *, fail: bool = False) -> None:
        self.seen: list[tuple[str, int, str, Any]] = []
        self._fail = fail

    def record(self) -> tuple[str, int]:
        current = scope.current()
        self.seen.append((current.step, current.attempt, caller.get(), baggage.get_baggage("tenant")))
        caller.set("changed by a body")
        return current.step, current.attempt

    def end(self, step: str) -> None:
        if self._fail and step in ("process", "produce"):
            raise ValueError("down")


def run_one_transaction(side: str, variant: str, recorder: HandlerRecorder) -> None:
    """Run one transaction whose first attempt times out, through the public API."""

    def body(payload: Any) -> str:
        step, attempt = recorder.record()
        while attempt == 0 and not scope.current().cancelled:
            utils.run_with_timeout(lambda: None, 1.0)
        recorder.end(step)
        return "done"

    async def body_async(payload: Any) -> str:
        step, attempt = recorder.record()
        if attempt == 0:
            await asyncio.Event().wait()
        recorder.end(step)
        return "done"

    def handler(transaction: Transaction) -> None:
        recorder.record()

    async def handler_async(transaction: Transaction) -> None:
        recorder.record()

    threads = variant == "threads"
    retry = {"retry": {"timeout": 0.05, "max_attempts": 2, "backoff": 0.0}}
    queue = MemoryConnector("orders")
    if side == "consume":
        queue.dispatch([Transaction({}, id="a")])
        decorate: Any = consumer(queue, policy=ConsumerPolicy.load({"steps": {"process": retry}}))
    else:
        decorate = producer(queue, policy=ProducerPolicy.load({"steps": {"produce": retry}}))
    task = decorate(body if threads else body_async)
    task.on_success(handler if threads else handler_async)
    task.on_failure(handler if threads else handler_async)

    def call() -> Any:
        return (
            task.consume_transactions() if side == "consume" else task.produce_transactions([Transaction({}, id="a")])
        )

    async def main() -> None:
        await call()

    if inspect.iscoroutinefunction(task.produce_transactions if side == "produce" else task.consume_transactions):
        asyncio.run(main())
    else:
        call()


@pytest.mark.parametrize("side", SIDES)
def test_every_handler_call_runs_in_a_copy_of_the_callers_context_even_after_a_timeout(side, variant):
    first = "process" if side == "consume" else "produce"
    recorder = HandlerRecorder()
    run_one_transaction(side, variant, recorder)
    expected = ("the caller's", "acme")
    assert recorder.seen == [(first, 0, *expected), (first, 1, *expected), ("success", 0, *expected)]
    assert caller.get() == "the caller's"


@pytest.mark.parametrize("side", SIDES)
def test_the_exception_handler_runs_in_a_copy_of_the_callers_context(side, variant):
    first = "process" if side == "consume" else "produce"
    recorder = HandlerRecorder(fail=True)
    run_one_transaction(side, variant, recorder)
    expected = ("the caller's", "acme")
    assert recorder.seen == [(first, 0, *expected), (first, 1, *expected), ("exception", 0, *expected)]


def test_the_helpers_carry_the_same_context():
    def read_context() -> tuple[str, Any]:
        return caller.get(), baggage.get_baggage("tenant")

    async def read_context_async() -> tuple[str, Any]:
        return read_context()

    async def main() -> list[Any]:
        return [
            await utils.with_context_async(read_context_async)(),
            await utils.run_with_timeout_async(read_context_async, 5.0),
        ]

    expected = ("the caller's", "acme")
    assert [utils.with_context(read_context)(), utils.run_with_timeout(read_context, 5.0), *asyncio.run(main())] == [
        expected
    ] * 4
