"""Check provider state in PostgreSQL: many processes share one quota, one breaker and one key on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ergon_framework.database import migrate
from ergon_framework.database import pool as lines
from ergon_framework.database.operation import run_operation
from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.circuit_breaker import BreakerPolicy, BreakerState, OverrideKind
from ergon_framework.providers.errors import (
    ProviderBadRequestError,
    ProviderCircuitOpenError,
    ProviderConnectionError,
    ProviderDependencyError,
    ProviderError,
    ProviderInternalError,
    ProviderQuotaExceededError,
)
from ergon_framework.providers.idempotency import StoredResult
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.postgres import admin, operations, retention
from ergon_framework.providers.postgres.quota_blocks import BlockPolicy
from ergon_framework.providers.postgres.state import DSN_VARIABLE, PostgresProviderState
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.state import (
    AdmissionRequest,
    AdmittedAttempt,
    AttemptResult,
    KeyInFlight,
    ProviderScope,
    ReplayedResult,
)
from tests.log_events import list_events
from tests.servers.controlled import load_breaker, load_quota
from tests.servers.pgbouncer import PrivatePgBouncer

_numbers = itertools.count(1)
#: Seconds within which an expected event has to happen; it usually takes a hundredth of that.
TIMEOUT_SECONDS = 20.0


@pytest.fixture(scope="module")
def dsn(postgres):
    address = postgres.create_database(f"provider_state_{os.getpid()}_{next(_numbers)}")
    migrate.upgrade(address)
    return address


@pytest.fixture
def provider_scope():
    """Return a provider scope that no other test uses."""
    return ProviderScope(f"tenant-{next(_numbers)}", "payments", "charging")


@pytest.fixture
def provider_state(dsn):
    with PostgresProviderState(dsn) as provider_state:
        yield provider_state


@pytest.fixture
def connection(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def make_request(
    provider_scope,
    *,
    key=None,
    number=1,
    owner="me",
    fingerprint="f",
    outcome_unknown=False,
    lease=10.0,
    within=None,
    **fields,
):
    return AdmissionRequest(
        scope=provider_scope,
        policy=ProviderPolicy(**fields),
        tenant_id=provider_scope.tenant_id or "acme",
        idempotency_key=key,
        fingerprint=fingerprint,
        owner=owner,
        attempt_number=number,
        lease=lease,
        now=time.time(),
        outcome_unknown=outcome_unknown,
        timeout=within,
    )


def make_result(*, error=None, value=None, is_last=True, outcome_unknown=False):
    return AttemptResult(
        now=time.time(),
        is_last=is_last,
        outcome_unknown=outcome_unknown,
        error=error,
        stored_result=None if value is None else StoredResult(value),
    )


def wait_until(condition, message):
    """Wait for *condition* and return its result."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.005)
    return result


def make_quota(limit):
    """Return a quota with a day and an hour window that no test outlasts."""
    return QuotaPolicy(day=limit, month=limit * 10)


class StatementCounter:
    """A counter of the statements sent by this thread; watchers of other states have their own threads."""

    def __init__(self, monkeypatch):
        self.sent = 0
        self._thread_id = threading.get_ident()
        monkeypatch.setattr(lines, "run_operation", self.perform)

    def perform(self, connection, operation):
        def count_statements():
            rows = None
            while True:
                try:
                    query = operation.send(rows)
                except StopIteration as stop:
                    return stop.value
                self.sent += threading.get_ident() == self._thread_id
                rows = yield query

        return run_operation(connection, count_statements())


@pytest.fixture
def statement_counter(monkeypatch):
    return StatementCounter(monkeypatch)


# -- round trips --------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-19", "PRV-22")
def test_a_call_with_a_key_and_a_quota_is_one_statement_before_it_and_one_after_it(
    provider_state, provider_scope, statement_counter
):
    admitted = provider_state.admit(make_request(provider_scope, key="k", quota=make_quota(5)))
    assert statement_counter.sent == 1
    provider_state.complete(admitted, make_result(value={"id": 1}))
    assert statement_counter.sent == 2


@pytest.mark.spec("PRV-20")
def test_a_success_that_changes_nothing_is_not_written(provider_state, provider_scope, statement_counter):
    admitted = provider_state.admit(make_request(provider_scope))
    assert provider_state.complete(admitted, make_result(value={"id": 1})) is None
    assert statement_counter.sent == 1
    provider_state.complete(
        provider_state.admit(make_request(provider_scope)), make_result(error=ProviderDependencyError("down"))
    )
    assert statement_counter.sent == 3
    provider_state.complete(provider_state.admit(make_request(provider_scope)), make_result(value={"id": 1}))
    assert statement_counter.sent == 5, "the count of faults was not zero"
    provider_state.complete(provider_state.admit(make_request(provider_scope)), make_result(value={"id": 1}))
    assert statement_counter.sent == 6


