"""Books in PostgreSQL: what many processes make of one quota, one breaker and one key, on a real server."""

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

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.books import Account, Admitted, Asked, Busy, Concluded, Replayed
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
from ergon_framework.providers.idempotency import Kept
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.sql import operator, results, sweeping
from ergon_framework.providers.sql.blocks import BlockPolicy
from ergon_framework.providers.sql.books import VARIABLE, PostgresBooks
from ergon_framework.schema import lines, migrate
from ergon_framework.schema.operation import perform
from tests.log_events import events_of
from tests.servers.pgbouncer import PrivatePgBouncer
from tests.servers.steered import stored_breaker, stored_quota

_numbers = itertools.count(1)
#: Seconds within which what must come has to come; on a good day it takes a hundredth of that.
PATIENCE = 20.0


@pytest.fixture(scope="module")
def dsn(postgres):
    address = postgres.create_database(f"books_{os.getpid()}_{next(_numbers)}")
    migrate.upgrade(address)
    return address


@pytest.fixture
def account():
    """One that nobody else uses."""
    return Account(f"tenant-{next(_numbers)}", "payments", "charging")


@pytest.fixture
def books(dsn):
    with PostgresBooks(dsn) as opened:
        yield opened


@pytest.fixture
def line(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def asked(account, *, key=None, number=1, owner="me", fingerprint="f", doubt=False, lease=10.0, within=None, **fields):
    return Asked(
        account=account,
        policy=ProviderPolicy(**fields),
        tenant_id=account.tenant_id or "acme",
        idempotency_key=key,
        fingerprint=fingerprint,
        owner=owner,
        attempt_number=number,
        lease=lease,
        now=time.time(),
        doubt=doubt,
        within=within,
    )


def ended(*, error=None, value=None, last=True, doubt=False):
    return Concluded(now=time.time(), last=last, doubt=doubt, error=error, kept=None if value is None else Kept(value))


def until(holds, what):
    """Wait for *holds*; what it answered."""
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return found


def hour(limit):
    """A window that no test outlasts, by day and hour."""
    return QuotaPolicy(day=limit, month=limit * 10)


class Statements:
    """Counts what is sent to the server by whoever visits; the watchers of other books have threads of their own."""

    def __init__(self, monkeypatch):
        self.sent = 0
        self._mine = threading.get_ident()
        monkeypatch.setattr(lines, "perform", self.perform)

    def perform(self, connection, operation):
        def counted():
            rows = None
            while True:
                try:
                    query = operation.send(rows)
                except StopIteration as stop:
                    return stop.value
                self.sent += threading.get_ident() == self._mine
                rows = yield query

        return perform(connection, counted())


@pytest.fixture
def counted(monkeypatch):
    return Statements(monkeypatch)


# -- round trips --------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-19", "PRV-22")
def test_a_call_with_a_key_and_a_quota_is_one_statement_before_it_and_one_after_it(books, account, counted):
    admitted = books.admit(asked(account, key="k", quota=hour(5)))
    assert counted.sent == 1
    books.conclude(admitted, ended(value={"id": 1}))
    assert counted.sent == 2


@pytest.mark.spec("PRV-20")
def test_a_success_that_changes_nothing_is_not_written_down(books, account, counted):
    admitted = books.admit(asked(account))
    assert books.conclude(admitted, ended(value={"id": 1})) is None
    assert counted.sent == 1
    books.conclude(books.admit(asked(account)), ended(error=ProviderDependencyError("down")))
    assert counted.sent == 3
    books.conclude(books.admit(asked(account)), ended(value={"id": 1}))
    assert counted.sent == 5, "the count of faults was not zero"
    books.conclude(books.admit(asked(account)), ended(value={"id": 1}))
    assert counted.sent == 6


# -- quota --------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-19")
@pytest.mark.parametrize("blocks", [None, BlockPolicy(size=7)])
def test_a_limit_admits_exactly_that_many_however_many_ask(dsn, account, line, blocks):
    limit, refused = 100, []

    def ask(shared):
        admitted = 0
        for _ in range(25):
            try:
                admission = shared.admit(asked(account, quota=hour(limit)))
            except ProviderQuotaExceededError as error:
                refused.append(error)
            else:
                shared.conclude(admission, ended(value={}))
                admitted += 1
        return admitted

    with PostgresBooks(dsn, blocks=blocks) as one, PostgresBooks(dsn, blocks=blocks) as two:
        with ThreadPoolExecutor(16) as pool:
            admitted = sum(pool.map(ask, [one, two] * 8))
        if blocks is None:
            assert admitted == limit
            assert len(refused) == 300
            assert 0 < refused[0].retry_after <= 86_400
        else:
            # What a block has left is not refused to anybody: it is spent by the process that has it.
            assert limit - 2 * blocks.size < admitted <= limit
    quota = stored_quota(line, account, WindowKind.DAY)
    assert (quota.used_count, quota.remaining_count) == (admitted, limit - admitted), "blocks came back at the end"


@pytest.mark.spec("PRV-19")
def test_what_was_never_sent_is_given_back_and_what_may_have_been_is_kept(books, account, line):
    for error, used in (
        (ProviderConnectionError("refused", sent=False), 0),
        (ProviderConnectionError("reset"), 1),
        (ProviderBadRequestError("no"), 2),
        (None, 3),
    ):
        admitted = books.admit(asked(account, quota=hour(9)))
        books.conclude(admitted, ended(error=error))
        books.conclude(admitted, ended(error=error))  # told twice, given back once
        assert stored_quota(line, account, WindowKind.DAY).used_count == used
        assert stored_quota(line, account, WindowKind.MONTH).used_count == used
    assert not line.execute(
        "select 1 from ergon.provider_reservations where tenant_id = %s", [account.tenant_id]
    ).fetchall()


@pytest.mark.spec("PRV-19")
def test_a_reservation_whose_owner_died_stays_booked_and_is_listed(dsn, books, account, line):
    admitted = books.admit(asked(account, quota=hour(9), lease=0.05))
    (found,) = until(
        lambda: (
            [row for row in books.reconcile() if row.account == account]
            or [row for row in operator.lost(dsn, account.tenant_id) if row.lost_at is not None]
        ),
        "the lease is over",
    )
    assert (found.calls, [kind for kind, _ in found.windows]) == (1, [WindowKind.DAY, WindowKind.MONTH])
    assert found.windows[0][1] == datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert f":{os.getpid()}" in found.owner
    assert [row for row in books.reconcile() if row.account == account] == [], "once"
    assert [row.id for row in operator.lost(dsn, account.tenant_id)] == [found.id]
    assert stored_quota(line, account, WindowKind.DAY).used_count == 1
    # He was only slow: what he tells in the end is true.
    books.conclude(admitted, ended(error=ProviderConnectionError("refused", sent=False)))
    assert stored_quota(line, account, WindowKind.DAY).used_count == 0
    assert operator.lost(dsn, account.tenant_id) == []


@pytest.mark.spec("PRV-09", "PRV-19")
def test_a_limit_that_changes_is_taken_over_and_no_limit_has_no_row(books, account, line):
    books.admit(asked(account))
    rows = "select 1 from ergon.provider_quota_states where tenant_id = %s"
    assert line.execute(rows, [account.tenant_id]).fetchall() == []
    for limit, admits in ((2, 2), (5, 3), (3, 0)):
        got = 0
        with contextlib.suppress(ProviderQuotaExceededError):
            while True:
                books.admit(asked(account, quota=QuotaPolicy(day=limit)))
                got += 1
        assert got == admits
        quota = stored_quota(line, account, WindowKind.DAY)
        assert (quota.limit_count, quota.used_count, quota.remaining_count) == (
            limit,
            quota.used_count,
            limit - quota.used_count,
        )
    rows = line.execute(
        "select last_exhausted_at is not null, window_end - window_start from ergon.provider_quota_states"
        " where tenant_id = %s",
        [account.tenant_id],
    ).fetchall()
    assert rows == [(True, timedelta(days=1) - timedelta(microseconds=2))]


@pytest.mark.spec("PRV-18", "PRV-19")
def test_tenants_do_not_share_unless_the_policy_says_so(books, line):
    one, two = (Account(f"tenant-{next(_numbers)}", "payments", "charging") for _ in range(2))
    books.admit(asked(one, quota=QuotaPolicy(day=1)))
    books.admit(asked(two, quota=QuotaPolicy(day=1)))
    together = Account(None, f"provider-{next(_numbers)}", "charging")
    books.admit(asked(together, quota=QuotaPolicy(day=1), scope="provider"))
    with pytest.raises(ProviderQuotaExceededError):
        books.admit(asked(together, quota=QuotaPolicy(day=1), scope="provider"))
    assert line.execute(
        "select tenant_id from ergon.provider_quota_states where provider_name = %s", [together.provider_name]
    ).fetchall() == [("*",)]


@pytest.mark.spec("PRV-18")
@pytest.mark.parametrize(
    "name", ["*", "", "x" * 256, "nul\0", "\ud800"], ids=["all", "empty", "long", "nul", "no text"]
)
def test_a_name_that_cannot_be_kept_is_refused_before_anything_is_sent(books, name, counted):
    with pytest.raises(ProviderBadRequestError) as refused:
        books.admit(asked(Account(name, "payments", "charging")))
    assert (refused.value.code, refused.value.sent, counted.sent) == ("name_refused", False, 0)


def test_a_key_that_is_too_long_is_refused(books, account, counted):
    with pytest.raises(ProviderBadRequestError):
        books.admit(asked(account, key="k" * 1025))
    assert counted.sent == 0
    assert isinstance(books.admit(asked(account, key="k" * 1024)), Admitted)


# -- blocks -------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-19")
def test_a_block_is_spent_without_a_visit_and_its_rest_comes_back(dsn, account, line, counted):
    with PostgresBooks(dsn, blocks=BlockPolicy(size=10)) as books:
        books.conclude(books.admit(asked(account, quota=hour(100))), ended(value={}))
        until(lambda: books._watcher.is_fresh(time.monotonic()), "the watcher has looked")
        quota = stored_quota(line, account, WindowKind.DAY)
        assert (quota.used_count, quota.remaining_count) == (10, 90)
        before = counted.sent
        for _ in range(3):
            books.conclude(books.admit(asked(account, quota=hour(100))), ended(value={}))
        unsent = books.admit(asked(account, quota=hour(100)))
        books.conclude(unsent, ended(error=ProviderConnectionError("refused", sent=False, fault=False)))
        assert counted.sent == before
    assert stored_quota(line, account, WindowKind.DAY).used_count == 4
    assert stored_quota(line, account, WindowKind.MONTH).used_count == 4


@pytest.mark.spec("PRV-19")
def test_after_its_lease_a_block_is_worth_nothing(dsn, account, line, monkeypatch):
    with PostgresBooks(dsn, blocks=BlockPolicy(size=10, lease=0.05)) as books:
        monkeypatch.setattr(books, "_tidied", lambda: iter(()))
        books.admit(asked(account, quota=hour(12)))
        purse = books._purse(asked(account, quota=hour(12)))
        until(lambda: not purse.has(time.monotonic()), "the lease ends")
        books.admit(asked(account, quota=hour(12)))
        assert stored_quota(line, account, WindowKind.DAY).used_count == 11, "nine came back, ten were taken"


@pytest.mark.spec("PRV-19")
def test_a_process_that_dies_strands_its_block_and_no_more(dsn, account, line):
    dead = PostgresBooks(dsn, blocks=BlockPolicy(size=30, lease=0.2))
    dead.admit(asked(account, quota=hour(100)))
    dead._begin_anew()  # as nobody who is gone would give anything back
    with PostgresBooks(dsn) as books:
        got = 0
        with contextlib.suppress(ProviderQuotaExceededError):
            while True:
                books.admit(asked(account, quota=hour(100)))
                got += 1
        assert got == 70
        (stranded,) = until(lambda: [row for row in books.reconcile() if row.calls == 30], "its lease ended")
        assert stranded.account == account
    assert stored_quota(line, account, WindowKind.DAY).used_count == 100
    dead.close()


@pytest.mark.spec("PRV-19", "PRV-22")
def test_a_key_comes_before_a_spent_quota_with_blocks_too(dsn, account):
    with PostgresBooks(dsn, blocks=BlockPolicy(size=5)) as books:
        rules = {"quota": QuotaPolicy(day=1)}
        books.conclude(books.admit(asked(account, key="k", **rules)), ended(value={"id": 1}))
        assert books.admit(asked(account, key="k", owner="you", **rules)).kept.value == {"id": 1}
        with pytest.raises(ProviderQuotaExceededError):
            books.admit(asked(account, key="other", **rules))
        with pytest.raises(ProviderQuotaExceededError):
            books.admit(asked(account, **rules))


@pytest.mark.spec("PRV-20")
def test_with_blocks_a_breaker_that_somebody_opened_is_known_at_once(dsn, books, account, counted):
    rules = {"quota": hour(1000), "breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)}
    with PostgresBooks(dsn, blocks=BlockPolicy(size=500)) as mine:
        mine.conclude(mine.admit(asked(account, **rules)), ended(value={}))
        until(lambda: mine._watcher.is_fresh(time.monotonic()), "the watcher has looked")
        books.conclude(books.admit(asked(account, **rules)), ended(error=ProviderDependencyError("down")))
        began = time.monotonic()

        def refused():
            with contextlib.suppress(ProviderCircuitOpenError):
                mine.conclude(mine.admit(asked(account, **rules)), ended(value={}))
                return None
            return time.monotonic() - began

        assert until(refused, "it was told") < 5.0
        before = counted.sent
        with pytest.raises(ProviderCircuitOpenError) as error:
            mine.admit(asked(account, **rules))
        assert error.value.open_until == pytest.approx(time.time() + 60, abs=10)
        assert counted.sent == before


# -- the breaker ------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-20")
def test_faults_of_many_at_once_open_the_breaker_once(dsn, account, line):
    rules = {"breaker": BreakerPolicy(failure_threshold=5, open_cooldown_seconds=60.0)}
    with PostgresBooks(dsn) as one, PostgresBooks(dsn) as two:
        admitted = [(books, books.admit(asked(account, **rules))) for books in [one, two] * 32]
        with ThreadPoolExecutor(16) as pool:
            down = ended(error=ProviderDependencyError("down"))
            entered = list(pool.map(lambda pair: pair[0].conclude(pair[1], down), admitted))
        assert entered.count(BreakerState.OPEN) == 1
        assert entered.count(None) == 63
        with pytest.raises(ProviderCircuitOpenError):
            two.admit(asked(account, **rules))
    found = stored_breaker(line, account)
    assert (found.state, found.consecutive_failures, found.generation) == (BreakerState.OPEN, 5, 1)
    health = line.execute(
        "select breaker_state, consecutive_failures, last_error_code, last_error_at is not null, last_success_at"
        " from ergon.provider_health_states where tenant_id = %s",
        [account.tenant_id],
    ).fetchall()
    assert health == [("open", 5, "dependency_unavailable", True, None)]


@pytest.mark.spec("PRV-20")
def test_one_probe_at_a_time_over_all_processes_and_an_abandoned_one_expires(dsn, account):
    rules = {"breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.05, probe_lease_seconds=3.0)}
    with PostgresBooks(dsn) as one, PostgresBooks(dsn) as two:
        late = two.admit(asked(account, **rules))
        one.conclude(one.admit(asked(account, **rules)), ended(error=ProviderDependencyError("down")))
        everybody = [one, two] * 8

        def probe(books):
            with contextlib.suppress(ProviderCircuitOpenError):
                return books.admit(asked(account, **rules))
            return None

        def probes():
            with ThreadPoolExecutor(16) as pool:
                return [found for found in pool.map(probe, everybody) if found is not None]

        (abandoned,) = until(probes, "the cooldown is over")
        assert abandoned.leave.probe.number == 1
        assert two.conclude(late, ended(error=ProviderDependencyError("down"))) is None, "from before it opened"
        (second,) = until(probes, "the abandoned one has lost its place")
        assert one.conclude(abandoned, ended(value={})) is None, "it came too late"
        assert two.conclude(second, ended(value={})) is BreakerState.CLOSED
        assert len(probes()) == 16


@pytest.mark.spec("PRV-06", "PRV-20")
def test_an_open_breaker_is_known_to_a_worker_that_starts_and_to_one_that_only_asks(dsn, books, account):
    rules = {"breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)}
    with PostgresBooks(dsn) as watching:
        assert watching.held_until(account) is None
        books.conclude(books.admit(asked(account, **rules)), ended(error=ProviderDependencyError("down")))
        assert books.held_until(account) == pytest.approx(time.time() + 60, abs=10)
        found = until(lambda: watching.held_until(account), "it was told")
        assert found == pytest.approx(books.held_until(account), abs=5)
    with PostgresBooks(dsn) as late, pytest.raises(ProviderCircuitOpenError):
        late.admit(asked(account, **rules))


@pytest.mark.spec("PRV-20")
def test_behind_a_pooler_nobody_is_told_and_everybody_looks(postgres, dsn, account):
    folder = tempfile.mkdtemp(prefix="ergon-pgbouncer-")
    pooler = PrivatePgBouncer(folder, postgres)
    try:
        pooler.start()
        rules = {"quota": hour(9), "breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)}
        through = pooler.dsn(dsn.rpartition("/")[2])
        with PostgresBooks(through) as watching, PostgresBooks(dsn) as books:
            assert watching.held_until(account) is None
            for number in range(3):
                watching.conclude(watching.admit(asked(account, key=f"k{number}", **rules)), ended(value={}))
            books.conclude(books.admit(asked(account, **rules)), ended(error=ProviderDependencyError("down")))
            began = time.monotonic()
            until(lambda: watching.held_until(account), "it looks by itself")
            assert time.monotonic() - began < 10
    finally:
        pooler.stop()
        shutil.rmtree(folder, ignore_errors=True)


# -- what operators say -------------------------------------------------------------------------------


@pytest.mark.spec("PRV-32")
def test_an_override_holds_for_all_ends_by_itself_and_leaves_its_audit_row(dsn, books, account):
    about = {"actor": "ops@example", "reason": "the provider's maintenance"}
    row = operator.force_open(dsn, account, seconds=60, **about)
    assert (row.override, row.state) == (OverrideKind.FORCE_OPEN, BreakerState.CLOSED)
    with pytest.raises(ProviderCircuitOpenError, match="force open"):
        books.admit(asked(account))
    row = operator.disable(dsn, account, until=datetime.now(UTC) + timedelta(seconds=60), **about)
    assert row.override is OverrideKind.DISABLE
    rules = {"breaker": BreakerPolicy(failure_threshold=1)}
    books.conclude(books.admit(asked(account, **rules)), ended(error=ProviderDependencyError("down")))
    assert isinstance(books.admit(asked(account, **rules)), Admitted), "nothing is counted while it holds"
    assert operator.lift(dsn, account, **about).override is None
    operator.force_open(dsn, account, seconds=0.05, **about)
    until(lambda: operator.breakers(dsn, account.tenant_id)[0].override is None, "it ends by itself")
    assert isinstance(books.admit(asked(account)), Admitted)
    said = operator.overrides(dsn, account.tenant_id)
    assert [one.action for one in said] == ["force_open", "lift", "disable", "force_open"]
    assert {(one.actor, one.reason, one.account) for one in said} == {(*about.values(), account)}
    assert [one.until is None for one in said] == [False, True, False, False]


@pytest.mark.spec("PRV-32")
@pytest.mark.parametrize("blocks", [None, BlockPolicy(size=1)])
def test_a_quota_is_extended_for_a_time_and_falls_back(dsn, account, line, blocks):
    rules, about = {"quota": QuotaPolicy(day=1)}, {"actor": "ops", "reason": "a sale"}
    with PostgresBooks(dsn, blocks=blocks) as books:

        def got():
            count = 0
            with contextlib.suppress(ProviderQuotaExceededError):
                while True:
                    books.admit(asked(account, **rules))
                    count += 1
            return count

        assert got() == 1
        operator.extend_quota(dsn, account, calls=3, seconds=60, **about)
        assert got() == 3
        assert stored_quota(line, account, WindowKind.DAY).limit_count == 4
        operator.extend_quota(dsn, account, calls=0, seconds=60, **about)
        assert got() == 0
        (shown,) = operator.quotas(dsn, account.tenant_id)
        assert (shown.limit_count, shown.used_count, shown.remaining_count) == (1, 4, -3)
        assert (shown.kind, shown.window_start.microsecond) == (WindowKind.DAY, 0)
        operator.extend_quota(dsn, account, calls=9, seconds=0.01, **about)
        time.sleep(0.02)  # the server's clock, not ours, has to pass it
        assert got() == 0


@pytest.mark.spec("PRV-32")
@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"seconds": 0},
        {"seconds": 32 * 86_400},
        {"seconds": 1, "until": datetime.now(UTC)},
        {"until": datetime(2020, 1, 1, tzinfo=UTC)},
        {"until": datetime(2099, 1, 1)},  # noqa: DTZ001 - that is what is wrong with it
        {"seconds": 1, "actor": " "},
        {"seconds": 1, "reason": ""},
        {"seconds": 1, "reason": "x" * 1001},
    ],
)
def test_an_override_needs_an_end_an_actor_and_a_reason(dsn, account, wrong):
    with pytest.raises(ConfigurationError):
        operator.force_open(dsn, account, **{"actor": "ops", "reason": "why", **wrong})
    assert operator.overrides(dsn, account.tenant_id) == []


def test_an_operator_cannot_name_a_tenant_that_is_all_of_them(dsn):
    with pytest.raises(ConfigurationError):
        operator.lift(dsn, Account("*", "payments", "charging"), actor="ops", reason="why")
    with pytest.raises(ConfigurationError):
        operator.breakers(dsn, limit=0)
    with pytest.raises(ConfigurationError):
        operator.extend_quota(dsn, Account("t", "p", "c"), calls=-1, seconds=1, actor="ops", reason="why")


# -- keys ---------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-22")
def test_of_many_equal_keys_at_once_one_is_let_through(dsn, account):
    with PostgresBooks(dsn) as one, PostgresBooks(dsn) as two:
        owners = [(books, f"owner-{n}") for n, books in enumerate([one, two] * 16)]
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda it: it[0].admit(asked(account, key="k", owner=it[1])), owners))
        (mine,) = (admission for admission in found if isinstance(admission, Admitted))
        assert sum(isinstance(admission, Busy) for admission in found) == 31
        assert next(it for it in found if isinstance(it, Busy)).until == pytest.approx(time.time() + 10, abs=5)
        one.conclude(mine, ended(value={"id": 7, "text": "ü\u0000\ud800"}))
        replayed = two.admit(asked(account, key="k", owner="late"))
        assert isinstance(replayed, Replayed)
        assert replayed.kept.value == {"id": 7, "text": "ü\u0000\ud800"}
        with pytest.raises(ProviderBadRequestError) as conflict:
            two.admit(asked(account, key="k", owner="late", fingerprint="g"))
        assert conflict.value.code == "idempotency_conflict"


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize("value", [{"when": object()}, {"x": float("nan")}, {"much": "x" * results.LARGEST}])
def test_a_result_that_cannot_be_kept_is_never_called_for_again(books, account, value, caplog):
    books.conclude(books.admit(asked(account, key="k")), ended(value=value))
    with pytest.raises(ProviderInternalError) as told:
        books.admit(asked(account, key="k", owner="you"))
    assert (told.value.code, told.value.final, told.value.sent) == ("result_not_kept", True, False)
    assert "provider result not kept" in events_of(caplog.records)


