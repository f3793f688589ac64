"""A queue in NATS JetStream.

JetStream is the part of a NATS server that stores messages in streams and delivers them to consumers.
"""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.connectors.nats.queue import NatsQueue
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "queue": ("NatsQueue",),
        },
        extras={
            "queue": ("nats", "nats"),
        },
    )

__all__ = [
    "NatsQueue",
]
