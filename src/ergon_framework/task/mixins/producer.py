"""The producer mixins; ``task.producer`` defines them."""

from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin

__all__ = ["AsyncProducerMixin", "ProducerMixin"]
