"""A relay moves what is in one connector to another: as it is, in order, and acked only when it has arrived."""

from __future__ import annotations

import asyncio
import threading

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    ConnectorError,
    Depth,
    Later,
)
from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import Category, ConfigurationError, ConnectionLost
from ergon_framework.failure import Attempt
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.gathering import AsyncGathering, Gathering
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.relay import AGAIN, POLICY, AsyncRelay, Relay, relay, relay_async
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.transaction import Transaction

ONCE = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.001}}}})
PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture(params=["sync", "async"])
def flavour(request):
    return request.param


def made(flavour, source, target, **options):
    return (relay if flavour == "sync" else relay_async)(source, target, **options)


def run(task, policy=ONCE):
    return task.run(policy) if isinstance(task, Relay) else asyncio.run(task.run(policy))


class Target(MemoryConnector):
    """A queue that says no: *refuse* gets each group, and may raise."""

    def __init__(self, refuse=lambda group: None):
        super().__init__("target", codec=JsonCodec())
        self.refuse = refuse
        self.groups = []
        self.opened = 0

    def open(self):
        self.opened += 1

    def close(self):
        self.opened -= 1
        super().close()

    async def open_async(self):
        self.open()

    def dispatch(self, transactions):
        self.groups.append([one.id for one in transactions])
        self.refuse(transactions)
        return super().dispatch(transactions)


def arrived(target):
    return [delivery.transaction for delivery in target.fetch_transactions(1000)]


# -- what arrives ---------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-15")
def test_everything_arrives_as_it_was_but_for_the_attempts(flavour):
    source, target = MemoryConnector("outbox"), Target()
    attempt = Attempt(attempt=0, category=Category.SYSTEM, error="no", at=1.0)
    whole = Transaction(
        "order-7",
        {"total": 7},
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
        trace=PARENT,
    )
    source.dispatch([whole, Transaction("bare")])
    report = run(made(flavour, source, target))
    found = {one.id: one for one in arrived(target)}
    assert found == {
        "order-7": whole.replace(attempts=0, history=()),
        "bare": Transaction("bare", source="outbox"),
    }
    assert report.settled == {"settled": 2}
    assert source.depth() == Depth(0)
    assert target.opened == 0


@pytest.mark.spec("CNN-15")
def test_the_order_of_each_key_is_kept_while_the_target_fails_now_and_then(flavour):
    turn = iter(range(10_000))

    def refuse(group):
        if next(turn) % 3 == 0:
            raise OSError("now and then")

    source, target = MemoryConnector("outbox"), Target(refuse)
    source.dispatch([Transaction(f"{key}-{n}", n, key=f"k{key}") for n in range(9) for key in range(5)])
    # As many slots as transactions: a queue that does not order by key gets back what waits behind its key beyond that.
    policy = ConsumerPolicy.load(
        {
            "loop": {"concurrency": {"value": 45}},
            "steps": {"process": {"retry": {"max_attempts": 100, "backoff": 0.001, "multiplier": 1.0}}},
        }
    )
    run(made(flavour, source, target), policy)
    by_key = {}
    for one in arrived(target):
        by_key.setdefault(one.key, []).append(one.payload)
    assert by_key == {f"k{key}": list(range(9)) for key in range(5)}


@pytest.mark.spec("CNN-15")
def test_what_has_no_trace_gets_that_of_its_own_lifecycle_and_not_that_of_its_group(flavour):
    task = made(flavour, MemoryConnector("outbox"), Target())
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("lifecycle") as span:
        sent = task._sent(Transaction("order-7"))
        own = task._sent(Transaction("own", trace=PARENT))
    assert f"{span.get_span_context().trace_id:032x}" in sent.trace["traceparent"]
    assert own.trace == PARENT


@pytest.mark.spec("CNN-15")
def test_it_is_acked_only_when_the_target_has_confirmed(flavour):
    source = MemoryConnector("outbox")
    seen = []
    target = Target(lambda group: seen.append(source.depth().in_flight))
    source.dispatch([Transaction("order-7")])
    run(made(flavour, source, target))
    assert seen == [1]


