"""Examining: how a database is, told as findings; it is only read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ergon_framework.connectors.postgres import statements
from ergon_framework.connectors.postgres.durability import Durability, read_durability
from ergon_framework.finding import Finding, Wall, Weight, of_clocks, of_durability, of_version
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.revisions import CHAIN, NEEDED, SCHEMA, suffices

#: The oldest release of the server that tests run with.
_OLDEST: Final = (15,)
#: How many tables are named whose rights are missing.
_NAMED: Final = 3

_SERVER: Final = """
select current_setting('server_version'), current_setting('server_version_num')::int, current_user::text,
    current_database()::text, pg_is_in_recovery(), to_regnamespace('ergon') is not null,
    coalesce(has_schema_privilege(to_regnamespace('ergon')::oid, 'usage'), false)
"""
_CLOCK: Final = "select extract(epoch from clock_timestamp())::float8"
_REVISION_THERE: Final = "select to_regclass('ergon.revision') is not null"
#: Read without a right, so that whoever may read nothing is told what is missing.
_RIGHTS: Final = """
select c.relname::text, array_agg(wanted order by wanted)
from pg_class c
cross join unnest(case when c.relkind = 'S' then array['usage'] when c.relname = 'revision' then array['select']
    else array['select', 'insert', 'update', 'delete'] end) as right_ (wanted)
where c.relnamespace = to_regnamespace('ergon') and c.relkind in ('r', 'p', 'S')
    and not case c.relkind when 'S' then has_sequence_privilege(c.oid, 'usage')
        else has_table_privilege(c.oid, wanted) end
group by 1 order by 1
"""
_QUEUE: Final = "select exists (select from ergon.queue where name = %(name)s)"
_GRANTS: Final = (
    f"as the owner: grant usage on schema {SCHEMA} to {{role}}; grant select, insert, update, delete on all tables in "
    f"schema {SCHEMA} to {{role}}; grant usage on all sequences in schema {SCHEMA} to {{role}}"
)


def examined(lines: Lines, name: str | None, wall: Wall) -> Operation[list[Finding]]:
    """How the database is, and the queue called *name* in it."""
    ((version, number, role, database, standby, made, usable),) = yield Query(_SERVER)
    found = [
        Finding("connection", Weight.FINE, f"connected to the database {database!r} as {role!r}"),
        of_version(version, server="PostgreSQL", number=(number // 10_000,), needed=_OLDEST),
    ]
    found += _way(direct=lines.direct)
    before = wall()
    ((theirs,),) = yield Query(_CLOCK)
    found.append(of_clocks(theirs, before, wall(), server="PostgreSQL"))
    durability = yield from read_durability(lines.hosts)
    found.append(
        of_durability(
            durability.words,
            durable=durability.durable,
            do="set fsync, full_page_writes and synchronous_commit to on, in postgresql.conf or for this role",
        )
    )
    found += _standbys(durability)
    if standby:
        found.append(
            Finding("role", Weight.BROKEN, "the server is a standby and takes no writes", "give the primary's address")
        )
    if made and not usable:
        return [*found, Finding("permissions", Weight.BROKEN, f"{role!r} may not use the schema", _granted(role))]
    revision: str | None = None
    if made and (yield Query(_REVISION_THERE))[0][0]:
        rights = _rights((yield Query(_RIGHTS)), role)
        found.append(rights)
        if rights.weight is Weight.BROKEN:
            return found
        rows = yield Query(statements.REVISION)
        revision = rows[0][0] if rows else None
    found.append(of_revision(revision))
    if name is not None and suffices(revision):
        ((there,),) = yield Query(_QUEUE, {"name": name})
        words = (
            f"the queue {name!r} is there" if there else f"the queue {name!r} is not there yet; its first user has it"
        )
        found.append(Finding("queue", Weight.FINE, words, shared=False))
    return found


def of_revision(revision: str | None) -> Finding:
    """Whether this release can work on the tables as they are."""
    upgrade = "run: ergon db upgrade"
    if not suffices(revision):
        seen = f"the database is at revision {revision or 'none'}, this release needs {NEEDED}"
        return Finding("schema", Weight.BROKEN, seen, upgrade)
    if revision in CHAIN and revision != CHAIN[-1]:
        missing = ", ".join(CHAIN[CHAIN.index(revision) + 1 :])
        seen = f"the database is at revision {revision}; what this release keeps in {missing} is not there"
        return Finding("schema", Weight.WARNING, seen, upgrade)
    return Finding("schema", Weight.FINE, f"the database is at revision {revision}; {NEEDED} or later is needed")


def _way(*, direct: bool | None) -> Iterator[Finding]:
    if direct is False:
        yield Finding(
            "pooler",
            Weight.FINE,
            "a pooler stands between: nobody is woken by the database, and workers look by themselves",
        )


def _standbys(durability: Durability) -> Iterator[Finding]:
    if durability.promotion:
        do = "name a standby in synchronous_standby_names and keep synchronous_commit on, or accept the loss"
        yield Finding("standby", Weight.WARNING, durability.promotion, do)
    elif durability.has_standbys is not False:
        yield Finding("standby", Weight.FINE, "commits wait for a synchronous standby: its promotion costs nothing")


def _rights(rows: list[tuple[str, list[str]]], role: str) -> Finding:
    if not rows:
        return Finding("permissions", Weight.FINE, f"{role!r} may read and write every table")
    named = "; ".join(f"no {', '.join(rights)} on {SCHEMA}.{table}" for table, rights in rows[:_NAMED])
    more = f", and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return Finding("permissions", Weight.BROKEN, f"{role!r} has {named}{more}", _granted(role))


def _granted(role: str) -> str:
    return _GRANTS.format(role='"' + role.replace('"', '""') + '"')
