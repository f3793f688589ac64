"""The table that ``task_execution_id`` refers to: the own one, or one that the host names.

Only the foreign key in the database says which table it is, so all processes agree.
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
from ergon_framework.providers.sql.reaching import reached

OWN_TABLE: Final = "ergon.task_executions"
#: Seconds that the server has for one answer: a table with many attempts is written anew.
_TIMEOUT_SECONDS: Final = 600.0

_CURRENT: Final = "select task_table::text, id_type from ergon.provider_task_table()"
_WANTED: Final = """
select c.oid::regclass::text, format_type(a.atttypid, null) from pg_class c
join pg_attribute a on a.attrelid = c.oid and a.attname = 'id' and not a.attisdropped
where c.oid = to_regclass(%s)
"""
_OWN_ROWS: Final = """
insert into ergon.task_executions (id) select name from unnest(%s::text[]) as names (name) order by name
on conflict do nothing
"""
_FOREIGN_KEYS: Final = """
select conname from pg_constraint where contype = 'f' and conrelid = 'ergon.provider_execution_metrics'::regclass
"""


def _is_uuid(text: str) -> bool:
    with suppress(ValueError):
        return str(uuid.UUID(text)) == text.lower()
    return False


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18  # noqa: PLR2004 - fits into 64 bits


#: The types of id that can be referred to, and which texts are such ids.
_TYPES: Final[dict[str, Callable[[str], bool]]] = {
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

    def ensure_rows(self, line: Connection[Any], ids: Iterable[str]) -> set[str]:
        """Return those of *ids* that attempts may refer to; rows of our own table are created, those of a host are not.

        An id that the host's table does not have is left out of the attempt.
        """
        wanted = sorted(one for one in set(ids) if _TYPES[self.id_type](one))
        if not wanted:
            return set()
        if self.is_own:
            line.execute(_OWN_ROWS, [wanted])
            return set(wanted)
        rows = line.execute(f"select id::text from {self.name} where id = any(%s::{self.id_type}[])", [wanted])  # noqa: S608 - the server's own names
        return {str(row[0]) for row in rows}


OWN: Final = TaskTable(OWN_TABLE, "text")


def read_task_table(line: Connection[Any]) -> TaskTable:
    """Return the table that attempts refer to."""
    found = line.execute(_CURRENT).fetchone()
    return OWN if found is None else TaskTable(*found)


def use_task_table(dsn: str, name: str) -> bool:
    """Make attempts refer to the column ``id`` of the table *name*; return whether that is a change.

    Attempts that refer to another table lose that reference. ConfigurationError if the table cannot be referred to.
    """
    with reached(dsn, patience=_TIMEOUT_SECONDS) as line:
        found = line.execute(_WANTED, [name]).fetchone()
        if found is None:
            raise ConfigurationError(
                f"providers.task_table {name!r} is invalid: there is no such table with a column id; create it, or "
                f"leave the setting out to use {OWN_TABLE}"
            )
        wanted = TaskTable(*found)
        if wanted.id_type not in _TYPES:
            raise ConfigurationError(
                f"providers.task_table {name!r} is invalid: its id is of type {wanted.id_type}; use a table whose id "
                f"is one of {', '.join(_TYPES)}"
            )
        if read_task_table(line) == wanted:
            return False
        try:
            _refer_to(line, wanted)
        except (psycopg.errors.InvalidForeignKey, psycopg.errors.InsufficientPrivilege) as error:
            raise ConfigurationError(
                f"providers.task_table {name!r} cannot be referred to: {error.diag.message_primary}; its id must be a "
                "primary key, and the role needs the right REFERENCES"
            ) from None
    return True


def _refer_to(line: Connection[Any], table: TaskTable) -> None:
    with line.transaction():
        line.execute("lock table ergon.provider_execution_metrics in access exclusive mode")
        for (constraint,) in line.execute(_FOREIGN_KEYS).fetchall():
            drop = sql.SQL("alter table ergon.provider_execution_metrics drop constraint {}")
            line.execute(drop.format(sql.Identifier(constraint)))
        line.execute(
            "alter table ergon.provider_execution_metrics alter column task_execution_id type "
            f"{table.id_type} using null"
        )
        line.execute(
            "alter table ergon.provider_execution_metrics add foreign key (task_execution_id) "
            f"references {table.name} (id)"
        )
