"""Steered: provider state in a database whose clock a test sets.

Provider state takes the time only from the server's clock, through one function. In a separate database a test replaces
that function; the provider state itself does not know it.
"""

from __future__ import annotations

import itertools

import psycopg

from ergon_framework.database import migrate
from ergon_framework.providers.circuit_breaker import BreakerSnapshot, BreakerState, Override, OverrideKind, Probe
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.postgres.keys import ALL_TENANTS
from ergon_framework.providers.postgres.state import PostgresProviderState

_numbers = itertools.count(1)

_CLOCK_SQL = """
create table public.steered (at timestamptz not null);
insert into public.steered values (clock_timestamp());
create or replace function ergon.provider_clock() returns timestamptz language sql volatile as
'select at from public.steered';
"""


def create_controlled_database(server) -> str:
    """Return a new database with our tables, whose clock stands still until it is set."""
    dsn = server.create_database(f"steered_{next(_numbers)}")
    migrate.upgrade(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_CLOCK_SQL)
    return dsn


class ControlledProviderState(PostgresProviderState):
    """Provider state in such a database: each round trip happens at the time that its arguments state."""

    def __init__(self, dsn, **options):
        super().__init__(dsn, **options)
        self.clock_connection = psycopg.connect(dsn, autocommit=True)
        self._memory = MemoryProviderState()

    def set_clock(self, now):
        self.clock_connection.execute("update public.steered set at = to_timestamp(%s)", [now])

    def _start_listener(self):
        """Do not listen: notifications would arrive in real time."""

    def admit(self, request):
        self.set_clock(request.now)
        return super().admit(request)

    async def admit_async(self, request):
        self.set_clock(request.now)
        return await super().admit_async(request)

    def complete(self, admitted, result):
        self.set_clock(result.now)
        return super().complete(admitted, result)

    async def complete_async(self, admitted, result):
        self.set_clock(result.now)
        return await super().complete_async(admitted, result)

    def record(self, row):
        self._memory.record(row)

    def empty(self):
        """Reset it as after a start on empty tables."""
        self._memory = MemoryProviderState()
        self._reset()
        for table in ("breakers", "keys", "reservations", "quota_states", "health_states"):
            self.clock_connection.execute(f"delete from ergon.provider_{table}")
        return self

    def close(self):
        super().close()
        self.clock_connection.close()

    # -- the views of the in-memory store, read from the tables ----------------------------------------

    def list_attempts(self):
        return self._memory.list_attempts()

    def get_hour(self, *account, now):
        return self._memory.get_hour(*account, now=now)

    def get_breaker(self, account):
        return load_breaker(self.clock_connection, account)

    def get_quota(self, account, kind):
        return load_quota(self.clock_connection, account, kind)


def list_scope_names(account):
    return [ALL_TENANTS if account.tenant_id is None else account.tenant_id, account.provider_name, account.capability]


def load_breaker(connection, account):
    row = connection.execute(
        "select state, consecutive_failures, extract(epoch from open_until)::float8, generation, probes,"
        " probes_started, probe_successes, override_kind,"
        " extract(epoch from override_until)::float8 from ergon.provider_breakers"
        " where (tenant_id, provider_name, capability) = (%s, %s, %s)",
        list_scope_names(account),
    ).fetchone()
    if row is None:
        return BreakerSnapshot()
    state, failures, open_until, generation, probes, begun, successes, kind, until = row
    return BreakerSnapshot(
        BreakerState(state),
        failures,
        open_until,
        generation,
        tuple(Probe(int(number), float(end)) for number, end in probes),
        begun,
        successes,
        None if kind is None else Override(OverrideKind(kind), until),
    )


class StoredQuota:
    """The row of a quota window."""

    def __init__(self, limit, used, remaining):
        self.limit_count, self.used_count, self.remaining_count = limit, used, remaining


def load_quota(connection, account, kind):
    """Return the row of the current window; None where there is none."""
    row = connection.execute(
        "select limit_count, used_count, remaining_count from ergon.provider_quota_states"
        " where (tenant_id, provider_name, capability) = (%s, %s, %s)"
        " and window_start = ergon.provider_window_start(%s, ergon.provider_clock())",
        [*list_scope_names(account), ["minute", "hour", "day", "month"].index(kind) + 1],
    ).fetchone()
    return None if row is None else StoredQuota(*row)
