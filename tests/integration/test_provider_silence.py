"""A database that stands still in the middle of a visit: whoever calls goes on in time, and the books are right."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time

import psycopg
import pytest

from ergon_framework.errors import ConnectionLost
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.books import Account
from ergon_framework.providers.errors import ProviderError, ProviderInternalError
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.sql.books import PostgresBooks
from ergon_framework.schema import lines, migrate
from ergon_framework.schema.operation import Query
from tests.servers.steered import stored_quota
from tests.twins.world import Pulse

#: Seconds that a call may take, and those by which it may be late on a machine that is not late itself.
BUDGET, LATE = 0.5, 0.25
QUICK = ProviderPolicy(timeout=BUDGET, retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(month=100))
PATIENCE = 20.0
_numbers = itertools.count(1)


@pytest.fixture
def late():
    """The seconds by which a call may be late here and now."""
    with Pulse() as pulse:
        yield lambda: LATE + 3 * pulse.late


@pytest.fixture(scope="module")
def dsn(postgres):
    address = postgres.create_database(f"silence_{os.getpid()}")
    migrate.upgrade(address)
    return address


@pytest.fixture
def account():
    return Account(f"tenant-{next(_numbers)}", "payments", "charging")


@pytest.fixture
def line(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def books(dsn):
    opened = PostgresBooks(dsn, connections=1)
    yield opened
    opened.close()


@contextlib.contextmanager
def standing_still(books):
    """The server's process behind the only connection of *books*, stopped."""
    (found,) = books._lines._idle
    pid = found.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


class Payments(ProviderBase):
    provider_name, capability = "payments", "charging"

    def __init__(self, act=lambda: None, **given):
        super().__init__(**given)
        self.act, self.made = act, 0

    def _execute_impl(self, **_):
        self.made += 1
        self.act()
        return {"status": "paid"}


def until(holds, what):
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return found


def reservations(line, account):
    query = "select count(*) from ergon.provider_reservations where tenant_id = %s"
    return line.execute(query, [account.tenant_id]).fetchone()[0]


def used(line, account):
    return stored_quota(line, account, WindowKind.MONTH).used_count


def timed(call):
    """What *call* returned or raised, and the seconds it took."""
    began = time.monotonic()
    try:
        came = call()
    except (Exception, KeyboardInterrupt) as error:
        came = error
    return came, time.monotonic() - began


@pytest.mark.spec("PRV-19", "PRV-21")
def test_a_server_that_stands_still_before_a_call_costs_the_budget_and_no_call_is_made(books, account, line, late):
    payments = Payments(books=books, policy=QUICK)
    payments.call("charge", tenant=account.tenant_id, key="first")
    with standing_still(books) as pid:
        came, took = timed(lambda: payments.call("charge", tenant=account.tenant_id, key="k"))
        assert (type(came), came.code, payments.made) == (ProviderInternalError, "books_unavailable", 1)
        assert isinstance(came.__cause__, ConnectionLost)
        assert BUDGET <= took < BUDGET + late()
        # What nobody waits for keeps its place, so that it is not joined by others.
        came, took = timed(lambda: payments.call("charge", tenant=account.tenant_id))
        assert "was free in time" in str(came.__cause__)
        assert took < BUDGET + late()
    # The server carries out what it was told; its reservation is nobody's, and lapses.
    until(lambda: reservations(line, account) == 1, "the visit was carried out all the same")
    until(lambda: _works(payments, account), "it goes on by itself")
    assert [one.info.backend_pid for one in books._lines._idle] != [pid]
    assert (payments.made, used(line, account), reservations(line, account)) == (2, 3, 1)
    line.execute("update ergon.provider_reservations set until = now() - interval '1 hour'")
    assert [lost.calls for lost in books.reconcile() if lost.account == account] == [1]


def _works(payments, account):
    with contextlib.suppress(ProviderError):
        return payments.call("charge", tenant=account.tenant_id)
    return None


@pytest.mark.spec("PRV-19", "PRV-21", "PRV-22")
def test_a_result_stands_though_the_server_stands_still_after_the_call(books, account, line, late):
    still = contextlib.ExitStack()
    payments = Payments(books=books, policy=QUICK)
    payments.call("charge", tenant=account.tenant_id, key="first")
    payments.act = lambda: still.enter_context(standing_still(books))
    with still:
        came, took = timed(lambda: payments.call("charge", tenant=account.tenant_id, key="k"))
        assert came == {"status": "paid"}
        assert BUDGET <= took < BUDGET + late()
    until(lambda: reservations(line, account) == 0, "what was sent is carried out")
    payments.act = lambda: None
    assert until(lambda: _replayed(payments, account), "its key stands for its result") == {"status": "paid"}
    assert (payments.made, used(line, account)) == (2, 2)


def _replayed(payments, account):
    with contextlib.suppress(ProviderError):
        return payments.call("charge", tenant=account.tenant_id, key="k")
    return None


