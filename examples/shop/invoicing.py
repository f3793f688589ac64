"""Has a Node process create the invoice, and reports it to headquarters: a fact with the invoice as its artifact."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ergon_framework import consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.executors import ExecutorCommand, PoolPolicy, run_in_executor
from ergon_framework.facts import Blob, Facts, Upload
from ergon_framework.facts.service import BoundaryClient, ServiceAddress, TlsFiles

invoices = PostgresQueue("invoices", inbox=True)


@contextmanager
def boundary() -> Iterator[dict[str, Facts]]:
    names = ("ERGON_FACTS_TLS_CERT", "ERGON_FACTS_TLS_KEY", "ERGON_FACTS_TLS_CA")
    files = TlsFiles(*(Path(os.environ[name]) for name in names))
    with BoundaryClient(ServiceAddress(host=os.environ["ERGON_FACTS_SERVER"], files=files, deadline=5)) as client:
        # The task's policy decides about retries, and waits out an outage.
        yield {"facts": Facts(client, zone="shop", max_retries=0)}


@consumer(invoices, lifespan=boundary)
def invoice(order: dict[str, Any]) -> dict[str, Any]:
    raise NotImplementedError("made by invoice.mjs")


@invoice.on_success
def publish_invoice(order: dict[str, Any], result: dict[str, Any], facts: Facts) -> None:
    # The same bytes whenever it is created again: an artifact never changes.
    document = json.dumps(result, sort_keys=True).encode()
    facts.append(
        "headquarters",
        subject=f"order:{order['order']}",
        predicate="invoiced",
        artifact=Upload(
            "shop-invoices", f"{result['number']}.json", Blob.from_bytes(document), media_type="application/json"
        ),
    )


node = ExecutorCommand(words=("node", "invoice.mjs"), environment={"PATH": os.environ["PATH"]})
task = run_in_executor(invoice, node, pool=PoolPolicy(size=1))
