"""Diagnostics of a database and of a queue in it, durability of commits, and depths of queues; all checks only read.

An operation is a generator that yields queries and receives their rows; a thread or an event loop runs it.

Durability says what a confirmed commit survives: a power loss, and the promotion of a standby. A diagnostic with
``shared=False`` is about this queue; all others are about the server, and a report on several queues shows them once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from psycopg.errors import InsufficientPrivilege

from ergon_framework.connectors.base import Depth
from ergon_framework.connectors.postgres import sql
from ergon_framework.database.operation import Operation, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.database.revisions import REQUIRED_REVISION, REVISIONS, SCHEMA, is_compatible
from ergon_framework.diagnostics import (
    Diagnostic,
    Severity,
    WallClock,
    check_clock_skew,
    check_durability,
    check_version,
)
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import Field

_log = logging.getLogger(__name__)


class PostgresDurability(NamedTuple):
    """Whether committed data survives a power loss, with the finding as text."""

    durable: bool
    message: str
    #: True if a standby is connected, False if none is known, None if none is connected but the address has several
    #: hosts, of which some may be standbys.
    has_standbys: bool | None = False
    #: What the promotion of a standby can lose, as text; empty if it loses nothing or no standby is known.
    promotion: str = ""

    @property
    def summary(self) -> str:
        return f"{self.message}; {self.promotion}" if self.promotion else self.message


def read_durability(hosts: int) -> Operation[PostgresDurability]:
    """Read the durability of a commit; *hosts* is the number of servers in the address."""
    settings: dict[str, str] = dict((yield Query(sql.SELECT_SETTINGS)))
    try:
        ((standbys,),) = yield Query(sql.COUNT_STANDBYS)
    except InsufficientPrivilege:
        standbys = 0  # this role may not see standbys, so none is known from here
    # An address with several hosts may name standbys that are not connected now: unknown.
    has_standbys = True if standbys else None if hosts > 1 else False
    promotion = "" if has_standbys is False else assess_promotion(settings)
    return assess_durability(settings)._replace(has_standbys=has_standbys, promotion=promotion)


def assess_promotion(settings: Mapping[str, str]) -> str:
    """Return what the promotion of a standby can lose under *settings*; empty if it loses nothing.

    >>> assess_promotion({"synchronous_commit": "on", "synchronous_standby_names": "FIRST 1 (a, b)"})
    ''
    >>> assess_promotion({"synchronous_commit": "on", "synchronous_standby_names": ""}).partition(": ")[2]
    'no standby is synchronous (synchronous_standby_names is empty)'
    """
    loss = "the promotion of a standby may lose confirmed work"
    if not settings.get("synchronous_standby_names", "").strip():
        return f"{loss}: no standby is synchronous (synchronous_standby_names is empty)"
    if settings.get("synchronous_commit") in ("off", "local"):
        return f"{loss}: commits do not wait for it (synchronous_commit is {settings['synchronous_commit']})"
    return ""


def assess_durability(settings: Mapping[str, str]) -> PostgresDurability:
    """Assess the durability that *settings* give.

    >>> assess_durability({"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}).durable
    True
    >>> assess_durability({"fsync": "on", "synchronous_commit": "off", "full_page_writes": "on"}).durable
    False
    """
    if settings.get("fsync") != "on":
        return PostgresDurability(
            durable=False, message="after a power loss the whole database may be lost: fsync is off"
        )
    if settings.get("full_page_writes") != "on":
        return PostgresDurability(
            durable=False, message="a power loss may tear pages of the database: full_page_writes is off"
        )
    if settings.get("synchronous_commit") == "off":
        return PostgresDurability(
            durable=False, message="after a power loss the last commits may be lost: synchronous_commit is off"
        )
    return PostgresDurability(durable=True, message="confirmed data survives a power loss")


def log_unverified(pool: ConnectionPool) -> None:
    """Log a warning if the connections of *pool* are encrypted without a verification of the server."""
    if pool.is_unverified:
        logs.log_event(logging.WARNING, "postgres server not verified", {Field.HOST: pool.host}, to=_log)


# -- diagnostics ------------------------------------------------------------------------------------

#: The oldest server release that the tests run with.
_MIN_VERSION: Final = (15,)
#: Maximum number of tables with missing rights that a diagnostic names.
_MAX_NAMED_TABLES: Final = 3

_SELECT_SERVER: Final = """
select current_setting('server_version'), current_setting('server_version_num')::int, current_user::text,
    current_database()::text, pg_is_in_recovery(), to_regnamespace('ergon') is not null,
    coalesce(has_schema_privilege(to_regnamespace('ergon')::oid, 'usage'), false)
"""
_SELECT_CLOCK: Final = "select extract(epoch from clock_timestamp())::float8"
_REVISION_TABLE_EXISTS: Final = "select to_regclass('ergon.revision') is not null"
#: The catalog is readable without any right, so that a role without rights gets the list of missing ones.
_SELECT_MISSING_RIGHTS: Final = """
select c.relname::text, array_agg(wanted order by wanted)
from pg_class c
cross join unnest(case when c.relkind = 'S' then array['usage'] when c.relname = 'revision' then array['select']
    else array['select', 'insert', 'update', 'delete'] end) as right_ (wanted)
where c.relnamespace = to_regnamespace('ergon') and c.relkind in ('r', 'p', 'S')
    and not case c.relkind when 'S' then has_sequence_privilege(c.oid, 'usage')
        else has_table_privilege(c.oid, wanted) end
group by 1 order by 1
"""
_QUEUE_EXISTS: Final = "select exists (select from ergon.queue where name = %(name)s)"
_GRANTS: Final = (
    f"as the owner: grant usage on schema {SCHEMA} to {{role}}; grant select, insert, update, delete on all tables in "
    f"schema {SCHEMA} to {{role}}; grant usage on all sequences in schema {SCHEMA} to {{role}}"
)


def diagnose(pool: ConnectionPool, name: str | None, wall: WallClock) -> Operation[list[Diagnostic]]:
    """Diagnose the database and, unless *name* is None, the queue of that name in it."""
    ((version, number, role, database, is_standby, has_schema, usable),) = yield Query(_SELECT_SERVER)
    findings = [
        Diagnostic("connection", Severity.OK, f"connected to the database {database!r} as {role!r}"),
        check_version(version, server="PostgreSQL", number=(number // 10_000,), minimum=_MIN_VERSION),
    ]
    findings += _check_pooler(direct=pool.is_direct)
    findings += _check_tls(is_unverified=pool.is_unverified)
    before = wall()
    ((server_time,),) = yield Query(_SELECT_CLOCK)
    findings.append(check_clock_skew(server_time, before, wall(), server="PostgreSQL"))
    durability = yield from read_durability(pool.host_count)
    findings.append(
        check_durability(
            durability.message,
            durable=durability.durable,
            remedy="set fsync, full_page_writes and synchronous_commit to on, in postgresql.conf or for this role",
        )
    )
    findings += _check_standbys(durability)
    if is_standby:
        findings.append(
            Diagnostic(
                "role", Severity.ERROR, "the server is a standby and rejects writes", "use the primary's address"
            )
        )
    if has_schema and not usable:
        return [
            *findings,
            Diagnostic("permissions", Severity.ERROR, f"{role!r} may not use the schema", _build_grants(role)),
        ]
    revision: str | None = None
    if has_schema and (yield Query(_REVISION_TABLE_EXISTS))[0][0]:
        rights = _check_rights((yield Query(_SELECT_MISSING_RIGHTS)), role)
        findings.append(rights)
        if rights.severity is Severity.ERROR:
            return findings
        rows = yield Query(sql.SELECT_REVISION)
        revision = rows[0][0] if rows else None
    findings.append(check_schema_revision(revision))
    if name is not None and is_compatible(revision):
        ((exists,),) = yield Query(_QUEUE_EXISTS, {"name": name})
        observed = (
            f"queue {name!r} exists" if exists else f"queue {name!r} does not exist yet; it is created on first use"
        )
        findings.append(Diagnostic("queue", Severity.OK, observed, shared=False))
    return findings


def check_schema_revision(revision: str | None) -> Diagnostic:
    """Check whether this release can work on the schema at *revision*."""
    upgrade = "run: ergon db upgrade"
    if not is_compatible(revision):
        observed = f"the database is at revision {revision or 'none'}, this release needs {REQUIRED_REVISION}"
        return Diagnostic("schema", Severity.ERROR, observed, upgrade)
    if revision in REVISIONS and revision != REVISIONS[-1]:
        missing = ", ".join(REVISIONS[REVISIONS.index(revision) + 1 :])
        observed = f"the database is at revision {revision}; the tables of {missing} are missing"
        return Diagnostic("schema", Severity.WARNING, observed, upgrade)
    return Diagnostic(
        "schema", Severity.OK, f"the database is at revision {revision}; {REQUIRED_REVISION} or later is needed"
    )


def _check_pooler(*, direct: bool | None) -> Iterator[Diagnostic]:
    """Report a connection pooler; *direct* is False behind one, and None while no connection was opened."""
    if direct is False:
        yield Diagnostic(
            "pooler",
            Severity.OK,
            "a connection pooler is in use: workers poll, because they receive no notifications from the database",
        )


def _check_tls(*, is_unverified: bool) -> Iterator[Diagnostic]:
    if is_unverified:
        observed = "connections are encrypted, but the server is not verified (sslmode=require)"
        remedy = "set sslmode=verify-full, and sslrootcert to the certificate of the authority that signed the server's"
        yield Diagnostic("tls", Severity.WARNING, observed, remedy)


def _check_standbys(durability: PostgresDurability) -> Iterator[Diagnostic]:
    if durability.promotion:
        remedy = "name a standby in synchronous_standby_names and keep synchronous_commit on, or accept the loss"
        yield Diagnostic("standby", Severity.WARNING, durability.promotion, remedy)
    elif durability.has_standbys is not False:
        yield Diagnostic("standby", Severity.OK, "commits wait for a synchronous standby: its promotion loses nothing")


def _check_rights(rows: list[tuple[str, list[str]]], role: str) -> Diagnostic:
    if not rows:
        return Diagnostic("permissions", Severity.OK, f"{role!r} may read and write every table")
    named = "; ".join(f"no {', '.join(rights)} on {SCHEMA}.{table}" for table, rights in rows[:_MAX_NAMED_TABLES])
    more = f", and {len(rows) - _MAX_NAMED_TABLES} more" if len(rows) > _MAX_NAMED_TABLES else ""
    return Diagnostic("permissions", Severity.ERROR, f"{role!r} has {named}{more}", _build_grants(role))


def _build_grants(role: str) -> str:
    return _GRANTS.format(role='"' + role.replace('"', '""') + '"')


# -- queue depths -----------------------------------------------------------------------------------

#: Maximum number of queues that are listed; each needs one query.
MAX_QUEUES: Final = 200

_SELECT_QUEUES: Final = "select id, name from ergon.queue order by name limit %(most)s"


def queue_depths() -> Operation[dict[str, Depth]]:
    """Return the depth of each queue, by its name."""
    depth_by_queue = {}
    for queue_id, name in (yield Query(_SELECT_QUEUES, {"most": MAX_QUEUES})):
        ((ready, delayed, in_flight, dead, oldest),) = yield Query(sql.DEPTH, {"queue": queue_id})
        depth_by_queue[str(name)] = Depth(ready, delayed, in_flight, dead, None if oldest is None else max(0.0, oldest))
    return depth_by_queue
