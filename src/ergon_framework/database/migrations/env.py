"""How Alembic runs the migrations: inside the schema, on the connection that it is given, or as text."""

from __future__ import annotations

from typing import Any

from alembic import context
from sqlalchemy import text

from ergon_framework.database.revisions import SCHEMA

OPTIONS: dict[str, Any] = {"version_table": "revision", "version_table_schema": SCHEMA, "transactional_ddl": True}


def run() -> None:
    """Run what was asked for."""
    connection = context.config.attributes.get("connection")
    if connection is None:
        context.configure(dialect_name="postgresql", literal_binds=True, **OPTIONS)
    else:
        context.configure(connection=connection, **OPTIONS)
    with context.begin_transaction():
        # "if not exists" wants the right to create even where nothing is to be created.
        if connection is None or connection.execute(text(f"select to_regnamespace('{SCHEMA}')")).scalar() is None:
            context.execute(f"create schema if not exists {SCHEMA}")
        context.run_migrations()


run()
