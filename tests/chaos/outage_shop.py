"""The tasks of provider_outage.py, with the default settings: ``ergon run tests.chaos.outage_shop:pay --streaming``.

``OUTAGE_BANK`` is the address of the bank, ``OUTAGE_FACTS`` that of the facts boundary, with its certificate, as JSON.
"""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from typing import Any

from ergon_framework import Transaction, consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.facts.append import Facts
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.tls import TlsFiles
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.errors import ProviderDependencyError
from ergon_framework.providers.postgres.state import PostgresProviderState

ZONES = ("Plant A", "Enterprise")


class BankProvider(ProviderBase):
    """Pays an order with one request, which carries the idempotency key."""

    provider_name = "bank"
    capability = "charging"

    def _execute_impl(self, *, payload: dict[str, Any], context: Any, **_: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection(os.environ["OUTAGE_BANK"], timeout=context.timeout)
        try:
            headers = {"Idempotency-Key": context.idempotency_key or "", "Content-Type": "application/json"}
            connection.request("POST", "/charges", json.dumps(payload), headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status != http.client.OK:
                raise ProviderDependencyError(f"the bank answered {answer.status}", http_status=answer.status)
            return {"status": "paid"}
        finally:
            connection.close()


orders = PostgresQueue("orders")
bank = BankProvider(state_store=PostgresProviderState())


@consumer(orders, uses=[bank])
def pay(order: dict[str, Any]) -> None:
    bank.call("charge", order)


def connect_boundary() -> BoundaryClient:
    settings = json.loads(os.environ["OUTAGE_FACTS"])
    return BoundaryClient(
        ServiceAddress(host=settings["host"], files=TlsFiles(*(Path(path) for path in settings["files"])))
    )


facts = Facts(connect_boundary(), zone=ZONES[0]) if "OUTAGE_FACTS" in os.environ else None


@consumer(orders)
def tell(order: dict[str, Any], transaction: Transaction) -> None:
    assert facts is not None
    facts.append(ZONES[1], subject=f"order:{transaction.id}", predicate="paid", object=order)
