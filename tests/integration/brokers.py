"""One queue on each broker for tests with one body: found by its name, at the address that the environment says."""

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
#: Short, so that what a dead one had claimed is soon somebody else's, and longer than a busy machine stands still: what
#: runs out under a worker that lives is a delivery more. RabbitMQ has none: it sees who is gone.
LEASE = 5.0


def named(broker, request, folder, monkeypatch):
    """A queue that processes find by the same name, if they run in *folder* and inherit the environment."""
    name = f"orders_{uuid.uuid4().hex[:8]}"
    options = "" if broker == "rabbitmq" else f"[queues.{name}.options]\nlease = {LEASE}\n"
    (folder / "ergon.toml").write_text(options, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(queues, "_chosen", [])
    monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__URL", ADDRESSES[broker](request))
    return queue(name)


def is_empty(depth):
    """Whether nothing waits, is put off, or is held; what others hold not every broker tells."""
    return depth.ready + depth.delayed + depth.in_flight == 0
