"""A queue in a Redis stream.

A stream is a log of entries; a consumer group keeps the list of entries that its consumers (the workers) have claimed.
"""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.connectors.redis.queue import RedisQueue
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "queue": ("RedisQueue",),
        },
        extras={
            "queue": ("redis", "redis"),
        },
    )

__all__ = [
    "RedisQueue",
]
