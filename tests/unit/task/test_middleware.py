"""Middleware: what a task refuses, what an unusual call does, and the harness."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from contextlib import asynccontextmanager, contextmanager

import pytest

from ergon_framework import (
    AsyncConsumerMixin,
    AsyncMiddleware,
    AsyncTask,
    ConfigurationError,
    ConsumerMixin,
    ConsumerPolicy,
    MemoryConnector,
    Middleware,
    Task,
    Transaction,
    consumer,
    producer,
    queue,
)
from ergon_framework import scope as scopes
from ergon_framework.clock import Clock
from ergon_framework.engine.aio import await_in_context
from ergon_framework.engine.effects import Call, Interrupted, Ok
from ergon_framework.scope import Scope
from ergon_framework.task.middleware_calls import MiddlewareSet, OpenTransaction, _leave, wrap_lifecycle
from ergon_framework.testing.chaos import assert_one_effect_per_ack, assert_survives
from ergon_framework.testing.harness import TaskHarness
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.policies import ProducerPolicy
from ergon_framework.worker.report import Outcome, OutcomeKind
from tests.unit.task.test_mixins import PlainProducer

TRANSACTION = Transaction({}, id="1")


class Consumer(ConsumerMixin, Task):
    def process_transaction(self, transaction):
        return transaction.id


class AsyncConsumer(AsyncConsumerMixin, AsyncTask):
    async def process_transaction(self, transaction):
        return transaction.id


class Plain(Middleware):
    @contextmanager
    def attempt(self, context):
        yield


class AsyncPlain(AsyncMiddleware):
    @asynccontextmanager
    async def attempt(self, context):
        yield


class BareGenerator(Middleware):
    def transaction(self, context):
        yield


class BareCoroutine(AsyncMiddleware):
    async def attempt(self, context): ...


class AsyncInSync(Middleware):
    @asynccontextmanager
    async def attempt(self, context):
        yield


class SyncInAsync(AsyncMiddleware):
    @contextmanager
    def attempt(self, context):
        yield


@pytest.mark.parametrize(
    "task_class, middleware, message",
    [
        (Consumer, Plain(), "middleware of Consumer is a Plain; pass a list: middleware=[…]"),
        (Consumer, [Plain], "middleware of Consumer has the class Plain; pass an instance: Plain()"),
        (Consumer, [AsyncPlain()], "middleware AsyncPlain is async, and Consumer is not; derive it from Middleware"),
        (
            AsyncConsumer,
            [Plain()],
            "middleware Plain is sync, and AsyncConsumer is not; derive it from AsyncMiddleware",
        ),
        (Consumer, [print], "has a builtin_function_or_method; derive its class from Middleware"),
        (
            Consumer,
            [BareGenerator()],
            "transaction of middleware BareGenerator returns no context manager; decorate it",
        ),
        (AsyncConsumer, [BareCoroutine()], "returns no context manager; decorate it with @asynccontextmanager"),
        (Consumer, [AsyncInSync()], "AsyncInSync is async, and its task is not; decorate it with @contextmanager"),
        (
            AsyncConsumer,
            [SyncInAsync()],
            "SyncInAsync is sync, and its task is not; decorate it with @asynccontextmanager",
        ),
    ],
)
def test_a_task_refuses_middleware_that_it_cannot_run(task_class, middleware, message):
    with pytest.raises(ConfigurationError) as refused:
        task_class(MemoryConnector("orders"), middleware=middleware)
    assert message in str(refused.value)


def test_middleware_is_an_attribute_of_the_class_or_a_keyword():
    class Declared(Consumer):
        middleware = (Plain(),)

    assert Declared(MemoryConnector("orders")).middleware is Declared.middleware
    assert Declared(MemoryConnector("orders"), middleware=[]).middleware == []
    Declared.middleware = (AsyncPlain(),)
    with pytest.raises(ConfigurationError, match="derive it from Middleware"):
        Declared(MemoryConnector("orders"))
    assert AsyncConsumer(MemoryConnector("orders"), middleware=[AsyncPlain()]).middleware


def test_middleware_that_is_set_later_is_checked_when_the_loop_starts():
    task = Consumer(MemoryConnector("orders"))
    task.middleware = [Plain]
    with pytest.raises(ConfigurationError, match="pass an instance"):
        task.run()


def test_the_default_methods_surround_nothing():
    for middleware in (Middleware(), AsyncMiddleware()):
        assert middleware.transaction(None).__class__ is middleware.attempt(None).__class__
    chosen = MiddlewareSet([Middleware(), Plain()], task="t", queue="q", is_async=False)
    assert (len(chosen.transaction_parts), len(chosen.attempt_parts)) == (0, 1)


def test_a_step_without_a_handler_of_the_task_is_not_surrounded():
    # A trace that is recorded shows the success step of every transaction, so that step can run without a handler.
    task = PlainProducer()
    spec = task._create_produce_spec(ProducerPolicy(), Clock())
    assert spec.skips_success
    middleware = MiddlewareSet([Plain()], task="t", queue="q", is_async=False)
    wrapped, start = wrap_lifecycle(middleware, spec, task._start_producing, handles_exception=False)
    assert (wrapped.success, wrapped.exception) == (spec.success, spec.exception)
    assert wrapped.process.fn is not spec.process.fn
    assert start == task._start_producing


def test_a_coroutine_of_a_sync_handler_is_an_error_before_the_middleware_exits():
    errors = []

    class Session(Middleware):
        @contextmanager
        def attempt(self, context):
            try:
                yield
            except TypeError as error:
                errors.append(str(error))
                raise

    async def work():
        raise AssertionError

    class Wrong(Consumer):
        def process_transaction(self, transaction):
            return work()

    orders = MemoryConnector("orders")
    orders.dispatch([TRANSACTION])
    report = Wrong(orders, middleware=[Session()]).run(
        ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}})
    )
    assert report.counts[OutcomeKind.FAILED] == 1
    assert "a handler returned a coroutine" in errors[0]


def test_a_plain_function_as_the_handler_of_an_async_task_has_middleware_too():
    steps = []

    class Noted(AsyncMiddleware):
        @asynccontextmanager
        async def attempt(self, context):
            steps.append(context.step)
            yield

    class Mixed(AsyncConsumer):
        def process_transaction(self, transaction):
            steps.append("handler")

    orders = MemoryConnector("orders")
    orders.dispatch([TRANSACTION])
    report = asyncio.run(Mixed(orders, middleware=[Noted()]).run())
    assert report.counts[OutcomeKind.SUCCEEDED] == 1
    assert steps == ["process", "handler"]


def test_a_call_that_starts_after_the_outcome_was_decided_runs_no_handler():
    opened = OpenTransaction(MiddlewareSet([Plain()], task="t", queue="q", is_async=False), TRANSACTION)
    assert opened.decide(Outcome(TRANSACTION, OutcomeKind.FAILED))
    calls = []

    def call_late():
        scopes.set_scope(Scope(TRANSACTION, "process", 0))
        opened.call(calls.append, 1)

    with pytest.raises(TransactionException) as refused:
        contextvars.copy_context().run(call_late)
    assert refused.value.code == "attempt_abandoned"
    assert (calls, opened.has_entered) == ([], False)
    opened.log_slow_exit(1.0)  # nothing exits, so there is nothing to log


def test_an_interrupt_before_the_exit_does_not_prevent_it():
    task = PlainProducer()
    spec = task._create_produce_spec(
        ProducerPolicy.load({"steps": {"produce": {"retry": {"timeout": None}}}}), Clock(monotonic=lambda: 0.0)
    )
    opened = OpenTransaction(MiddlewareSet([], task="t", queue="q", is_async=False), TRANSACTION)
    script = _leave(opened, spec, Outcome(TRANSACTION, OutcomeKind.SUCCEEDED))
    first = next(script)
    assert (type(first), first.until) == (Call, float("inf"))
    second = script.send(Interrupted())
    assert second.until == 0.5
    assert second.fn() is None
    with pytest.raises(StopIteration):
        script.send(Ok(None))


@pytest.mark.parametrize("waits", [False, True])
def test_await_in_context_runs_every_step_in_the_context(waits):
    variable = contextvars.ContextVar("variable", default="unset")

    async def work(value):
        variable.set(value)
        if waits:
            await asyncio.sleep(0)
        return variable.get()

    async def main():
        context = contextvars.copy_context()
        return await await_in_context(context, work, "inside"), variable.get(), context[variable]

    assert asyncio.run(main()) == ("inside", "unset", "inside")


def make_task(kind, log):
    if kind == "sync":

        class Noted(Middleware):
            @contextmanager
            def transaction(self, context):
                yield
                log.append(context.outcome.kind)

            @contextmanager
            def attempt(self, context):
                log.append((context.task, context.step, context.attempt))
                yield

        @consumer(queue("orders"), middleware=[Noted()])
        def charge(order):
            log.append(order)

        return charge

    class AsyncNoted(AsyncMiddleware):
        @asynccontextmanager
        async def transaction(self, context):
            yield
            log.append(context.outcome.kind)

        @asynccontextmanager
        async def attempt(self, context):
            log.append((context.task, context.step, context.attempt))
            yield

    @consumer(queue("orders"), middleware=[AsyncNoted()])
    async def charge_async(order):
        log.append(order)

    charge_async._name = "charge"
    return charge_async


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_harness_runs_middleware_like_a_worker(kind):
    log = []
    harness = TaskHarness(make_task(kind, log))
    harness.send(Transaction("payload", id="1"))
    result = harness.run()
    assert result.acked == {"1": 1}
    assert log == [("charge", "process", 0), "payload", OutcomeKind.SUCCEEDED]


class Ledger:
    def __init__(self, effects):
        self.effects = effects

    def charge(self, order, key):
        self.effects.record(order, key=key)


def make_balanced_task(entries):
    """Return a task whose middleware notes each entry and each exit."""

    class Balanced(Middleware):
        @contextmanager
        def transaction(self, context):
            with self._note("transaction"):
                yield

        @contextmanager
        def attempt(self, context):
            with self._note("attempt"):
                yield

        @contextmanager
        def _note(self, part):
            entries[part] += 1
            try:
                yield
            finally:
                entries[part] -= 1

    @consumer(queue("orders"), middleware=[Balanced()], services={"ledger": None})
    def charge(order, transaction, ledger):
        ledger.charge(transaction.id, transaction.derive("charge"))

    return charge


def test_middleware_stays_balanced_in_trials_with_faults_at_every_place():
    entries = Counter()
    task, orders = make_balanced_task(entries), [Transaction({}, id=f"order-{number}") for number in range(3)]

    def make(effects):
        harness = TaskHarness(task, ledger=Ledger(effects))
        harness.send(*orders)
        return harness

    check = assert_one_effect_per_ack(orders, lambda transaction: transaction.id)
    result = assert_survives(make, runs=40, required_effects=check)
    assert (result.runs, result.faults > 40) == (40, True)
    # A killed worker ends within a transaction; an attempt of a plain function has always been left.
    assert entries["attempt"] == 0
    assert 0 <= entries["transaction"] <= 3 * result.killed_workers


def test_a_function_producer_has_middleware():
    steps = []

    class Noted(Middleware):
        @contextmanager
        def attempt(self, context):
            steps.append((context.task, context.queue, context.step))
            yield

    @producer(MemoryConnector("parcels"), middleware=[Noted()])
    def send(order, transaction):
        return transaction

    report = send.produce_transactions([TRANSACTION])
    assert report.count(OutcomeKind.SUCCEEDED) == 1
    assert steps == [("send", "parcels", "produce")]


def test_a_function_task_without_a_failure_handler_has_no_middleware_around_it():
    steps = []

    class Noted(Middleware):
        @contextmanager
        def attempt(self, context):
            steps.append(context.step)
            yield

    policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}})

    @consumer(MemoryConnector("orders"), policy=policy, middleware=[Noted()])
    def charge(order):
        raise OSError

    for expected in (["process"], ["process", "exception"]):
        steps.clear()
        charge.connector.dispatch([Transaction({}, id=f"{len(expected)}")])
        charge.run()
        assert steps == expected
        charge.on_failure(lambda order, error: None)
