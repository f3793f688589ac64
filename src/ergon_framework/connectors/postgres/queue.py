"""PostgresQueue: a queue in a PostgreSQL database, as a sync and an async connector.

A fetch claims messages for a lease: a claim is the exclusive right to process them, and ends unless the process renews
its lease. A settlement (ack, release, deferral or dead letter) is valid only with the claim's receipt. The parts are in
other modules: claims, settlements, dead letters, the outbox, the notification listener and the clean-up.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from ergon_framework.audit import create_entry
from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Defer,
    Delivery,
    Depth,
    Listener,
    SettlementRequest,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.credentials import CredentialsSource
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult, ReplayResult
from ergon_framework.connectors.encryption import select_codec
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.postgres import audit, cleanup, dead_letters, lookup, outbox, sql
from ergon_framework.connectors.postgres.claims import ClaimManager, PostgresReceipt
from ergon_framework.connectors.postgres.client import DatabaseClient, acquire_client, release_client
from ergon_framework.connectors.postgres.inspect import diagnose
from ergon_framework.connectors.postgres.outbox import DispatchStatement, build_dispatch
from ergon_framework.connectors.postgres.settle import PostgresSettler
from ergon_framework.connectors.wakeup import WakeupHub
from ergon_framework.database.address import is_same_database, public_address
from ergon_framework.database.operation import BEGIN, COMMIT, Operation, Query
from ergon_framework.diagnostics import Diagnostic, WallClock
from ergon_framework.errors import ConfigurationError
from ergon_framework.history import History
from ergon_framework.scope import current
from ergon_framework.transaction import Transaction

R = TypeVar("R")

#: The environment variable with the address of the database, read if the program gives none.
DSN_VARIABLE: Final = "ERGON_POSTGRES__DSN"
#: The longest interval between two polls of a waiting fetch, with or without the notification listener.
_POLL_INTERVAL_SECONDS: Final = 0.25
#: Highest priority, and negated the lowest: a claim makes one query for each priority in use.
_MAX_PRIORITY: Final = 100
#: Seconds that a fetch waits for messages blocked by a key that is in flight in this process.
_BLOCKED_WAIT_SECONDS: Final = 5.0
#: Timeout for a cancelled fetch to release the messages that it claimed.
_RELEASE_TIMEOUT_SECONDS: Final = 1.0
_DAY_SECONDS: Final = 86_400.0
_INSERT_MARK: Final = outbox.SqlTemplate("""
insert into ergon.inbox (queue, transaction_id)
select coalesce(
    (select id from ergon.queue where name = cast({queue} as text)), ergon.create_queue(cast({queue} as text))
), cast({id} as text)
on conflict do nothing returning transaction_id
""")


class PostgresQueue(Connector, AsyncConnector):
    """One queue of a database that ``ergon db upgrade`` has prepared.

    The address is *dsn*, or ``ERGON_POSTGRES__DSN`` of the environment. Claims last for *lease*
    seconds and are renewed together for the whole process. Transactions with the same key are
    delivered one at a time, in the order of their dispatch. With *inbox*, an acked id is remembered
    for *inbox_days* and not run again. *priority* returns the priority of a transaction, by default
    its own; a higher one runs first. Dead letters are kept for *dead_days*, without limit if None. One
    fetch loads bodies of *max_fetch_bytes* at most, and always at least one. *credentials* returns
    the user and the password, and is called before every new connection.
    """

    writes_audit = True  # in the transaction of the action

    def __init__(
        self,
        name: str,
        *,
        dsn: str | None = None,
        lease: float = 30.0,
        codec: Codec | None = None,
        inbox: bool = False,
        inbox_days: float = 30.0,
        dead_days: float | None = None,
        priority: Callable[[Transaction], int] | None = None,
        max_fetch_bytes: int = MAX_FETCH_BYTES,
        credentials: CredentialsSource | None = None,
    ) -> None:
        if not 0 < len(name) <= 200:  # noqa: PLR2004 - as the table says
            raise ConfigurationError(f"queue name {name!r:.40} must have 1 to 200 characters, not {len(name)}")
        if not 0 < lease < math.inf:
            raise ConfigurationError(f"a lease must be a finite number of seconds > 0, not {lease!r}")
        self._name = name
        self._dsn = dsn
        self._lease = lease
        self._credentials = credentials
        self._codec = self._select_codec(codec)
        self._inbox = inbox
        self._inbox_days = inbox_days
        self._dead_days = dead_days
        self._priority = priority
        self._limits = FetchLimits(max_fetch_bytes)
        self._lock = threading.Lock()
        self._arrivals = WakeupHub()
        self._client: DatabaseClient | None = None
        self._inherited: DatabaseClient | None = None
        self._number: int | None = None
        self._listener_count = 0
        self._unsubscribe: Callable[[], None] | None = None
        #: Callbacks that end the retention of marks and dead letters; None before the first fetch.
        self._end_retention: list[Callable[[], None]] | None = None

    def _select_codec(self, codec: Codec | None) -> Codec:
        return select_codec(codec)

    def __repr__(self) -> str:
        return f"PostgresQueue({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def server_address(self) -> str | None:
        return public_address(self._dsn or os.environ.get(DSN_VARIABLE))

    @property
    def server_host(self) -> str | None:
        client = self._client
        return None if client is None else client.pool.host

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the queue; the durability is known once the queue was opened."""
        durability = None if self._client is None else self._client.durability
        return Capabilities(
            mode="queue",
            renewable=True,
            lease=self._lease,
            release_uncounted=True,
            delays=True,
            dead_letters=True,
            fenced_by="token",
            durable=None if durability is None else durability.durable,
            priority=True,
            ordered_by_key=True,
            max_payload=self._codec.max_bytes,
        )

    @property
    def durability(self) -> str | None:
        """What a power loss or the promotion of a standby could lose, as text; None before the queue was opened."""
        return None if self._client is None or self._client.durability is None else self._client.durability.summary

    # -- opening and closing ------------------------------------------------------------------------

    def _get_client(self) -> DatabaseClient:
        with self._lock:
            self._reset_after_fork()
            if self._client is None:
                self._client = acquire_client(self._require_dsn(), self._lease, self._credentials)
                self._claims = ClaimManager(
                    self._client.worker_lease,
                    self._codec,
                    name=self._name,
                    inbox=self._inbox,
                    limits=self._limits,
                    listener_id=self._client.listener.listener_id,
                    wake_after=self._wake_after,
                )
                self._settler = PostgresSettler(
                    self._client.worker_lease, self._claims, codec=self._codec, inbox=self._inbox
                )
            return self._client

    def _reset_after_fork(self) -> None:
        """Drop the claims, connections and threads of the parent in a forked child, without touching them."""
        if self._client is not None and self._client.owner_pid != os.getpid():
            # A reference is kept, so that the parent's connections are not garbage-collected here.
            self._inherited, self._client, self._number, self._unsubscribe = self._client, None, None, None
            self._end_retention = None

    def _require_dsn(self) -> str:
        dsn = self._dsn or os.environ.get(DSN_VARIABLE)
        if not dsn:
            raise ConfigurationError(f"queue {self._name!r} has no database address: set {DSN_VARIABLE} or pass dsn=…")
        return dsn

    def _ensure_open(self, client: DatabaseClient) -> Operation[int]:
        """Return the queue's number; check the schema the first time."""
        if self._number is None:
            yield from client.check_schema()
            ((self._number,),) = yield Query(sql.ENSURE_QUEUE, {"name": self._name})
        self._subscribe(client)
        return self._number

    def _run(self, work: Callable[[DatabaseClient], Operation[R]]) -> R:
        client = self._get_client()
        return client.pool.run(work(client))

    async def _run_async(self, work: Callable[[DatabaseClient], Operation[R]]) -> R:
        client = self._get_client()
        return await client.pool.run_async(work(client))

    def open(self) -> None:
        """Connect; reject a database whose schema is too old, and log the durability of its settings."""
        self._run(self._ensure_open)

    async def open_async(self) -> None:
        await self._run_async(self._ensure_open)

    def close(self) -> None:
        """Disconnect. Unsettled messages are redelivered when their lease ends."""
        self.interrupt()
        client, is_last = self._detach()
        if client is not None:
            with suppress(Exception):  # an unavailable server expires the lease by its own clock
                client.pool.run(self._release_worker(client, is_last=is_last))
        if client is not None and is_last:
            client.pool.close()

    async def close_async(self) -> None:
        self.interrupt()
        client, is_last = self._detach()
        if client is not None:
            with suppress(Exception):  # as in close
                await client.pool.run_async(self._release_worker(client, is_last=is_last))
        if client is not None and is_last:
            await client.pool.close_async()

    def _release_worker(self, client: DatabaseClient, *, is_last: bool) -> Operation[None]:
        yield from self._claims.release_unconfirmed()
        if is_last:
            yield from client.worker_lease.deregister()

    def _detach(self) -> tuple[DatabaseClient | None, bool]:
        """Detach from the client; return it, and whether this was its last user in this process."""
        with self._lock:
            self._reset_after_fork()
            client, self._client, self._number = self._client, None, None
            if client is not None:
                self._claims.close()
            for end in self._end_retention or ():
                end()
            self._end_retention = None
            if self._unsubscribe is not None:
                self._unsubscribe()
                self._unsubscribe = None
        return client, client is not None and release_client(client)

    def interrupt(self) -> None:
        """Make every waiting fetch return immediately."""
        self._arrivals.interrupt()

    # -- wake-ups -------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> Unlisten:
        unlisten = self._arrivals.listen(listener)
        with self._lock:
            self._listener_count += 1
        if self._client is not None:
            self._subscribe(self._client)

        def stop_listening() -> None:
            unlisten()
            with self._lock:
                self._listener_count -= 1
                if self._listener_count == 0 and self._unsubscribe is not None:
                    self._unsubscribe()
                    self._unsubscribe = None

        return stop_listening

    def _subscribe(self, client: DatabaseClient) -> None:
        with self._lock:
            if self._listener_count and self._unsubscribe is None and self._number is not None:
                self._unsubscribe = client.listener.subscribe(self._number, self._arrivals.notify)

    def _wake_after(self, seconds: float) -> None:
        client, number = self._client, self._number
        if client is not None and number is not None:
            client.listener.wake_after(number, max(0.0, seconds))

    # -- fetch ------------------------------------------------------------------------------------------

    def limit_deliveries(self, max_deliveries: int) -> None:
        self._limits.raise_max_deliveries(max_deliveries)

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """Return ready transactions: redelivered ones first, then by priority and age."""
        if batch_size < 1:
            return []
        began = time.monotonic()
        with self._arrivals.waiter() as waiter:
            while True:
                waiter.clear()
                until = began + self._compute_wait(wait)
                deliveries = self._run(lambda client: self._claim(client, batch_size))
                remaining = until - time.monotonic()
                if deliveries or remaining <= 0 or waiter.is_interrupted:
                    return deliveries
                waiter.wait(min(remaining, _POLL_INTERVAL_SECONDS))

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        began = time.monotonic()
        with self._arrivals.waiter_async() as waiter:
            while True:
                waiter.clear()
                until = began + self._compute_wait(wait)
                deliveries = await self._claim_async(batch_size)
                remaining = until - time.monotonic()
                if deliveries or remaining <= 0 or waiter.is_interrupted:
                    return deliveries
                await waiter.wait(min(remaining, _POLL_INTERVAL_SECONDS))

    def _compute_wait(self, wait: float) -> float:
        """Return how long an empty fetch waits: messages may be blocked by keys in flight in this process.

        An empty result would end a loop that only drains the queue. Computed before the poll, so that
        nothing is in flight during the last poll.
        """
        return max(wait, _BLOCKED_WAIT_SECONDS) if self._client is not None and self._claims.has_keyed_claims else wait

    async def _claim_async(self, batch_size: int) -> list[Delivery]:
        try:
            return await self._run_async(lambda client: self._claim(client, batch_size))
        except asyncio.CancelledError:
            # The caller that cancels does not handle what was claimed meanwhile; other workers do.
            with suppress(Exception):
                async with asyncio.timeout(_RELEASE_TIMEOUT_SECONDS):
                    await self._run_async(lambda _: self._claims.release_unconfirmed())
            raise

    def _claim(self, client: DatabaseClient, count: int) -> Operation[list[Delivery]]:
        number = yield from self._ensure_open(client)
        # Expired workers first, this one included: a lease that was not renewed has ended.
        if (yield from client.reap_expired_workers()):
            self._arrivals.notify()
        if self._end_retention is None:
            self._start_cleanup(client, number)
        if self._settler.has_unsent:
            yield from self._settler.flush_unsent(number)
        yield from self._return_unsettled(client, number)
        return (
            yield from self._claims.claim(
                number, count, wants_wakeup=self._listener_count > 0 and client.listener.listening
            )
        )

    def _start_cleanup(self, client: DatabaseClient, number: int) -> None:
        """Delete old marks and dead letters while this queue is open; a queue that only dispatches deletes none."""
        with self._lock:
            if self._end_retention is not None or self._client is not client:
                return
            self._end_retention = []
            if self._inbox:
                marks = cleanup.retain_marks(number, self._inbox_days * _DAY_SECONDS)
                self._end_retention.append(client.cleanup.add(marks))
            if self._dead_days is not None:
                retention = cleanup.retain_dead_letters(number, self._dead_days * _DAY_SECONDS)
                self._end_retention.append(client.cleanup.add(retention))

    def _return_unsettled(self, client: DatabaseClient, number: int) -> Operation[None]:
        """Return claims that nothing will settle: the renewals of the process would keep them while it runs."""
        returned = yield from client.worker_lease.return_abandoned()
        if (yield from self._settler.return_failed(number)) or returned:
            self._arrivals.notify()

    # -- settle and renew -------------------------------------------------------------------------------

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        if not requests:
            return []
        with self._queue_unsent_on_error(requests):
            return self._notify_ready(self._run(lambda client: self._settle(client, requests)))

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        if not requests:
            return []
        with self._queue_unsent_on_error(requests):
            return self._notify_ready(await self._run_async(lambda client: self._settle(client, requests)))

    @contextmanager
    def _queue_unsent_on_error(self, requests: Sequence[SettlementRequest]) -> Iterator[None]:
        """Queue *requests* for the next fetch if settling them fails: a caller that gives up does not repeat them."""
        self._get_client()
        try:
            yield
        except BaseException:
            self._settler.queue_unsent(requests)
            raise

    def _settle(
        self, client: DatabaseClient, requests: Sequence[SettlementRequest]
    ) -> Operation[tuple[list[SettleResult], bool]]:
        number = yield from self._ensure_open(client)
        settled = yield from self._settler.settle(number, requests)
        for delay in {settlement.delay for _, settlement in requests if isinstance(settlement, Defer)}:
            self._wake_after(delay)
        return settled

    def _notify_ready(self, settled: tuple[list[SettleResult], bool]) -> list[SettleResult]:
        results, ready = settled
        if ready:
            self._arrivals.notify()
        return results

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self._run(lambda client: self._extend(client, deliveries)) if deliveries else []

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._run_async(lambda client: self._extend(client, deliveries)) if deliveries else []

    def _extend(self, client: DatabaseClient, deliveries: Sequence[Delivery]) -> Operation[list[float | None]]:
        """Renew the lease of the whole worker instance once, if it still is the one that holds the claims."""
        held, receipts = self._claims.held, [delivery.receipt for delivery in deliveries]
        own_receipts = [
            receipt
            for receipt in receipts
            if isinstance(receipt, PostgresReceipt) and receipt.id in held.get((receipt.worker, receipt.token), ())
        ]
        extended: dict[Any, float] = {}
        for worker in {receipt.worker for receipt in own_receipts}:
            if worker == client.worker_lease.worker and (yield from client.worker_lease.renew(worker)) is not None:
                extended |= dict.fromkeys(
                    (receipt for receipt in own_receipts if receipt.worker == worker), client.worker_lease.until
                )
        self._settler.extend_failed(extended, client.worker_lease.until)
        yield from self._return_unsettled(client, (yield from self._ensure_open(client)))
        return [extended.get(receipt) for receipt in receipts]

    # -- dispatch ---------------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Insert all transactions or none; return when the database has committed them."""
        return self._run(self._prepare_dispatch(transactions)) if transactions else []

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._run_async(self._prepare_dispatch(transactions)) if transactions else []

    def _prepare_dispatch(
        self, transactions: Sequence[Transaction]
    ) -> Callable[[DatabaseClient], Operation[Sequence[Confirmation]]]:
        statement = self._build_statement(transactions)

        def send(client: DatabaseClient) -> Operation[Sequence[Confirmation]]:
            yield from self._ensure_open(client)
            style, prepares = outbox.ParamStyle.PSYCOPG, bool(client.pool.is_direct)
            text = outbox.render(statement.template, statement.parameters, style, prepares=prepares).sql
            yield Query(text, statement.parameters)
            return [Confirmation(name) for name in statement.ids]

        return send

    def _build_statement(self, transactions: Sequence[Transaction]) -> DispatchStatement:
        prepared = [self.prepare(transaction) for transaction in transactions]
        priority_of = self._priority
        priorities = (
            [self._check_priority(each.priority) for each in prepared]
            if priority_of is None
            else [self._check_priority(priority_of(each)) for each in prepared]
        )
        return build_dispatch(self._name, self._number, prepared, codec=self._codec, priorities=priorities)

    def _check_priority(self, priority: int) -> int:
        level = int(priority)
        if not -_MAX_PRIORITY <= level <= _MAX_PRIORITY:
            raise ConfigurationError(f"a priority must be between -{_MAX_PRIORITY} and {_MAX_PRIORITY}, not {level}")
        return level

    # -- on the caller's own connection -------------------------------------------------------------------

    def dispatch_statement(self, transactions: Sequence[Transaction], *, style: str = "psycopg") -> outbox.Statement:
        """Return the statement that dispatches *transactions*, for any connection to this database.

        *style* is the library that will execute it: psycopg, sqlalchemy (inside ``text()``), asyncpg or django.
        """
        try:
            param_style = outbox.ParamStyle(style)
        except ValueError:
            raise ConfigurationError(
                f"unknown style {style!r}: the styles are {', '.join(outbox.ParamStyle)}"
            ) from None
        statement = self._build_statement(transactions)
        return outbox.render(statement.template, statement.parameters, param_style)

    def dispatch_on(self, connection: Any, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Dispatch inside the open transaction of *connection*: the messages exist if and only if it commits.

        *connection* is one of psycopg, SQLAlchemy (a Session too) or Django. A connection that commits
        each statement automatically is rejected.
        """
        if not transactions:
            return []
        if self._may_open():
            self.open()
        statement = self._build_statement(transactions)
        outbox.execute_on(connection, statement.template, statement.parameters)
        return [Confirmation(name) for name in statement.ids]

    async def dispatch_on_async(self, connection: Any, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Dispatch inside the open transaction of an async connection of psycopg, SQLAlchemy or asyncpg."""
        if not transactions:
            return []
        if self._may_open():
            await self.open_async()
        statement = self._build_statement(transactions)
        await outbox.execute_on_async(connection, statement.template, statement.parameters)
        return [Confirmation(name) for name in statement.ids]

    def _may_open(self) -> bool:
        """Return whether the queue has no number yet and can get one.

        The row of a new queue, inserted in the caller's transaction, would block all others that insert it
        until that transaction ends.
        """
        return self._number is None and bool(self._dsn or os.environ.get(DSN_VARIABLE))

    def record_processed_on(self, connection: Any, transaction: Transaction | None = None) -> bool:
        """Mark a transaction as processed in the handler's own database transaction; return False if it was before.

        The effects of that database transaction then happen once, even if two workers handle the transaction.
        Without *transaction*, mark the one that is being handled.
        """
        return bool(outbox.execute_on(connection, _INSERT_MARK, self._build_mark(transaction)))

    async def record_processed_on_async(self, connection: Any, transaction: Transaction | None = None) -> bool:
        """Mark a transaction as processed on an async connection; see ``record_processed_on``."""
        return bool(await outbox.execute_on_async(connection, _INSERT_MARK, self._build_mark(transaction)))

    def _build_mark(self, transaction: Transaction | None) -> dict[str, Any]:
        if not self._inbox:
            raise ConfigurationError(f"queue {self._name!r} has no inbox: create it with inbox=True")
        if transaction is None:
            scope = current()
            if scope is None:
                raise ConfigurationError("no transaction is being handled here; pass transaction=…")
            transaction = scope.transaction
        return {"queue": self._name, "id": transaction.id}

    # -- inspection ---------------------------------------------------------------------------------------

    def depth(self) -> Depth:
        return self._run(self._depth)

    async def depth_async(self) -> Depth:
        return await self._run_async(self._depth)

    def _depth(self, client: DatabaseClient) -> Operation[Depth]:
        number = yield from self._ensure_open(client)
        ((ready, delayed, in_flight, dead, age),) = yield Query(sql.DEPTH, {"queue": number})
        return Depth(ready, delayed, in_flight, dead, None if age is None else max(0.0, age))

    def find_queued(self, ids: Collection[str]) -> Collection[str]:
        return self._run(lambda client: self._find_queued(client, ids))

    async def find_queued_async(self, ids: Collection[str]) -> Collection[str]:
        return await self._run_async(lambda client: self._find_queued(client, ids))

    def _find_queued(self, client: DatabaseClient, ids: Collection[str]) -> Operation[set[str]]:
        number = yield from self._ensure_open(client)
        return (yield from dead_letters.find_queued(number, list(ids)))

    def is_in(self, dsn: str) -> bool:
        """Return whether this queue is in the database at *dsn*."""
        return is_same_database(self._require_dsn(), dsn)

    def lookup(self, transaction_id: str) -> Sequence[History]:
        """Look up a transaction in this queue: its location, its recorded attempts, and whether it is done."""
        return self._run(lambda client: self._lookup(client, transaction_id))

    async def lookup_async(self, transaction_id: str) -> Sequence[History]:
        return await self._run_async(lambda client: self._lookup(client, transaction_id))

    def _lookup(self, client: DatabaseClient, transaction_id: str) -> Operation[Sequence[History]]:
        yield from self._ensure_open(client)
        return (yield from lookup.lookup_transaction(transaction_id, self._name))

    def diagnose(self, wall: WallClock) -> Sequence[Diagnostic]:
        """Diagnose the database and the queue; a missing queue is not created."""
        return self._run(lambda client: diagnose(client.pool, self._name, wall))

    # -- dead letters -------------------------------------------------------------------------------------

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._run(lambda client: self._list_dead(client, query, after=after, limit=limit))

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._run_async(lambda client: self._list_dead(client, query, after=after, limit=limit))

    def _list_dead(
        self, client: DatabaseClient, query: DeadLetterQuery, *, after: str | None, limit: int
    ) -> Operation[Sequence[DeadLetterRecord]]:
        number = yield from self._ensure_open(client)
        return (
            yield from dead_letters.list_dead(
                number, self._name, self._codec, query, after=after, limit=limit, max_bytes=self._limits.max_bytes
            )
        )

    def replay_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        replayed = self._run(lambda client: self._replay_dead(client, handles))
        self._arrivals.notify()
        return replayed

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        replayed = await self._run_async(lambda client: self._replay_dead(client, handles))
        self._arrivals.notify()
        return replayed

    def _replay_dead(self, client: DatabaseClient, handles: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
        number = yield from self._ensure_open(client)
        return (yield from self._move_with_audit("dlq.replay", number, handles, dead_letters.replay_dead))

    def _move_with_audit(
        self, action: str, number: int, handles: Sequence[str], move: dead_letters.MoveOperation
    ) -> Operation[Sequence[ReplayResult]]:
        """Move dead letters and insert the audit row in one transaction."""
        entry = create_entry(action, self._name)
        yield BEGIN
        ids = (yield from dead_letters.find_ids(number, handles)) if entry is not None else []
        results = yield from move(number, handles)
        if entry is not None:
            count = sum(result.outcome is not DeadLetterResult.GONE for result in results)
            yield from audit.write_entry(entry.end(count=count, targets=ids))
        yield Query(sql.NOTIFY_LISTENERS, {"queue": number})
        yield COMMIT
        return results

    def discard_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self._run(lambda client: self._discard_dead(client, handles))

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run_async(lambda client: self._discard_dead(client, handles))

    def replace_dead(self, handle: str, transaction: Transaction) -> ReplayResult:
        return self._run(self._prepare_replace(handle, transaction))

    async def replace_dead_async(self, handle: str, transaction: Transaction) -> ReplayResult:
        return await self._run_async(self._prepare_replace(handle, transaction))

    def _prepare_replace(
        self, handle: str, transaction: Transaction
    ) -> Callable[[DatabaseClient], Operation[ReplayResult]]:
        statement = self._build_statement([self._prepare_replacement(transaction)])

        def replace(client: DatabaseClient) -> Operation[ReplayResult]:
            number = yield from self._ensure_open(client)
            entry = create_entry("dlq.edit", self._name, [transaction.id])
            yield BEGIN
            result = yield from dead_letters.replace_dead(number, handle, statement.parameters)
            if entry is not None and result.outcome is DeadLetterResult.REPLAYED:
                yield from audit.write_entry(entry.end(count=1))
            yield Query(sql.NOTIFY_LISTENERS, {"queue": number})
            yield COMMIT
            self._arrivals.notify()
            return result

        return replace

    def _discard_dead(self, client: DatabaseClient, handles: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
        number = yield from self._ensure_open(client)
        return (yield from self._move_with_audit("dlq.discard", number, handles, dead_letters.discard_dead))
