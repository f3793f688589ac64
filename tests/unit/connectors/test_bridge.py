"""The bridges: the same answers, the same errors, and nothing lost when a caller gives up."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextvars import ContextVar

import pytest

from ergon_framework.connectors.base import Ack, Release, SettleResult
from ergon_framework.connectors.bridge import AsyncBridge, SyncBridge, _Outcome, as_async, as_sync
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConfigurationError, ConnectionLost
from tests.unit.connectors.worlds import Ear, OnlyAsync, OnlySync, ids, orders

WHO = ContextVar("who", default="nobody")


class Held(OnlySync):
    """A sync connector whose fetch waits for the test, and which says what was settled."""

    def __init__(self, inner):
        super().__init__(inner)
        self.begun, self.gate, self.settled = threading.Event(), threading.Event(), threading.Event()
        self.settlings = []

    def fetch_transactions(self, batch_size, **extra):
        self.begun.set()
        assert self.gate.wait(10.0)
        return super().fetch_transactions(batch_size, **extra)

    def settle(self, settlings):
        self.settlings.extend(settlings)
        try:
            return super().settle(settlings)
        finally:
            self.settled.set()


async def until(event):
    """Wait for a thread's event without blocking the loop and without the default executor."""
    done = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def watch():
        found = event.wait(10.0)
        loop.call_soon_threadsafe(done.set_result, found)

    threading.Thread(target=watch, daemon=True).start()
    assert await done


# -- which bridge -----------------------------------------------------------------------------------------


def test_a_flavour_that_is_there_needs_no_bridge():
    memory = MemoryConnector()
    sync, aio = OnlySync(memory), OnlyAsync(memory)
    assert as_sync(memory) is as_async(memory) is memory
    assert as_sync(sync) is sync
    assert as_async(aio) is aio


def test_a_flavour_that_is_missing_is_bridged():
    memory = MemoryConnector()
    assert isinstance(as_sync(OnlyAsync(memory)), SyncBridge)
    assert isinstance(as_async(OnlySync(memory)), AsyncBridge)


@pytest.mark.parametrize("bridge", [as_sync, as_async])
def test_what_is_no_connector_is_refused(bridge):
    with pytest.raises(ConfigurationError, match="dict"):
        bridge({})


# -- to async ---------------------------------------------------------------------------------------------


def test_errors_pass_to_async_unchanged():
    error = ConnectionLost("cut")

    class Cut(OnlySync):
        def depth(self):
            raise error

        def dispatch(self, transactions):
            raise SystemExit(3)

        def settle(self, settlings):
            raise StopIteration

    async def world():
        bridge = as_async(Cut(MemoryConnector()))
        with pytest.raises(ConnectionLost) as caught:
            await bridge.depth_async()
        assert caught.value is error
        with pytest.raises(SystemExit):
            await bridge.dispatch_async([])
        # Python itself turns this one around; what counts is that nobody waits for ever.
        with pytest.raises(RuntimeError, match="StopIteration"):
            await bridge.settle_async([])
        await bridge.close_async()

    asyncio.run(world())


def test_calls_run_on_daemon_threads_of_the_bridge_with_the_callers_context():
    seen = []

    class Curious(OnlySync):
        def depth(self):
            seen.append((WHO.get(), threading.current_thread()))

    async def world():
        WHO.set("caller")
        bridge = as_async(Curious(MemoryConnector("orders")))
        await bridge.depth_async()
        await bridge.close_async()

    asyncio.run(world())
    ((who, thread),) = seen
    assert who == "caller"
    assert thread.daemon
    assert thread.name == "ergon-orders-calls"


def test_a_blocked_fetch_keeps_nobody_from_settling():
    memory = MemoryConnector()
    held = Held(memory)
    memory.dispatch(orders("a"))
    (delivery,) = memory.fetch_transactions(1)

    async def world():
        bridge = as_async(held)
        fetches = [asyncio.create_task(bridge.fetch_transactions_async(1)) for _ in range(20)]
        await until(held.begun)
        results = await bridge.settle_async([(delivery, Ack())])
        held.gate.set()
        await asyncio.gather(*fetches)
        await bridge.close_async()
        return results

    assert asyncio.run(world()) == [SettleResult.SETTLED]


def test_a_fetch_whose_caller_gave_up_is_released_when_it_comes_home():
    memory = MemoryConnector()
    held = Held(memory)
    memory.dispatch(orders("a"))

    async def world():
        bridge = as_async(held)
        fetch = asyncio.create_task(bridge.fetch_transactions_async(1))
        await until(held.begun)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        held.gate.set()
        await until(held.settled)
        await bridge.close_async()

    asyncio.run(world())
    assert [type(settlement) for _, settlement in held.settlings] == [Release]
    assert [delivery.deliveries for delivery in memory.fetch_transactions(1)] == [1]


