"""A queue in NATS JetStream."""

from ergon_framework.errors import extra

extra("nats", "nats")

from ergon_framework.connectors.nats.queue import NatsQueue  # noqa: E402 - not before its client is known to be there

__all__ = ["NatsQueue"]
