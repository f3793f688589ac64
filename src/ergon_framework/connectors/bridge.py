"""Bridges: the missing variant of a connector, sync or async, built from the one that it has.

Errors cross unchanged. A thread cannot be stopped, so a fetch whose caller gave up continues; the deliveries that it
returns then are released.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from ergon_framework._util.daemon_executor import DaemonExecutor
from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Delivery,
    Depth,
    Listener,
    Release,
    SettlementRequest,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.telemetry import logs
from ergon_framework.transaction import Transaction

_T = TypeVar("_T")
_create_lock = threading.Lock()
_log = logging.getLogger(__name__)

#: Threads for calls that may block, and threads reserved for claims: a fetch that blocks must not delay
#: renewing or settling.
_CALL_THREADS = 4
_CLAIM_THREADS = 2
#: Seconds that close() waits for calls that ignore their cancellation; the daemon thread is then abandoned.
_CLOSE_TIMEOUT_SECONDS = 5.0


def as_sync(connector: Connector | AsyncConnector) -> Connector:
    """Return *connector* if it has the sync variant, else a bridge with its own event loop."""
    if isinstance(connector, Connector):
        return connector
    if isinstance(connector, AsyncConnector):
        return _get_bridge(connector, SyncBridge)
    raise _not_a_connector_error(connector)


def as_async(connector: Connector | AsyncConnector) -> AsyncConnector:
    """Return *connector* if it has the async variant, else a bridge with a few dedicated threads."""
    if isinstance(connector, AsyncConnector):
        return connector
    if isinstance(connector, Connector):
        return _get_bridge(connector, AsyncBridge)
    raise _not_a_connector_error(connector)


def _get_bridge(connector: Any, bridge: Callable[[Any], _T]) -> _T:
    """Return the one bridge of *connector*, creating it if needed: each has its own threads or event loop."""
    with _create_lock:
        if connector.bridged is None:
            connector.bridged = bridge(connector)
        instance: _T = connector.bridged
    return instance


def _not_a_connector_error(value: object) -> ConfigurationError:
    return ConfigurationError(f"a {type(value).__qualname__} is not a connector; subclass Connector or AsyncConnector")


class _CallResult(Generic[_T]):
    """The result of a call, value or error: futures reject some exceptions, so errors are wrapped."""

    __slots__ = ("_error", "_value")

    def __init__(self, value: _T | None = None, *, error: BaseException | None = None) -> None:
        self._value = value
        self._error = error

    @property
    def deliveries(self) -> Sequence[Delivery]:
        """The deliveries of a fetch; empty if it failed."""
        return self._value if self._error is None and self._value else ()  # type: ignore[return-value]

    def get(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def _to_release_requests(deliveries: Sequence[Delivery]) -> list[SettlementRequest]:
    release = Release()
    return [(delivery, release) for delivery in deliveries]


def _log_unreleased(connector: Connector | AsyncConnector, deliveries: Sequence[Delivery], error: Exception) -> None:
    logs.log_event(
        logging.WARNING,
        "release failed",
        {"queue": connector.name, "deliveries": len(deliveries), "error": type(error).__qualname__},
        to=_log,
    )


# -- a sync connector for async callers -------------------------------------------------------------


class AsyncBridge(AsyncConnector):
    """The async variant of a sync connector, each call on one of a few daemon threads.

    The connector is called from several threads at the same time. A call that is cancelled before a thread has begun
    it is never made; a call that has begun continues without its caller.
    """

    # The bridged connector does, so the base class must not wrap the methods of this class to write audit rows.
    writes_audit = True

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self._calls = DaemonExecutor(f"ergon-{connector.name}-calls", size=_CALL_THREADS)
        self._claims = DaemonExecutor(f"ergon-{connector.name}-claims", size=_CLAIM_THREADS)

    @property
    def name(self) -> str:
        return self.connector.name

    @property
    def server_address(self) -> str | None:
        return self.connector.server_address

    @property
    def server_host(self) -> str | None:
        return self.connector.server_host

    @property
    def write_refusal(self) -> str | None:
        return self.connector.write_refusal

    @property
    def capabilities(self) -> Capabilities:
        return self.connector.capabilities

    def listen(self, listener: Listener) -> Unlisten:
        return self.connector.listen(listener)

    def limit_deliveries(self, max_deliveries: int) -> None:
        self.connector.limit_deliveries(max_deliveries)

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return await self._run(
            self._calls, lambda: self.connector.fetch_transactions(batch_size, **extra), on_late=self._release
        )

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return await self._run(self._claims, lambda: self.connector.settle(requests))

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._run(self._claims, lambda: self.connector.extend(deliveries))

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._run(self._calls, lambda: self.connector.dispatch(transactions))

    async def depth_async(self) -> Depth | None:
        return await self._run(self._calls, self.connector.depth)

    async def find_queued_async(self, ids: Collection[str]) -> Collection[str] | None:
        return await self._run(self._calls, lambda: self.connector.find_queued(ids))

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._run(self._calls, lambda: self.connector.list_dead(query, after=after, limit=limit))

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run(self._calls, lambda: self.connector.replay_dead(handles))

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run(self._calls, lambda: self.connector.discard_dead(handles))

    async def replace_dead_async(self, handle: str, transaction: Transaction) -> ReplayResult:
        return await self._run(self._calls, lambda: self.connector.replace_dead(handle, transaction))

    async def open_async(self) -> None:
        self._calls.open()
        self._claims.open()
        await self._run(self._calls, self.connector.open)

    async def close_async(self) -> None:
        """Close the connector and let the threads exit when their calls return; it waits for none of them."""
        try:
            await self._run(self._calls, self.connector.close)
        finally:
            self._calls.close()
            self._claims.close()

    async def _run(
        self,
        threads: DaemonExecutor,
        call: Callable[[], _T],
        *,
        on_late: Callable[[_CallResult[_T]], None] | None = None,
    ) -> _T:
        """Run *call* on one of *threads*; *on_late* gets the result of a call whose caller was cancelled meanwhile."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_CallResult[_T]] = loop.create_future()
        context = copy_context()

        def finish(outcome: _CallResult[_T]) -> None:
            if not future.done():
                future.set_result(outcome)
            elif on_late is not None:
                on_late(outcome)

        def job() -> None:
            if future.cancelled():
                return
            outcome = _attempt(lambda: context.run(call))
            try:
                loop.call_soon_threadsafe(finish, outcome)
            except RuntimeError:  # the loop has closed, and with it all waiting callers
                if on_late is not None:
                    on_late(outcome)

        threads.submit(job)
        try:
            outcome = await future
        except asyncio.CancelledError:
            # The result may have arrived in the same loop step in which the caller was cancelled.
            if on_late is not None and future.done() and not future.cancelled():
                on_late(future.result())
            raise
        return outcome.get()

    def _release(self, outcome: _CallResult[Sequence[Delivery]]) -> None:
        if deliveries := outcome.deliveries:
            self._claims.submit(lambda: self._release_deliveries(deliveries))

    def _release_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        try:
            self.connector.settle(_to_release_requests(deliveries))
        except Exception as error:  # noqa: BLE001 - no caller waits for this any more; it is logged
            _log_unreleased(self.connector, deliveries, error)