@pytest.mark.spec("PRV-22", "PRV-26")
def test_keys_windows_and_lost_reservations_are_removed_when_their_time_is_over(books, account, line):
    short = {"keep": 0.01, "quota": hour(9)}
    books.conclude(books.admit(asked(account, key="over", lease=0.01, **short)), ended(value={}))
    books.conclude(books.admit(asked(account, key="lasts", lease=0.01, quota=hour(9))), ended(value={}))
    books.admit(asked(account, key="in flight", owner="you", **short))
    line.execute(
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end,"
        " limit_count, remaining_count) select %s, 'payments', 'charging', d, d + interval '1 day', 1, 1"
        " from generate_series(now() - interval '9 days', now() - interval '5 days', interval '1 day') d",
        [account.tenant_id],
    )
    sweeper = sweeping.Sweeper()

    def left():
        books._lines.run(sweeper.swept())
        keys = line.execute(
            "select key from ergon.provider_keys where tenant_id = %s order by key", [account.tenant_id]
        )
        windows = "select count(*) from ergon.provider_quota_states where tenant_id = %s"
        return keys.fetchall(), line.execute(windows, [account.tenant_id]).fetchone()

    until(lambda: left() == ([("in flight",), ("lasts",)], (2,)), "what is over is gone, and nothing else")


