"""Check a database that stops responding during a round trip: callers continue in time and the state is correct."""

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

from ergon_framework.database import migrate, pool
from ergon_framework.database.operation import Query
from ergon_framework.errors import ConnectionLostError
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.errors import ProviderError, ProviderInternalError
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.postgres.state import PostgresProviderState
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.state import ProviderScope
from tests.both_drivers.harness import WakeupDelayMeter
from tests.servers.controlled import load_quota

#: Seconds that a call may take, and the tolerance on a machine that is not slow itself.
CALL_TIMEOUT_SECONDS, TOLERANCE_SECONDS = 0.5, 0.25
SHORT_POLICY = ProviderPolicy(
    timeout=CALL_TIMEOUT_SECONDS, retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(month=100)
)
TIMEOUT_SECONDS = 20.0
_numbers = itertools.count(1)


@pytest.fixture
def get_tolerance():
    """Return a function that returns the tolerance in seconds here and now."""
    with WakeupDelayMeter() as pulse:
        yield lambda: TOLERANCE_SECONDS + 3 * pulse.late


@pytest.fixture(scope="module")
def dsn(postgres):
    address = postgres.create_database(f"silence_{os.getpid()}")
    migrate.upgrade(address)
    return address


@pytest.fixture
def provider_scope():
    return ProviderScope(f"tenant-{next(_numbers)}", "payments", "charging")


@pytest.fixture
def connection(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def provider_state(dsn):
    provider_state = PostgresProviderState(dsn, connections=1)
    yield provider_state
    provider_state.close()


@contextlib.contextmanager
def stop_server_process(provider_state):
    """Stop the server process of the only connection of *provider_state*."""
    (connection,) = provider_state._pool._idle
    pid = connection.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


class CountingPayments(ProviderBase):
    provider_name, capability = "payments", "charging"

    def __init__(self, act=lambda: None, **options):
        super().__init__(**options)
        self.act, self.call_count = act, 0

    def _execute_impl(self, **_):
        self.call_count += 1
        self.act()
        return {"status": "paid"}


def wait_until(condition, message):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.005)
    return result


def count_reservations(connection, provider_scope):
    query = "select count(*) from ergon.provider_reservations where tenant_id = %s"
    return connection.execute(query, [provider_scope.tenant_id]).fetchone()[0]


def read_used_count(connection, provider_scope):
    return load_quota(connection, provider_scope, WindowKind.MONTH).used_count


def measure(call):
    """Return what *call* returned or raised, and the seconds it took."""
    started_at = time.monotonic()
    try:
        outcome = call()
    except (Exception, KeyboardInterrupt) as error:
        outcome = error
    return outcome, time.monotonic() - started_at


@pytest.mark.spec("PRV-19", "PRV-21")
def test_a_stopped_server_before_a_call_takes_the_call_timeout_and_no_call_is_made(
    provider_state, provider_scope, connection, get_tolerance
):
    payments = CountingPayments(state_store=provider_state, policy=SHORT_POLICY)
    payments.call("charge", tenant=provider_scope.tenant_id, key="first")
    with stop_server_process(provider_state) as pid:
        outcome, elapsed = measure(lambda: payments.call("charge", tenant=provider_scope.tenant_id, key="k"))
        assert (type(outcome), outcome.code, payments.call_count) == (
            ProviderInternalError,
            "provider_state_unavailable",
            1,
        )
        assert isinstance(outcome.__cause__, ConnectionLostError)
        assert CALL_TIMEOUT_SECONDS <= elapsed < CALL_TIMEOUT_SECONDS + get_tolerance()
        # An abandoned round trip keeps its connection, so that no other one joins it.
        outcome, elapsed = measure(lambda: payments.call("charge", tenant=provider_scope.tenant_id))
        assert "no free connection" in str(outcome.__cause__)
        assert elapsed < CALL_TIMEOUT_SECONDS + get_tolerance()
    # The server executes the pending statement; its reservation has no owner and expires.
    wait_until(lambda: count_reservations(connection, provider_scope) == 1, "the visit was carried out all the same")
    wait_until(lambda: _try_call(payments, provider_scope), "it goes on by itself")
    assert [one.info.backend_pid for one in provider_state._pool._idle] != [pid]
    assert (
        payments.call_count,
        read_used_count(connection, provider_scope),
        count_reservations(connection, provider_scope),
    ) == (2, 3, 1)
    connection.execute("update ergon.provider_reservations set until = now() - interval '1 hour'")
    assert [lost.calls for lost in provider_state.reconcile() if lost.account == provider_scope] == [1]


