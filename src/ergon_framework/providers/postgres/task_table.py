"""The table that ``task_execution_id`` refers to: the framework's own, or one that the embedding application names.

The attempts of provider calls are rows of ``provider_execution_metrics``; each may refer to the execution of the task
that made the call. Only the foreign key in the database defines the table of executions, so all processes agree.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import Connection, sql

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.postgres.connection import connection

OWN_TABLE: Final = "ergon.task_executions"
#: Statement timeout: changing the type of the column rewrites the whole table of attempts.
_TIMEOUT_SECONDS: Final = 600.0

_SELECT_CURRENT: Final = "select task_table::text, id_type from ergon.provider_task_table()"
_SELECT_CANDIDATE: Final = """
select c.oid::regclass::text, format_type(a.atttypid, null) from pg_class c
join pg_attribute a on a.attrelid = c.oid and a.attname = 'id' and not a.attisdropped
where c.oid = to_regclass(%s)
"""
#: Ordered, so that concurrent transactions lock the same ids in the same order and cannot deadlock.
_INSERT_OWN_ROWS: Final = """
insert into ergon.task_executions (id) select name from unnest(%s::text[]) as names (name) order by name
on conflict do nothing
"""
_SELECT_FOREIGN_KEYS: Final = """
select conname from pg_constraint where contype = 'f' and conrelid = 'ergon.provider_execution_metrics'::regclass
"""


#: An integer as PostgreSQL prints it, of at most as many digits as a bigint has.
_CANONICAL_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,18}").fullmatch


def _is_uuid(text: str) -> bool:
    with suppress(ValueError):
        return str(uuid.UUID(text)) == text.lower()
    return False


def _is_bigint(text: str) -> bool:
    # The length first: converting a very long text to a number would take long.
    return _CANONICAL_INTEGER(text) is not None and -(2**63) <= int(text) < 2**63


#: The supported id types, and the check whether a text is such an id.
_ID_CHECKS: Final[dict[str, Callable[[str], bool]]] = {
    "text": lambda _: True,
    "character varying": lambda _: True,
    "uuid": _is_uuid,
    "bigint": _is_bigint,
}


@dataclass(frozen=True, slots=True)
class TaskTable:
    """A table of task executions: its name, and the type of its id."""

    name: str
    id_type: str

    @property
    def is_own(self) -> bool:
        return self.name == OWN_TABLE

    def ensure_rows(self, conn: Connection[Any], ids: Iterable[str]) -> set[str]:
        """Return those of *ids* that attempts may refer to; missing rows of the framework's own table are created.

        The table of an embedding application is only read: an attempt with an id that it does not have refers to none.
        """
        valid_ids = sorted(execution_id for execution_id in set(ids) if _ID_CHECKS[self.id_type](execution_id))
        if not valid_ids:
            return set()
        if self.is_own:
            conn.execute(_INSERT_OWN_ROWS, [valid_ids])
            return set(valid_ids)
        rows = conn.execute(f"select id::text from {self.name} where id = any(%s::{self.id_type}[])", [valid_ids])  # noqa: S608 - the server's own names
        return {str(row[0]) for row in rows}


OWN_TASK_TABLE: Final = TaskTable(OWN_TABLE, "text")


def read_task_table(conn: Connection[Any]) -> TaskTable:
    """Return the table that attempts refer to."""
    row = conn.execute(_SELECT_CURRENT).fetchone()
    return OWN_TASK_TABLE if row is None else TaskTable(*row)


def use_task_table(dsn: str, name: str) -> bool:
    """Make attempts refer to the column ``id`` of the table *name*; return whether that is a change.

    Attempts that refer to another table lose that reference. Raises ConfigurationError if the table cannot be
    referred to.
    """
    with connection(dsn, answer_timeout=_TIMEOUT_SECONDS) as conn:
        row = conn.execute(_SELECT_CANDIDATE, [name]).fetchone()
        if row is None:
            raise ConfigurationError(
                f"providers.task_table {name!r} is invalid: there is no such table with a column id; create it, or "
                f"leave the setting out to use {OWN_TABLE}"
            )
        task_table = TaskTable(*row)
        if task_table.id_type not in _ID_CHECKS:
            raise ConfigurationError(
                f"providers.task_table {name!r} is invalid: its id is of type {task_table.id_type}; use a table whose "
                f"id is one of {', '.join(_ID_CHECKS)}"
            )
        if read_task_table(conn) == task_table:
            return False
        try:
            _replace_foreign_key(conn, task_table)
        except (psycopg.errors.InvalidForeignKey, psycopg.errors.InsufficientPrivilege) as error:
            raise ConfigurationError(
                f"providers.task_table {name!r} cannot be referred to: {error.diag.message_primary}; its id must be a "
                "primary key, and the role needs the REFERENCES privilege"
            ) from None
    return True


def _replace_foreign_key(conn: Connection[Any], table: TaskTable) -> None:
    with conn.transaction():
        conn.execute("lock table ergon.provider_execution_metrics in access exclusive mode")
        for (constraint,) in conn.execute(_SELECT_FOREIGN_KEYS).fetchall():
            drop = sql.SQL("alter table ergon.provider_execution_metrics drop constraint {}")
            conn.execute(drop.format(sql.Identifier(constraint)))
        conn.execute(
            "alter table ergon.provider_execution_metrics alter column task_execution_id type "
            f"{table.id_type} using null"
        )
        conn.execute(
            "alter table ergon.provider_execution_metrics add foreign key (task_execution_id) "
            f"references {table.name} (id)"
        )
