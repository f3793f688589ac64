"""Databases with our tables: copies of one template per server, reused while their schema is unchanged."""

from __future__ import annotations

import time
import uuid
from functools import cache

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from ergon_framework.database import migrate
from tests.servers.postgres import PostgresServerError, PrivatePostgres

_DISCONNECT_TIMEOUT_SECONDS = 20.0
#: All schema objects that a test may change; table rows are not part of it.
_SCHEMA_QUERY = """
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
_TABLES_QUERY = """
select format('%I.%I', schemaname, tablename) from pg_tables
    where schemaname in ('ergon', 'public') and tablename <> 'revision'
"""
_OTHER_SESSIONS = "from pg_stat_activity where datname = %s and pid <> pg_backend_pid()"


def create_migrated_database(server: PrivatePostgres) -> str:
    """Return the dsn of a new database with our tables and one of the application's."""
    return server.create_database(f"copy_{uuid.uuid4().hex[:12]}", like=_create_template(server))


@cache
def _create_template(server: PrivatePostgres) -> str:
    """Return the template of all others: a copy takes a fifth of the time of a creation."""
    name = f"pattern_{uuid.uuid4().hex[:12]}"
    dsn = server.create_database(name)
    migrate.upgrade(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("create table effect (name text)")
    return name


class DatabasePool:
    """Lends databases of one server, each to one borrower at a time."""

    def __init__(self, server: PrivatePostgres) -> None:
        self._server = server
        self._free_dsns: list[str] = []
        self._schema: str | None = None

    def borrow(self) -> str:
        dsn = self._free_dsns.pop() if self._free_dsns else create_migrated_database(self._server)
        if self._schema is None:
            self._schema = _read_schema(dsn)
        return dsn

    def release(self, dsn: str) -> None:
        """Disconnect remaining clients; drop a database whose schema changed, empty the others."""
        name = str(conninfo_to_dict(dsn)["dbname"])
        self._disconnect_clients(name)
        if _read_schema(dsn) != self._schema:
            with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
                connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
            return
        with psycopg.connect(dsn, autocommit=True) as connection:
            tables = [table for (table,) in connection.execute(_TABLES_QUERY)]
            # Without foreign keys: all rows are deleted.
            connection.execute("set session_replication_role = replica")
            connection.execute("; ".join(f"delete from {table}" for table in tables))
        self._free_dsns.append(dsn)

    def _disconnect_clients(self, name: str) -> None:
        deadline = time.monotonic() + _DISCONNECT_TIMEOUT_SECONDS
        with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
            while connection.execute(f"select pg_terminate_backend(pid) {_OTHER_SESSIONS}", [name]).rowcount:
                if time.monotonic() > deadline:
                    raise PostgresServerError(f"a session stays connected to {name}")
                time.sleep(0.005)


def _read_schema(dsn: str) -> str | None:
    with psycopg.connect(dsn) as connection:
        try:
            row = connection.execute(_SCHEMA_QUERY).fetchone()
        except psycopg.errors.UndefinedTable:
            return None
    return row[0] if row else None
