"""Ledger: what really happened to every message, written by triggers inside the server.

It is the second source: the journals say what workers believed, the ledger what was true.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import psycopg

SCHEMA = """
create schema chaos;
create table chaos.effect (id text not null, worker text not null, at timestamptz not null default clock_timestamp());
create table chaos.sent (place bigint not null, id text not null, at timestamptz not null default clock_timestamp());
create index on chaos.sent (id);
create table chaos.step (
    seq bigint generated always as identity, place bigint not null, what text not null, worker bigint, token bigint,
    at timestamptz not null default clock_timestamp(), by text not null default current_setting('application_name')
);
create table chaos.expiration (
    worker bigint not null, alive_until timestamptz not null,
    at timestamptz not null default clock_timestamp(), by text not null default current_setting('application_name')
);

-- What comes back is moved into content by the statement that brings it back, which is over when this is asked.
create function chaos.on_ready() returns trigger language plpgsql as $$ begin
    if tg_op = 'INSERT' then
        insert into chaos.sent (place, id) values (new.id, new.transaction_id);
    elsif not exists (select 1 from ergon.content c where c.id = old.id) then
        insert into chaos.step (place, what) values (old.id, 'gone');
    end if;
    return null;
end $$;
create trigger chaos after insert or delete on ergon.ready for each row execute function chaos.on_ready();

create function chaos.on_content() returns trigger language plpgsql as $$ begin
    insert into chaos.step (place, what) values (old.id, 'gone');
    return null;
end $$;
create trigger chaos after delete on ergon.content for each row execute function chaos.on_content();

-- taken: by an instance that removed the expired holder. back: released by the holder.
create function chaos.on_claim() returns trigger language plpgsql as $$
declare
    before bigint[] := case when tg_op = 'INSERT' then '{}' else old.ids end;
    after bigint[] := case when tg_op = 'DELETE' then '{}' else new.ids end;
begin
    if tg_op <> 'INSERT' then
        insert into chaos.step (place, what, worker, token)
        select c.id,
            case when exists (select 1 from ergon.worker w where w.id = old.worker) then 'back' else 'taken' end,
            old.worker, old.token
        from ergon.content c where c.id = any(before) and c.id <> all(after);
    end if;
    if tg_op <> 'DELETE' then
        insert into chaos.step (place, what, worker, token)
        select id, 'claim', new.worker, new.token from unnest(after) as i(id) where id <> all(before);
    end if;
    return null;
end $$;
create trigger chaos after insert or update or delete on ergon.claim for each row execute function chaos.on_claim();

create function chaos.on_worker() returns trigger language plpgsql as $$ begin
    insert into chaos.expiration (worker, alive_until) values (old.id, old.alive_until);
    return null;
end $$;
create trigger chaos after delete on ergon.worker for each row execute function chaos.on_worker();
"""

#: A claim: message, worker instance, token.
Claim = tuple[int, int, int]


@dataclass
class Step:
    """One event of a claim; *seq* orders the events of one message."""

    seq: int
    kind: str
    timestamp: float
    application: str


@dataclass
class Ledger:
    """All that the server knows at the end."""

    #: Message number -> transaction id.
    sent: dict[int, str] = field(default_factory=dict)
    effects: list[str] = field(default_factory=list)
    #: Transaction id, reason, deliveries, body.
    dead: list[tuple[str, str, int, bytes]] = field(default_factory=list)
    remaining: list[int] = field(default_factory=list)
    claims: dict[Claim, Step] = field(default_factory=dict)
    claim_ends: dict[Claim, Step] = field(default_factory=dict)
    #: Messages that were removed while unclaimed.
    removed: list[int] = field(default_factory=list)
    #: Claims of claimed messages, and messages released by or taken from a worker that did not hold them.
    violations: list[str] = field(default_factory=list)
    #: Worker instance -> until when it was alive, when it was found expired, by whom.
    expirations: dict[int, tuple[float, float, str]] = field(default_factory=dict)


def create_ledger(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(SCHEMA)


def find_sent(connection: psycopg.Connection[Any], ids: list[str]) -> set[str]:
    """Return those of *ids* that were ever sent."""
    return {row[0] for row in connection.execute("select id from chaos.sent where id = any(%s)", (ids,))}


def read_ledger(dsn: str) -> Ledger:
    ledger = Ledger()
    with psycopg.connect(dsn, autocommit=True) as connection:
        ledger.sent = dict(connection.execute("select place, id from chaos.sent").fetchall())
        ledger.effects = [row[0] for row in connection.execute("select id from chaos.effect")]
        rows = connection.execute("select id from ergon.ready union all select id from ergon.content")
        ledger.remaining = [row[0] for row in rows]
        ledger.dead = connection.execute(
            "select transaction_id, reason, deliveries, body from ergon.dead_letter order by id"
        ).fetchall()
        steps = (
            "select seq, place, what, worker, token, extract(epoch from at)::float8, by from chaos.step order by seq"
        )
        _follow_claims(ledger, connection.execute(steps))
        expirations = connection.execute(
            "select worker, extract(epoch from alive_until)::float8, extract(epoch from at)::float8, by "
            "from chaos.expiration"
        )
        ledger.expirations = {
            worker: (alive_until, timestamp, application) for worker, alive_until, timestamp, application in expirations
        }
    return ledger


def _follow_claims(ledger: Ledger, steps: Iterable[tuple[Any, ...]]) -> None:
    """Follow the holder of each message, event by event."""
    holders: dict[int, Claim] = {}
    for seq, message, kind, worker, token, timestamp, application in steps:
        step, holder = Step(seq, kind, timestamp, application), holders.get(message)
        if kind == "claim":
            if holder is not None:
                ledger.violations.append(f"{message} claimed by {worker}-{token} while {holder} held it")
            holders[message] = (message, worker, token)
            ledger.claims[message, worker, token] = step
        elif holder is None:
            ledger.removed.append(message)
        else:
            if kind != "gone" and holder != (message, worker, token):
                ledger.violations.append(f"{message} {kind} from {worker}-{token} while {holder} held it")
            ledger.claim_ends[holder] = step
            del holders[message]


def count_messages(connection: psycopg.Connection[Any]) -> tuple[int, int, int]:
    """Count remaining messages, claimed ones among them, and effects."""
    row = connection.execute(
        "select (select count(*) from ergon.ready) + (select count(*) from ergon.content), "
        "(select count(*) from chaos.effect), "
        "(select count(*) from ergon.claim h cross join unnest(h.ids, h.ranks) as i(id, rank) where exists "
        "(select 1 from ergon.content c where c.id = i.id) or exists "
        "(select 1 from ergon.ready r where r.queue = h.queue and r.rank = i.rank and r.id = i.id))"
    ).fetchone()
    assert row is not None
    return row[0], row[2], row[1]
