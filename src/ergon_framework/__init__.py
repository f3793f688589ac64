"""Ergon: business transactions between systems, without lost or doubled work."""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports
from ergon_framework.audit import act_as
from ergon_framework.connectors.base import Ack, AsyncConnector, Capabilities, Connector, DeadLetter, Defer, Delivery
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.simple import SimpleConnector
from ergon_framework.errors import Category, ConfigurationError, ConnectionLostError, ErgonError
from ergon_framework.gates import Pause
from ergon_framework.runner.loading import load_policy
from ergon_framework.runner.queues import queue
from ergon_framework.runner.settings import load_settings
from ergon_framework.scope import current as current_scope
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.decorators import AsyncConsumer, AsyncProducer, Consumer, Producer, consumer, producer
from ergon_framework.task.handler import RawPayload
from ergon_framework.task.middleware import AsyncMiddleware, AttemptContext, Middleware, TransactionContext
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.task.relay import relay
from ergon_framework.task.routing import Router, router
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import (
    BusinessError,
    FetchException,
    LoopStalled,
    LoopTimeout,
    TransactionException,
)
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy, RetryPolicy

if TYPE_CHECKING:
    from ergon_framework.jobs.schedule import Schedule, cron
else:
    # Schedules use the store of jobs, which most programs do not need.
    __getattr__ = lazy_exports(__name__, {"jobs.schedule": ("Schedule", "cron")})

__all__ = [
    "Ack",
    "AsyncConnector",
    "AsyncConsumer",
    "AsyncConsumerMixin",
    "AsyncMiddleware",
    "AsyncProducer",
    "AsyncProducerMixin",
    "AsyncTask",
    "AttemptContext",
    "BusinessError",
    "Capabilities",
    "Category",
    "ConfigurationError",
    "ConnectionLostError",
    "Connector",
    "Consumer",
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
    "Middleware",
    "Pause",
    "Producer",
    "ProducerMixin",
    "ProducerPolicy",
    "RawPayload",
    "RetryPolicy",
    "Router",
    "Schedule",
    "SimpleConnector",
    "Task",
    "Transaction",
    "TransactionContext",
    "TransactionException",
    "act_as",
    "consumer",
    "cron",
    "current_scope",
    "load_policy",
    "load_settings",
    "producer",
    "queue",
    "relay",
    "router",
]