# -- the two flavours, and what is around them --------------------------------------------------------


@pytest.mark.spec("PRV-19", "PRV-20", "PRV-22")
def test_the_async_flavour_keeps_the_same_books(dsn, account):
    rules = {"quota": hour(5), "breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)}

    async def main():
        async with PostgresBooks(dsn) as books:
            owners = (asked(account, key="k", owner=f"o{n}", **rules) for n in range(8))
            found = await asyncio.gather(*(books.admit_async(one) for one in owners))
            (mine,) = (admission for admission in found if isinstance(admission, Admitted))
            await books.conclude_async(mine, ended(value={"id": 1}))
            assert (await books.admit_async(asked(account, key="k", owner="late", **rules))).kept.value == {"id": 1}
            down = await books.admit_async(asked(account, **rules))
            assert await books.conclude_async(down, ended(error=ProviderDependencyError("x"))) is BreakerState.OPEN
            with pytest.raises(ProviderCircuitOpenError):
                await books.admit_async(asked(account, **rules))
            assert [row for row in await books.reconcile_async() if row.account == account] == []

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


QUICK = ProviderPolicy(timeout=1.5, retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(day=100))


@pytest.mark.spec("PRV-19", "PRV-21")
@pytest.mark.parametrize("away", ["stopped", "cut"])
def test_without_the_database_there_is_no_call_within_the_deadline_and_afterwards_there_is(new_postgres, account, away):
    server = new_postgres(fsync=False)
    migrate.upgrade(server.dsn())
    with PostgresBooks(server.dsn()) as books:
        payments = Payments(books=books, policy=QUICK)
        assert payments.call("charge", tenant=account.tenant_id) == {"status": "paid"}
        server.stop("immediate") if away == "stopped" else server.cut()
        began = time.monotonic()
        with pytest.raises(ProviderInternalError) as error:
            payments.call("charge", tenant=account.tenant_id)
        assert error.value.code == "books_unavailable"
        assert time.monotonic() - began < QUICK.timeout + 1.0
        server.start() if away == "stopped" else server.mend()

        def works():
            with contextlib.suppress(ProviderError):
                return payments.call("charge", tenant=account.tenant_id)
            return None

        assert until(works, "it goes on by itself") == {"status": "paid"}
        until(lambda: books._watcher.is_fresh(time.monotonic()), "and so does the watcher")


@pytest.mark.spec("PRV-21")
def test_a_visit_that_was_given_up_waits_for_nobody_for_ever_and_leaves_its_connection_sound(dsn, account, line):
    rules = {"quota": QuotaPolicy(day=100)}
    with PostgresBooks(dsn, connections=1) as books, psycopg.connect(dsn) as hog:
        books.conclude(books.admit(asked(account, **rules)), ended(value={}))
        hog.execute("select 1 from ergon.provider_quota_states where tenant_id = %s for update", [account.tenant_id])
        with ThreadPoolExecutor(2) as pool:
            stuck = pool.submit(books.admit, asked(account, lease=0.5, **rules))
            waiting = (
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            )
            until(lambda: line.execute(waiting).fetchone()[0] or stuck.done(), "it waits for the row")
            # The only connection is taken: whoever has no time to wait for it asks for nothing later.
            with pytest.raises(ErgonError, match="was free in time"):
                books.admit(asked(account, within=0.01, **rules))
            with pytest.raises(ErgonError, match="did not grant a lock in time"):
                stuck.result(PATIENCE)
        hog.rollback()
        books.conclude(books.admit(asked(account, **rules)), ended(value={}))
    assert stored_quota(line, account, WindowKind.DAY).used_count == 2


@pytest.mark.spec("PRV-21")
def test_a_cancelled_visit_leaves_its_connection_sound(dsn, account):
    rules = {"quota": QuotaPolicy(day=100)}

    async def main():
        async with PostgresBooks(dsn, connections=1) as books, await psycopg.AsyncConnection.connect(dsn) as hog:
            await books.conclude_async(await books.admit_async(asked(account, **rules)), ended(value={}))
            await hog.execute(
                "select 1 from ergon.provider_quota_states where tenant_id = %s for update", [account.tenant_id]
            )
            payments = AsyncPayments(books=books, policy=QUICK.model_copy(update={"timeout": 0.3}))
            with pytest.raises(ProviderInternalError) as error:
                await payments.call("charge", tenant=account.tenant_id)
            assert error.value.code == "books_unavailable"
            await hog.rollback()
            patient = AsyncPayments(books=books, policy=QUICK.model_copy(update={"timeout": PATIENCE}))
            assert await patient.call("charge", tenant=account.tenant_id) == {"status": "paid"}

    asyncio.run(main())


@pytest.mark.spec("PRV-19", "PRV-20")
def test_a_forked_child_has_connections_blocks_and_a_watcher_of_its_own(dsn, account, line):
    rules = {"quota": hour(100)}
    with PostgresBooks(dsn, blocks=BlockPolicy(size=10)) as books:
        books.admit(asked(account, **rules))
        watcher = books._watcher
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                assert books._watcher is None
                for _ in range(2):
                    books.admit(asked(account, **rules))
                assert books._watcher is not watcher
                books.close()
                code = 0
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert stored_quota(line, account, WindowKind.DAY).used_count == 12, "two of its own, and our block of ten"
        books.admit(asked(account, **rules))
    assert stored_quota(line, account, WindowKind.DAY).used_count == 4


@pytest.mark.spec("PRV-19", "PRV-20", "DX-25")
def test_a_forked_child_that_ends_without_a_call_leaves_the_connections_of_its_parent_open(dsn, account):
    with PostgresBooks(dsn) as books:
        books.admit(asked(account))
        (session,) = books._lines._idle
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                books.close()  # as at the exit of every process
                code = 0
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert session.execute("select 1").fetchone() == (1,)


class Noted:
    def __init__(self):
        self.rows, self.closed = [], None

    def record(self, row):
        self.rows.append(row)

    def close(self, timeout):
        self.closed = timeout


@pytest.mark.spec("PRV-26")
def test_attempts_go_to_the_writer_and_without_metrics_are_counted(dsn, account):
    writer = Noted()
    with PostgresBooks(dsn, writer=writer) as books:
        Payments(books=books).call("charge", tenant=account.tenant_id)
        assert [row.tenant_id for row in writer.rows] == [account.tenant_id]
    assert writer.closed is not None
    with PostgresBooks(dsn, metrics=False) as books:
        Payments(books=books).call("charge", tenant=account.tenant_id)
        assert books.dropped == 1


@pytest.mark.spec("PRV-02", "PRV-26", "DX-25")
def test_attempts_are_written_without_being_asked_for_and_after_a_close_too(dsn, account):
    books = PostgresBooks(dsn)
    for made in (1, 2):
        Payments(books=books).call("charge", tenant=account.tenant_id)
        books.close()
        count = "select count(*) from ergon.provider_execution_metrics where tenant_id = %s"
        with psycopg.connect(dsn) as line:
            assert line.execute(count, [account.tenant_id]).fetchone() == (made,)
    assert books.dropped == 0


def test_a_database_without_the_tables_is_told_to_be_upgraded(postgres, monkeypatch):
    empty = postgres.create_database(f"books_{os.getpid()}_{next(_numbers)}")
    with pytest.raises(ConfigurationError, match="run: ergon db upgrade"), PostgresBooks(empty):
        pass
    migrate.upgrade(empty, "0001")
    with pytest.raises(ConfigurationError, match="the books need 0011; run: ergon db upgrade"), PostgresBooks(empty):
        pass
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=VARIABLE):
        PostgresBooks()


def test_an_attempt_is_concluded_where_it_was_admitted(books, account):
    with pytest.raises(ConfigurationError, match="that admitted it"):
        books.conclude(Admitted(asked(account), None), ended())
