"""Checks of dispatch and of third-party messages.

A dispatch sends transactions to a queue. It is confirmed, sets their source (the queue's name) and trace headers, and
sends all of a batch or nothing. An unreadable message is delivered with its bytes. Ids such as CNN-02 name the
requirements in docs/spec. A client is a new connector of the check's queue, like that of another process.
``system.receive`` puts a message into the queue as a third-party producer does, without the connector.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context

from ergon_framework.connectors.base import DeadLetter, Delivery, Release, UndecodableError
from ergon_framework.errors import ErgonError
from ergon_framework.telemetry.context import copy_with_otel_context, extract_context
from ergon_framework.testing.conformance.check import (
    CheckFailed,
    check,
    expect,
    require_dead_letters,
    require_encoding,
    require_external_messages,
    require_payload_limit,
)
from ergon_framework.testing.conformance.connector.client import CheckContext, Client, run_in_thread
from ergon_framework.transaction import Transaction


@check("CNN-02")
async def a_confirmed_dispatch_is_delivered(context: CheckContext) -> None:
    producer = await context.client()
    client = await context.client()
    sent = context.transactions(5)
    confirmed_ids = [confirmation.transaction_id for confirmation in await producer.dispatch(*sent)]
    expect(confirmed_ids == [each.id for each in sent], f"dispatching {len(sent)} confirmed {confirmed_ids}")
    await producer.close()
    deliveries = await client.claim(5, within=5.0)
    expect(
        {each.transaction.id for each in deliveries} == {each.id for each in sent},
        "deliveries differ from what was sent",
    )
    await client.ack(*deliveries)


@check("CNN-02", needs=(require_encoding,))
async def dispatch_takes_all_or_none(context: CheckContext) -> None:
    client = await context.client()
    await _expect_rejected(
        client, context.transaction(0), context.transaction(1, payload=object()), context.transaction(2)
    )
    await client.expect_nothing(reason="one of three could not be encoded")


@check("CNN-02", needs=(require_payload_limit,))
async def a_too_large_payload_is_rejected(context: CheckContext) -> None:
    client = await context.client()
    limit = client.capabilities.max_payload or 0
    await _expect_rejected(client, context.transaction(0), context.transaction(1, payload="x" * (limit + 1)))
    await client.expect_nothing(reason="one of two exceeded max_payload")


async def _expect_rejected(client: Client, *transactions: Transaction) -> None:
    try:
        await client.dispatch(*transactions)
    except CheckFailed:
        raise
    except ErgonError as error:
        expect(error.final, f"{type(error).__name__} is not final, but a retry cannot succeed")
    else:
        ids = ", ".join(repr(each.id) for each in transactions)
        raise CheckFailed(f"dispatch confirmed {ids}, of which one cannot be encoded or is too large; it must raise")


@check("CNN-03")
async def source_and_trace_are_stamped(context: CheckContext) -> None:
    client = await context.client()
    trace_id = f"{0xABC:032x}"
    trace_context = extract_context({"traceparent": f"00-{trace_id}-{0xDEF:016x}-01"})
    task_context = copy_context() if trace_context is None else copy_with_otel_context(copy_context(), trace_context)
    sending = client.dispatch(context.transaction("plain"), context.transaction("own", source="elsewhere"))
    await asyncio.create_task(sending, context=task_context)
    transactions = {each.transaction.id: each.transaction for each in await client.claim(2)}
    expect(
        transactions["tx-plain"].source == client.connector.name,
        f"the source is {transactions['tx-plain'].source!r}, not the queue's name {client.connector.name!r}",
    )
    expect(transactions["tx-own"].source == "elsewhere", f"an explicit source became {transactions['tx-own'].source!r}")
    parent = transactions["tx-plain"].trace.get("traceparent", "")
    expect(trace_id in parent, f"dispatched inside a span, the traceparent is {parent!r}")


BROKEN_BODY = b'{"half": \xff'
HEADERS = {"ergon-id": "broken-1", "x-theirs": "kept"}


async def _receive_undecodable(context: CheckContext, client: Client, body: bytes) -> Delivery:
    await run_in_thread(lambda: context.system.receive(context.queue, body, HEADERS))
    delivery = await client.claim_one()
    expect(isinstance(delivery.error, UndecodableError), f"the error of unreadable bytes is {delivery.error!r}")
    expect(delivery.transaction.payload == body, "the payload of an unreadable message is not its bytes")
    return delivery


@check("CNN-05", needs=(require_external_messages,))
async def an_undecodable_message_arrives_with_its_bytes(context: CheckContext) -> None:
    client = await context.client()
    delivery = await _receive_undecodable(context, client, BROKEN_BODY)
    await client.settle_successfully(Release(), delivery)
    again = await client.claim_one()
    expect(again.transaction.id == delivery.transaction.id, "an unreadable message has another id at each delivery")
    expect(again.transaction.payload == BROKEN_BODY, "a release changed the bytes")
    await client.dispatch(context.transaction())
    neighbour = await client.claim_one()
    expect(neighbour.error is None, "a readable message after an unreadable one has an error")
    await client.ack(again, neighbour)


@check("CNN-05", needs=(require_external_messages, require_payload_limit))
async def a_too_large_message_arrives_with_its_size(context: CheckContext) -> None:
    client = await context.client()
    limit = client.capabilities.max_payload or 0
    body = b'"' + b"x" * limit + b'"'
    await run_in_thread(lambda: context.system.receive(context.queue, body, HEADERS))
    delivery = await client.claim_one()
    expect(isinstance(delivery.error, UndecodableError), f"the error of a body over the limit is {delivery.error!r}")
    expect(str(len(body)) in str(delivery.error), f"the error does not name the size: {delivery.error}")
    # A connector that learns the size first does not load the body.
    expect(delivery.transaction.payload in (None, body), "the payload of a body over the limit is not its bytes")
    await client.ack(delivery)


@check("CNN-05", "CNN-08", needs=(require_external_messages, require_dead_letters))
async def an_undecodable_message_is_dead_lettered_with_its_bytes(context: CheckContext) -> None:
    client = await context.client()
    delivery = await _receive_undecodable(context, client, BROKEN_BODY)
    await client.settle_successfully(DeadLetter("undecodable"), delivery)
    (record,) = await client.list_dead()
    expect(record.raw == BROKEN_BODY, "the dead letter does not hold the bytes of the message")
    expect(record.headers.get("x-theirs") == "kept", "the dead letter does not hold the message's own headers")
    expect(record.reason == "undecodable", f"the reason is {record.reason!r}")
    await client.replay_dead(record.handle)
    again = await client.claim_one()
    expect(again.error is not None, "a replayed unreadable message has no error")
    expect(again.transaction.payload == BROKEN_BODY, "a replay changed the bytes")
    await client.ack(again)
