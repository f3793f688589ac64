"""Place orders as a web application does: each in its own span, and then exit."""

import os

from opentelemetry import trace

from ergon_framework import Transaction
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.runner.otlp import configure_otlp

configure_otlp("web")
orders = RabbitMQQueue(os.environ["QUEUE"])
for number in range(2):
    with trace.get_tracer("web").start_as_current_span("place order", attributes={"order": number}):
        orders.dispatch([Transaction({"number": number}, id=f"order-{number}")])
orders.close()
trace.get_tracer_provider().shutdown()
