"""A queue in RabbitMQ."""

from ergon_framework.errors import require_extra

require_extra("rabbitmq", "pika")

from ergon_framework.connectors.rabbitmq.queue import RabbitMQQueue  # noqa: E402 - the check for its client comes first

__all__ = ["RabbitMQQueue"]
