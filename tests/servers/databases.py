"""Databases with our tables: copies of one that is made once for each server, and used again when left as they came."""

from __future__ import annotations

import time
import uuid
from functools import cache

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from ergon_framework.schema import migrate
from tests.servers.postgres import PostgresServerError, PrivatePostgres

_PATIENCE = 20.0
#: All that a test may have made, changed or dropped; what is in the tables is not part of it.
_SHAPE = """
select md5(string_agg(told, ' ' order by told)) from (
    select format('%s %s %s', c.oid::regclass, c.relkind, c.relnatts) from pg_class c
        where c.relnamespace in (select oid from pg_namespace where nspname in ('ergon', 'public'))
    union all select format('%s %s', p.oid::regprocedure, md5(p.prosrc)) from pg_proc p
        where p.pronamespace in (select oid from pg_namespace where nspname in ('ergon', 'public'))
    union all select format('%s %s', o.conname, pg_get_constraintdef(o.oid)) from pg_constraint o
        where o.connamespace in (select oid from pg_namespace where nspname in ('ergon', 'public'))
    union all select format('%s %s %s', t.tgrelid::regclass, t.tgname, t.tgenabled) from pg_trigger t
    union all select format('%s', s.setconfig) from pg_db_role_setting s
        where s.setdatabase = (select oid from pg_database where datname = current_database())
    union all select version_num from ergon.revision
) shape (told)
"""
_TABLES = """
select format('%I.%I', schemaname, tablename) from pg_tables
    where schemaname in ('ergon', 'public') and tablename <> 'revision'
"""
_OTHERS = "from pg_stat_activity where datname = %s and pid <> pg_backend_pid()"


def migrated(server: PrivatePostgres) -> str:
    """The dsn of a new database with our tables and one of the application's."""
    return server.create_database(f"copy_{uuid.uuid4().hex[:12]}", like=_pattern(server))


@cache
def _pattern(server: PrivatePostgres) -> str:
    """The database that all others are copies of: to copy one takes a fifth of the time that it takes to make one."""
    name = f"pattern_{uuid.uuid4().hex[:12]}"
    dsn = server.create_database(name)
    migrate.upgrade(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("create table effect (name text)")
    return name


class Databases:
    """Lends databases of one server, each to one borrower at a time."""

    def __init__(self, server: PrivatePostgres) -> None:
        self._server = server
        self._spare: list[str] = []
        self._shape: str | None = None

    def borrow(self) -> str:
        dsn = self._spare.pop() if self._spare else migrated(self._server)
        if self._shape is None:
            self._shape = _shape(dsn)
        return dsn

    def give_back(self, dsn: str) -> None:
        """Whoever is still connected is sent away; a database that has another shape now is dropped, others emptied."""
        name = str(conninfo_to_dict(dsn)["dbname"])
        self._send_away(name)
        if _shape(dsn) != self._shape:
            with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
                connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
            return
        with psycopg.connect(dsn, autocommit=True) as connection:
            tables = [table for (table,) in connection.execute(_TABLES)]
            # Whatever refers to what: all of it goes.
            connection.execute("set session_replication_role = replica")
            connection.execute("; ".join(f"delete from {table}" for table in tables))
        self._spare.append(dsn)

    def _send_away(self, name: str) -> None:
        end = time.monotonic() + _PATIENCE
        with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
            while connection.execute(f"select pg_terminate_backend(pid) {_OTHERS}", [name]).rowcount:
                if time.monotonic() > end:
                    raise PostgresServerError(f"somebody stays connected to {name}")
                time.sleep(0.005)


def _shape(dsn: str) -> str | None:
    with psycopg.connect(dsn) as connection:
        try:
            row = connection.execute(_SHAPE).fetchone()
        except psycopg.errors.UndefinedTable:
            return None
    return row[0] if row else None
