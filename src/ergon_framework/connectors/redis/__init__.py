"""A queue in a Redis stream."""

from ergon_framework.errors import require_extra

require_extra("redis", "redis")

from ergon_framework.connectors.redis.queue import RedisQueue  # noqa: E402 - its client must be checked for first

__all__ = ["RedisQueue"]
