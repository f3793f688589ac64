"""A queue in a Redis stream."""

from ergon_framework.errors import extra

extra("redis", "redis")

from ergon_framework.connectors.redis.queue import RedisQueue  # noqa: E402 - not before its client is known to be there

__all__ = ["RedisQueue"]
