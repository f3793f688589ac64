"""One queue on each broker for broker-independent tests, found by name at the address from the environment."""

from __future__ import annotations

import uuid

from ergon_framework import queue
from ergon_framework.runner import queues

#: How to get the address of a server that a test may use.
ADDRESSES = {
    "postgres": lambda request: request.getfixturevalue("database"),
    "rabbitmq": lambda request: request.getfixturevalue("rabbitmq"),
    "nats": lambda request: request.getfixturevalue("nats_server").url,
    "redis": lambda request: request.getfixturevalue("new_redis")().url,
}
BROKERS = list(ADDRESSES)
#: Short, so that claims of a killed worker expire soon, and longer than a busy machine stalls: a lease that expires
#: under a live worker costs one more delivery. RabbitMQ has no lease: it sees lost connections.
LEASE_SECONDS = 5.0


def create_named_queue(broker, request, folder, monkeypatch):
    """Create a queue that processes find by the same name if they run in *folder* and inherit the environment."""
    name = f"orders_{uuid.uuid4().hex[:8]}"
    options = "" if broker == "rabbitmq" else f"[queues.{name}.options]\nlease = {LEASE_SECONDS}\n"
    (folder / "ergon.toml").write_text(options, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(queues, "_chosen", [])
    monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__URL", ADDRESSES[broker](request))
    return queue(name)


def is_empty(depth):
    """Return whether no message is ready, delayed or in flight; not every broker reports claims of other consumers."""
    return depth.ready + depth.delayed + depth.in_flight == 0
