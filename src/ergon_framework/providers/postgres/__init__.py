"""The state of providers in PostgreSQL: quota, circuit breakers, idempotency keys and attempts.

A provider is a third-party API. A quota is the number of calls that a tenant may make in a window of time. A circuit
breaker stops calls to a failing provider. An idempotency key stores the result of a call, so that a repetition returns
it. An attempt is one try of a call.
"""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.providers.postgres import admin
    from ergon_framework.providers.postgres.quota_blocks import BlockPolicy
    from ergon_framework.providers.postgres.state import PostgresProviderState
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "": ("admin",),
            "quota_blocks": ("BlockPolicy",),
            "state": ("PostgresProviderState",),
        },
        extras={
            "admin": ("postgres", "psycopg"),
            "quota_blocks": ("postgres", "psycopg"),
            "state": ("postgres", "psycopg"),
        },
    )

__all__ = [
    "BlockPolicy",
    "PostgresProviderState",
    "admin",
]
