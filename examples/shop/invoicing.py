"""Has a Node process make the invoice, and tells headquarters of it: a fact with the invoice as its artifact."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ergon_framework import consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import Command
from ergon_framework.executor.task import isolated
from ergon_framework.facts.blob import Blob
from ergon_framework.facts.facts import Facts
from ergon_framework.facts.publish import Upload
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.files import TlsFiles

invoices = PostgresQueue("invoices", inbox=True)


@contextmanager
def boundary() -> Iterator[dict[str, Facts]]:
    names = ("ERGON_FACTS_TLS_CERT", "ERGON_FACTS_TLS_KEY", "ERGON_FACTS_TLS_CA")
    files = TlsFiles(*(Path(os.environ[name]) for name in names))
    with BoundaryClient(Address(host=os.environ["ERGON_FACTS_SERVER"], files=files, deadline=5)) as client:
        # How often it is tried again is the business of the task's policy, which waits out an outage.
        yield {"facts": Facts(client, zone="shop", max_retries=0)}


@consumer(invoices, lifespan=boundary)
def invoice(order: dict[str, Any]) -> dict[str, Any]:
    raise NotImplementedError("made by invoice.mjs")


@invoice.on_success
def tell(order: dict[str, Any], made: dict[str, Any], facts: Facts) -> None:
    # The same bytes whenever it is made again: an artifact never changes.
    document = json.dumps(made, sort_keys=True).encode()
    facts.append(
        "headquarters",
        subject=f"order:{order['order']}",
        predicate="invoiced",
        artifact=Upload("shop-invoices", f"{made['number']}.json", Blob.of(document), media_type="application/json"),
    )


node = Command(words=("node", "invoice.mjs"), environment={"PATH": os.environ["PATH"]})
task = isolated(invoice, node, pool=PoolPolicy(size=1))
