"""A queue, an outbox and an inbox in PostgreSQL."""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.queue import PostgresQueue
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "queue": ("PostgresQueue",),
        },
        extras={
            "queue": ("postgres", "psycopg"),
        },
    )

__all__ = [
    "PostgresQueue",
]