@pytest.mark.spec("PRV-21")
@pytest.mark.parametrize("blow", [KeyboardInterrupt, RuntimeError])
def test_what_strikes_the_thread_in_a_visit_comes_out_at_once_and_its_line_is_given_up(
    books, account, line, blow, late
):
    payments = Payments(books=books, policy=QUICK.model_copy(update={"timeout": PATIENCE}))
    payments.call("charge", tenant=account.tenant_id)

    def strike(*_):
        raise blow("called away")

    before = signal.signal(signal.SIGUSR1, strike)
    main = threading.main_thread().ident
    try:
        with standing_still(books):
            threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1)).start()
            came, took = timed(lambda: payments.call("charge", tenant=account.tenant_id))
            assert (type(came), str(came), payments.made) == (blow, "called away", 1)
            assert took < 0.2 + late()
            assert books._lines._idle == []
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert payments.call("charge", tenant=account.tenant_id) == {"status": "paid"}


@pytest.mark.spec("PRV-21")
def test_a_connection_that_takes_too_long_is_given_up_and_serves_the_next(dsn, monkeypatch, late):
    held, opened = threading.Event(), lines.Lines(dsn, most=1)
    connect = opened.connect

    def slow():
        held.wait(PATIENCE)
        return connect()

    def one():
        ((found,),) = yield Query("select pg_backend_pid()")
        return found

    monkeypatch.setattr(opened, "connect", slow)
    try:
        came, took = timed(lambda: opened.run(one(), within=0.1))
        assert (type(came), str(came)) == (ConnectionLost, "the database could not be reached in time")
        assert took < 0.1 + late()
        with pytest.raises(ConnectionLost, match="was free in time"):
            opened.run(one(), within=0.01)
        held.set()
        late = until(lambda: opened._idle, "it is kept for the next")[0].info.backend_pid
        assert opened.run(one(), within=PATIENCE) == late
    finally:
        held.set()
        opened.close()


# -- for asyncio --------------------------------------------------------------------------------------


class AsyncPayments(AsyncProviderBase):
    provider_name, capability = "payments", "charging"

    def __init__(self, act=lambda: None, **given):
        super().__init__(**given)
        self.act, self.made = act, 0

    async def _execute_impl(self, **_):
        self.made += 1
        self.act()
        return {"status": "paid"}


@contextlib.contextmanager
def standing_still_async(books):
    ((found,),) = (kept.idle for kept in books._lines._per_loop.values())
    pid = found.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


async def timed_async(call):
    began = time.monotonic()
    try:
        came = await call
    except (Exception, asyncio.CancelledError) as error:
        came = error
    return came, time.monotonic() - began


async def works_async(payments, **given):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(ProviderError):
            return await payments.call("charge", **given)
    raise AssertionError("it does not go on by itself")


@pytest.mark.spec("PRV-19", "PRV-21", "PRV-22")
def test_tasks_go_on_in_time_before_and_after_a_call(dsn, account, line, late):
    tenant = account.tenant_id

    async def main():
        async with PostgresBooks(dsn, connections=1) as books:
            payments = AsyncPayments(books=books, policy=QUICK)
            await payments.call("charge", tenant=tenant, key="first")
            with standing_still_async(books) as pid:
                came, took = await timed_async(payments.call("charge", tenant=tenant, key="before"))
                assert (type(came), came.code, payments.made) == (ProviderInternalError, "books_unavailable", 1)
                assert isinstance(came.__cause__, ConnectionLost)
                assert BUDGET <= took < BUDGET + late()
                came, took = await timed_async(payments.call("charge", tenant=tenant))
                assert "was free in time" in str(came.__cause__)
                assert took < BUDGET + late()
            assert await works_async(payments, tenant=tenant, key="second") == {"status": "paid"}
            ((found,),) = (kept.idle for kept in books._lines._per_loop.values())
            assert found.info.backend_pid != pid
            still = contextlib.ExitStack()
            payments.act = lambda: still.enter_context(standing_still_async(books))
            with still:
                came, took = await timed_async(payments.call("charge", tenant=tenant, key="after"))
                assert came == {"status": "paid"}
                assert BUDGET <= took < BUDGET + late()
            payments.act = lambda: None
            assert await works_async(payments, tenant=tenant, key="after") == {"status": "paid"}
            return payments.made

    assert asyncio.run(main()) == 3
    assert (used(line, account), reservations(line, account)) == (4, 1)


@pytest.mark.spec("PRV-21")
def test_a_task_that_is_cancelled_in_a_visit_leaves_at_once(dsn, account, late):
    async def main():
        async with PostgresBooks(dsn, connections=1) as books:
            payments = AsyncPayments(books=books, policy=QUICK.model_copy(update={"timeout": PATIENCE}))
            await payments.call("charge", tenant=account.tenant_id)
            with standing_still_async(books):
                task = asyncio.create_task(payments.call("charge", tenant=account.tenant_id))
                asyncio.get_running_loop().call_later(0.2, task.cancel)
                came, took = await timed_async(task)
                assert (type(came), payments.made) == (asyncio.CancelledError, 1)
                assert took < 0.2 + late()
            assert await payments.call("charge", tenant=account.tenant_id) == {"status": "paid"}

    asyncio.run(main())
