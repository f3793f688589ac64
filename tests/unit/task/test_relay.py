"""A relay moves what is in one connector to another: as it is, in order, and acked only when it has arrived."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    ConnectorError,
    Defer,
    Depth,
)
from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import Category, ConfigurationError, ConnectionLostError
from ergon_framework.failure import Attempt
from ergon_framework.task.relay import DEFAULT_POLICY, RETRY_DELAY_SECONDS, AsyncRelay, Relay, relay, relay_async
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.transaction import Transaction
from ergon_framework.worker.coalesce import AsyncCoalescer, Coalescer
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.policies import ConsumerPolicy

RETRY_POLICY = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.001}}}})
TRACE_CONTEXT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture(params=["sync", "async"])
def variant(request):
    return request.param


def make_relay(variant, source, target, **options):
    return (relay if variant == "sync" else relay_async)(source, target, **options)


def run(task, policy=RETRY_POLICY):
    return task.run(policy) if isinstance(task, Relay) else asyncio.run(task.run(policy))


class RecordingTarget(MemoryConnector):
    """A queue that says no: *refuse* gets each group, and may raise."""

    def __init__(self, reject=lambda group: None):
        super().__init__("target", codec=JsonCodec(max_bytes=1000))
        self.reject = reject
        self.groups = []
        self.open_count = 0

    def open(self):
        self.open_count += 1

    def close(self):
        self.open_count -= 1
        super().close()

    async def open_async(self):
        self.open()

    def dispatch(self, transactions):
        self.groups.append([one.id for one in transactions])
        self.reject(transactions)
        return super().dispatch(transactions)


def fetch_all(target):
    return [delivery.transaction for delivery in target.fetch_transactions(1000)]


# -- what arrives ---------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-15")
def test_transactions_arrive_unchanged_except_for_their_attempts(variant):
    source, target = MemoryConnector("outbox"), RecordingTarget()
    attempt = Attempt(attempt=0, category=Category.SYSTEM, error="no", at=1.0)
    complete = Transaction(
        {"total": 7},
        id="order-7",
        source="shop",
        type="order",
        schema_version=2,
        key="k",
        tenant="t",
        correlation="c",
        causation="x",
        created_at=5.0,
        expires_at=4e9,
        attempts=2,
        history=(attempt,),
        trace=TRACE_CONTEXT,
    )
    source.dispatch([complete, Transaction(id="bare")])
    report = run(make_relay(variant, source, target))
    received = {one.id: one for one in fetch_all(target)}
    assert received == {
        "order-7": complete.replace(attempts=0, history=()),
        "bare": Transaction(id="bare", source="outbox"),
    }
    assert report.settled == {"settled": 2}
    assert source.depth() == Depth(0)
    assert target.open_count == 0


@pytest.mark.spec("CNN-15")
def test_the_order_of_each_key_is_kept_while_the_target_fails_sometimes(variant):
    turn = iter(range(10_000))

    def reject(group):
        if next(turn) % 3 == 0:
            raise OSError("now and then")

    source, target = MemoryConnector("outbox"), RecordingTarget(reject)
    source.dispatch([Transaction(n, id=f"{key}-{n}", key=f"k{key}") for n in range(9) for key in range(5)])
    # As many slots as transactions: a queue that does not order by key gets back what waits behind its key beyond that.
    policy = ConsumerPolicy.load(
        {
            "loop": {"concurrency": {"value": 45}},
            "steps": {"process": {"retry": {"max_attempts": 100, "backoff": 0.001, "multiplier": 1.0}}},
        }
    )
    run(make_relay(variant, source, target), policy)
    by_key = {}
    for one in fetch_all(target):
        by_key.setdefault(one.key, []).append(one.payload)
    assert by_key == {f"k{key}": list(range(9)) for key in range(5)}


@pytest.mark.spec("CNN-15")
def test_a_transaction_without_a_trace_gets_the_trace_of_its_own_lifecycle(variant):
    task = make_relay(variant, MemoryConnector("outbox"), RecordingTarget())
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("lifecycle") as span:
        prepared = task._prepare(Transaction(id="order-7"))
        prepared_with_trace = task._prepare(Transaction(id="own", trace=TRACE_CONTEXT))
    assert f"{span.get_span_context().trace_id:032x}" in prepared.trace["traceparent"]
    assert prepared_with_trace.trace == TRACE_CONTEXT


@pytest.mark.spec("CNN-15")
def test_a_transaction_is_acked_only_after_the_target_has_confirmed(variant):
    source = MemoryConnector("outbox")
    seen = []
    target = RecordingTarget(lambda group: seen.append(source.depth().in_flight))
    source.dispatch([Transaction(id="order-7")])
    run(make_relay(variant, source, target))
    assert seen == [1]


def test_a_dispatch_without_a_confirmation_has_failed(variant):
    class UnconfirmingTarget(RecordingTarget):
        def dispatch(self, transactions):
            super().dispatch(transactions)
            return []

        async def dispatch_async(self, transactions):
            return self.dispatch(transactions)

    source = MemoryConnector("outbox")
    source.dispatch([Transaction(id="order-7")])
    report = run(make_relay(variant, source, UnconfirmingTarget()))
    assert [outcome.error.code for outcome in report.failures] == ["connector"]
    assert source.depth().delayed == 1


@pytest.mark.spec("CNN-15")
def test_a_delayed_transaction_stays_in_the_source_until_it_is_due(variant):
    now = [1000.0]
    source = MemoryConnector("outbox", clock=lambda: now[0], wall=lambda: now[0])
    target = RecordingTarget()
    source.dispatch([Transaction(id="later", not_before=1060.0), Transaction(id="now")])
    run(make_relay(variant, source, target))
    assert [one.id for one in fetch_all(target)] == ["now"]
    assert source.depth() == Depth(0, delayed=1)
    now[0] = 1061.0
    run(make_relay(variant, source, target))
    assert [(one.id, one.not_before) for one in fetch_all(target)] == [("later", None)]


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("has_priorities, arrives", [(True, 5), (None, 5), (False, 0)])
def test_a_priority_is_kept_where_the_target_has_priorities(variant, monkeypatch, has_priorities, arrives):
    target = RecordingTarget()
    monkeypatch.setattr(target, "_capabilities", replace(target.capabilities, priority=has_priorities))
    task = make_relay(variant, MemoryConnector("outbox"), target)
    assert task._prepare(Transaction(id="order-7", priority=5)).priority == arrives


# -- what does not --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConnectionLostError("down"), OSError("odd"), ConfigurationError("not upgraded")])
def test_failures_of_the_target_are_deferred_and_never_dead_lettered(variant, error):
    def reject(group):
        raise error

    source = MemoryConnector("outbox")
    source.dispatch([Transaction(id=f"order-{n}") for n in range(3)])
    run(make_relay(variant, source, RecordingTarget(reject)))
    assert source.depth() == Depth(0, delayed=3)


def test_only_the_faulty_transaction_is_dead_lettered(variant):
    source, target = MemoryConnector("outbox"), RecordingTarget()
    source.dispatch([Transaction(id="good-1"), Transaction("x" * 1000, id="bad"), Transaction(id="good-2")])
    run(make_relay(variant, source, target))
    assert sorted(one.id for one in fetch_all(target)) == ["good-1", "good-2"]
    assert [(letter.envelope.id, letter.reason) for letter in source.dead_letters] == [("bad", "unencodable")]


@pytest.mark.parametrize(
    "error, expected",
    [
        (TransactionException("no", Category.BUSINESS), None),
        (TransactionException("no", Category.SYSTEM, final=True), None),
        (TransactionException("no", Category.SYSTEM), Defer(RETRY_DELAY_SECONDS)),
        (TransactionException("no", Category.TIMEOUT), Defer(RETRY_DELAY_SECONDS)),
    ],
)
def test_the_error_decides_between_dead_letter_and_deferral(variant, error, expected):
    task = make_relay(variant, MemoryConnector("a"), MemoryConnector("b"))
    settlement = task.handle_transaction_exception(Transaction(id="x"), error)
    assert (settlement if variant == "sync" else asyncio.run(settlement)) == expected


def test_an_invalid_relay_is_rejected_with_an_explanation(variant):
    queue = MemoryConnector("outbox")
    with pytest.raises(ConfigurationError, match="the same connector as source and target"):
        make_relay(variant, queue, queue)
    with pytest.raises(ConfigurationError, match="relay target must be a connector, not a str"):
        make_relay(variant, queue, "target")
    with pytest.raises(ConfigurationError, match=r"connector of .* is invalid: it is a str"):
        make_relay(variant, "source", queue)
    for interval in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match="depth_every"):
            make_relay(variant, queue, MemoryConnector("b"), depth_every=interval)


def test_a_relay_has_its_own_name_and_policy(variant):
    task = make_relay(variant, MemoryConnector("outbox"), MemoryConnector("orders"))
    assert (task.name, task.policy) == ("outbox-to-orders", DEFAULT_POLICY)
    assert DEFAULT_POLICY.loop.streaming
    named = make_relay(
        variant, MemoryConnector("outbox"), MemoryConnector("orders"), name="forward", policy=RETRY_POLICY
    )
    assert (named.name, named.policy) == ("forward", RETRY_POLICY)
    assert isinstance(named, Relay if variant == "sync" else AsyncRelay)


# -- the other flavour's connectors ------------------------------------------------------------------------


class AsyncOnlyQueue(AsyncConnector):
    def __init__(self):
        self.inner = MemoryConnector("only-async")

    name = "only-async"
    capabilities = Capabilities(
        mode="queue",
        renewable=False,
        lease=None,
        release_uncounted=True,
        delays=True,
        dead_letters=False,
        fenced_by="token",
        durable=False,
    )

    async def fetch_transactions_async(self, batch_size, **extra):
        return self.inner.fetch_transactions(batch_size)

    async def settle_async(self, requests):
        return self.inner.settle(requests)

    async def dispatch_async(self, transactions):
        return self.inner.dispatch(transactions)


class SyncOnlyQueue(Connector):
    name = "only-sync"
    capabilities = AsyncOnlyQueue.capabilities

    def __init__(self):
        self.inner = MemoryConnector("only-sync")

    def fetch_transactions(self, batch_size, **extra):
        return self.inner.fetch_transactions(batch_size)

    def settle(self, requests):
        return self.inner.settle(requests)

    def dispatch(self, transactions):
        return self.inner.dispatch(transactions)


@pytest.mark.parametrize("kinds", [(AsyncOnlyQueue, SyncOnlyQueue), (SyncOnlyQueue, AsyncOnlyQueue)])
def test_any_connector_can_be_source_or_target(variant, kinds):
    source, target = (kind() for kind in kinds)
    source.inner.dispatch([Transaction(id=f"order-{n}") for n in range(5)])
    run(make_relay(variant, source, target))
    assert sorted(one.id for one in fetch_all(target.inner)) == [f"order-{n}" for n in range(5)]


# -- how much there is to do --------------------------------------------------------------------------------


class MeasuredQueue(MemoryConnector):
    """Says how often it was asked, and lets a test wait for that."""

    def __init__(self, answers):
        super().__init__("outbox")
        self.answers = iter(answers)
        self.depth_calls = threading.Semaphore(0)

    def depth(self):
        self.depth_calls.release()
        answer = next(self.answers, None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def depth_async(self):
        return self.depth()


def read_levels(provider):
    registry = get_registry(provider)
    depths = {labels["ergon.queue.state"]: value for labels, value in registry.read(names.QUEUE_DEPTH)}
    return depths, [value for _, value in registry.read(names.QUEUE_LAG)]


FULL_LEVELS = ({"ready": 7, "delayed": 2, "in_flight": 1, "dead": 3}, [4.5])


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize(
    "answer, expected",
    [
        (Depth(7, 2, 1, 3, 4.5), FULL_LEVELS),
        (Depth(0), ({"ready": 0, "delayed": 0, "in_flight": 0, "dead": 0}, [0.0])),
        (None, ({}, [])),
        (OSError("unreachable"), ({}, [])),
    ],
)
def test_depth_and_lag_are_published_while_the_relay_runs_and_removed_afterwards(variant, answer, expected):
    provider = MeterProvider()
    source = MeasuredQueue([Depth(9)] * 1000)
    task = make_relay(variant, source, MemoryConnector("target"), depth_every=0.01)
    task.telemetry = TelemetryOptions(meter_provider=provider)

    def wait_for_levels():
        for _ in range(3):  # the third question comes when the second answer is known
            assert source.depth_calls.acquire(timeout=20)
        return read_levels(provider)

    def observe_levels():
        assert wait_for_levels()[0]["ready"] == 9, "what follows replaces something"
        source.answers = iter([answer] * 1000)
        source.depth_calls = threading.Semaphore(0)
        return wait_for_levels()

    async def observe_levels_async():
        async with task.open():
            return await asyncio.to_thread(observe_levels)

    if variant == "sync":
        with task.open():
            observed = observe_levels()
    else:
        observed = asyncio.run(observe_levels_async())
    assert observed == expected
    assert read_levels(provider) == ({}, [])
    provider.shutdown()


def test_depth_is_polled_no_more_often_than_its_interval(variant):
    source = MeasuredQueue([])
    task = make_relay(variant, source, MemoryConnector("target"), depth_every=3600.0)
    source.dispatch([Transaction(id=f"order-{n}") for n in range(100)])
    run(task)
    assert source.depth_calls.acquire(blocking=False)
    assert not source.depth_calls.acquire(blocking=False)


# -- going together -----------------------------------------------------------------------------------------


class HeldDispatch:
    """A dispatch that a test holds up: each call waits to be let through, and may fail."""

    def __init__(self, *errors):
        self.calls = []
        self.errors = list(errors)
        self.started = threading.Semaphore(0)
        self.release = threading.Semaphore(0)

    def __call__(self, group):
        self.calls.append(sorted(one.id for one in group))
        error = self.errors.pop(0) if self.errors else None
        self.started.release()
        assert self.release.acquire(timeout=20)
        if error is not None:
            raise error
        return [Confirmation(one.id) for one in group]


def submit_all(coalescer, transaction_ids, results):
    def submit(transaction_id):
        try:
            coalescer.submit(Transaction(id=transaction_id))
        except Exception as error:
            results[transaction_id] = error
        else:
            results[transaction_id] = None

    threads = [threading.Thread(target=submit, args=(transaction_id,)) for transaction_id in transaction_ids]
    for thread in threads:
        thread.start()
    return threads


def wait_until(condition):
    """Wait until *condition* holds; it is brought about by other threads."""
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never came to that")


def submit_group(dispatch):
    """A first one on its way, and three that came meanwhile."""
    coalescer, results = Coalescer(dispatch), {}
    threads = submit_all(coalescer, ["first"], results)
    assert dispatch.started.acquire(timeout=20)
    threads += submit_all(coalescer, ["a", "b", "c"], results)
    wait_until(lambda: len(coalescer._open_group.members) == 3)
    dispatch.release.release(10)
    for thread in threads:
        thread.join(20)
    return results


def test_transactions_that_arrive_during_a_dispatch_form_one_group():
    dispatch = HeldDispatch()
    assert submit_group(dispatch) == dict.fromkeys(["first", "a", "b", "c"])
    assert dispatch.calls == [["first"], ["a", "b", "c"]]


def test_a_group_that_fails_is_sent_one_by_one():
    dispatch = HeldDispatch(None, UnencodableError("one of them"), UnencodableError("you"))
    results = submit_group(dispatch)
    assert sorted(map(str, filter(None, results.values()))) == ["you"]
    assert dispatch.calls[1] == ["a", "b", "c"]
    assert sorted(map(tuple, dispatch.calls[2:])) == [("a",), ("b",), ("c",)]


def test_a_lost_connection_fails_the_whole_group():
    lost = ConnectionLostError("down")
    dispatch = HeldDispatch(None, lost)
    assert submit_group(dispatch) == {"first": None, "a": lost, "b": lost, "c": lost}
    assert len(dispatch.calls) == 2


def test_the_error_of_a_single_transaction_is_its_own():
    error = ConnectorError("odd")
    dispatch = HeldDispatch(error)
    assert submit_group(dispatch) == {"first": error, "a": None, "b": None, "c": None}


class AsyncHeldDispatch:
    def __init__(self, *errors):
        self.calls = []
        self.errors = list(errors)
        self.release = asyncio.Event()

    async def __call__(self, group):
        self.calls.append(sorted(one.id for one in group))
        error = self.errors.pop(0) if self.errors else None
        await self.release.wait()
        if error is not None:
            raise error
        return [Confirmation(one.id) for one in group]


def submit_group_async(make_dispatch, *, cancelled_id=None):
    async def run_calls():
        dispatch = make_dispatch()
        coalescer = AsyncCoalescer(dispatch)
        tasks = {name: asyncio.create_task(coalescer.submit(Transaction(id=name))) for name in ("first", "a", "b", "c")}
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert dispatch.calls == [["first"]]
        if cancelled_id is not None:
            tasks[cancelled_id].cancel()
            await asyncio.wait([tasks[cancelled_id]])
        dispatch.release.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 20)
        # The next caller finds a group that it can flush.
        assert coalescer._open_group.members == []
        return dict(zip(tasks, results, strict=True)), dispatch.calls

    return asyncio.run(run_calls())


def test_async_transactions_form_one_group():
    results, calls = submit_group_async(AsyncHeldDispatch)
    assert results == dict.fromkeys(["first", "a", "b", "c"])
    assert calls == [["first"], ["a", "b", "c"]]


def test_an_async_group_that_fails_is_sent_one_by_one():
    results, calls = submit_group_async(
        lambda: AsyncHeldDispatch(None, UnencodableError("one"), UnencodableError("you"))
    )
    assert sorted(map(str, filter(None, results.values()))) == ["you"]
    assert sorted(map(tuple, calls[2:])) == [("a",), ("b",), ("c",)]


def test_a_lost_connection_fails_the_whole_async_group():
    lost = ConnectionLostError("down")
    results, calls = submit_group_async(lambda: AsyncHeldDispatch(None, lost))
    assert results == {"first": None, "a": lost, "b": lost, "c": lost}
    assert len(calls) == 2


def test_cancelling_a_leader_before_its_dispatch_cancels_no_other_member():
    results, calls = submit_group_async(AsyncHeldDispatch, cancelled_id="a")
    assert isinstance(results.pop("a"), asyncio.CancelledError)
    assert results == dict.fromkeys(["first", "b", "c"])
    assert sorted(map(tuple, calls[1:])) == [("b",), ("c",)]


def test_cancelling_a_leader_during_its_dispatch_lets_the_next_group_go():
    results, calls = submit_group_async(AsyncHeldDispatch, cancelled_id="first")
    assert isinstance(results.pop("first"), asyncio.CancelledError)
    assert results == dict.fromkeys(["a", "b", "c"])
    assert calls[1] == ["a", "b", "c"]


def test_a_cancelled_member_is_still_sent_with_its_group():
    results, calls = submit_group_async(AsyncHeldDispatch, cancelled_id="b")
    assert isinstance(results.pop("b"), asyncio.CancelledError)
    assert results == dict.fromkeys(["first", "a", "c"])
    assert calls[1] == ["a", "b", "c"]
