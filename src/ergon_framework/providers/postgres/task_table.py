"""The table that ``task_execution_id`` refers to: the framework's own, or one that the host names.

Only the foreign key in the database defines which table it is, so all processes agree.
"""

from __future__ import annotations

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
#: Seconds to wait for one answer of the server: a table with many attempts is rewritten.
_TIMEOUT_SECONDS: Final = 600.0

_SELECT_CURRENT: Final = "select task_table::text, id_type from ergon.provider_task_table()"
_SELECT_CANDIDATE: Final = """
select c.oid::regclass::text, format_type(a.atttypid, null) from pg_class c
join pg_attribute a on a.attrelid = c.oid and a.attname = 'id' and not a.attisdropped
where c.oid = to_regclass(%s)
"""
_INSERT_OWN_ROWS: Final = """
insert into ergon.task_executions (id) select name from unnest(%s::text[]) as names (name) order by name
on conflict do nothing
"""
_SELECT_FOREIGN_KEYS: Final = """
select conname from pg_constraint where contype = 'f' and conrelid = 'ergon.provider_execution_metrics'::regclass
"""


def _is_uuid(text: str) -> bool:
    with suppress(ValueError):
        return str(uuid.UUID(text)) == text.lower()
    return False


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18  # noqa: PLR2004 - fits into 64 bits


#: The supported id types, and the check whether a text is such an id.
_ID_CHECKS: Final[dict[str, Callable[[str], bool]]] = {
    "text": lambda _: True,
    "character varying": lambda _: True,
    "uuid": _is_uuid,
    "bigint": _is_number,
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
        """Return those of *ids* that attempts may refer to; rows of the own table are created, those of a host are not.

        An id that the host's table does not have is omitted from the attempt.
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
            _refer_to(conn, task_table)
        except (psycopg.errors.InvalidForeignKey, psycopg.errors.InsufficientPrivilege) as error:
            raise ConfigurationError(
                f"providers.task_table {name!r} cannot be referred to: {error.diag.message_primary}; its id must be a "
                "primary key, and the role needs the right REFERENCES"
            ) from None
    return True


def _refer_to(conn: Connection[Any], table: TaskTable) -> None:
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