def _try_call(payments, provider_scope):
    with contextlib.suppress(ProviderError):
        return payments.call("charge", tenant=provider_scope.tenant_id)
    return None


@pytest.mark.spec("PRV-19", "PRV-21", "PRV-22")
def test_a_result_is_returned_although_the_server_stops_after_the_call(
    provider_state, provider_scope, connection, get_tolerance
):
    stack = contextlib.ExitStack()
    payments = CountingPayments(state_store=provider_state, policy=SHORT_POLICY)
    payments.call("charge", tenant=provider_scope.tenant_id, key="first")
    payments.act = lambda: stack.enter_context(stop_server_process(provider_state))
    with stack:
        outcome, elapsed = measure(lambda: payments.call("charge", tenant=provider_scope.tenant_id, key="k"))
        assert outcome == {"status": "paid"}
        assert CALL_TIMEOUT_SECONDS <= elapsed < CALL_TIMEOUT_SECONDS + get_tolerance()
    wait_until(lambda: count_reservations(connection, provider_scope) == 0, "what was sent is carried out")
    payments.act = lambda: None
    assert wait_until(lambda: _try_replay(payments, provider_scope), "its key stands for its result") == {
        "status": "paid"
    }
    assert (payments.call_count, read_used_count(connection, provider_scope)) == (2, 2)


def _try_replay(payments, provider_scope):
    with contextlib.suppress(ProviderError):
        return payments.call("charge", tenant=provider_scope.tenant_id, key="k")
    return None


@pytest.mark.spec("PRV-21")
@pytest.mark.parametrize("error_class", [KeyboardInterrupt, RuntimeError])
def test_an_exception_during_a_round_trip_is_raised_immediately_and_its_connection_is_dropped(
    provider_state, provider_scope, connection, error_class, get_tolerance
):
    payments = CountingPayments(
        state_store=provider_state, policy=SHORT_POLICY.model_copy(update={"timeout": TIMEOUT_SECONDS})
    )
    payments.call("charge", tenant=provider_scope.tenant_id)

    def raise_error(*_):
        raise error_class("called away")

    previous_handler = signal.signal(signal.SIGUSR1, raise_error)
    main = threading.main_thread().ident
    try:
        with stop_server_process(provider_state):
            threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1)).start()
            outcome, elapsed = measure(lambda: payments.call("charge", tenant=provider_scope.tenant_id))
            assert (type(outcome), str(outcome), payments.call_count) == (error_class, "called away", 1)
            assert elapsed < 0.2 + get_tolerance()
            assert provider_state._pool._idle == []
    finally:
        signal.signal(signal.SIGUSR1, previous_handler)
    assert payments.call("charge", tenant=provider_scope.tenant_id) == {"status": "paid"}


@pytest.mark.spec("PRV-21")
def test_a_connection_that_takes_too_long_is_abandoned_and_serves_the_next_call(dsn, monkeypatch, get_tolerance):
    may_connect, connection_pool = threading.Event(), pool.ConnectionPool(dsn, max_size=1)
    connect = connection_pool.connect

    def connect_slowly():
        may_connect.wait(TIMEOUT_SECONDS)
        return connect()

    def query_pid():
        ((pid,),) = yield Query("select pg_backend_pid()")
        return pid

    monkeypatch.setattr(connection_pool, "connect", connect_slowly)
    try:
        outcome, elapsed = measure(lambda: connection_pool.run(query_pid(), timeout_seconds=0.1))
        assert (type(outcome), str(outcome)) == (ConnectionLostError, "connecting to the database timed out")
        assert elapsed < 0.1 + get_tolerance()
        with pytest.raises(ConnectionLostError, match="no free connection"):
            connection_pool.run(query_pid(), timeout_seconds=0.01)
        may_connect.set()
        get_tolerance = wait_until(lambda: connection_pool._idle, "it is kept for the next")[0].info.backend_pid
        assert connection_pool.run(query_pid(), timeout_seconds=TIMEOUT_SECONDS) == get_tolerance
    finally:
        may_connect.set()
        connection_pool.close()