def test_a_fetch_that_outlives_its_event_loop_is_released():
    memory = MemoryConnector()
    held = Held(memory)
    memory.dispatch(orders("a"))

    async def world():
        task = asyncio.create_task(as_async(held).fetch_transactions_async(1))
        await until(held.begun)
        task.cancel()

    asyncio.run(world())
    held.gate.set()
    assert held.settled.wait(10.0)
    assert memory.depth().in_flight == 0


def test_a_fetch_that_came_home_in_the_step_of_its_cancellation_is_released():
    memory = MemoryConnector()
    held = Held(memory)
    held.gate.set()
    memory.dispatch(orders("a"))

    async def world():
        bridge = as_async(held)
        loop = asyncio.get_running_loop()
        fetch = asyncio.create_task(bridge.fetch_transactions_async(1))
        signal = loop.call_soon_threadsafe

        def with_cancellation(arrive, outcome, **extra):
            # The result and then, in the same step, the caller's end.
            signal(lambda: (arrive(outcome), fetch.cancel()))

        loop.call_soon_threadsafe = with_cancellation
        try:
            with pytest.raises(asyncio.CancelledError):
                await fetch
        finally:
            loop.call_soon_threadsafe = signal
        await until(held.settled)
        await bridge.close_async()

    asyncio.run(world())
    assert memory.depth().ready == 1


def test_a_call_that_was_cancelled_before_it_began_is_never_made():
    memory = MemoryConnector()
    held = Held(memory)
    calls = []

    class Counting(Held):
        def dispatch(self, transactions):
            calls.append(transactions)
            return super().dispatch(transactions)

    held = Counting(memory)

    async def world():
        bridge = as_async(held)
        fetches = [asyncio.create_task(bridge.fetch_transactions_async(1)) for _ in range(4)]  # every thread is taken
        await until(held.begun)
        dispatch = asyncio.create_task(bridge.dispatch_async(orders("a")))
        await asyncio.sleep(0)
        dispatch.cancel()
        await asyncio.gather(dispatch, return_exceptions=True)
        held.gate.set()
        await asyncio.gather(*fetches)
        await bridge.depth_async()  # behind the dispatch in the line
        await bridge.close_async()

    asyncio.run(world())
    assert calls == []


def test_a_late_release_that_fails_is_said(caplog):
    class Broken(Held):
        def settle(self, settlings):
            self.settled.set()
            raise ConnectionLost("cut")

    memory = MemoryConnector("orders")
    broken = Broken(memory)
    memory.dispatch(orders("a"))
    caplog.set_level(logging.WARNING)
    bridge = as_async(broken)
    bridge._give_back(memory.fetch_transactions(1))
    (record,) = caplog.records
    assert (record.queue, record.deliveries, record.error) == ("orders", 1, "ConnectionLost")


def test_a_hung_call_does_not_hold_up_the_end_of_the_process():
    code = (
        "import asyncio, threading\n"
        "from tests.unit.connectors.worlds import OnlySync\n"
        "from ergon_framework.connectors.bridge import as_async\n"
        "from ergon_framework.connectors.memory import MemoryConnector\n"
        "begun = threading.Event()\n"
        "class Hung(OnlySync):\n"
        "    def depth(self):\n"
        "        begun.set()\n"
        "        threading.Event().wait()\n"
        "async def world():\n"
        "    task = asyncio.create_task(as_async(Hung(MemoryConnector())).depth_async())\n"
        "    await asyncio.sleep(0)\n"
        "    begun.wait()\n"
        "    task.cancel()\n"
        "asyncio.run(world())"
    )
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60, check=False).returncode == 0


# -- to sync ----------------------------------------------------------------------------------------------


class Aio(OnlyAsync):
    """An async connector whose fetch waits for the test."""

    def __init__(self, inner):
        super().__init__(inner)
        self.begun, self.settled, self.threads, self.who = threading.Event(), threading.Event(), set(), []

    async def fetch_transactions_async(self, batch_size, **extra):
        self.gate = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.begun.set()
        await self.gate.wait()
        return await super().fetch_transactions_async(batch_size, **extra)

    async def settle_async(self, settlings):
        results = await super().settle_async(settlings)
        self.settled.set()
        return results

    async def depth_async(self):
        self.threads.add(threading.current_thread())
        self.who.append(WHO.get())
        return await super().depth_async()

    def let_go(self):
        self.loop.call_soon_threadsafe(self.gate.set)


def test_errors_pass_to_sync_unchanged_and_spoil_no_later_call():
    error = ConnectionLost("cut")

    class Cut(OnlyAsync):
        async def extend_async(self, deliveries):
            raise error

        async def dispatch_async(self, transactions):
            raise SystemExit(3)

    bridge = as_sync(Cut(MemoryConnector()))
    with pytest.raises(ConnectionLost) as caught:
        bridge.extend([])
    assert caught.value is error
    with pytest.raises(SystemExit):
        bridge.dispatch([])
    assert bridge.depth().ready == 0
    bridge.close()


