"""Middleware around transactions and attempts: order, errors, timeouts and context, the same in both variants."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import asynccontextmanager, contextmanager

import pytest

from ergon_framework import (
    AsyncMiddleware,
    AsyncProducerMixin,
    MemoryConnector,
    Middleware,
    ProducerMixin,
    ProducerPolicy,
    Transaction,
)
from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.errors import Category
from ergon_framework.telemetry.names import Event
from ergon_framework.worker.exceptions import BusinessError, TransactionException
from ergon_framework.worker.report import OutcomeKind
from tests.both_drivers.harness import (
    Stubborn,
    make_policy,
    raise_error,
    return_value,
    wait_then_return,
)

tenant = contextvars.ContextVar("tenant", default="none")
ONE_ATTEMPT = {"max_attempts": 1}


def make_middleware(variant, *, name="Recorded", transaction=None, attempt=None):
    """Return a middleware whose methods run these generator functions of the context."""

    def make_method(body):
        manager = contextmanager(body)
        if variant == "threads":
            return lambda self, context: manager(context)

        @asynccontextmanager
        async def method(self, context):
            with manager(context):
                await asyncio.sleep(0)
                try:
                    yield
                finally:
                    await asyncio.sleep(0)

        return method

    methods = {key: make_method(body) for key, body in (("transaction", transaction), ("attempt", attempt)) if body}
    return type(name, (Middleware if variant == "threads" else AsyncMiddleware,), methods)()


def record(log, label, describe=lambda context: ""):
    """Return a body that records its entry and its exit, with the error that passes."""

    def body(context):
        log.append(f"enter {label}{describe(context)}")
        try:
            yield
        except BaseException as error:
            log.append(f"exit {label} {type(error).__name__}")
            raise
        log.append(f"exit {label}")

    return body


def fail(*, enter=None, leave=None, log=None):
    """Return a body that raises one of these errors; lists give one for each call, None for no error."""
    calls = []

    def pick(errors):
        return errors[min(len(calls) - 1, len(errors) - 1)] if isinstance(errors, list) else errors

    def body(context):
        calls.append(context)
        error = pick(enter)
        if error is not None:
            raise error
        try:
            yield
        finally:
            if log is not None:
                log.append("exit")
            error = pick(leave)
            if error is not None:
                raise error

    return body


def get_failures(caplog):
    return [entry for entry in caplog.records if getattr(entry, "event", None) == Event.MIDDLEWARE_FAILED]


def test_the_first_middleware_is_outermost_and_a_transaction_surrounds_its_attempts(build, variant):
    log = []
    world = build(process=lambda call: log.append("process")).offer("a")
    world.task.middleware = [
        make_middleware(variant, transaction=record(log, f"transaction {n}"), attempt=record(log, f"attempt {n}"))
        for n in (1, 2)
    ]
    world.run(make_policy())
    attempt = ["enter attempt 1", "enter attempt 2"], ["exit attempt 2", "exit attempt 1"]
    assert log == [
        "enter transaction 1",
        "enter transaction 2",
        *attempt[0],
        "process",
        *attempt[1],
        *attempt[0],  # the success handler
        *attempt[1],
        "exit transaction 2",
        "exit transaction 1",
    ]
    assert world.kinds() == {"a": "succeeded"}


def test_an_attempt_knows_its_task_queue_step_and_number(build, variant):
    contexts = []

    def body(context):
        contexts.append(context)
        yield

    world = build(process=[raise_error(OSError()), raise_error(BusinessError("no"))]).offer("a")
    world.task.middleware = [make_middleware(variant, attempt=body)]
    world.run(make_policy())
    assert [(each.step, each.attempt) for each in contexts] == [("process", 0), ("process", 1), ("exception", 0)]
    assert {(each.task, each.queue, each.transaction.id) for each in contexts} == {
        (type(world.task).__name__, "queue", "a")
    }
    assert contexts[0].transaction is world.of("process")[0].transaction
    with pytest.raises(AttributeError):
        contexts[0].step = "other"


@pytest.mark.parametrize(
    "bodies, kind, error",
    [
        ({}, OutcomeKind.SUCCEEDED, None),
        ({"process": raise_error(BusinessError("no"))}, OutcomeKind.FAILED, BusinessError),
        (
            {"process": raise_error(BusinessError("no")), "exception": raise_error(OSError())},
            OutcomeKind.EXCEPTION_HANDLER_FAILED,
            BusinessError,
        ),
        (
            {"process": raise_error(TransactionException(retry_after=60.0))},
            OutcomeKind.DEFERRED,
            TransactionException,
        ),
    ],
)
def test_a_transaction_exits_once_with_its_outcome_and_its_error(build, variant, bodies, kind, error):
    seen = []

    def body(context):
        assert context.outcome is None
        passed = None
        try:
            yield
        except BaseException as raised:
            passed = raised
            raise
        finally:
            seen.append((context, passed))

    world = build(**bodies).offer("a")
    world.task.middleware = [make_middleware(variant, transaction=body)]
    world.run(make_policy(process={"max_attempts": 2}))
    [(context, passed)] = seen
    assert context.outcome.kind is world.outcome().kind is kind
    assert (passed is None) if error is None else isinstance(passed, error)
    assert passed is world.outcome().error
    assert (context.queue, context.transaction.id) == ("queue", "a")


def test_a_middleware_cannot_change_the_outcome_that_it_sees(build, variant):
    def body(context):
        yield
        context.outcome.settlement = DeadLetter("changed")
        context.outcome.kind = OutcomeKind.FAILED
        context.outcome.durations.clear()

    world = build().offer("a")
    world.task.middleware = [make_middleware(variant, transaction=body)]
    world.run(make_policy())
    assert world.kinds() == {"a": "succeeded"}
    assert world.outcome().durations
    assert [type(each) for each in world.settlements()] == [Ack]


def test_context_variables_of_a_middleware_are_visible_in_the_handlers_and_nowhere_else(build, variant):
    seen, after = {}, []

    def transaction(context):
        token = tenant.set(f"tenant of {context.transaction.id}")
        yield
        tenant.reset(token)  # raises in another context
        after.append(tenant.get())

    detail = contextvars.ContextVar("detail", default="none")

    def attempt(context):
        token = detail.set(f"{tenant.get()} {context.step}")
        yield
        detail.reset(token)

    def process(call):
        seen.setdefault(call.id, []).append((tenant.get(), detail.get()))
        if call.number == 0:
            raise OSError

    world = build(process=process).offer("a", "b")
    world.task.middleware = [make_middleware(variant, transaction=transaction, attempt=attempt)]
    world.run(make_policy(concurrency=1))
    assert seen == {each: [(f"tenant of {each}", f"tenant of {each} process")] * 2 for each in ("a", "b")}
    assert after == ["none", "none"]
    assert world.kinds() == {"a": "succeeded", "b": "succeeded"}


def test_an_error_of_the_handler_passes_through_and_cannot_be_suppressed(build, variant):
    log = []

    def swallow(context):
        try:
            yield
        except BusinessError as error:
            log.append(str(error))

    world = build(process=raise_error(BusinessError("no stock"))).offer("a")
    world.task.middleware = [
        make_middleware(variant, transaction=swallow, attempt=record(log, "outer")),
        make_middleware(variant, attempt=swallow),
    ]
    world.run(make_policy())
    assert log[:3] == ["enter outer", "no stock", "exit outer BusinessError"]
    assert world.kinds() == {"a": "failed"}
    assert world.outcome().category is Category.BUSINESS


def test_an_error_on_the_way_in_fails_the_attempt_with_the_name_of_the_middleware(build, variant):
    log = []
    world = build().offer("a")
    world.task.middleware = [
        make_middleware(variant, attempt=record(log, "outer")),
        make_middleware(variant, name="Database", attempt=fail(enter=[BusinessError("no connection"), None])),
    ]
    world.run(make_policy())
    assert world.steps() == ["process", "success"], "the first attempt did not reach the handler"
    [failed] = world.outcome().failed_attempts
    assert failed.error.category is Category.SYSTEM
    assert str(failed.error) == "middleware Database failed on enter: BusinessError: no connection"
    assert failed.error.code == "middleware_failed"
    assert log[:2] == ["enter outer", "exit outer TransactionException"]
    assert world.kinds() == {"a": "succeeded"}


def test_an_error_on_the_way_out_fails_an_attempt_that_had_succeeded(build, variant):
    log = []
    world = build(process=return_value("done")).offer("a")
    world.task.middleware = [
        make_middleware(variant, attempt=record(log, "outer")),
        make_middleware(variant, name="Session", attempt=fail(leave=[OSError("commit"), None])),
    ]
    world.run(make_policy())
    assert world.steps() == ["process", "process", "success"]
    assert str(world.outcome().failed_attempts[0].error) == "middleware Session failed on exit: OSError: commit"
    assert log[:2] == ["enter outer", "exit outer TransactionException"]
    assert world.kinds() == {"a": "succeeded"}


def test_an_error_on_the_way_out_does_not_replace_that_of_the_handler(build, variant, caplog):
    world = build(process=raise_error(BusinessError("no stock"))).offer("a")
    world.task.middleware = [make_middleware(variant, name="Session", attempt=fail(leave=[OSError("rollback"), None]))]
    world.run(make_policy())
    assert (world.outcome().category, str(world.outcome().error)) == (Category.BUSINESS, "no stock")
    [entry] = get_failures(caplog)
    assert (entry.middleware, entry.transaction_id, entry.step) == ("Session", "a", "process")
    assert (entry.reason, entry.error_type) == ("failed on exit", "OSError")


def test_an_exit_of_the_interpreter_in_a_middleware_is_the_result_of_the_attempt(build, variant):
    world = build().offer("a")
    world.task.middleware = [make_middleware(variant, attempt=fail(leave=GeneratorExit("end")))]
    world.run(make_policy(process=ONE_ATTEMPT))
    assert world.kinds() == {"a": "handler_failed"}
    assert isinstance(world.outcome().error.__cause__, GeneratorExit)


def test_a_transaction_that_cannot_be_entered_is_a_failed_attempt_and_is_entered_by_the_next(build, variant):
    log = []
    world = build().offer("a")
    world.task.middleware = [
        make_middleware(variant, transaction=record(log, "outer")),
        make_middleware(variant, name="Tenants", transaction=fail(enter=[OSError("down"), None], log=log)),
    ]
    world.run(make_policy())
    assert world.steps() == ["process", "success"]
    [failed] = world.outcome().failed_attempts
    assert str(failed.error) == "middleware Tenants failed on enter: OSError: down"
    assert log == ["enter outer", "exit", "exit outer"], "what was entered is not entered again"


def test_without_its_transaction_middleware_no_handler_runs(build, variant):
    world = build().offer("a")
    world.task.middleware = [make_middleware(variant, name="Tenants", transaction=fail(enter=OSError("down")))]
    world.run(make_policy(process={"max_attempts": 2}, exception={"max_attempts": 2}))
    assert world.steps() == []
    assert world.kinds() == {"a": "handler_failed"}
    assert "Tenants" in str(world.outcome().error)
    assert isinstance(world.settlements()[0], DeadLetter)


@pytest.mark.invariant
def test_an_error_at_the_end_of_a_transaction_is_logged_and_loses_no_outcome(build, variant, caplog):
    log = []
    world = build().offer("a")
    world.task.middleware = [
        make_middleware(variant, transaction=record(log, "outer")),
        make_middleware(variant, name="Audit", transaction=fail(leave=OSError("disk full"))),
    ]
    world.run(make_policy())
    assert world.kinds() == {"a": "succeeded"}
    assert log == ["enter outer", "exit outer"]
    [entry] = get_failures(caplog)
    assert (entry.middleware, entry.error, entry.queue) == ("Audit", "disk full", "queue")


@pytest.mark.invariant
def test_an_abandoned_attempt_exits_with_an_error_when_its_body_has_left(build, variant):
    log = []
    world = build()
    signal = world.signal()
    world.bodies["process"] = [wait_then_return(Stubborn(signal)), return_value(2)]

    def attempt(context):
        label = f"{context.step} {context.attempt}"
        try:
            yield
        except BaseException as error:
            log.append(f"{label} {type(error).__name__} {getattr(error, 'code', None)}")
            raise
        else:
            log.append(label)

    world.task.middleware = [make_middleware(variant, attempt=attempt)]
    world.offer("a").start(make_policy(process={"timeout": 0.05, "exit_grace": 10.0}))
    world.until(lambda: world.of("process") and world.only("process").scope.cancelled)
    assert log == []
    signal.set()
    world.finish()
    # The stubborn body returns normally, and its result is discarded: a session must not commit.
    assert log == ["process 0 TransactionException attempt_abandoned", "process 1", "success 0"]
    assert world.outcome().result == 2


def test_a_cancelled_attempt_exits_with_the_cancellation(build, variant):
    if variant == "threads":
        return  # nothing cancels a thread
    log = []
    world = build(process=[wait_then_return(10.0), return_value(2)]).offer("a")
    world.task.middleware = [make_middleware(variant, attempt=record(log, "attempt"))]
    world.run(make_policy(process={"timeout": 0.05}))
    assert log[:2] == ["enter attempt", "exit attempt CancelledError"]
    assert world.kinds() == {"a": "succeeded"}


def test_a_transaction_is_left_when_the_last_abandoned_call_has_exited(build, variant):
    log = []
    world = build()
    signal = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(signal))
    world.bodies["exception"] = lambda call: log.append("exception")
    world.task.middleware = [
        make_middleware(variant, transaction=record(log, "transaction", lambda c: f" {c.outcome}"))
    ]
    world.offer("a").start(make_policy(process={"timeout": 0.05, "exit_grace": 0.0}))
    world.until(lambda: world.outcomes)
    assert log == ["enter transaction None", "exception"]
    signal.set()
    world.until(lambda: len(log) == 3)
    assert log[-1] == "exit transaction TransactionException"
    world.finish()
    assert world.kinds() == {"a": "failed"}


def test_a_released_transaction_exits_with_an_error(build, variant):
    seen = []

    def body(context):
        try:
            yield
        except TransactionException as error:
            seen.append((error.code, context.outcome.kind))
            raise

    world = build(process=raise_error(OSError())).offer("a")
    world.task.middleware = [make_middleware(variant, transaction=body)]
    world.start(make_policy(process={"backoff": 20.0, "timeout": None}, drain_timeout=0.0))
    world.until(lambda: world.of("process") and world.only("process").ended)
    world.stop().finish()
    assert seen == [("released", OutcomeKind.RELEASED)]
    assert world.kinds() == {"a": "released"}


def make_hanging_middleware(variant, left):
    """Return a middleware whose exit from a transaction ignores its cancellation and waits for *left*."""
    if variant == "threads":

        class Audit(Middleware):
            @contextmanager
            def transaction(self, context):
                try:
                    yield
                finally:
                    left.wait()

        return Audit()

    class AsyncAudit(AsyncMiddleware):
        @asynccontextmanager
        async def transaction(self, context):
            try:
                yield
            finally:
                while not left.is_set():
                    try:
                        await left.wait_async()
                    except asyncio.CancelledError:
                        continue

    return AsyncAudit()


def test_an_exit_that_hangs_is_abandoned_and_keeps_its_slot(build, variant, caplog):
    world = build()
    left = world.signal()
    world.task.middleware = [make_hanging_middleware(variant, left)]
    world.offer("a").start(make_policy(process={"timeout": 0.1}, concurrency=1, streaming=True))
    world.until(lambda: world.outcomes)
    [entry] = get_failures(caplog)
    assert entry.middleware.endswith("Audit")
    assert entry.error == "it did not exit within 0.1 s"
    world.offer("b")
    world.never(lambda: len(world.of("process")) > 1)
    left.set()
    world.until(lambda: len(world.outcomes) == 2)
    world.stop().finish()
    assert world.kinds() == {"a": "succeeded", "b": "succeeded"}


@pytest.mark.invariant
def test_a_transaction_is_not_redelivered_while_its_middleware_exits(build, variant):
    world = build(process=raise_error(TransactionException(retry_after=60.0)))
    left = world.signal()
    world.task.middleware = [make_hanging_middleware(variant, left)]
    world.offer("a").start(make_policy(process={"timeout": 0.1}, streaming=True))
    world.until(lambda: world.of("process") and world.only("process").ended)
    world.never(world.settlements, seconds=0.4)
    left.set()
    world.until(world.settlements)
    world.stop().finish()
    assert world.kinds() == {"a": "deferred"}


def test_an_attempt_beside_one_that_still_enters_the_transaction_fails(build, variant):
    world = build()
    signal = world.signal()
    log = []

    def body(context):
        yield

    middleware = make_middleware(variant, name="Tenants", transaction=body)
    if variant == "threads":

        @contextmanager
        def slow(self, context):
            signal.wait()
            yield from record(log, "slow")(context)

    else:

        @asynccontextmanager
        async def slow(self, context):
            while not signal.is_set():
                try:
                    await signal.wait_async()
                except asyncio.CancelledError:
                    continue
            with contextmanager(record(log, "slow"))(context):
                yield

    type(middleware).transaction = slow
    world.task.middleware = [middleware, make_middleware(variant, transaction=record(log, "inner"))]
    policy = make_policy(process={"timeout": 0.05, "exit_grace": 0.0}, exception={"max_attempts": 1})
    world.offer("a").start(policy)
    world.until(lambda: world.outcomes)
    signal.set()
    world.until(lambda: len(log) == 2)
    world.finish()
    assert world.steps() == []
    assert world.kinds() == {"a": "handler_failed"}
    assert "still entering" in str(world.outcome().handler_error)
    # Entered after the outcome was decided: it exits at once, and nothing further is entered.
    assert log == ["enter slow", "exit slow TransactionException"]


def test_a_result_that_is_not_a_context_manager_fails_the_attempt(build, variant):
    base = Middleware if variant == "threads" else AsyncMiddleware
    middleware = type("Plain", (base,), {"attempt": lambda self, context: None})()
    world = build().offer("a")
    world.task.middleware = [middleware]
    world.run(make_policy(process=ONE_ATTEMPT))
    assert "middleware Plain failed on enter: TypeError: it returned a NoneType" in str(world.outcome().error)


def test_a_class_based_context_manager_may_raise_the_same_error_again(build, variant, caplog):
    class Manager:
        def __enter__(self): ...

        def __exit__(self, kind, error, trace):
            if error is not None:
                raise error

        async def __aenter__(self): ...

        async def __aexit__(self, kind, error, trace):
            self.__exit__(kind, error, trace)

    base = Middleware if variant == "threads" else AsyncMiddleware
    method = lambda self, context: Manager()  # noqa: E731 - a method of a class made here
    world = build(process=raise_error(BusinessError("no"))).offer("a")
    world.task.middleware = [type("Plain", (base,), {"attempt": method, "transaction": method})()]
    world.run(make_policy())
    assert world.kinds() == {"a": "failed"}
    assert get_failures(caplog) == []


class SyncProducer(ProducerMixin):
    def __init__(self, connector):
        self.connector = connector


class AsyncProducer(AsyncProducerMixin):
    def __init__(self, connector):
        self.connector = connector


def test_a_producer_has_middleware_and_a_default_handler_has_none(variant):
    log = []
    connector = MemoryConnector("parcels")
    task = SyncProducer(connector) if variant == "threads" else AsyncProducer(connector)
    task.middleware = [
        make_middleware(
            variant,
            transaction=record(log, "transaction"),
            attempt=record(log, "attempt ", lambda context: context.step),
        )
    ]
    result = task.produce_transactions([Transaction({}, id="1")], ProducerPolicy())
    report = asyncio.run(result) if variant == "asyncio" else result
    assert report.count(OutcomeKind.SUCCEEDED) == 1
    assert log == ["enter transaction", "enter attempt produce", "exit attempt ", "exit transaction"]