# -- for asyncio --------------------------------------------------------------------------------------


class AsyncCountingPayments(AsyncProviderBase):
    provider_name, capability = "payments", "charging"

    def __init__(self, act=lambda: None, **options):
        super().__init__(**options)
        self.act, self.call_count = act, 0

    async def _execute_impl(self, **_):
        self.call_count += 1
        self.act()
        return {"status": "paid"}


@contextlib.contextmanager
def stop_server_process_async(provider_state):
    ((connection,),) = (pooled.idle for pooled in provider_state._pool._per_loop.values())
    pid = connection.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


async def measure_async(call):
    started_at = time.monotonic()
    try:
        outcome = await call
    except (Exception, asyncio.CancelledError) as error:
        outcome = error
    return outcome, time.monotonic() - started_at


async def call_until_success(payments, **options):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ProviderError):
            return await payments.call("charge", **options)
    raise AssertionError("it does not go on by itself")


@pytest.mark.spec("PRV-19", "PRV-21", "PRV-22")
def test_tasks_continue_in_time_before_and_after_a_call(dsn, provider_scope, connection, get_tolerance):
    tenant = provider_scope.tenant_id

    async def main():
        async with PostgresProviderState(dsn, connections=1) as state:
            payments = AsyncCountingPayments(state_store=state, policy=SHORT_POLICY)
            await payments.call("charge", tenant=tenant, key="first")
            with stop_server_process_async(state) as pid:
                outcome, elapsed = await measure_async(payments.call("charge", tenant=tenant, key="before"))
                assert (type(outcome), outcome.code, payments.call_count) == (
                    ProviderInternalError,
                    "provider_state_unavailable",
                    1,
                )
                assert isinstance(outcome.__cause__, ConnectionLostError)
                assert CALL_TIMEOUT_SECONDS <= elapsed < CALL_TIMEOUT_SECONDS + get_tolerance()
                outcome, elapsed = await measure_async(payments.call("charge", tenant=tenant))
                assert "no free connection" in str(outcome.__cause__)
                assert elapsed < CALL_TIMEOUT_SECONDS + get_tolerance()
            assert await call_until_success(payments, tenant=tenant, key="second") == {"status": "paid"}
            ((idle,),) = (pooled.idle for pooled in state._pool._per_loop.values())
            assert idle.info.backend_pid != pid
            stack = contextlib.ExitStack()
            payments.act = lambda: stack.enter_context(stop_server_process_async(state))
            with stack:
                outcome, elapsed = await measure_async(payments.call("charge", tenant=tenant, key="after"))
                assert outcome == {"status": "paid"}
                assert CALL_TIMEOUT_SECONDS <= elapsed < CALL_TIMEOUT_SECONDS + get_tolerance()
            payments.act = lambda: None
            assert await call_until_success(payments, tenant=tenant, key="after") == {"status": "paid"}
            return payments.call_count

    assert asyncio.run(main()) == 3
    assert (read_used_count(connection, provider_scope), count_reservations(connection, provider_scope)) == (4, 1)


@pytest.mark.spec("PRV-21")
def test_a_task_cancelled_during_a_round_trip_ends_immediately(dsn, provider_scope, get_tolerance):
    async def main():
        async with PostgresProviderState(dsn, connections=1) as state:
            payments = AsyncCountingPayments(
                state_store=state, policy=SHORT_POLICY.model_copy(update={"timeout": TIMEOUT_SECONDS})
            )
            await payments.call("charge", tenant=provider_scope.tenant_id)
            with stop_server_process_async(state):
                task = asyncio.create_task(payments.call("charge", tenant=provider_scope.tenant_id))
                asyncio.get_running_loop().call_later(0.2, task.cancel)
                outcome, elapsed = await measure_async(task)
                assert (type(outcome), payments.call_count) == (asyncio.CancelledError, 1)
                assert elapsed < 0.2 + get_tolerance()
            assert await payments.call("charge", tenant=provider_scope.tenant_id) == {"status": "paid"}

    asyncio.run(main())
