"""A queue in RabbitMQ."""

from ergon_framework.errors import extra

extra("rabbitmq", "pika")

from ergon_framework.connectors.rabbitmq.queue import RabbitMQQueue  # noqa: E402 - not before its client is known to be there

__all__ = ["RabbitMQQueue"]
