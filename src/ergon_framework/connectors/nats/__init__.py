"""A queue in NATS JetStream."""

from ergon_framework.errors import require_extra

require_extra("nats", "nats")

from ergon_framework.connectors.nats.queue import NatsQueue  # noqa: E402 - the check for its client comes first

__all__ = ["NatsQueue"]
