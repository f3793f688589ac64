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
from ergon_framework.connectors.bridge import AsyncBridge, SyncBridge, _CallResult, as_async, as_sync
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from tests.unit.connectors.harness import OnlyAsync, OnlySync, RecordingListener, ids_of, make_orders

CALLER_NAME = ContextVar("who", default="unknown")


class BlockingConnector(OnlySync):
    """A sync connector whose fetch waits for the test, and which says what was settled."""

    def __init__(self, inner):
        super().__init__(inner)
        self.started, self.gate, self.settle_called = threading.Event(), threading.Event(), threading.Event()
        self.settlings = []

    def fetch_transactions(self, batch_size, **extra):
        self.started.set()
        assert self.gate.wait(10.0)
        return super().fetch_transactions(batch_size, **extra)

    def settle(self, requests):
        self.settlings.extend(requests)
        try:
            return super().settle(requests)
        finally:
            self.settle_called.set()


async def wait_for(event):
    """Wait for a thread's event without blocking the loop and without the default executor."""
    future = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def wait_in_thread():
        was_set = event.wait(10.0)
        loop.call_soon_threadsafe(future.set_result, was_set)

    threading.Thread(target=wait_in_thread, daemon=True).start()
    assert await future


# -- which bridge -----------------------------------------------------------------------------------------


def test_an_implemented_variant_needs_no_bridge():
    memory = MemoryConnector()
    sync, aio = OnlySync(memory), OnlyAsync(memory)
    assert as_sync(memory) is as_async(memory) is memory
    assert as_sync(sync) is sync
    assert as_async(aio) is aio


def test_a_missing_variant_is_bridged():
    memory = MemoryConnector()
    assert isinstance(as_sync(OnlyAsync(memory)), SyncBridge)
    assert isinstance(as_async(OnlySync(memory)), AsyncBridge)


@pytest.mark.parametrize("bridge", [as_sync, as_async])
def test_an_object_that_is_not_a_connector_is_rejected(bridge):
    with pytest.raises(ConfigurationError, match="dict"):
        bridge({})


# -- to async ---------------------------------------------------------------------------------------------


def test_errors_pass_to_async_unchanged():
    error = ConnectionLostError("cut")

    class FailingConnector(OnlySync):
        def depth(self):
            raise error

        def dispatch(self, transactions):
            raise SystemExit(3)

        def settle(self, requests):
            raise StopIteration

    async def main():
        bridge = as_async(FailingConnector(MemoryConnector()))
        with pytest.raises(ConnectionLostError) as caught:
            await bridge.depth_async()
        assert caught.value is error
        with pytest.raises(SystemExit):
            await bridge.dispatch_async([])
        # Python itself turns this one around; what counts is that no caller waits forever.
        with pytest.raises(RuntimeError, match="StopIteration"):
            await bridge.settle_async([])
        await bridge.close_async()

    asyncio.run(main())


def test_calls_run_on_daemon_threads_of_the_bridge_with_the_callers_context():
    calls = []

    class RecordingConnector(OnlySync):
        def depth(self):
            calls.append((CALLER_NAME.get(), threading.current_thread()))

    async def main():
        CALLER_NAME.set("caller")
        bridge = as_async(RecordingConnector(MemoryConnector("orders")))
        await bridge.depth_async()
        await bridge.close_async()

    asyncio.run(main())
    ((caller_name, thread),) = calls
    assert caller_name == "caller"
    assert thread.daemon
    assert thread.name == "ergon-orders-calls"


def test_a_blocked_fetch_does_not_block_settling():
    memory = MemoryConnector()
    blocking = BlockingConnector(memory)
    memory.dispatch(make_orders("a"))
    (delivery,) = memory.fetch_transactions(1)

    async def main():
        bridge = as_async(blocking)
        fetches = [asyncio.create_task(bridge.fetch_transactions_async(1)) for _ in range(20)]
        await wait_for(blocking.started)
        results = await bridge.settle_async([(delivery, Ack())])
        blocking.gate.set()
        await asyncio.gather(*fetches)
        await bridge.close_async()
        return results

    assert asyncio.run(main()) == [SettleResult.SETTLED]


def test_deliveries_of_a_cancelled_fetch_are_released_when_it_returns():
    memory = MemoryConnector()
    blocking = BlockingConnector(memory)
    memory.dispatch(make_orders("a"))

    async def main():
        bridge = as_async(blocking)
        fetch = asyncio.create_task(bridge.fetch_transactions_async(1))
        await wait_for(blocking.started)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        blocking.gate.set()
        await wait_for(blocking.settle_called)
        await bridge.close_async()

    asyncio.run(main())
    assert [type(settlement) for _, settlement in blocking.settlings] == [Release]
    assert [delivery.deliveries for delivery in memory.fetch_transactions(1)] == [1]