# -- quota --------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-19")
@pytest.mark.parametrize("blocks", [None, BlockPolicy(size=7)])
def test_a_limit_admits_exactly_that_many_concurrent_calls(dsn, provider_scope, connection, blocks):
    limit, rejections = 100, []

    def admit_calls(state):
        admitted = 0
        for _ in range(25):
            try:
                admission = state.admit(make_request(provider_scope, quota=make_quota(limit)))
            except ProviderQuotaExceededError as error:
                rejections.append(error)
            else:
                state.complete(admission, make_result(value={}))
                admitted += 1
        return admitted

    with PostgresProviderState(dsn, blocks=blocks) as first, PostgresProviderState(dsn, blocks=blocks) as second:
        with ThreadPoolExecutor(16) as pool:
            admitted = sum(pool.map(admit_calls, [first, second] * 8))
        if blocks is None:
            assert admitted == limit
            assert len(rejections) == 300
            assert 0 < rejections[0].retry_after <= 86_400
        else:
            # Unused quota of a block is not refused: the process that has the block uses it.
            assert limit - 2 * blocks.size < admitted <= limit
    quota = load_quota(connection, provider_scope, WindowKind.DAY)
    assert (quota.used_count, quota.remaining_count) == (admitted, limit - admitted), "blocks came back at the end"


@pytest.mark.spec("PRV-19")
def test_quota_of_an_unsent_call_is_released_and_that_of_a_possibly_sent_call_is_kept(
    provider_state, provider_scope, connection
):
    for error, expected in (
        (ProviderConnectionError("refused", sent=False), 0),
        (ProviderConnectionError("reset"), 1),
        (ProviderBadRequestError("no"), 2),
        (None, 3),
    ):
        admitted = provider_state.admit(make_request(provider_scope, quota=make_quota(9)))
        provider_state.complete(admitted, make_result(error=error))
        provider_state.complete(admitted, make_result(error=error))  # reported twice, released once
        assert load_quota(connection, provider_scope, WindowKind.DAY).used_count == expected
        assert load_quota(connection, provider_scope, WindowKind.MONTH).used_count == expected
    assert not connection.execute(
        "select 1 from ergon.provider_reservations where tenant_id = %s", [provider_scope.tenant_id]
    ).fetchall()


@pytest.mark.spec("PRV-19")
def test_a_reservation_whose_owner_died_stays_reserved_and_is_listed(dsn, provider_state, provider_scope, connection):
    admitted = provider_state.admit(make_request(provider_scope, quota=make_quota(9), lease=0.05))
    (reservation,) = wait_until(
        lambda: (
            [row for row in provider_state.reconcile() if row.account == provider_scope]
            or [row for row in admin.list_lost_reservations(dsn, provider_scope.tenant_id) if row.lost_at is not None]
        ),
        "the lease is over",
    )
    assert (reservation.calls, [kind for kind, _ in reservation.windows]) == (1, [WindowKind.DAY, WindowKind.MONTH])
    assert reservation.windows[0][1] == datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert f":{os.getpid()}" in reservation.owner
    assert [row for row in provider_state.reconcile() if row.account == provider_scope] == [], "once"
    assert [row.id for row in admin.list_lost_reservations(dsn, provider_scope.tenant_id)] == [reservation.id]
    assert load_quota(connection, provider_scope, WindowKind.DAY).used_count == 1
    # The owner was only slow: its late report is applied.
    provider_state.complete(admitted, make_result(error=ProviderConnectionError("refused", sent=False)))
    assert load_quota(connection, provider_scope, WindowKind.DAY).used_count == 0
    assert admin.list_lost_reservations(dsn, provider_scope.tenant_id) == []


@pytest.mark.spec("PRV-09", "PRV-19")
def test_a_changed_limit_is_applied_and_no_limit_has_no_row(provider_state, provider_scope, connection):
    provider_state.admit(make_request(provider_scope))
    rows = "select 1 from ergon.provider_quota_states where tenant_id = %s"
    assert connection.execute(rows, [provider_scope.tenant_id]).fetchall() == []
    for limit, admits in ((2, 2), (5, 3), (3, 0)):
        admitted = 0
        with contextlib.suppress(ProviderQuotaExceededError):
            while True:
                provider_state.admit(make_request(provider_scope, quota=QuotaPolicy(day=limit)))
                admitted += 1
        assert admitted == admits
        quota = load_quota(connection, provider_scope, WindowKind.DAY)
        assert (quota.limit_count, quota.used_count, quota.remaining_count) == (
            limit,
            quota.used_count,
            limit - quota.used_count,
        )
    rows = connection.execute(
        "select last_exhausted_at is not null, window_end - window_start from ergon.provider_quota_states"
        " where tenant_id = %s",
        [provider_scope.tenant_id],
    ).fetchall()
    assert rows == [(True, timedelta(days=1) - timedelta(microseconds=2))]