def test_a_target_that_confirms_less_than_it_was_given_has_not_confirmed(flavour):
    class Silent(Target):
        def dispatch(self, transactions):
            super().dispatch(transactions)
            return []

        async def dispatch_async(self, transactions):
            return self.dispatch(transactions)

    source = MemoryConnector("outbox")
    source.dispatch([Transaction("order-7")])
    report = run(made(flavour, source, Silent()))
    assert [outcome.error.code for outcome in report.failures] == ["connector"]
    assert source.depth().delayed == 1


# -- what does not --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConnectionLost("down"), OSError("odd"), ConfigurationError("not upgraded")])
def test_what_the_target_is_to_blame_for_waits_and_is_never_put_aside(flavour, error):
    def refuse(group):
        raise error

    source = MemoryConnector("outbox")
    source.dispatch([Transaction(f"order-{n}") for n in range(3)])
    run(made(flavour, source, Target(refuse)))
    assert source.depth() == Depth(0, delayed=3)


def test_what_a_transaction_is_to_blame_for_is_put_aside_and_nobody_else_pays(flavour):
    source, target = MemoryConnector("outbox"), Target()
    source.dispatch([Transaction("good-1"), Transaction("bad", {1, 2}), Transaction("good-2")])
    run(made(flavour, source, target))
    assert sorted(one.id for one in arrived(target)) == ["good-1", "good-2"]
    assert [(letter.envelope.id, letter.reason) for letter in source.dead_letters] == [("bad", "unencodable")]


@pytest.mark.parametrize(
    "error, verdict",
    [
        (TransactionException("no", Category.BUSINESS), None),
        (TransactionException("no", Category.SYSTEM, final=True), None),
        (TransactionException("no", Category.SYSTEM), Later(AGAIN)),
        (TransactionException("no", Category.TIMEOUT), Later(AGAIN)),
    ],
)
def test_the_verdict(flavour, error, verdict):
    task = made(flavour, MemoryConnector("a"), MemoryConnector("b"))
    given = task.handle_transaction_exception(Transaction("x"), error)
    assert (given if flavour == "sync" else asyncio.run(given)) == verdict


def test_what_cannot_be_a_relay_is_refused_with_words(flavour):
    queue = MemoryConnector("outbox")
    with pytest.raises(ConfigurationError, match="to itself"):
        made(flavour, queue, queue)
    with pytest.raises(ConfigurationError, match="target is a connector, not a str"):
        made(flavour, queue, "target")
    with pytest.raises(ConfigurationError, match="given a str as its connector"):
        made(flavour, "source", queue)
    for every in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match="depth_every"):
            made(flavour, queue, MemoryConnector("b"), depth_every=every)


def test_a_relay_has_a_name_and_a_policy_of_its_own(flavour):
    task = made(flavour, MemoryConnector("outbox"), MemoryConnector("orders"))
    assert (task.name, task.policy) == ("outbox-to-orders", POLICY)
    assert POLICY.loop.streaming
    named = made(flavour, MemoryConnector("outbox"), MemoryConnector("orders"), name="forward", policy=ONCE)
    assert (named.name, named.policy) == ("forward", ONCE)
    assert isinstance(named, Relay if flavour == "sync" else AsyncRelay)


# -- the other flavour's connectors ------------------------------------------------------------------------


class OnlyAsync(AsyncConnector):
    def __init__(self):
        self.inner = MemoryConnector("only-async")

    name = "only-async"
    capabilities = Capabilities(
        mode="queue",
        renewable=False,
        lease=None,
        release_is_free=True,
        delays=True,
        dead_letters=False,
        fenced_by="token",
        durable=False,
    )

    async def fetch_transactions_async(self, batch_size, **extra):
        return self.inner.fetch_transactions(batch_size)

    async def settle_async(self, settlings):
        return self.inner.settle(settlings)

    async def dispatch_async(self, transactions):
        return self.inner.dispatch(transactions)


class OnlySync(Connector):
    name = "only-sync"
    capabilities = OnlyAsync.capabilities

    def __init__(self):
        self.inner = MemoryConnector("only-sync")

    def fetch_transactions(self, batch_size, **extra):
        return self.inner.fetch_transactions(batch_size)

    def settle(self, settlings):
        return self.inner.settle(settlings)

    def dispatch(self, transactions):
        return self.inner.dispatch(transactions)