def test_deliveries_of_a_fetch_that_outlives_its_event_loop_are_released():
    memory = MemoryConnector()
    blocking = BlockingConnector(memory)
    memory.dispatch(make_orders("a"))

    async def main():
        task = asyncio.create_task(as_async(blocking).fetch_transactions_async(1))
        await wait_for(blocking.started)
        task.cancel()

    asyncio.run(main())
    blocking.gate.set()
    assert blocking.settle_called.wait(10.0)
    assert memory.depth().in_flight == 0


def test_deliveries_of_a_fetch_that_returns_during_its_cancellation_are_released():
    memory = MemoryConnector()
    blocking = BlockingConnector(memory)
    blocking.gate.set()
    memory.dispatch(make_orders("a"))

    async def main():
        bridge = as_async(blocking)
        loop = asyncio.get_running_loop()
        fetch = asyncio.create_task(bridge.fetch_transactions_async(1))
        call_soon_threadsafe = loop.call_soon_threadsafe

        def cancel_after_arrival(callback, outcome, **extra):
            # The result and then, in the same step, the caller's end.
            call_soon_threadsafe(lambda: (callback(outcome), fetch.cancel()))

        loop.call_soon_threadsafe = cancel_after_arrival
        try:
            with pytest.raises(asyncio.CancelledError):
                await fetch
        finally:
            loop.call_soon_threadsafe = call_soon_threadsafe
        await wait_for(blocking.settle_called)
        await bridge.close_async()

    asyncio.run(main())
    assert memory.depth().ready == 1


def test_a_call_that_is_cancelled_before_it_starts_is_never_made():
    memory = MemoryConnector()
    blocking = BlockingConnector(memory)
    calls = []

    class CountingConnector(BlockingConnector):
        def dispatch(self, transactions):
            calls.append(transactions)
            return super().dispatch(transactions)

    blocking = CountingConnector(memory)

    async def main():
        bridge = as_async(blocking)
        fetches = [asyncio.create_task(bridge.fetch_transactions_async(1)) for _ in range(4)]  # every thread is taken
        await wait_for(blocking.started)
        dispatch = asyncio.create_task(bridge.dispatch_async(make_orders("a")))
        await asyncio.sleep(0)
        dispatch.cancel()
        await asyncio.gather(dispatch, return_exceptions=True)
        blocking.gate.set()
        await asyncio.gather(*fetches)
        await bridge.depth_async()  # behind the dispatch in the line
        await bridge.close_async()

    asyncio.run(main())
    assert calls == []


def test_a_late_release_that_fails_is_logged(caplog):
    class FailingConnector(BlockingConnector):
        def settle(self, requests):
            self.settle_called.set()
            raise ConnectionLostError("cut")

    memory = MemoryConnector("orders")
    failing = FailingConnector(memory)
    memory.dispatch(make_orders("a"))
    caplog.set_level(logging.WARNING)
    bridge = as_async(failing)
    bridge._release_deliveries(memory.fetch_transactions(1))
    (record,) = caplog.records
    assert (record.queue, record.deliveries, record.error) == ("orders", 1, "ConnectionLostError")


