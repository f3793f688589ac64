"""Steered: books in a database whose clock a test holds in its hand.

The books go by the server's clock and by nothing else, and take it from one function. In a database of
its own a test replaces that function; the books themselves know nothing of it.
"""

from __future__ import annotations

import itertools

import psycopg

from ergon_framework.providers.circuit_breaker import BreakerState, Override, OverrideKind, Probe, Snapshot
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.sql.books import PostgresBooks
from ergon_framework.providers.sql.names import ALL
from ergon_framework.schema import migrate

_numbers = itertools.count(1)

_CLOCK = """
create table public.steered (at timestamptz not null);
insert into public.steered values (clock_timestamp());
create or replace function ergon.provider_clock() returns timestamptz language sql volatile as
'select at from public.steered';
"""


def steered_database(server) -> str:
    """A new database with our tables, whose clock stands still until it is set."""
    dsn = server.create_database(f"steered_{next(_numbers)}")
    migrate.upgrade(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_CLOCK)
    return dsn


class SteeredBooks(PostgresBooks):
    """Books in such a database: each visit is made at the moment that it says it is made at."""

    def __init__(self, dsn, **options):
        super().__init__(dsn, **options)
        self.line = psycopg.connect(dsn, autocommit=True)
        self._memory = MemoryBooks()

    def set_clock(self, now):
        self.line.execute("update public.steered set at = to_timestamp(%s)", [now])

    def _watch(self):
        """Nobody watches: what it would see, it would see in real time."""

    def admit(self, asked):
        self.set_clock(asked.now)
        return super().admit(asked)

    async def admit_async(self, asked):
        self.set_clock(asked.now)
        return await super().admit_async(asked)

    def conclude(self, admitted, concluded):
        self.set_clock(concluded.now)
        return super().conclude(admitted, concluded)

    async def conclude_async(self, admitted, concluded):
        self.set_clock(concluded.now)
        return await super().conclude_async(admitted, concluded)

    def record(self, row):
        self._memory.record(row)

    def empty(self):
        """As after a start on empty tables."""
        self._memory = MemoryBooks()
        self._begin_anew()
        for table in ("breakers", "keys", "reservations", "quota_states", "health_states"):
            self.line.execute(f"delete from ergon.provider_{table}")
        return self

    def close(self):
        super().close()
        self.line.close()

    # -- what memory's books show, read from the tables ------------------------------------------------

    def rows(self):
        return self._memory.rows()

    def hour(self, *account, now):
        return self._memory.hour(*account, now=now)

    def breaker(self, account):
        return stored_breaker(self.line, account)

    def quota(self, account, kind):
        return stored_quota(self.line, account, kind)


def names(account):
    return [ALL if account.tenant_id is None else account.tenant_id, account.provider_name, account.capability]


def stored_breaker(line, account):
    row = line.execute(
        "select state, consecutive_failures, extract(epoch from open_until)::float8, generation, probes, probes_begun,"
        " probe_successes, override_kind, extract(epoch from override_until)::float8 from ergon.provider_breakers"
        " where (tenant_id, provider_name, capability) = (%s, %s, %s)",
        names(account),
    ).fetchone()
    if row is None:
        return Snapshot()
    state, failures, open_until, generation, probes, begun, successes, kind, until = row
    return Snapshot(
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
    """A window's row."""

    def __init__(self, limit, used, remaining):
        self.limit_count, self.used_count, self.remaining_count = limit, used, remaining


def stored_quota(line, account, kind):
    """The row of the current window; None where there is none."""
    row = line.execute(
        "select limit_count, used_count, remaining_count from ergon.provider_quota_states"
        " where (tenant_id, provider_name, capability) = (%s, %s, %s)"
        " and window_start = ergon.provider_window_start(%s, ergon.provider_clock())",
        [*names(account), ["minute", "hour", "day", "month"].index(kind) + 1],
    ).fetchone()
    return None if row is None else StoredQuota(*row)