@pytest.mark.parametrize("kinds", [(OnlyAsync, OnlySync), (OnlySync, OnlyAsync)])
def test_any_connector_can_be_source_or_target(flavour, kinds):
    source, target = (kind() for kind in kinds)
    source.inner.dispatch([Transaction(f"order-{n}") for n in range(5)])
    run(made(flavour, source, target))
    assert sorted(one.id for one in arrived(target.inner)) == [f"order-{n}" for n in range(5)]


# -- how much there is to do --------------------------------------------------------------------------------


class Measured(MemoryConnector):
    """Says how often it was asked, and lets a test wait for that."""

    def __init__(self, answers):
        super().__init__("outbox")
        self.answers = iter(answers)
        self.asked = threading.Semaphore(0)

    def depth(self):
        self.asked.release()
        answer = next(self.answers, None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def depth_async(self):
        return self.depth()


def levels(provider):
    registry = registry_of(provider)
    depths = {labels["ergon.queue.state"]: value for labels, value in registry.read(names.QUEUE_DEPTH)}
    return depths, [value for _, value in registry.read(names.QUEUE_LAG)]


FULL = ({"ready": 7, "delayed": 2, "in_flight": 1, "dead": 3}, [4.5])


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize(
    "answer, shown",
    [
        (Depth(7, 2, 1, 3, 4.5), FULL),
        (Depth(0), ({"ready": 0, "delayed": 0, "in_flight": 0, "dead": 0}, [0.0])),
        (None, ({}, [])),
        (OSError("unreachable"), ({}, [])),
    ],
)
def test_depth_and_lag_are_read_while_the_relay_runs_and_vanish_with_it(flavour, answer, shown):
    provider = MeterProvider()
    source = Measured([Depth(9)] * 1000)
    task = made(flavour, source, MemoryConnector("target"), depth_every=0.01)
    task.telemetry = TelemetryOptions(meter_provider=provider)

    def asked():
        for _ in range(3):  # the third question comes when the second answer is known
            assert source.asked.acquire(timeout=20)
        return levels(provider)

    def looked():
        assert asked()[0]["ready"] == 9, "what follows replaces something"
        source.answers = iter([answer] * 1000)
        source.asked = threading.Semaphore(0)
        return asked()

    async def opened():
        async with task.opened():
            return await asyncio.to_thread(looked)

    if flavour == "sync":
        with task.opened():
            found = looked()
    else:
        found = asyncio.run(opened())
    assert found == shown
    assert levels(provider) == ({}, [])
    provider.shutdown()


def test_depth_is_asked_for_no_more_often_than_told(flavour):
    source = Measured([])
    task = made(flavour, source, MemoryConnector("target"), depth_every=3600.0)
    source.dispatch([Transaction(f"order-{n}") for n in range(100)])
    run(task)
    assert source.asked.acquire(blocking=False)
    assert not source.asked.acquire(blocking=False)


# -- going together -----------------------------------------------------------------------------------------


class Line:
    """A dispatch that a test holds up: each call waits to be let through, and may fail."""

    def __init__(self, *errors):
        self.calls = []
        self.errors = list(errors)
        self.began = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, group):
        self.calls.append(sorted(one.id for one in group))
        error = self.errors.pop(0) if self.errors else None
        self.began.release()
        assert self.go.acquire(timeout=20)
        if error is not None:
            raise error
        return [Confirmation(one.id) for one in group]


