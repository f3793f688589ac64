"""Diagnose a database and a queue in it; the checks only read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ergon_framework.connectors.postgres import statements
from ergon_framework.connectors.postgres.durability import PostgresDurability, read_durability
from ergon_framework.finding import Diagnostic, Severity, WallClock, check_clock_skew, check_durability, check_version
from ergon_framework.schema.lines import ConnectionPool
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.revisions import REQUIRED_REVISION, REVISIONS, SCHEMA, is_compatible

#: The oldest server release that the tests run with.
_MIN_VERSION: Final = (15,)
#: How many tables with missing rights a diagnostic names.
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
    """Diagnose the database, and the queue called *name* in it."""
    ((version, number, role, database, is_standby, has_schema, usable),) = yield Query(_SELECT_SERVER)
    findings = [
        Diagnostic("connection", Severity.OK, f"connected to the database {database!r} as {role!r}"),
        check_version(version, server="PostgreSQL", number=(number // 10_000,), minimum=_MIN_VERSION),
    ]
    findings += _check_pooler(direct=pool.is_direct)
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
                "role", Severity.ERROR, "the server is a standby and takes no writes", "give the primary's address"
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
        if rights.weight is Severity.ERROR:
            return findings
        rows = yield Query(statements.SELECT_REVISION)
        revision = rows[0][0] if rows else None
    findings.append(check_schema_revision(revision))
    if name is not None and is_compatible(revision):
        ((exists,),) = yield Query(_QUEUE_EXISTS, {"name": name})
        observed = (
            f"the queue {name!r} is there" if exists else f"the queue {name!r} is not there yet; its first user has it"
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
        observed = f"the database is at revision {revision}; what this release keeps in {missing} is not there"
        return Diagnostic("schema", Severity.WARNING, observed, upgrade)
    return Diagnostic(
        "schema", Severity.OK, f"the database is at revision {revision}; {REQUIRED_REVISION} or later is needed"
    )


def _check_pooler(*, direct: bool | None) -> Iterator[Diagnostic]:
    if direct is False:
        yield Diagnostic(
            "pooler",
            Severity.OK,
            "a pooler stands between: nobody is woken by the database, and workers look by themselves",
        )


def _check_standbys(durability: PostgresDurability) -> Iterator[Diagnostic]:
    if durability.promotion:
        remedy = "name a standby in synchronous_standby_names and keep synchronous_commit on, or accept the loss"
        yield Diagnostic("standby", Severity.WARNING, durability.promotion, remedy)
    elif durability.has_standbys is not False:
        yield Diagnostic("standby", Severity.OK, "commits wait for a synchronous standby: its promotion costs nothing")


def _check_rights(rows: list[tuple[str, list[str]]], role: str) -> Diagnostic:
    if not rows:
        return Diagnostic("permissions", Severity.OK, f"{role!r} may read and write every table")
    named = "; ".join(f"no {', '.join(rights)} on {SCHEMA}.{table}" for table, rights in rows[:_MAX_NAMED_TABLES])
    more = f", and {len(rows) - _MAX_NAMED_TABLES} more" if len(rows) > _MAX_NAMED_TABLES else ""
    return Diagnostic("permissions", Severity.ERROR, f"{role!r} has {named}{more}", _build_grants(role))


def _build_grants(role: str) -> str:
    return _GRANTS.format(role='"' + role.replace('"', '""') + '"')
