"""Schedules of tasks: a function whose payload is sent to a queue at scheduled times, once in the fleet.

A schedule is a task: ``ergon run`` runs it beside the consumers of its module. Its connector returns the next scheduled
time (a tick) when it is due; the task then calls the function and sends what it returns. The entry in the database is
that of a job's cron, and the same code decides which ticks are due: the row is locked while a tick is fired.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, cast

from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Defer,
    Delivery,
    SettlementRequest,
    SettleResult,
)
from ergon_framework.database.extras import require_psycopg
from ergon_framework.errors import ConfigurationError
from ergon_framework.jobs import metrics
from ergon_framework.jobs.cron import DEFAULT_GRACE_SECONDS, CronTiming, Misfire, tick_id
from ergon_framework.jobs.metrics import CronTickResult
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.consumer import ConsumerMixin
from ergon_framework.task.keywords import refuse_unknown_keywords
from ergon_framework.task.signature import callable_name, is_async
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    EmptyQueuePolicy,
    ProcessPolicy,
    RetryPolicy,
)

if TYPE_CHECKING:
    from ergon_framework.jobs.tick_store import TickStore

P = ParamSpec("P")
R = TypeVar("R")

#: Maximum seconds of one wait for the next tick: an operator may have resumed the entry, and a stop waits for it.
MAX_WAIT_SECONDS: Final = 1.0
#: Seconds before a tick that failed, or that another process fires, is tried again.
RETRY_SECONDS: Final = 5.0
LOCKED_WAIT_SECONDS: Final = 0.2
#: One tick at a time, without end. The fetch itself waits for the next tick.
SCHEDULE_POLICY: Final = ConsumerPolicy(
    loop=ConsumerLoopPolicy(
        streaming=True,
        concurrency=ConcurrencyPolicy(value=1),
        batch=BatchPolicy(size=1),
        empty_queue=EmptyQueuePolicy(backoff=0.01, cap=0.01),
    ),
    steps=ConsumerSteps(process=ProcessPolicy(retry=RetryPolicy(timeout=30.0))),
)
_CAPABILITIES: Final = Capabilities(
    mode="queue",
    renewable=False,
    lease=None,
    release_uncounted=True,
    delays=False,
    dead_letters=False,
    fenced_by="token",
    durable=True,
)


class TickSource(Connector):
    """The connector of a schedule: its one message is the tick that is due, which another process may get as well.

    The task locks the entry before it sends; so of several processes with the same tick, one sends.
    """

    def __init__(
        self, timing: CronTiming, target: Connector | AsyncConnector, *, dsn: str | None, tenant: str | None
    ) -> None:
        self.timing = timing
        self.target = target
        self._dsn = dsn
        self._tenant = tenant
        self._lock = Lock()
        #: While the schedule is open.
        self._store: TickStore | None = None
        #: After a failure, the time on the monotonic clock of the next fetch.
        self._retry_at = 0.0

    @property
    def name(self) -> str:
        return self.timing.name

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def store(self) -> TickStore:
        """The entry in the database. It is not opened here: a fetch that outlives its loop must not open it again."""
        with self._lock:
            if self._store is None:
                raise ConfigurationError(f"schedule {self.name!r} is not open: use run() or open()")
            return self._store

    def open(self) -> None:
        """Connect, and declare the entry; ConfigurationError without an address of a database."""
        require_psycopg()
        # Imported here: the package can be imported without the driver of the database.
        module = importlib.import_module("ergon_framework.jobs.tick_store")
        store: TickStore = module.TickStore(self.timing, self.target, dsn=self._dsn, tenant=self._tenant)
        try:
            store.declare()
        except BaseException:
            store.close()
            raise
        with self._lock:
            self._store = store

    def close(self) -> None:
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def fetch_transactions(self, batch_size: int, **_extra: Any) -> Sequence[Delivery]:  # noqa: ARG002 - one tick
        """Wait at most a second for the next tick; return it when it is due and no other process fires it."""
        pause = self._retry_at - time.monotonic()
        if pause > 0:
            time.sleep(min(pause, MAX_WAIT_SECONDS))
            return []
        store = self.store
        next_tick = store.find_next_tick()
        seconds = MAX_WAIT_SECONDS if next_tick is None else next_tick[1]
        if seconds > 0:
            time.sleep(min(seconds, MAX_WAIT_SECONDS))
        if next_tick is None or seconds > MAX_WAIT_SECONDS:
            return []
        if store.is_locked():
            time.sleep(LOCKED_WAIT_SECONDS)
            return []
        due_at = next_tick[0]
        transaction = Transaction(due_at.isoformat(), id=tick_id(self.name, due_at), source=self.name)
        return [Delivery(transaction, due_at, 1)]

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        """Settle ticks; nothing is stored here, because a tick that was not fired stays due."""
        for _, settlement in requests:
            if isinstance(settlement, Defer):
                self._retry_at = time.monotonic() + settlement.delay
        return [SettleResult.SETTLED for _ in requests]

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:  # noqa: ARG002 - rejected
        raise ConfigurationError(f"nothing can be sent to schedule {self.name!r}; send to queue {self.target.name!r}")


class Schedule(ConsumerMixin, Task, Generic[P, R]):
    """A schedule made of a function, which can still be called as one."""

    connector: TickSource

    def __init__(
        self,
        fn: Callable[P, R],
        source: TickSource,
        *,
        type: str | None = None,  # noqa: A002 - the name of the envelope field
        key: str | None = None,
        tenant: str | None = None,
    ) -> None:
        self._fn = fn
        self._name = source.name
        self._takes_time = _takes_time(fn)
        self._fields = {
            field: value for field, value in {"type": type, "key": key, "tenant": tenant}.items() if value is not None
        }
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__
        super().__init__(source, policy=SCHEDULE_POLICY)

    @property
    def name(self) -> str:
        return self._name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function unchanged: for tests and for other code."""
        return self._fn(*args, **kwargs)

    def process_transaction(self, transaction: Transaction) -> None:
        """Fire the tick: send the payload of its time, and write the next time."""
        fired = self.connector.store.fire(datetime.fromisoformat(transaction.payload), self.create_transaction)
        recorder = metrics.job_metrics(self.name)
        if fired is None:
            recorder.record_tick(CronTickResult.REPEATED, 1)
            return
        recorder.record_tick(CronTickResult.FIRED, fired.submitted)
        if fired.missed_since is not None:
            metrics.log_misfire(self.name, fired.name, submitted=fired.submitted)

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> Defer:  # noqa: ARG002
        """Try the tick again later: it stays due until it is fired, or until it is a misfire."""
        return Defer(RETRY_SECONDS)

    def create_transaction(self, tick: datetime) -> Transaction:
        """Return the transaction of the scheduled time *tick*, with the payload that the function returns for it."""
        source = self.connector
        arguments = (source.timing.schedule.to_local(tick),) if self._takes_time else ()
        payload: Any = cast("Callable[..., Any]", self._fn)(*arguments)
        if is_async(self._fn):
            payload = asyncio.run(payload)
        fields: dict[str, Any] = {**self._fields, "id": tick_id(self.name, tick)}
        return source.target.transaction(payload, **fields)