def sent(gathering, names, results):
    def send(name):
        try:
            gathering.send(Transaction(name))
        except Exception as error:
            results[name] = error
        else:
            results[name] = None

    threads = [threading.Thread(target=send, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    return threads


def settled(condition):
    """Wait until *condition* holds; it is brought about by other threads."""
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never came to that")


def both(line):
    """A first one on its way, and three that came meanwhile."""
    gathering, results = Gathering(line), {}
    threads = sent(gathering, ["first"], results)
    assert line.began.acquire(timeout=20)
    threads += sent(gathering, ["a", "b", "c"], results)
    settled(lambda: len(gathering._open.members) == 3)
    line.go.release(10)
    for thread in threads:
        thread.join(20)
    return results


def test_those_who_come_while_one_is_on_its_way_go_together():
    line = Line()
    assert both(line) == dict.fromkeys(["first", "a", "b", "c"])
    assert line.calls == [["first"], ["a", "b", "c"]]


def test_a_group_that_fails_is_sent_one_by_one():
    line = Line(None, UnencodableError("one of them"), UnencodableError("you"))
    results = both(line)
    assert sorted(map(str, filter(None, results.values()))) == ["you"]
    assert line.calls[1] == ["a", "b", "c"]
    assert sorted(map(tuple, line.calls[2:])) == [("a",), ("b",), ("c",)]


def test_a_lost_connection_is_one_for_the_whole_group():
    lost = ConnectionLost("down")
    line = Line(None, lost)
    assert both(line) == {"first": None, "a": lost, "b": lost, "c": lost}
    assert len(line.calls) == 2


def test_the_error_of_one_who_goes_alone_is_its_own():
    odd = ConnectorError("odd")
    line = Line(odd)
    assert both(line) == {"first": odd, "a": None, "b": None, "c": None}


class AsyncLine:
    def __init__(self, *errors):
        self.calls = []
        self.errors = list(errors)
        self.go = asyncio.Event()

    async def __call__(self, group):
        self.calls.append(sorted(one.id for one in group))
        error = self.errors.pop(0) if self.errors else None
        await self.go.wait()
        if error is not None:
            raise error
        return [Confirmation(one.id) for one in group]


def both_async(line_of, *, cancelled=None):
    async def scene():
        line = line_of()
        gathering = AsyncGathering(line)
        tasks = {name: asyncio.create_task(gathering.send(Transaction(name))) for name in ("first", "a", "b", "c")}
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert line.calls == [["first"]]
        if cancelled is not None:
            tasks[cancelled].cancel()
            await asyncio.wait([tasks[cancelled]])
        line.go.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 20)
        # Whoever comes next finds a group that it can lead.
        assert gathering._open.members == []
        return dict(zip(tasks, results, strict=True)), line.calls

    return asyncio.run(scene())


def test_async_ones_go_together_too():
    results, calls = both_async(AsyncLine)
    assert results == dict.fromkeys(["first", "a", "b", "c"])
    assert calls == [["first"], ["a", "b", "c"]]


def test_an_async_group_that_fails_is_sent_one_by_one():
    results, calls = both_async(lambda: AsyncLine(None, UnencodableError("one"), UnencodableError("you")))
    assert sorted(map(str, filter(None, results.values()))) == ["you"]
    assert sorted(map(tuple, calls[2:])) == [("a",), ("b",), ("c",)]


def test_a_lost_connection_is_one_for_the_whole_async_group():
    lost = ConnectionLost("down")
    results, calls = both_async(lambda: AsyncLine(None, lost))
    assert results == {"first": None, "a": lost, "b": lost, "c": lost}
    assert len(calls) == 2


def test_a_leader_that_is_cancelled_before_its_turn_takes_nobody_with_it():
    results, calls = both_async(AsyncLine, cancelled="a")
    assert isinstance(results.pop("a"), asyncio.CancelledError)
    assert results == dict.fromkeys(["first", "b", "c"])
    assert sorted(map(tuple, calls[1:])) == [("b",), ("c",)]


def test_a_leader_that_is_cancelled_on_its_way_lets_the_next_ones_go():
    results, calls = both_async(AsyncLine, cancelled="first")
    assert isinstance(results.pop("first"), asyncio.CancelledError)
    assert results == dict.fromkeys(["a", "b", "c"])
    assert calls[1] == ["a", "b", "c"]


def test_a_member_that_is_cancelled_goes_with_its_group_all_the_same():
    results, calls = both_async(AsyncLine, cancelled="b")
    assert isinstance(results.pop("b"), asyncio.CancelledError)
    assert results == dict.fromkeys(["first", "a", "c"])
    assert calls[1] == ["a", "b", "c"]
