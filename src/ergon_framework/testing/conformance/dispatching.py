"""Checks of dispatch: confirmation, source and trace headers, and all-or-nothing batches."""

from __future__ import annotations

import asyncio
from contextvars import copy_context

from ergon_framework.errors import ErgonError
from ergon_framework.telemetry.context import context_with, extract_context
from ergon_framework.testing.conformance.check import CheckFailed, check, encoded, expect, limited
from ergon_framework.testing.conformance.client import Client
from ergon_framework.testing.conformance.sitting import CheckContext
from ergon_framework.transaction import Transaction


@check("CNN-02")
async def what_is_confirmed_is_there(sitting: CheckContext) -> None:
    producer = await sitting.client()
    client = await sitting.client()
    sent = sitting.transactions(5)
    confirmed = [confirmation.transaction_id for confirmation in await producer.dispatch(*sent)]
    expect(confirmed == [each.id for each in sent], f"dispatching {len(sent)} confirmed {confirmed}")
    await producer.close()
    found = await client.claim(5, within=5.0)
    expect({each.transaction.id for each in found} == {each.id for each in sent}, "others came than were dispatched")
    await client.ack(*found)


@check("CNN-02", needs=(encoded,))
async def dispatch_takes_all_or_none(sitting: CheckContext) -> None:
    client = await sitting.client()
    await _refused(client, sitting.transaction(0), sitting.transaction(1, payload=object()), sitting.transaction(2))
    await client.finds_nothing(because="one of three could not be written")


@check("CNN-02", needs=(limited,))
async def what_is_too_large_is_refused(sitting: CheckContext) -> None:
    client = await sitting.client()
    limit = client.capabilities.max_payload or 0
    await _refused(client, sitting.transaction(0), sitting.transaction(1, payload="x" * (limit + 1)))
    await client.finds_nothing(because="one of two was beyond max_payload")


async def _refused(client: Client, *transactions: Transaction) -> None:
    try:
        await client.dispatch(*transactions)
    except CheckFailed:
        raise
    except ErgonError as error:
        expect(error.final, f"{type(error).__name__} is not final, but trying again cannot help")
    else:
        raise CheckFailed("a transaction that cannot be sent was confirmed")


@check("CNN-03")
async def source_and_trace_are_stamped(sitting: CheckContext) -> None:
    client = await sitting.client()
    trace_id = f"{0xABC:032x}"
    here = extract_context({"traceparent": f"00-{trace_id}-{0xDEF:016x}-01"})
    below = copy_context() if here is None else context_with(copy_context(), here)
    sending = client.dispatch(sitting.transaction("plain"), sitting.transaction("own", source="elsewhere"))
    await asyncio.create_task(sending, context=below)
    found = {each.transaction.id: each.transaction for each in await client.claim(2)}
    expect(
        found["tx-plain"].source == client.connector.name,
        f"the source is {found['tx-plain'].source!r}, not the queue's name {client.connector.name!r}",
    )
    expect(found["tx-own"].source == "elsewhere", f"a given source became {found['tx-own'].source!r}")
    parent = found["tx-plain"].trace.get("traceparent", "")
    expect(trace_id in parent, f"dispatched below a span, the traceparent is {parent!r}")