@pytest.mark.spec("PRV-18", "PRV-19")
def test_tenants_share_a_quota_only_if_the_policy_says_so(provider_state, connection):
    first, second = (ProviderScope(f"tenant-{next(_numbers)}", "payments", "charging") for _ in range(2))
    provider_state.admit(make_request(first, quota=QuotaPolicy(day=1)))
    provider_state.admit(make_request(second, quota=QuotaPolicy(day=1)))
    shared = ProviderScope(None, f"provider-{next(_numbers)}", "charging")
    provider_state.admit(make_request(shared, quota=QuotaPolicy(day=1), scope="provider"))
    with pytest.raises(ProviderQuotaExceededError):
        provider_state.admit(make_request(shared, quota=QuotaPolicy(day=1), scope="provider"))
    assert connection.execute(
        "select tenant_id from ergon.provider_quota_states where provider_name = %s", [shared.provider_name]
    ).fetchall() == [("*",)]


@pytest.mark.spec("PRV-18")
@pytest.mark.parametrize(
    "name", ["*", "", "x" * 256, "nul\0", "\ud800"], ids=["all", "empty", "long", "nul", "no text"]
)
def test_an_invalid_tenant_name_is_rejected_before_anything_is_sent(provider_state, name, statement_counter):
    with pytest.raises(ProviderBadRequestError) as caught:
        provider_state.admit(make_request(ProviderScope(name, "payments", "charging")))
    assert (caught.value.code, caught.value.sent, statement_counter.sent) == ("name_refused", False, 0)


def test_a_key_that_is_too_long_is_rejected(provider_state, provider_scope, statement_counter):
    with pytest.raises(ProviderBadRequestError):
        provider_state.admit(make_request(provider_scope, key="k" * 1025))
    assert statement_counter.sent == 0
    assert isinstance(provider_state.admit(make_request(provider_scope, key="k" * 1024)), AdmittedAttempt)


# -- blocks -------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-19")
def test_a_block_is_used_without_a_round_trip_and_its_unused_quota_is_released(
    dsn, provider_scope, connection, statement_counter
):
    with PostgresProviderState(dsn, blocks=BlockPolicy(size=10)) as state:
        state.complete(state.admit(make_request(provider_scope, quota=make_quota(100))), make_result(value={}))
        wait_until(lambda: state._listener.is_fresh(time.monotonic()), "the watcher has looked")
        quota = load_quota(connection, provider_scope, WindowKind.DAY)
        assert (quota.used_count, quota.remaining_count) == (10, 90)
        before = statement_counter.sent
        for _ in range(3):
            state.complete(state.admit(make_request(provider_scope, quota=make_quota(100))), make_result(value={}))
        admitted = state.admit(make_request(provider_scope, quota=make_quota(100)))
        state.complete(admitted, make_result(error=ProviderConnectionError("refused", sent=False, fault=False)))
        assert statement_counter.sent == before
    assert load_quota(connection, provider_scope, WindowKind.DAY).used_count == 4
    assert load_quota(connection, provider_scope, WindowKind.MONTH).used_count == 4


@pytest.mark.spec("PRV-19")
def test_an_expired_block_admits_no_call(dsn, provider_scope, connection, monkeypatch):
    with PostgresProviderState(dsn, blocks=BlockPolicy(size=10, lease=0.05)) as state:
        monkeypatch.setattr(state, "_release_expired_blocks", lambda: iter(()))
        state.admit(make_request(provider_scope, quota=make_quota(12)))
        block_cache = state._get_block_cache(make_request(provider_scope, quota=make_quota(12)))
        wait_until(lambda: not block_cache.has_quota(time.monotonic()), "the lease ends")
        state.admit(make_request(provider_scope, quota=make_quota(12)))
        assert load_quota(connection, provider_scope, WindowKind.DAY).used_count == 11, "nine came back, ten were taken"


@pytest.mark.spec("PRV-19")
def test_a_process_that_dies_loses_only_its_block(dsn, provider_scope, connection):
    dead = PostgresProviderState(dsn, blocks=BlockPolicy(size=30, lease=0.2))
    dead.admit(make_request(provider_scope, quota=make_quota(100)))
    dead._reset()  # a dead process would release nothing
    with PostgresProviderState(dsn) as state:
        admitted = 0
        with contextlib.suppress(ProviderQuotaExceededError):
            while True:
                state.admit(make_request(provider_scope, quota=make_quota(100)))
                admitted += 1
        assert admitted == 70
        (lost,) = wait_until(lambda: [row for row in state.reconcile() if row.calls == 30], "its lease ended")
        assert lost.account == provider_scope
    assert load_quota(connection, provider_scope, WindowKind.DAY).used_count == 100
    dead.close()


