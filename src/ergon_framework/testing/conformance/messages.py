"""Checks of third-party messages: unreadable messages are delivered with their bytes."""

from __future__ import annotations

from ergon_framework.connectors.base import DeadLetter, Delivery, Release, UndecodableError
from ergon_framework.testing.conformance.check import check, dead_letters, expect, foreign, limited
from ergon_framework.testing.conformance.client import Client, in_thread
from ergon_framework.testing.conformance.sitting import CheckContext

BROKEN = b'{"half": \xff'
HEADERS = {"ergon-id": "broken-1", "x-theirs": "kept"}


async def _received(sitting: CheckContext, client: Client, body: bytes) -> Delivery:
    await in_thread(lambda: sitting.candidate.receive(sitting.queue, body, HEADERS))
    delivery = await client.claim_one()
    expect(isinstance(delivery.error, UndecodableError), f"the error of unreadable bytes is {delivery.error!r}")
    expect(delivery.transaction.payload == body, "the payload of what cannot be read is not its bytes")
    return delivery


@check("CNN-05", needs=(foreign,))
async def what_cannot_be_read_comes_with_its_bytes(sitting: CheckContext) -> None:
    client = await sitting.client()
    delivery = await _received(sitting, client, BROKEN)
    await client.settles(Release(), delivery)
    again = await client.claim_one()
    expect(again.transaction.id == delivery.transaction.id, "what cannot be read has another id at each delivery")
    expect(again.transaction.payload == BROKEN, "a release changed the bytes")
    await client.dispatch(sitting.transaction())
    neighbour = await client.claim_one()
    expect(neighbour.error is None, "a readable message behind an unreadable one has an error")
    await client.ack(again, neighbour)


@check("CNN-05", needs=(foreign, limited))
async def what_is_too_large_to_read_says_its_size(sitting: CheckContext) -> None:
    client = await sitting.client()
    limit = client.capabilities.max_payload or 0
    body = b'"' + b"x" * limit + b'"'
    await in_thread(lambda: sitting.candidate.receive(sitting.queue, body, HEADERS))
    delivery = await client.claim_one()
    expect(isinstance(delivery.error, UndecodableError), f"the error of a body over the limit is {delivery.error!r}")
    expect(str(len(body)) in str(delivery.error), f"the error does not name the size: {delivery.error}")
    # A connector that learns the size first does not load the body.
    expect(delivery.transaction.payload in (None, body), "the payload of a body over the limit is not its bytes")
    await client.ack(delivery)


@check("CNN-05", "CNN-08", needs=(foreign, dead_letters))
async def what_cannot_be_read_is_a_dead_letter_with_its_bytes(sitting: CheckContext) -> None:
    client = await sitting.client()
    delivery = await _received(sitting, client, BROKEN)
    await client.settles(DeadLetter("undecodable"), delivery)
    (record,) = await client.list_dead()
    expect(record.raw == BROKEN, "the dead letter does not hold the bytes of the message")
    expect(record.headers.get("x-theirs") == "kept", "the dead letter does not hold the message's own headers")
    expect(record.reason == "undecodable", f"the reason is {record.reason!r}")
    await client.replay_dead(record.handle)
    again = await client.claim_one()
    expect(again.error is not None, "a replayed message is readable by now")
    expect(again.transaction.payload == BROKEN, "a replay changed the bytes")
    await client.ack(again)
