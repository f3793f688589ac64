"""Payloads of 200 generated types pass every broker and are read back equal."""

from __future__ import annotations

import pytest

from ergon_framework import MemoryConnector
from ergon_framework.connectors.base import Ack, SettleResult
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.payload_json import encode_payload
from ergon_framework.task.payload import PayloadReader
from ergon_framework.transaction import Transaction
from tests.integration.brokers import BROKERS, create_named_queue, is_empty
from tests.payload_types import draw_payload

pytestmark = [pytest.mark.spec("CNN-03", "CON-44"), pytest.mark.invariant]

#: Seconds for the server to hand out all messages.
FETCH_SECONDS = 20.0


@pytest.fixture(params=[*BROKERS, "memory"])
def orders(request, tmp_path, monkeypatch):
    """A queue on each broker."""
    if request.param == "memory":
        yield MemoryConnector("orders")
        return
    connector = as_sync(create_named_queue(request.param, request, tmp_path, monkeypatch).connector)
    connector.open()
    yield connector
    connector.close()


def test_payloads_of_generated_types_pass_a_broker(orders):
    cases = {f"order-{seed}": draw_payload(seed) for seed in range(200)}
    orders.dispatch([Transaction(payload, id=name) for name, (_, payload) in cases.items()])
    received = {}
    while len(received) < len(cases):
        deliveries = orders.fetch_transactions(100, wait=FETCH_SECONDS)
        assert deliveries, f"{len(received)} of {len(cases)} were delivered"
        results = orders.settle([(delivery, Ack()) for delivery in deliveries])
        assert set(results) == {SettleResult.SETTLED}
        received |= {delivery.transaction.id: delivery.transaction for delivery in deliveries}
    assert is_empty(orders.depth())
    for name, (payload_type, payload) in cases.items():
        read = PayloadReader(payload_type).read(received[name])
        assert read == payload, name
        assert encode_payload(read) == encode_payload(payload), name