def test_a_hung_call_does_not_block_process_exit():
    code = (
        "import asyncio, threading\n"
        "from tests.unit.connectors.harness import OnlySync\n"
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


class AsyncBlockingConnector(OnlyAsync):
    """An async connector whose fetch waits for the test."""

    def __init__(self, inner):
        super().__init__(inner)
        self.started, self.settle_called, self.threads, self.caller_names = (
            threading.Event(),
            threading.Event(),
            set(),
            [],
        )

    async def fetch_transactions_async(self, batch_size, **extra):
        self.gate = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.started.set()
        await self.gate.wait()
        return await super().fetch_transactions_async(batch_size, **extra)

    async def settle_async(self, requests):
        results = await super().settle_async(requests)
        self.settle_called.set()
        return results

    async def depth_async(self):
        self.threads.add(threading.current_thread())
        self.caller_names.append(CALLER_NAME.get())
        return await super().depth_async()

    def release_fetch(self):
        self.loop.call_soon_threadsafe(self.gate.set)


def test_errors_pass_to_sync_unchanged_and_do_not_affect_later_calls():
    error = ConnectionLostError("cut")

    class FailingConnector(OnlyAsync):
        async def extend_async(self, deliveries):
            raise error

        async def dispatch_async(self, transactions):
            raise SystemExit(3)

    bridge = as_sync(FailingConnector(MemoryConnector()))
    with pytest.raises(ConnectionLostError) as caught:
        bridge.extend([])
    assert caught.value is error
    with pytest.raises(SystemExit):
        bridge.dispatch([])
    assert bridge.depth().ready == 0
    bridge.close()


def test_one_loop_on_one_daemon_thread_with_each_callers_context():
    aio = AsyncBlockingConnector(MemoryConnector("orders"))
    bridge = as_sync(aio)
    token = CALLER_NAME.set("first")
    bridge.depth()
    CALLER_NAME.reset(token)
    bridge.depth()
    (thread,) = aio.threads
    assert (thread.name, thread.daemon) == ("ergon-orders-loop", True)
    assert aio.caller_names == ["first", "unknown"]
    bridge.close()
    thread.join(10.0)
    assert not thread.is_alive()


def test_closing_ends_a_waiting_fetch_with_connection_lost():
    aio = AsyncBlockingConnector(MemoryConnector())
    bridge, errors = as_sync(aio), []

    def fetch():
        try:
            bridge.fetch_transactions(1)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    assert aio.started.wait(10.0)
    bridge.close()
    thread.join(10.0)
    assert [type(error) for error in errors] == [ConnectionLostError]


class InterruptedFuture(Future):
    """A future whose waiter is interrupted, as the main thread is by Ctrl-C."""

    def exception(self, timeout=None):
        raise KeyboardInterrupt


def test_deliveries_of_an_interrupted_fetch_are_released_when_it_returns(monkeypatch):
    memory = MemoryConnector()
    aio = AsyncBlockingConnector(memory)
    memory.dispatch(make_orders("a"))
    bridge = as_sync(aio)
    monkeypatch.setattr("asyncio.tasks.concurrent.futures.Future", InterruptedFuture)
    with pytest.raises(KeyboardInterrupt):
        bridge.fetch_transactions(1)
    monkeypatch.undo()
    assert aio.started.wait(10.0)
    aio.release_fetch()
    assert aio.settle_called.wait(10.0)
    assert [delivery.deliveries for delivery in memory.fetch_transactions(1)] == [1]
    bridge.close()


def test_a_late_fetch_of_a_closed_bridge_is_logged(caplog):
    memory = MemoryConnector("orders")
    memory.dispatch(make_orders("a"))
    bridge = as_sync(OnlyAsync(memory))
    late: Future = Future()
    late.set_result(_CallResult(memory.fetch_transactions(1)))
    caplog.set_level(logging.WARNING)
    bridge._release(late)
    (record,) = caplog.records
    assert (record.queue, record.deliveries, record.error) == ("orders", 1, "ConnectionLostError")


def test_a_late_fetch_during_close_is_logged(caplog):
    memory = MemoryConnector("orders")
    memory.dispatch(make_orders("a"))
    bridge = as_sync(OnlyAsync(memory))
    bridge._loop = asyncio.new_event_loop()
    bridge._loop.close()
    late: Future = Future()
    late.set_result(_CallResult(memory.fetch_transactions(1)))
    caplog.set_level(logging.WARNING)
    bridge._release(late)
    assert [record.error for record in caplog.records] == ["RuntimeError"]


def test_a_late_release_on_the_loop_that_fails_is_logged(caplog):
    class FailingConnector(OnlyAsync):
        async def settle_async(self, requests):
            raise ConnectionLostError("cut")

    memory = MemoryConnector("orders")
    memory.dispatch(make_orders("a"))
    caplog.set_level(logging.WARNING)
    asyncio.run(as_sync(FailingConnector(memory))._release_deliveries(memory.fetch_transactions(1)))
    assert [record.error for record in caplog.records] == ["ConnectionLostError"]


@pytest.mark.parametrize("outcome", [_CallResult([]), _CallResult(error=ConnectionLostError("cut")), None])
def test_a_late_fetch_without_deliveries_logs_nothing(outcome, caplog):
    late: Future = Future()
    if outcome is None:
        late.cancel()
        late.set_running_or_notify_cancel()
    else:
        late.set_result(outcome)
        as_async(OnlySync(MemoryConnector()))._release(outcome)
    as_sync(OnlyAsync(MemoryConnector()))._release(late)
    assert caplog.records == []


def test_a_bridge_has_the_name_and_capabilities_of_its_connector():
    memory = MemoryConnector("orders")
    for bridge in (as_sync(OnlyAsync(memory)), as_async(OnlySync(memory))):
        assert (bridge.name, bridge.capabilities) == ("orders", memory.capabilities)


def test_calling_from_its_own_loop_is_an_error_and_not_a_deadlock():
    class CallbackListener(RecordingListener):
        def wake(self):
            super().wake()
            try:
                bridge.depth()
            except ConfigurationError as error:
                self.error = error

    listener = CallbackListener()
    bridge = as_sync(OnlyAsync(MemoryConnector()))
    bridge.listen(listener)
    bridge.dispatch(make_orders("a"))
    assert "own event loop" in str(listener.error)
    bridge.close()


def test_a_closed_bridge_starts_again():
    bridge = as_sync(OnlyAsync(MemoryConnector()))
    bridge.dispatch(make_orders("a"))
    bridge.close()
    bridge.open()
    assert ids_of(bridge.fetch_transactions(1)) == ["a"]
    bridge.close()


def test_a_connector_has_one_bridge():
    connector = OnlyAsync(MemoryConnector())
    assert as_sync(connector) is as_sync(connector)


def test_a_connector_makes_transactions_of_its_own_queue():
    transaction = MemoryConnector("orders").transaction({"total": 3}, id="7", type="order")
    assert (transaction.source, transaction.id, transaction.type, transaction.payload) == (
        "orders",
        "7",
        "order",
        {"total": 3},
    )