def test_one_loop_on_one_daemon_thread_with_each_callers_context():
    aio = Aio(MemoryConnector("orders"))
    bridge = as_sync(aio)
    token = WHO.set("first")
    bridge.depth()
    WHO.reset(token)
    bridge.depth()
    (thread,) = aio.threads
    assert (thread.name, thread.daemon) == ("ergon-orders-loop", True)
    assert aio.who == ["first", "nobody"]
    bridge.close()
    thread.join(10.0)
    assert not thread.is_alive()


def test_closing_ends_a_waiting_fetch_with_connection_lost():
    aio = Aio(MemoryConnector())
    bridge, errors = as_sync(aio), []

    def fetch():
        try:
            bridge.fetch_transactions(1)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    assert aio.begun.wait(10.0)
    bridge.close()
    thread.join(10.0)
    assert [type(error) for error in errors] == [ConnectionLost]


class Interrupted(Future):
    """A future whose waiter is interrupted, as the main thread is by Ctrl-C."""

    def exception(self, timeout=None):
        raise KeyboardInterrupt


def test_a_fetch_whose_waiter_was_interrupted_is_released_when_it_comes_home(monkeypatch):
    memory = MemoryConnector()
    aio = Aio(memory)
    memory.dispatch(orders("a"))
    bridge = as_sync(aio)
    monkeypatch.setattr("asyncio.tasks.concurrent.futures.Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        bridge.fetch_transactions(1)
    monkeypatch.undo()
    assert aio.begun.wait(10.0)
    aio.let_go()
    assert aio.settled.wait(10.0)
    assert [delivery.deliveries for delivery in memory.fetch_transactions(1)] == [1]
    bridge.close()


def test_a_late_fetch_of_a_closed_bridge_is_said(caplog):
    memory = MemoryConnector("orders")
    memory.dispatch(orders("a"))
    bridge = as_sync(OnlyAsync(memory))
    late: Future = Future()
    late.set_result(_Outcome(memory.fetch_transactions(1)))
    caplog.set_level(logging.WARNING)
    bridge._release(late)
    (record,) = caplog.records
    assert (record.queue, record.deliveries, record.error) == ("orders", 1, "ConnectionLost")


def test_a_late_fetch_in_the_moment_of_closing_is_said(caplog):
    memory = MemoryConnector("orders")
    memory.dispatch(orders("a"))
    bridge = as_sync(OnlyAsync(memory))
    bridge._loop = asyncio.new_event_loop()
    bridge._loop.close()
    late: Future = Future()
    late.set_result(_Outcome(memory.fetch_transactions(1)))
    caplog.set_level(logging.WARNING)
    bridge._release(late)
    assert [record.error for record in caplog.records] == ["RuntimeError"]


def test_a_late_release_on_the_loop_that_fails_is_said(caplog):
    class Broken(OnlyAsync):
        async def settle_async(self, settlings):
            raise ConnectionLost("cut")

    memory = MemoryConnector("orders")
    memory.dispatch(orders("a"))
    caplog.set_level(logging.WARNING)
    asyncio.run(as_sync(Broken(memory))._give_back(memory.fetch_transactions(1)))
    assert [record.error for record in caplog.records] == ["ConnectionLost"]


@pytest.mark.parametrize("outcome", [_Outcome([]), _Outcome(error=ConnectionLost("cut")), None])
def test_a_late_fetch_that_brought_nothing_leaves_nothing_to_do(outcome, caplog):
    late: Future = Future()
    if outcome is None:
        late.cancel()
        late.set_running_or_notify_cancel()
    else:
        late.set_result(outcome)
        as_async(OnlySync(MemoryConnector()))._release(outcome)
    as_sync(OnlyAsync(MemoryConnector()))._release(late)
    assert caplog.records == []


def test_a_bridge_is_described_by_its_connector():
    memory = MemoryConnector("orders")
    for bridge in (as_sync(OnlyAsync(memory)), as_async(OnlySync(memory))):
        assert (bridge.name, bridge.capabilities) == ("orders", memory.capabilities)


def test_calling_from_its_own_loop_is_an_error_and_not_a_deadlock():
    class Calling(Ear):
        def wake(self):
            super().wake()
            try:
                bridge.depth()
            except ConfigurationError as error:
                self.error = error

    ear = Calling()
    bridge = as_sync(OnlyAsync(MemoryConnector()))
    bridge.listen(ear)
    bridge.dispatch(orders("a"))
    assert "own event loop" in str(ear.error)
    bridge.close()


def test_a_closed_bridge_starts_again():
    bridge = as_sync(OnlyAsync(MemoryConnector()))
    bridge.dispatch(orders("a"))
    bridge.close()
    bridge.open()
    assert ids(bridge.fetch_transactions(1)) == ["a"]
    bridge.close()


def test_a_connector_has_one_bridge_however_often_it_is_asked_for():
    only = OnlyAsync(MemoryConnector())
    assert as_sync(only) is as_sync(only)


def test_a_connector_makes_transactions_of_its_own_queue():
    made = MemoryConnector("orders").transaction({"total": 3}, id="7", type="order")
    assert (made.source, made.id, made.type, made.payload) == ("orders", "7", "order", {"total": 3})
