"""Ergon: business transactions between systems, without lost or doubled work."""

from ergon_framework.connectors.base import Ack, AsyncConnector, Capabilities, Connector, DeadLetter, Defer, Delivery
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.simple import SimpleConnector
from ergon_framework.errors import Category, ConfigurationError, ConnectionLostError, ErgonError
from ergon_framework.runner.queues import queue
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.decorators import consumer, producer
from ergon_framework.task.exceptions import (
    BusinessError,
    FetchException,
    LoopStalled,
    LoopTimeout,
    TransactionException,
)
from ergon_framework.task.gates import Pause
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy, RetryPolicy
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.transaction import Transaction

__all__ = [
    "Ack",
    "AsyncConnector",
    "AsyncConsumerMixin",
    "AsyncProducerMixin",
    "AsyncTask",
    "BusinessError",
    "Capabilities",
    "Category",
    "ConfigurationError",
    "ConnectionLostError",
    "Connector",
    "ConsumerMixin",
    "ConsumerPolicy",
    "DeadLetter",
    "Defer",
    "Delivery",
    "ErgonError",
    "FetchException",
    "LoopStalled",
    "LoopTimeout",
    "MemoryConnector",
    "Pause",
    "ProducerMixin",
    "ProducerPolicy",
    "RetryPolicy",
    "SimpleConnector",
    "Task",
    "Transaction",
    "TransactionException",
    "consumer",
    "producer",
    "queue",
]
