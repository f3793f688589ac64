"""A queue in RabbitMQ."""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.connectors.rabbitmq.queue import RabbitMQQueue
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "queue": ("RabbitMQQueue",),
        },
        extras={
            "queue": ("rabbitmq", "pika"),
        },
    )

__all__ = [
    "RabbitMQQueue",
]