def _attempt(call: Callable[[], _T]) -> _CallResult[_T]:
    try:
        return _CallResult(call())
    except BaseException as error:  # noqa: BLE001 - handed to the caller, which raises it
        return _CallResult(error=error)


# -- an async connector for sync callers --------------------------------------------------------------


class SyncBridge(Connector):
    """The sync variant of an async connector, which runs on one event loop in one daemon thread.

    The loop starts at the first call and ends at close; calls that are still running then fail with
    ConnectionLostError. It must not be called from its own loop's thread, for example by a listener.
    """

    # The bridged connector does, as in AsyncBridge.
    writes_audit = True

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
    def server_host(self) -> str | None:
        return self.connector.server_host

    @property
    def write_refusal(self) -> str | None:
        return self.connector.write_refusal

    @property
    def capabilities(self) -> Capabilities:
        return self.connector.capabilities

    def listen(self, listener: Listener) -> Unlisten:
        return self.connector.listen(listener)

    def limit_deliveries(self, max_deliveries: int) -> None:
        self.connector.limit_deliveries(max_deliveries)

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        future = self._start(self.connector.fetch_transactions_async, batch_size, **extra)
        try:
            future.exception()  # waits; an error of the call is in its result
        except CancelledError:
            pass
        except BaseException:
            # The wait was interrupted, for example by KeyboardInterrupt; the fetch continues.
            future.add_done_callback(self._release)
            raise
        return self._get_value(future)

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return self._get_value(self._start(self.connector.settle_async, requests))

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self._get_value(self._start(self.connector.extend_async, deliveries))

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return self._get_value(self._start(self.connector.dispatch_async, transactions))

    def depth(self) -> Depth | None:
        return self._get_value(self._start(self.connector.depth_async))

    def find_queued(self, ids: Collection[str]) -> Collection[str] | None:
        return self._get_value(self._start(self.connector.find_queued_async, ids))

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._get_value(self._start(self.connector.list_dead_async, query, after=after, limit=limit))

    def replay_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self._get_value(self._start(self.connector.replay_dead_async, handles))

    def discard_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self._get_value(self._start(self.connector.discard_dead_async, handles))

    def replace_dead(self, handle: str, transaction: Transaction) -> ReplayResult:
        return self._get_value(self._start(self.connector.replace_dead_async, handle, transaction))

    def open(self) -> None:
        self._get_value(self._start(self.connector.open_async))

    def close(self) -> None:
        """Close the connector, then end its event loop and its thread."""
        try:
            self._get_value(self._start(self.connector.close_async))
        finally:
            with self._lock:
                loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
            if loop is not None and thread is not None:
                loop.call_soon_threadsafe(loop.stop)
                thread.join(_CLOSE_TIMEOUT_SECONDS)

    def _start(self, call: Callable[..., Coroutine[Any, Any, _T]], *args: Any, **extra: Any) -> Future[_CallResult[_T]]:
        if threading.current_thread() is self._thread:
            raise ConfigurationError(
                f"the sync bridge of {self.name!r} was called from its own event loop, which would wait for itself; "
                "call it from another thread"
            )
        with self._lock:
            loop = self._ensure_loop()
            # Under the lock, so that no call is handed to a loop that was just stopped. call_soon_threadsafe
            # copies the caller's context.
            return asyncio.run_coroutine_threadsafe(_await_call(call, args, extra=extra), loop)

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_loop, args=(self._loop,), name=f"ergon-{self.connector.name}-loop", daemon=True
            )
            self._thread.start()
        return self._loop

    def _get_value(self, future: Future[_CallResult[_T]]) -> _T:
        try:
            return future.result().get()
        except (asyncio.CancelledError, CancelledError) as error:
            raise ConnectionLostError(f"the bridge to {self.name!r} was closed during the call") from error

    def _release(self, future: Future[_CallResult[Sequence[Delivery]]]) -> None:
        """Release the deliveries of *future*; called on the loop's thread, or on the caller's if it is done."""
        deliveries = () if future.cancelled() else future.result().deliveries
        if not deliveries:
            return
        loop = self._loop
        if loop is None:
            _log_unreleased(self.connector, deliveries, ConnectionLostError("the bridge is closed"))
            return
        coroutine = self._release_deliveries(deliveries)
        try:
            asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:  # the loop was closed after it was read above
            coroutine.close()
            _log_unreleased(self.connector, deliveries, error)

    async def _release_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        try:
            await self.connector.settle_async(_to_release_requests(deliveries))
        except Exception as error:  # noqa: BLE001 - no caller waits for this any more; it is logged
            _log_unreleased(self.connector, deliveries, error)


async def _await_call(
    call: Callable[..., Coroutine[Any, Any, _T]], args: tuple[Any, ...], *, extra: dict[str, Any]
) -> _CallResult[_T]:
    try:
        return _CallResult(await call(*args, **extra))
    except BaseException as error:  # noqa: BLE001 - handed to the caller; SystemExit would stop the shared loop
        return _CallResult(error=error)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run *loop* until it is stopped, then cancel the remaining tasks."""
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_remaining())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _cancel_remaining() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