def _takes_time(fn: Callable[..., Any]) -> bool:
    """Return whether *fn* takes the scheduled time; raise an error if it takes anything else."""
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters:
        return False
    if len(parameters) == 1 and parameters[0].kind in {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    }:
        return True
    names = ", ".join(parameter.name for parameter in parameters)
    raise ConfigurationError(
        f"the function {callable_name(fn)} of a schedule takes {names}; it can take no parameter, or one: the "
        "scheduled time"
    )


class _ScheduleDecorator:
    """Makes a function a schedule."""

    def __init__(self, create: Callable[[Callable[..., Any]], Any]) -> None:
        self._create = create

    def __call__(self, fn: Callable[P, R], /) -> Schedule[P, R]:
        schedule: Schedule[P, R] = self._create(fn)
        return schedule


@refuse_unknown_keywords
def cron(
    expression: str,
    target: Connector | AsyncConnector | Task | AsyncTask,
    *,
    name: str | None = None,
    zone: str = "UTC",
    misfire: Misfire | str = Misfire.ONCE,
    grace: float = DEFAULT_GRACE_SECONDS,
    tenant: str | None = None,
    type: str | None = None,  # noqa: A002 - the name of the envelope field
    key: str | None = None,
    dsn: str | None = None,
) -> _ScheduleDecorator:
    """Make a function a schedule: at the times of *expression*, its return value is sent to *target*.

    Each time is sent once, however many processes run the schedule. *target* is a queue, or a task, whose queue is
    meant. The function takes nothing, or the scheduled time in *zone*. The id of what is sent is ``cron:NAME:TIME``.

    PostgreSQL stores the fired times, at *dsn* or ``ERGON_POSTGRES__DSN``. If *target* is a queue in that database, a
    time is sent exactly once. At another broker a process that is killed between the sending and the commit leads to a
    second transaction with the same id.

    The *name*, by default that of the function, identifies the schedule in that database. *misfire* says what happens
    to times that are late by more than *grace* seconds: ``skip`` sends nothing, ``once`` sends the last of them, and
    ``all`` sends each. *tenant*, *type* and *key* are those of what is sent.
    """
    connector = target.connector if isinstance(target, Task | AsyncTask) else target
    if not isinstance(connector, Connector | AsyncConnector):
        raise ConfigurationError(f"a schedule sends to a connector or to a task, not to a {target.__class__.__name__}")

    def create(fn: Callable[..., Any]) -> Schedule[Any, Any]:
        timing = CronTiming(name or callable_name(fn), expression, zone=zone, misfire=misfire, grace=grace)
        source = TickSource(timing, connector, dsn=dsn, tenant=tenant)
        return Schedule(fn, source, type=type, key=key, tenant=tenant)

    return _ScheduleDecorator(create)
