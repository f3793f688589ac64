"""A queue, an outbox and an inbox in PostgreSQL."""

from ergon_framework.errors import extra

extra("postgres", "psycopg")

from ergon_framework.connectors.postgres.queue import PostgresQueue  # noqa: E402 - not before its driver is known to be there

__all__ = ["PostgresQueue"]
