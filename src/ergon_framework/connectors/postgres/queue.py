"""PostgresQueue: a queue in a PostgreSQL database, in both flavours."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from ergon_framework.audit import new_entry
from ergon_framework.connectors.arrivals import Arrivals
from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Delivery,
    Depth,
    Later,
    Listener,
    SettleResult,
    Settling,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import select_codec
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.postgres import audit, burials, callers, cleanup, statements, tracing
from ergon_framework.connectors.postgres.claiming import Claiming
from ergon_framework.connectors.postgres.dispatching import Dispatch, dispatch
from ergon_framework.connectors.postgres.examining import examined
from ergon_framework.connectors.postgres.home import Home, home_of, leave
from ergon_framework.connectors.postgres.receipt import Receipt
from ergon_framework.connectors.postgres.settling import Settler
from ergon_framework.errors import ConfigurationError
from ergon_framework.finding import Finding, Wall
from ergon_framework.history import History
from ergon_framework.schema.lines import is_same_database, public_address
from ergon_framework.schema.operation import BEGIN, COMMIT, Operation, Query
from ergon_framework.scope import current
from ergon_framework.transaction import Transaction

R = TypeVar("R")

#: Where the address of the database is looked for if the program does not give one.
VARIABLE: Final = "ERGON_POSTGRES__DSN"
#: A waiting fetch looks at least this often, doorbell or not.
_LOOK: Final = 0.25
#: How many levels of priority there are above 0, and below it: each that is in use costs a claim one more look.
_LEVELS: Final = 100
#: Seconds that a fetch waits for what is behind the keys that are in hand in this process.
_BEHIND: Final = 5.0
#: Seconds that a cancelled fetch may take to give back what it claimed.
_GIVE_BACK: Final = 1.0
_DAY: Final = 86_400.0
_MARK: Final = callers.Template("""
insert into ergon.inbox (queue, transaction_id)
select coalesce(
    (select id from ergon.queue where name = cast({queue} as text)), ergon.make_queue(cast({queue} as text))
), cast({id} as text)
on conflict do nothing returning transaction_id
""")


class PostgresQueue(Connector, AsyncConnector):
    """One queue of a database that ``ergon db upgrade`` has prepared.

    The address is *dsn*, or the environment's ``ERGON_POSTGRES__DSN``. Claims last for *lease*
    seconds and are renewed as one for the whole process. Transactions with the same key are handed
    out one at a time, in the order of their dispatch. With *inbox*, an acked id is remembered for
    *inbox_days* and not run again. *priority* says how urgent a transaction is: 0 unless told
    otherwise, the larger the sooner. Dead letters are kept for *dead_days*, None for ever. One fetch
    loads bodies of *max_fetch_bytes* at most, and always at least one.
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
    ) -> None:
        if not 0 < len(name) <= 200:  # noqa: PLR2004 - as the table says
            raise ConfigurationError(f"the name of a queue has 1 to 200 characters, not {len(name)}")
        if not 0 < lease < math.inf:
            raise ConfigurationError(f"a lease must be a finite number of seconds > 0, not {lease!r}")
        self._name = name
        self._dsn = dsn
        self._lease = lease
        self._codec = self._select_codec(codec)
        self._inbox = inbox
        self._inbox_days = inbox_days
        self._dead_days = dead_days
        self._priority = priority
        self._limits = FetchLimits(max_fetch_bytes)
        self._lock = threading.Lock()
        self._arrivals = Arrivals()
        self._home: Home | None = None
        self._inherited: Home | None = None
        self._number: int | None = None
        self._listening = 0
        self._unhang: Callable[[], None] | None = None
        #: Ends the retention of marks and dead letters; None before the first fetch.
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
        return public_address(self._dsn or os.environ.get(VARIABLE))

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; whether it is durable is known once it was opened."""
        durability = None if self._home is None else self._home.durability
        return Capabilities(
            mode="queue",
            renewable=True,
            lease=self._lease,
            release_is_free=True,
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
        """In words, what a power loss and the promotion of a standby could cost; None before the queue was opened."""
        return None if self._home is None or self._home.durability is None else self._home.durability.summary

    # -- coming and going ---------------------------------------------------------------------------

    def _at_home(self) -> Home:
        with self._lock:
            self._after_fork()
            if self._home is None:
                self._home = home = home_of(self._address(), self._lease)
                self._claiming = Claiming(
                    self._home.tenure,
                    self._codec,
                    name=self._name,
                    inbox=self._inbox,
                    limits=self._limits,
                    has_bounds=lambda: home.has_bounded_claims,
                    sleeper=self._home.doorbell.sleeper,
                    remind=self._remind,
                )
                self._settler = Settler(self._home.tenure, self._claiming, codec=self._codec, inbox=self._inbox)
            return self._home

    def _after_fork(self) -> None:
        """In a forked child, leave the claims, connections and threads of the parent alone."""
        if self._home is not None and self._home.owner != os.getpid():
            # Kept, so that nobody collects connections that are the parent's.
            self._inherited, self._home, self._number, self._unhang = self._home, None, None, None
            self._end_retention = None

    def _address(self) -> str:
        dsn = self._dsn or os.environ.get(VARIABLE)
        if not dsn:
            raise ConfigurationError(
                f"the queue {self._name!r} has no database: set {VARIABLE} in the environment or give dsn=…"
            )
        return dsn

    def _opened(self, home: Home) -> Operation[int]:
        """The queue's number; the first time, with a look at the database."""
        if self._number is None:
            yield from home.checked()
            ((self._number,),) = yield Query(statements.QUEUE, {"name": self._name})
        self._hang(home)
        return self._number

    def _run(self, work: Callable[[Home], Operation[R]]) -> R:
        home = self._at_home()
        return home.lines.run(work(home))

    async def _run_async(self, work: Callable[[Home], Operation[R]]) -> R:
        home = self._at_home()
        return await home.lines.run_async(work(home))

    def open(self) -> None:
        """Connect; refuse a database whose schema is too old, and say what its settings are worth."""
        self._run(self._opened)

    async def open_async(self) -> None:
        await self._run_async(self._opened)

    def close(self) -> None:
        """Disconnect. What is still held comes back to somebody when the lease ends."""
        self.interrupt()
        home, last = self._left()
        if home is not None:
            with suppress(Exception):  # a server that is gone will find out by itself
                home.lines.run(self._parted(home, last=last))
        if home is not None and last:
            home.lines.close()

    async def close_async(self) -> None:
        self.interrupt()
        home, last = self._left()
        if home is not None:
            with suppress(Exception):  # as above
                await home.lines.run_async(self._parted(home, last=last))
        if home is not None and last:
            await home.lines.close_async()

    def _parted(self, home: Home, *, last: bool) -> Operation[None]:
        yield from self._claiming.disowned()
        if last:
            yield from home.tenure.retired()

    def _left(self) -> tuple[Home | None, bool]:
        """The home that is left, and whether nobody else in this process lives there."""
        with self._lock:
            self._after_fork()
            home, self._home, self._number = self._home, None, None
            if home is not None:
                self._claiming.close()
            for end in self._end_retention or ():
                end()
            self._end_retention = None
            if self._unhang is not None:
                self._unhang()
                self._unhang = None
        return home, home is not None and leave(home)

    def interrupt(self) -> None:
        """Every fetch that is waiting now returns at once."""
        self._arrivals.interrupt()

    # -- being woken ----------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> Unlisten:
        unlisten = self._arrivals.listen(listener)
        with self._lock:
            self._listening += 1
        if self._home is not None:
            self._hang(self._home)

        def leave_off() -> None:
            unlisten()
            with self._lock:
                self._listening -= 1
                if self._listening == 0 and self._unhang is not None:
                    self._unhang()
                    self._unhang = None

        return leave_off

    def _hang(self, home: Home) -> None:
        with self._lock:
            if self._listening and self._unhang is None and self._number is not None:
                self._unhang = home.doorbell.hang(self._number, self._arrivals.arrived)

    def _remind(self, seconds: float) -> None:
        home, number = self._home, self._number
        if home is not None and number is not None:
            home.doorbell.remind(number, max(0.0, seconds))

    # -- fetch ------------------------------------------------------------------------------------------

    def limit_deliveries(self, most: int) -> None:
        self._limits.raise_deliveries(most)

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """What is ready: what came back first, then by priority and age."""
        if batch_size < 1:
            return []
        began = time.monotonic()
        with self._arrivals.bell() as bell:
            while True:
                bell.clear()
                until = began + self._patience(wait)
                found = self._run(lambda home: self._claimed(home, batch_size))
                left = until - time.monotonic()
                if found or left <= 0 or bell.interrupted:
                    return found
                bell.rung(min(left, _LOOK))

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        began = time.monotonic()
        with self._arrivals.bell_async() as bell:
            while True:
                bell.clear()
                until = began + self._patience(wait)
                found = await self._claimed_async(batch_size)
                left = until - time.monotonic()
                if found or left <= 0 or bell.interrupted:
                    return found
                await bell.rung(min(left, _LOOK))

    def _patience(self, wait: float) -> float:
        """How long a fetch that finds nothing waits: others may have their turn behind what is in hand here.

        To say that there is nothing would end a loop that only means to empty the queue. Asked before
        the look, so that the last look is one with nothing in hand.
        """
        return max(wait, _BEHIND) if self._home is not None and self._claiming.holds_keys else wait

    async def _claimed_async(self, batch_size: int) -> list[Delivery]:
        try:
            return await self._run_async(lambda home: self._claimed(home, batch_size))
        except asyncio.CancelledError:
            # Whoever cancels has no use for what was claimed on the way, and somebody else has.
            with suppress(Exception):
                async with asyncio.timeout(_GIVE_BACK):
                    await self._run_async(lambda _: self._claiming.disowned())
            raise

    def _claimed(self, home: Home, count: int) -> Operation[list[Delivery]]:
        number = yield from self._opened(home)
        # The dead first, even if it is oneself: what nobody renewed for a lease is nobody's.
        if (yield from home.reaped()):
            self._arrivals.arrived()
        if self._end_retention is None:
            self._start_cleanup(home, number)
        if self._settler.owes:
            yield from self._settler.pay(number)
        yield from self._return_unsettled(home, number)
        return (yield from self._claiming.claim(number, count, asks=self._listening > 0 and home.doorbell.hears))

    def _start_cleanup(self, home: Home, number: int) -> None:
        """Delete old marks and dead letters while this queue is open; a queue that only sends deletes none."""
        with self._lock:
            if self._end_retention is not None or self._home is not home:
                return
            self._end_retention = []
            if self._inbox:
                marks = cleanup.retain_marks(number, self._inbox_days * _DAY)
                self._end_retention.append(home.cleanup.add(marks))
            if self._dead_days is not None:
                dead_letters = cleanup.retain_dead_letters(number, self._dead_days * _DAY)
                self._end_retention.append(home.cleanup.add(dead_letters))

    def _return_unsettled(self, home: Home, number: int) -> Operation[None]:
        """Return claims that nothing will settle: renewals of the process would keep them while it runs."""
        returned = yield from home.tenure.return_abandoned()
        if (yield from self._settler.return_failed(number)) or returned:
            self._arrivals.arrived()

    # -- settle and renew -------------------------------------------------------------------------------

    def settle(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        if not settlings:
            return []
        with self._owing(settlings):
            return self._told(self._run(lambda home: self._settled(home, settlings)))

    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        if not settlings:
            return []
        with self._owing(settlings):
            return self._told(await self._run_async(lambda home: self._settled(home, settlings)))

    @contextmanager
    def _owing(self, settlings: Sequence[Settling]) -> Iterator[None]:
        self._at_home()
        try:
            yield
        except BaseException:
            self._settler.owe(settlings)
            raise

    def _settled(self, home: Home, settlings: Sequence[Settling]) -> Operation[tuple[list[SettleResult], bool]]:
        number = yield from self._opened(home)
        settled = yield from self._settler.settle(number, settlings)
        for delay in {how.delay for _, how in settlings if isinstance(how, Later)}:
            self._remind(delay)
        return settled

    def _told(self, settled: tuple[list[SettleResult], bool]) -> list[SettleResult]:
        results, ready = settled
        if ready:
            self._arrivals.arrived()
        return results

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self._run(lambda home: self._extended(home, deliveries)) if deliveries else []

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._run_async(lambda home: self._extended(home, deliveries)) if deliveries else []

    def _extended(self, home: Home, deliveries: Sequence[Delivery]) -> Operation[list[float | None]]:
        """One renewal for the whole instance, if it still is the one that holds them."""
        held, receipts = self._claiming.held, [delivery.receipt for delivery in deliveries]
        mine = [
            receipt
            for receipt in receipts
            if isinstance(receipt, Receipt) and receipt.id in held.get((receipt.worker, receipt.token), ())
        ]
        kept: dict[Any, float] = {}
        for worker in {receipt.worker for receipt in mine}:
            if worker == home.tenure.worker and (yield from home.tenure.renewed(worker)) is not None:
                kept |= dict.fromkeys((receipt for receipt in mine if receipt.worker == worker), home.tenure.until)
        self._settler.extend_failed(kept, home.tenure.until)
        yield from self._return_unsettled(home, (yield from self._opened(home)))
        return [kept.get(receipt) for receipt in receipts]

    # -- dispatch ---------------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Put all into the queue, or none; returns when the database has committed them."""
        return self._run(self._sent(transactions)) if transactions else []

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._run_async(self._sent(transactions)) if transactions else []

    def _sent(self, transactions: Sequence[Transaction]) -> Callable[[Home], Operation[Sequence[Confirmation]]]:
        given = self._given(transactions)

        def sent(home: Home) -> Operation[Sequence[Confirmation]]:
            yield from self._opened(home)
            style, prepares = callers.Style.PSYCOPG, bool(home.lines.direct)
            sql = callers.rendered(given.template, given.parameters, style, prepares=prepares).sql
            yield Query(sql, given.parameters)
            return [Confirmation(name) for name in given.ids]

        return sent

    def _given(self, transactions: Sequence[Transaction]) -> Dispatch:
        stamped = [self.stamped(transaction) for transaction in transactions]
        urgent = self._priority
        priorities = [0] * len(stamped) if urgent is None else [self._level(urgent(each)) for each in stamped]
        return dispatch(self._name, self._number, stamped, codec=self._codec, priorities=priorities)

    def _level(self, priority: int) -> int:
        level = int(priority)
        if not -_LEVELS <= level <= _LEVELS:
            raise ConfigurationError(f"a priority is between -{_LEVELS} and {_LEVELS}, not {level}")
        return level

    # -- on the caller's own connection -------------------------------------------------------------------

    def statement(self, transactions: Sequence[Transaction], *, style: str = "psycopg") -> callers.Statement:
        """The statement that dispatches *transactions*, for any connection to this database.

        *style* is the library that will execute it: psycopg, sqlalchemy (inside ``text()``), asyncpg or django.
        """
        try:
            known = callers.Style(style)
        except ValueError:
            raise ConfigurationError(
                f"there is no style {style!r}; the styles are {', '.join(callers.Style)}"
            ) from None
        given = self._given(transactions)
        return callers.rendered(given.template, given.parameters, known)

    def dispatch_on(self, connection: Any, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Dispatch inside the transaction that is open on *connection*: they are there if it commits, and only then.

        *connection* is one of psycopg, SQLAlchemy (a Session too) or Django. One that commits each
        statement by itself is refused.
        """
        if not transactions:
            return []
        if self._may_open():
            self.open()
        given = self._given(transactions)
        callers.run(connection, given.template, given.parameters)
        return [Confirmation(name) for name in given.ids]

    async def dispatch_on_async(self, connection: Any, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """The same on an async connection of psycopg, SQLAlchemy or asyncpg."""
        if not transactions:
            return []
        if self._may_open():
            await self.open_async()
        given = self._given(transactions)
        await callers.run_async(connection, given.template, given.parameters)
        return [Confirmation(name) for name in given.ids]

    def _may_open(self) -> bool:
        """Whether the queue is yet to be named, and can be.

        Named first inside the caller's transaction, it would keep everybody else who names it waiting
        until that ends.
        """
        return self._number is None and bool(self._dsn or os.environ.get(VARIABLE))

    def mark_on(self, connection: Any, transaction: Transaction | None = None) -> bool:
        """Inside the handler's own database transaction: remember that this one was done; False if it was before.

        Effects of the same database transaction then happen once, whoever else is handling it. Without
        *transaction* it is the one that is being handled.
        """
        return bool(callers.run(connection, _MARK, self._mark(transaction)))

    async def mark_on_async(self, connection: Any, transaction: Transaction | None = None) -> bool:
        """The same on an async connection."""
        return bool(await callers.run_async(connection, _MARK, self._mark(transaction)))

    def _mark(self, transaction: Transaction | None) -> dict[str, Any]:
        if not self._inbox:
            raise ConfigurationError(f"the queue {self._name!r} has no inbox; make it with inbox=True")
        if transaction is None:
            scope = current()
            if scope is None:
                raise ConfigurationError("no transaction is being handled here; say which one is meant")
            transaction = scope.transaction
        return {"queue": self._name, "id": transaction.id}

    # -- what is there ------------------------------------------------------------------------------------

    def depth(self) -> Depth:
        return self._run(self._depth)

    async def depth_async(self) -> Depth:
        return await self._run_async(self._depth)

    def _depth(self, home: Home) -> Operation[Depth]:
        number = yield from self._opened(home)
        ((ready, delayed, in_flight, dead, age),) = yield Query(statements.DEPTH, {"queue": number})
        return Depth(ready, delayed, in_flight, dead, None if age is None else max(0.0, age))

    def queued(self, ids: Collection[str]) -> Collection[str]:
        return self._run(lambda home: self._queued(home, ids))

    async def queued_async(self, ids: Collection[str]) -> Collection[str]:
        return await self._run_async(lambda home: self._queued(home, ids))

    def _queued(self, home: Home, ids: Collection[str]) -> Operation[set[str]]:
        number = yield from self._opened(home)
        return (yield from burials.queued(number, list(ids)))

    def is_in(self, dsn: str) -> bool:
        """Tell whether this queue is in the database at *dsn*."""
        return is_same_database(self._address(), dsn)

    def trace(self, transaction_id: str) -> Sequence[History]:
        """What this queue knows of a transaction: where it is, the attempts that travel with it, that it is done."""
        return self._run(lambda home: self._traced(home, transaction_id))

    async def trace_async(self, transaction_id: str) -> Sequence[History]:
        return await self._run_async(lambda home: self._traced(home, transaction_id))

    def _traced(self, home: Home, transaction_id: str) -> Operation[Sequence[History]]:
        yield from self._opened(home)
        return (yield from tracing.trace(transaction_id, self._name))

    def examine(self, wall: Wall) -> Sequence[Finding]:
        """How the database and the queue are; the queue is not made if it is not there."""
        return self._run(lambda home: examined(home.lines, self._name, wall))

    # -- dead letters -------------------------------------------------------------------------------------

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._run(lambda home: self._listed(home, query, after=after, limit=limit))

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._run_async(lambda home: self._listed(home, query, after=after, limit=limit))

    def _listed(
        self, home: Home, query: DeadLetterQuery, *, after: str | None, limit: int
    ) -> Operation[Sequence[DeadLetterRecord]]:
        number = yield from self._opened(home)
        return (
            yield from burials.listed(
                number, self._name, self._codec, query, after=after, limit=limit, load=self._limits.max_bytes
            )
        )

    def replay_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        replayed = self._run(lambda home: self._replayed(home, places))
        self._arrivals.arrived()
        return replayed

    async def replay_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        replayed = await self._run_async(lambda home: self._replayed(home, places))
        self._arrivals.arrived()
        return replayed

    def _replayed(self, home: Home, places: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
        number = yield from self._opened(home)
        return (yield from self._audited("dlq.replay", number, places, burials.replayed))

    def _audited(
        self, action: str, number: int, places: Sequence[str], move: burials.Move
    ) -> Operation[Sequence[ReplayResult]]:
        """Move dead letters and leave the audit row in one transaction."""
        entry = new_entry(action, self._name)
        yield BEGIN
        ids = (yield from burials.ids_at(number, places)) if entry is not None else []
        results = yield from move(number, places)
        if entry is not None:
            count = sum(result.became is not Became.GONE for result in results)
            yield from audit.note(entry.end(count=count, targets=ids))
        yield Query(statements.WAKE, {"queue": number})
        yield COMMIT
        return results

    def discard_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self._run(lambda home: self._discarded(home, places))

    async def discard_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run_async(lambda home: self._discarded(home, places))

    def replace_dead(self, place: str, transaction: Transaction) -> ReplayResult:
        return self._run(self._replaced(place, transaction))

    async def replace_dead_async(self, place: str, transaction: Transaction) -> ReplayResult:
        return await self._run_async(self._replaced(place, transaction))

    def _replaced(self, place: str, transaction: Transaction) -> Callable[[Home], Operation[ReplayResult]]:
        given = self._given([transaction])

        def replaced(home: Home) -> Operation[ReplayResult]:
            number = yield from self._opened(home)
            entry = new_entry("dlq.edit", self._name, [transaction.id])
            yield BEGIN
            result = yield from burials.replace_dead(number, place, given.parameters)
            if entry is not None and result.became is Became.REPLAYED:
                yield from audit.note(entry.end(count=1))
            yield Query(statements.WAKE, {"queue": number})
            yield COMMIT
            self._arrivals.arrived()
            return result

        return replaced

    def _discarded(self, home: Home, places: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
        number = yield from self._opened(home)
        return (yield from self._audited("dlq.discard", number, places, burials.discarded))