@pytest.mark.spec("PRV-19", "PRV-22")
def test_a_stored_result_precedes_an_exhausted_quota_with_blocks_too(dsn, provider_scope):
    with PostgresProviderState(dsn, blocks=BlockPolicy(size=5)) as state:
        options = {"quota": QuotaPolicy(day=1)}
        state.complete(state.admit(make_request(provider_scope, key="k", **options)), make_result(value={"id": 1}))
        assert state.admit(make_request(provider_scope, key="k", owner="you", **options)).stored_result.value == {
            "id": 1
        }
        with pytest.raises(ProviderQuotaExceededError):
            state.admit(make_request(provider_scope, key="other", **options))
        with pytest.raises(ProviderQuotaExceededError):
            state.admit(make_request(provider_scope, **options))


@pytest.mark.spec("PRV-20")
def test_with_blocks_a_breaker_opened_elsewhere_is_known_immediately(
    dsn, provider_state, provider_scope, statement_counter
):
    options = {"quota": make_quota(1000), "breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)}
    with PostgresProviderState(dsn, blocks=BlockPolicy(size=500)) as state:
        state.complete(state.admit(make_request(provider_scope, **options)), make_result(value={}))
        wait_until(lambda: state._listener.is_fresh(time.monotonic()), "the watcher has looked")
        provider_state.complete(
            provider_state.admit(make_request(provider_scope, **options)),
            make_result(error=ProviderDependencyError("down")),
        )
        started_at = time.monotonic()

        def measure_until_rejected():
            with contextlib.suppress(ProviderCircuitOpenError):
                state.complete(state.admit(make_request(provider_scope, **options)), make_result(value={}))
                return None
            return time.monotonic() - started_at

        assert wait_until(measure_until_rejected, "it was told") < 5.0
        before = statement_counter.sent
        with pytest.raises(ProviderCircuitOpenError) as error:
            state.admit(make_request(provider_scope, **options))
        assert error.value.open_until == pytest.approx(time.time() + 60, abs=10)
        assert statement_counter.sent == before


# -- the breaker ------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-20")
def test_many_concurrent_failures_open_the_breaker_once(dsn, provider_scope, connection):
    options = {"breaker": BreakerPolicy(failure_threshold=5, open_cooldown_seconds=60.0)}
    with PostgresProviderState(dsn) as first, PostgresProviderState(dsn) as second:
        admitted = [(state, state.admit(make_request(provider_scope, **options))) for state in [first, second] * 32]
        with ThreadPoolExecutor(16) as pool:
            failure = make_result(error=ProviderDependencyError("down"))
            states = list(pool.map(lambda pair: pair[0].complete(pair[1], failure), admitted))
        assert states.count(BreakerState.OPEN) == 1
        assert states.count(None) == 63
        with pytest.raises(ProviderCircuitOpenError):
            second.admit(make_request(provider_scope, **options))
    breaker = load_breaker(connection, provider_scope)
    assert (breaker.state, breaker.consecutive_failures, breaker.generation) == (BreakerState.OPEN, 5, 1)
    health = connection.execute(
        "select breaker_state, consecutive_failures, last_error_code, last_error_at is not null, last_success_at"
        " from ergon.provider_health_states where tenant_id = %s",
        [provider_scope.tenant_id],
    ).fetchall()
    assert health == [("open", 5, "dependency_unavailable", True, None)]


@pytest.mark.spec("PRV-20")
def test_one_probe_at_a_time_over_all_processes_and_an_abandoned_one_expires(dsn, provider_scope):
    options = {"breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.05, probe_lease_seconds=3.0)}
    with PostgresProviderState(dsn) as one, PostgresProviderState(dsn) as two:
        late_attempt = two.admit(make_request(provider_scope, **options))
        one.complete(
            one.admit(make_request(provider_scope, **options)), make_result(error=ProviderDependencyError("down"))
        )
        states = [one, two] * 8

        def try_admit(state):
            with contextlib.suppress(ProviderCircuitOpenError):
                return state.admit(make_request(provider_scope, **options))
            return None

        def collect_probes():
            with ThreadPoolExecutor(16) as pool:
                return [admission for admission in pool.map(try_admit, states) if admission is not None]

        (abandoned,) = wait_until(collect_probes, "the cooldown is over")
        assert abandoned.permit.probe.number == 1
        assert two.complete(late_attempt, make_result(error=ProviderDependencyError("down"))) is None, (
            "from before it opened"
        )
        (second_attempt,) = wait_until(collect_probes, "the abandoned one has lost its place")
        assert one.complete(abandoned, make_result(value={})) is None, "it came too late"
        assert two.complete(second_attempt, make_result(value={})) is BreakerState.CLOSED
        assert len(collect_probes()) == 16


@pytest.mark.spec("PRV-06", "PRV-20")
def test_an_open_breaker_is_known_to_a_new_worker_and_to_one_that_only_queries(dsn, provider_state, provider_scope):
    options = {"breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)}
    with PostgresProviderState(dsn) as observer:
        assert observer.blocked_until(provider_scope) is None
        provider_state.complete(
            provider_state.admit(make_request(provider_scope, **options)),
            make_result(error=ProviderDependencyError("down")),
        )
        assert provider_state.blocked_until(provider_scope) == pytest.approx(time.time() + 60, abs=10)
        open_until = wait_until(lambda: observer.blocked_until(provider_scope), "it was told")
        assert open_until == pytest.approx(provider_state.blocked_until(provider_scope), abs=5)
    with PostgresProviderState(dsn) as late_state, pytest.raises(ProviderCircuitOpenError):
        late_state.admit(make_request(provider_scope, **options))


@pytest.mark.spec("PRV-20")
def test_behind_a_pooler_every_process_polls_instead_of_being_notified(postgres, dsn, provider_scope):
    folder = tempfile.mkdtemp(prefix="ergon-pgbouncer-")
    pooler = PrivatePgBouncer(folder, postgres)
    try:
        pooler.start()
        options = {"quota": make_quota(9), "breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)}
        pooler_dsn = pooler.dsn(dsn.rpartition("/")[2])
        with PostgresProviderState(pooler_dsn) as observer, PostgresProviderState(dsn) as state:
            assert observer.blocked_until(provider_scope) is None
            for number in range(3):
                observer.complete(
                    observer.admit(make_request(provider_scope, key=f"k{number}", **options)), make_result(value={})
                )
            state.complete(
                state.admit(make_request(provider_scope, **options)), make_result(error=ProviderDependencyError("down"))
            )
            started_at = time.monotonic()
            wait_until(lambda: observer.blocked_until(provider_scope), "it looks by itself")
            assert time.monotonic() - started_at < 10
    finally:
        pooler.stop()
        shutil.rmtree(folder, ignore_errors=True)


# -- overrides by operators ---------------------------------------------------------------------------


@pytest.mark.spec("PRV-32")
def test_an_override_applies_to_all_expires_automatically_and_leaves_its_audit_row(dsn, provider_state, provider_scope):
    audit = {"actor": "ops@example", "reason": "the provider's maintenance"}
    row = admin.force_open(dsn, provider_scope, seconds=60, **audit)
    assert (row.override, row.state) == (OverrideKind.FORCE_OPEN, BreakerState.CLOSED)
    with pytest.raises(ProviderCircuitOpenError, match="force open"):
        provider_state.admit(make_request(provider_scope))
    row = admin.disable(dsn, provider_scope, until=datetime.now(UTC) + timedelta(seconds=60), **audit)
    assert row.override is OverrideKind.DISABLE
    options = {"breaker": BreakerPolicy(failure_threshold=1)}
    provider_state.complete(
        provider_state.admit(make_request(provider_scope, **options)),
        make_result(error=ProviderDependencyError("down")),
    )
    assert isinstance(provider_state.admit(make_request(provider_scope, **options)), AdmittedAttempt), (
        "nothing is counted while it holds"
    )
    assert admin.clear_override(dsn, provider_scope, **audit).override is None
    admin.force_open(dsn, provider_scope, seconds=0.05, **audit)
    wait_until(lambda: admin.list_breakers(dsn, provider_scope.tenant_id)[0].override is None, "it ends by itself")
    assert isinstance(provider_state.admit(make_request(provider_scope)), AdmittedAttempt)
    overrides = admin.list_overrides(dsn, provider_scope.tenant_id)
    assert [one.action for one in overrides] == ["force_open", "lift", "disable", "force_open"]
    assert {(one.actor, one.reason, one.account) for one in overrides} == {(*audit.values(), provider_scope)}
    assert [one.until is None for one in overrides] == [False, True, False, False]


@pytest.mark.spec("PRV-32")
@pytest.mark.parametrize("blocks", [None, BlockPolicy(size=1)])
def test_a_quota_extension_expires(dsn, provider_scope, connection, blocks):
    options, audit = {"quota": QuotaPolicy(day=1)}, {"actor": "ops", "reason": "a sale"}
    with PostgresProviderState(dsn, blocks=blocks) as state:

        def count_admitted():
            count = 0
            with contextlib.suppress(ProviderQuotaExceededError):
                while True:
                    state.admit(make_request(provider_scope, **options))
                    count += 1
            return count

        assert count_admitted() == 1
        admin.extend_quota(dsn, provider_scope, calls=3, seconds=60, **audit)
        assert count_admitted() == 3
        assert load_quota(connection, provider_scope, WindowKind.DAY).limit_count == 4
        admin.extend_quota(dsn, provider_scope, calls=0, seconds=60, **audit)
        assert count_admitted() == 0
        (quota,) = admin.list_quotas(dsn, provider_scope.tenant_id)
        assert (quota.limit_count, quota.used_count, quota.remaining_count) == (1, 4, -3)
        assert (quota.kind, quota.window_start.microsecond) == (WindowKind.DAY, 0)
        admin.extend_quota(dsn, provider_scope, calls=9, seconds=0.01, **audit)
        time.sleep(0.02)  # the server's clock, not ours, has to pass it
        assert count_admitted() == 0


@pytest.mark.spec("PRV-32")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seconds": 0},
        {"seconds": 32 * 86_400},
        {"seconds": 1, "until": datetime.now(UTC)},
        {"until": datetime(2020, 1, 1, tzinfo=UTC)},
        {"until": datetime(2099, 1, 1)},  # noqa: DTZ001 - the missing time zone is the error
        {"seconds": 1, "actor": " "},
        {"seconds": 1, "reason": ""},
        {"seconds": 1, "reason": "x" * 1001},
    ],
)
def test_an_override_needs_an_end_an_actor_and_a_reason(dsn, provider_scope, options):
    with pytest.raises(ConfigurationError):
        admin.force_open(dsn, provider_scope, **{"actor": "ops", "reason": "why", **options})
    assert admin.list_overrides(dsn, provider_scope.tenant_id) == []


def test_an_operator_cannot_name_an_invalid_tenant_limit_or_extension(dsn):
    with pytest.raises(ConfigurationError):
        admin.clear_override(dsn, ProviderScope("*", "payments", "charging"), actor="ops", reason="why")
    with pytest.raises(ConfigurationError):
        admin.list_breakers(dsn, limit=0)
    with pytest.raises(ConfigurationError):
        admin.extend_quota(dsn, ProviderScope("t", "p", "c"), calls=-1, seconds=1, actor="ops", reason="why")


# -- keys ---------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-22")
def test_one_of_many_concurrent_calls_with_equal_keys_is_admitted(dsn, provider_scope):
    with PostgresProviderState(dsn) as first, PostgresProviderState(dsn) as second:
        owners = [(state, f"owner-{n}") for n, state in enumerate([first, second] * 16)]
        with ThreadPoolExecutor(16) as pool:
            admissions = list(
                pool.map(lambda it: it[0].admit(make_request(provider_scope, key="k", owner=it[1])), owners)
            )
        (admitted,) = (admission for admission in admissions if isinstance(admission, AdmittedAttempt))
        assert sum(isinstance(admission, KeyInFlight) for admission in admissions) == 31
        assert next(it for it in admissions if isinstance(it, KeyInFlight)).until == pytest.approx(
            time.time() + 10, abs=5
        )
        first.complete(admitted, make_result(value={"id": 7, "text": "ü\u0000\ud800"}))
        replayed = second.admit(make_request(provider_scope, key="k", owner="late"))
        assert isinstance(replayed, ReplayedResult)
        assert replayed.stored_result.value == {"id": 7, "text": "ü\u0000\ud800"}
        with pytest.raises(ProviderBadRequestError) as conflict:
            second.admit(make_request(provider_scope, key="k", owner="late", fingerprint="g"))
        assert conflict.value.code == "idempotency_conflict"


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize(
    "value", [{"when": object()}, {"x": float("nan")}, {"much": "x" * operations.MAX_RESULT_BYTES}]
)
def test_a_call_whose_result_cannot_be_stored_is_never_repeated(provider_state, provider_scope, value, caplog):
    provider_state.complete(provider_state.admit(make_request(provider_scope, key="k")), make_result(value=value))
    with pytest.raises(ProviderInternalError) as caught:
        provider_state.admit(make_request(provider_scope, key="k", owner="you"))
    assert (caught.value.code, caught.value.final, caught.value.sent) == ("result_not_kept", True, False)
    assert "provider result not stored" in list_events(caplog.records)


@pytest.mark.spec("PRV-22", "PRV-26")
def test_expired_keys_windows_and_lost_reservations_are_removed(provider_state, provider_scope, connection):
    options = {"keep": 0.01, "quota": make_quota(9)}
    provider_state.complete(
        provider_state.admit(make_request(provider_scope, key="over", lease=0.01, **options)), make_result(value={})
    )
    provider_state.complete(
        provider_state.admit(make_request(provider_scope, key="lasts", lease=0.01, quota=make_quota(9))),
        make_result(value={}),
    )
    provider_state.admit(make_request(provider_scope, key="in flight", owner="you", **options))
    connection.execute(
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end,"
        " limit_count, remaining_count) select %s, 'payments', 'charging', d, d + interval '1 day', 1, 1"
        " from generate_series(now() - interval '9 days', now() - interval '5 days', interval '1 day') d",
        [provider_scope.tenant_id],
    )
    sweeper = retention.Maintenance()

    def read_rows():
        provider_state._pool.run(sweeper.run())
        keys = connection.execute(
            "select key from ergon.provider_keys where tenant_id = %s order by key", [provider_scope.tenant_id]
        )
        windows = "select count(*) from ergon.provider_quota_states where tenant_id = %s"
        return keys.fetchall(), connection.execute(windows, [provider_scope.tenant_id]).fetchone()

    wait_until(lambda: read_rows() == ([("in flight",), ("lasts",)], (2,)), "what is over is gone, and nothing else")


# -- sync and async variants and their environment ----------------------------------------------------


@pytest.mark.spec("PRV-19", "PRV-20", "PRV-22")
def test_the_async_variant_shares_the_same_state(dsn, provider_scope):
    options = {"quota": make_quota(5), "breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)}

    async def main():
        async with PostgresProviderState(dsn) as state:
            requests = (make_request(provider_scope, key="k", owner=f"o{n}", **options) for n in range(8))
            admissions = await asyncio.gather(*(state.admit_async(request) for request in requests))
            (admitted,) = (admission for admission in admissions if isinstance(admission, AdmittedAttempt))
            await state.complete_async(admitted, make_result(value={"id": 1}))
            assert (
                await state.admit_async(make_request(provider_scope, key="k", owner="late", **options))
            ).stored_result.value == {"id": 1}
            down = await state.admit_async(make_request(provider_scope, **options))
            assert (
                await state.complete_async(down, make_result(error=ProviderDependencyError("x"))) is BreakerState.OPEN
            )
            with pytest.raises(ProviderCircuitOpenError):
                await state.admit_async(make_request(provider_scope, **options))
            assert [row for row in await state.reconcile_async() if row.account == provider_scope] == []

    asyncio.run(main())


class Payments(ProviderBase):
    provider_name = "payments"
    capability = "charging"

    def _execute_impl(self, **_):
        return {"status": "paid"}


class AsyncPayments(AsyncProviderBase):
    provider_name = "payments"
    capability = "charging"

    async def _execute_impl(self, **_):
        return {"status": "paid"}


SHORT_POLICY = ProviderPolicy(timeout=1.5, retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(day=100))


@pytest.mark.spec("PRV-19", "PRV-21")
@pytest.mark.parametrize("failure", ["stopped", "cut"])
def test_without_the_database_calls_fail_in_time_and_recover_afterwards(new_postgres, provider_scope, failure):
    server = new_postgres(fsync=False)
    migrate.upgrade(server.dsn())
    with PostgresProviderState(server.dsn()) as state:
        payments = Payments(state_store=state, policy=SHORT_POLICY)
        assert payments.call("charge", tenant=provider_scope.tenant_id) == {"status": "paid"}
        server.stop("immediate") if failure == "stopped" else server.partition_network()
        started_at = time.monotonic()
        with pytest.raises(ProviderInternalError) as error:
            payments.call("charge", tenant=provider_scope.tenant_id)
        assert error.value.code == "provider_state_unavailable"
        assert time.monotonic() - started_at < SHORT_POLICY.timeout + 1.0
        server.start() if failure == "stopped" else server.heal_network()

        def try_call():
            with contextlib.suppress(ProviderError):
                return payments.call("charge", tenant=provider_scope.tenant_id)
            return None

        assert wait_until(try_call, "it goes on by itself") == {"status": "paid"}
        wait_until(lambda: state._listener.is_fresh(time.monotonic()), "and so does the watcher")


@pytest.mark.spec("PRV-21")
def test_an_abandoned_round_trip_ends_in_time_and_leaves_its_connection_usable(dsn, provider_scope, connection):
    options = {"quota": QuotaPolicy(day=100)}
    with PostgresProviderState(dsn, connections=1) as state, psycopg.connect(dsn) as blocker:
        state.complete(state.admit(make_request(provider_scope, **options)), make_result(value={}))
        blocker.execute(
            "select 1 from ergon.provider_quota_states where tenant_id = %s for update", [provider_scope.tenant_id]
        )
        with ThreadPoolExecutor(2) as pool:
            blocked = pool.submit(state.admit, make_request(provider_scope, lease=0.5, **options))
            waiting = (
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            )
            wait_until(lambda: connection.execute(waiting).fetchone()[0] or blocked.done(), "it waits for the row")
            # The only connection is taken: a caller without time to wait for it is rejected and sends nothing later.
            with pytest.raises(ErgonError, match="no free connection of 1 within the timeout"):
                state.admit(make_request(provider_scope, within=0.01, **options))
            with pytest.raises(ErgonError, match="did not grant a lock in time"):
                blocked.result(TIMEOUT_SECONDS)
        blocker.rollback()
        state.complete(state.admit(make_request(provider_scope, **options)), make_result(value={}))
    assert load_quota(connection, provider_scope, WindowKind.DAY).used_count == 2


@pytest.mark.spec("PRV-21")
def test_a_cancelled_round_trip_leaves_its_connection_usable(dsn, provider_scope):
    options = {"quota": QuotaPolicy(day=100)}

    async def main():
        async with (
            PostgresProviderState(dsn, connections=1) as state,
            await psycopg.AsyncConnection.connect(dsn) as blocker,
        ):
            await state.complete_async(
                await state.admit_async(make_request(provider_scope, **options)), make_result(value={})
            )
            await blocker.execute(
                "select 1 from ergon.provider_quota_states where tenant_id = %s for update", [provider_scope.tenant_id]
            )
            payments = AsyncPayments(state_store=state, policy=SHORT_POLICY.model_copy(update={"timeout": 0.3}))
            with pytest.raises(ProviderInternalError) as error:
                await payments.call("charge", tenant=provider_scope.tenant_id)
            assert error.value.code == "provider_state_unavailable"
            await blocker.rollback()
            slow_payments = AsyncPayments(
                state_store=state, policy=SHORT_POLICY.model_copy(update={"timeout": TIMEOUT_SECONDS})
            )
            assert await slow_payments.call("charge", tenant=provider_scope.tenant_id) == {"status": "paid"}

    asyncio.run(main())


@pytest.mark.spec("PRV-19", "PRV-20")
def test_a_forked_child_has_separate_connections_blocks_and_listener(dsn, provider_scope, connection):
    options = {"quota": make_quota(100)}
    with PostgresProviderState(dsn, blocks=BlockPolicy(size=10)) as state:
        state.admit(make_request(provider_scope, **options))
        listener = state._listener
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                assert state._listener is None
                for _ in range(2):
                    state.admit(make_request(provider_scope, **options))
                assert state._listener is not listener
                state.close()
                code = 0
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert load_quota(connection, provider_scope, WindowKind.DAY).used_count == 12, (
            "two of its own, and our block of ten"
        )
        state.admit(make_request(provider_scope, **options))
    assert load_quota(connection, provider_scope, WindowKind.DAY).used_count == 4


@pytest.mark.spec("PRV-19", "PRV-20", "DX-25")
def test_a_forked_child_that_ends_without_a_call_leaves_the_connections_of_its_parent_open(dsn, provider_scope):
    with PostgresProviderState(dsn) as state:
        state.admit(make_request(provider_scope))
        (session,) = state._pool._idle
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                state.close()  # as at the exit of every process
                code = 0
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert session.execute("select 1").fetchone() == (1,)


class RecordingWriter:
    def __init__(self):
        self.rows, self.close_timeout = [], None

    def record(self, row):
        self.rows.append(row)

    def close(self, timeout):
        self.close_timeout = timeout


@pytest.mark.spec("PRV-26")
def test_attempts_go_to_the_writer_and_without_metrics_are_counted(dsn, provider_scope):
    writer = RecordingWriter()
    with PostgresProviderState(dsn, writer=writer) as state:
        Payments(state_store=state).call("charge", tenant=provider_scope.tenant_id)
        assert [row.tenant_id for row in writer.rows] == [provider_scope.tenant_id]
    assert writer.close_timeout is not None
    with PostgresProviderState(dsn, metrics=False) as state:
        Payments(state_store=state).call("charge", tenant=provider_scope.tenant_id)
        assert state.dropped == 1


@pytest.mark.spec("PRV-02", "PRV-26", "DX-25")
def test_attempts_are_written_by_default_and_after_a_close_too(dsn, provider_scope):
    state = PostgresProviderState(dsn)
    for expected in (1, 2):
        Payments(state_store=state).call("charge", tenant=provider_scope.tenant_id)
        state.close()
        count = "select count(*) from ergon.provider_execution_metrics where tenant_id = %s"
        with psycopg.connect(dsn) as connection:
            assert connection.execute(count, [provider_scope.tenant_id]).fetchone() == (expected,)
    assert state.dropped == 0


def test_a_database_without_the_tables_is_rejected_with_the_upgrade_command(postgres, monkeypatch):
    empty = postgres.create_database(f"provider_state_{os.getpid()}_{next(_numbers)}")
    with pytest.raises(ConfigurationError, match="run: ergon db upgrade"), PostgresProviderState(empty):
        pass
    migrate.upgrade(empty, "0001")
    with (
        pytest.raises(ConfigurationError, match="needed is 0002; run: ergon db upgrade"),
        PostgresProviderState(empty),
    ):
        pass
    monkeypatch.delenv(DSN_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=DSN_VARIABLE):
        PostgresProviderState()


def test_an_attempt_can_only_be_completed_by_the_state_that_admitted_it(provider_state, provider_scope):
    with pytest.raises(ConfigurationError, match="was admitted by another state store"):
        provider_state.complete(AdmittedAttempt(make_request(provider_scope), None), make_result())
