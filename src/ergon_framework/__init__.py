"""Ergon: business transactions between systems, without losing or doubling work."""

from ergon_framework.connectors.base import Ack, AsyncConnector, Capabilities, Connector, DeadLetter, Delivery, Later
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.simple import SimpleConnector
from ergon_framework.errors import Category, ConfigurationError, ConnectionLost, ErgonError
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
    "ConnectionLost",
    "Connector",
    "ConsumerMixin",
    "ConsumerPolicy",
    "DeadLetter",
    "Delivery",
    "ErgonError",
    "FetchException",
    "Later",
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
