"""Bridge: the flavour that a connector does not have, made of the one that it has.

Errors cross unchanged. Nobody can stop a thread, so a fetch whose caller gave up goes on; what
it brings home then is released, not forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Delivery,
    Depth,
    Listener,
    Release,
    SettleResult,
    Settling,
    Unlisten,
)
from ergon_framework.connectors.daemons import Daemons
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.telemetry import logs
from ergon_framework.transaction import Transaction

_T = TypeVar("_T")
_making = threading.Lock()
_log = logging.getLogger(__name__)

#: Threads for calls that may wait, and threads kept free for claims: a fetch that blocks must
#: not keep anybody from renewing or settling.
_CALLS = 4
_CLAIMS = 2
#: How long close() waits for what ignores its cancellation; the thread is a daemon and is then left behind.
_LEAVE = 5.0


def as_sync(connector: Connector | AsyncConnector) -> Connector:
    """*connector* itself if it has the sync flavour, else a bridge with an event loop of its own."""
    if isinstance(connector, Connector):
        return connector
    if isinstance(connector, AsyncConnector):
        return _bridged(connector, SyncBridge)
    raise _not_one(connector)


def as_async(connector: Connector | AsyncConnector) -> AsyncConnector:
    """*connector* itself if it has the async flavour, else a bridge with a few threads of its own."""
    if isinstance(connector, AsyncConnector):
        return connector
    if isinstance(connector, Connector):
        return _bridged(connector, AsyncBridge)
    raise _not_one(connector)


def _bridged(connector: Any, bridge: Callable[[Any], _T]) -> _T:
    """One bridge per connector: each has threads or an event loop of its own."""
    with _making:
        if connector.bridged is None:
            connector.bridged = bridge(connector)
        made: _T = connector.bridged
    return made


def _not_one(thing: object) -> ConfigurationError:
    return ConfigurationError(f"a {type(thing).__qualname__} is not a connector; subclass Connector or AsyncConnector")


class _Outcome(Generic[_T]):
    """What a call came to: futures refuse some exceptions, so none is handed to them."""

    __slots__ = ("_error", "_value")

    def __init__(self, value: _T | None = None, *, error: BaseException | None = None) -> None:
        self._value = value
        self._error = error

    @property
    def deliveries(self) -> Sequence[Delivery]:
        """What a fetch brought; nothing if it failed."""
        return self._value if self._error is None and self._value else ()  # type: ignore[return-value]

    def get(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def _settlings(deliveries: Sequence[Delivery]) -> list[Settling]:
    release = Release()
    return [(delivery, release) for delivery in deliveries]


def _unreleased(connector: Connector | AsyncConnector, deliveries: Sequence[Delivery], error: Exception) -> None:
    logs.say(
        logging.WARNING,
        "late deliveries could not be released; they come back when their claims end",
        {"queue": connector.name, "deliveries": len(deliveries), "error": type(error).__qualname__},
        to=_log,
    )


# -- a sync connector for async callers -------------------------------------------------------------


class AsyncBridge(AsyncConnector):
    """The async flavour of a sync connector, each call on one of a few daemon threads.

    The connector is called from several threads at once. A call that is cancelled before a
    thread has begun it is never made; one that has begun goes on without its caller.
    """

    writes_audit = True  # its connector does

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self._calls = Daemons(f"ergon-{connector.name}-calls", size=_CALLS)
        self._claims = Daemons(f"ergon-{connector.name}-claims", size=_CLAIMS)

    @property
    def name(self) -> str:
        return self.connector.name

    @property
    def server_address(self) -> str | None:
        return self.connector.server_address

    @property
    def write_refusal(self) -> str | None:
        return self.connector.write_refusal

    @property
    def capabilities(self) -> Capabilities:
        return self.connector.capabilities

    def listen(self, listener: Listener) -> Unlisten:
        return self.connector.listen(listener)

    def limit_deliveries(self, most: int) -> None:
        self.connector.limit_deliveries(most)

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return await self._run(
            self._calls, lambda: self.connector.fetch_transactions(batch_size, **extra), late=self._release
        )

    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        return await self._run(self._claims, lambda: self.connector.settle(settlings))

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._run(self._claims, lambda: self.connector.extend(deliveries))

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._run(self._calls, lambda: self.connector.dispatch(transactions))

    async def depth_async(self) -> Depth | None:
        return await self._run(self._calls, self.connector.depth)

    async def queued_async(self, ids: Collection[str]) -> Collection[str] | None:
        return await self._run(self._calls, lambda: self.connector.queued(ids))

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._run(self._calls, lambda: self.connector.list_dead(query, after=after, limit=limit))

    async def replay_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run(self._calls, lambda: self.connector.replay_dead(places))

    async def discard_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run(self._calls, lambda: self.connector.discard_dead(places))

    async def replace_dead_async(self, place: str, transaction: Transaction) -> ReplayResult:
        return await self._run(self._calls, lambda: self.connector.replace_dead(place, transaction))

    async def open_async(self) -> None:
        self._calls.open()
        self._claims.open()
        await self._run(self._calls, self.connector.open)

    async def close_async(self) -> None:
        """Close the connector and let the threads go as they come home; none is waited for."""
        try:
            await self._run(self._calls, self.connector.close)
        finally:
            self._calls.close()
            self._claims.close()

    async def _run(
        self, threads: Daemons, call: Callable[[], _T], *, late: Callable[[_Outcome[_T]], None] | None = None
    ) -> _T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Outcome[_T]] = loop.create_future()
        context = copy_context()

        def arrive(outcome: _Outcome[_T]) -> None:
            if not future.done():
                future.set_result(outcome)
            elif late is not None:
                late(outcome)

        def job() -> None:
            if future.cancelled():
                return
            outcome = _attempted(lambda: context.run(call))
            try:
                loop.call_soon_threadsafe(arrive, outcome)
            except RuntimeError:  # the loop has closed, and with it everybody who waited there
                if late is not None:
                    late(outcome)

        threads.submit(job)
        try:
            outcome = await future
        except asyncio.CancelledError:
            # The result may have come in the very step in which the caller was cancelled.
            if late is not None and future.done() and not future.cancelled():
                late(future.result())
            raise
        return outcome.get()

    def _release(self, outcome: _Outcome[Sequence[Delivery]]) -> None:
        if deliveries := outcome.deliveries:
            self._claims.submit(lambda: self._give_back(deliveries))

    def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        try:
            self.connector.settle(_settlings(deliveries))
        except Exception as error:  # noqa: BLE001 - nobody waits for this any more; it is said in the log
            _unreleased(self.connector, deliveries, error)


def _attempted(call: Callable[[], _T]) -> _Outcome[_T]:
    try:
        return _Outcome(call())
    except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
        return _Outcome(error=error)


# -- an async connector for sync callers --------------------------------------------------------------


class SyncBridge(Connector):
    """The sync flavour of an async connector, which lives on one event loop on one daemon thread.

    The loop starts at the first call and ends at close; what is still running there then fails
    with ConnectionLost. It cannot be called from its own loop's thread, by a listener for instance.
    """

    writes_audit = True  # its connector does

    def __init__(self, connector: AsyncConnector) -> None:
        self.connector = connector
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self.connector.name

    @property
    def server_address(self) -> str | None:
        return self.connector.server_address

    @property
    def write_refusal(self) -> str | None:
        return self.connector.write_refusal

    @property
    def capabilities(self) -> Capabilities:
        return self.connector.capabilities

    def listen(self, listener: Listener) -> Unlisten:
        return self.connector.listen(listener)

    def limit_deliveries(self, most: int) -> None:
        self.connector.limit_deliveries(most)

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        future = self._start(self.connector.fetch_transactions_async, batch_size, **extra)
        try:
            future.exception()  # waits; what the call raised is in the outcome
        except CancelledError:
            pass
        except BaseException:
            # The wait was interrupted, as by KeyboardInterrupt; the fetch goes on.
            future.add_done_callback(self._release)
            raise
        return self._value(future)

    def settle(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        return self._value(self._start(self.connector.settle_async, settlings))

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self._value(self._start(self.connector.extend_async, deliveries))

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return self._value(self._start(self.connector.dispatch_async, transactions))

    def depth(self) -> Depth | None:
        return self._value(self._start(self.connector.depth_async))

    def queued(self, ids: Collection[str]) -> Collection[str] | None:
        return self._value(self._start(self.connector.queued_async, ids))

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._value(self._start(self.connector.list_dead_async, query, after=after, limit=limit))

    def replay_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self._value(self._start(self.connector.replay_dead_async, places))

    def discard_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self._value(self._start(self.connector.discard_dead_async, places))

    def replace_dead(self, place: str, transaction: Transaction) -> ReplayResult:
        return self._value(self._start(self.connector.replace_dead_async, place, transaction))

    def open(self) -> None:
        self._value(self._start(self.connector.open_async))

    def close(self) -> None:
        """Close the connector, then end its event loop and its thread."""
        try:
            self._value(self._start(self.connector.close_async))
        finally:
            with self._lock:
                loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
            if loop is not None and thread is not None:
                loop.call_soon_threadsafe(loop.stop)
                thread.join(_LEAVE)

    def _start(self, call: Callable[..., Coroutine[Any, Any, _T]], *args: Any, **extra: Any) -> Future[_Outcome[_T]]:
        if threading.current_thread() is self._thread:
            raise ConfigurationError(
                f"the sync bridge of {self.name!r} was called from its own event loop, which would wait for itself; "
                "call it from another thread"
            )
        with self._lock:
            loop = self._running()
            # Under the lock, so that no call is handed to a loop that has just been ended. The
            # caller's context goes along: call_soon_threadsafe copies it.
            return asyncio.run_coroutine_threadsafe(_awaited(call, args, extra=extra), loop)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_live, args=(self._loop,), name=f"ergon-{self.connector.name}-loop", daemon=True
            )
            self._thread.start()
        return self._loop

    def _value(self, future: Future[_Outcome[_T]]) -> _T:
        try:
            return future.result().get()
        except (asyncio.CancelledError, CancelledError) as error:
            raise ConnectionLost(f"the bridge to {self.name!r} was closed during the call") from error

    def _release(self, future: Future[_Outcome[Sequence[Delivery]]]) -> None:
        """Called on the loop's thread, or on the caller's if the fetch was done already."""
        deliveries = () if future.cancelled() else future.result().deliveries
        if not deliveries:
            return
        loop = self._loop
        if loop is None:
            _unreleased(self.connector, deliveries, ConnectionLost("the bridge is closed"))
            return
        giving_back = self._give_back(deliveries)
        try:
            asyncio.run_coroutine_threadsafe(giving_back, loop)
        except RuntimeError as error:  # closed in between
            giving_back.close()
            _unreleased(self.connector, deliveries, error)

    async def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        try:
            await self.connector.settle_async(_settlings(deliveries))
        except Exception as error:  # noqa: BLE001 - nobody waits for this any more; it is said in the log
            _unreleased(self.connector, deliveries, error)


async def _awaited(
    call: Callable[..., Coroutine[Any, Any, _T]], args: tuple[Any, ...], *, extra: dict[str, Any]
) -> _Outcome[_T]:
    try:
        return _Outcome(await call(*args, **extra))
    except BaseException as error:  # noqa: BLE001 - handed to the caller; SystemExit would end the loop for all
        return _Outcome(error=error)


def _live(loop: asyncio.AbstractEventLoop) -> None:
    """Run *loop* until it is stopped, then end what is left on it."""
    try:
        loop.run_forever()
        loop.run_until_complete(_end_others())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
