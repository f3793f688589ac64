"""A queue, an outbox and an inbox in PostgreSQL."""

from ergon_framework.errors import require_extra

require_extra("postgres", "psycopg")

from ergon_framework.connectors.postgres.queue import PostgresQueue  # noqa: E402 - the driver must be checked for first

__all__ = ["PostgresQueue"]
