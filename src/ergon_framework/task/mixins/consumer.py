"""The consumer mixins; ``task.consumer`` defines them."""

from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin

__all__ = ["AsyncConsumerMixin", "ConsumerMixin"]
