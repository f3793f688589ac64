"""A queue, an outbox and an inbox in PostgreSQL.

A queue delivers transactions to workers. An outbox dispatches them in the caller's own database transaction. An inbox
records the ids of processed transactions, so that a repeated delivery is acked without calling the handler.
"""

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
