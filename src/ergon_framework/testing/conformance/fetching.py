"""Checks of fetch: its results, its waiting, and the notification of listeners."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from ergon_framework.connectors.base import AsyncConnector, Connector, Delivery, Release
from ergon_framework.errors import ConnectionLostError
from ergon_framework.testing.conformance.check import (
    NotApplicable,
    check,
    expect,
    free_release,
    ordered,
    prioritised,
    queue_mode,
)
from ergon_framework.testing.conformance.client import Client, RecordingListener
from ergon_framework.testing.conformance.sitting import CheckContext

#: Seconds within which a waiting client must be notified of an arrival.
SOON = 5.0


@check("CNN-01", "CNN-10")
async def a_fetch_brings_no_more_than_it_asks_for(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(7))
    expect(not await client.fetch(0), "a fetch of 0 brought something")
    first = await client.fetch(3, wait=1.0)
    expect(0 < len(first) <= 3, f"a fetch of 3 with 7 there brought {len(first)}")
    rest = await client.claim(7 - len(first))
    found = sorted(delivery.transaction.id for delivery in [*first, *rest])
    expect(found == [f"tx-{number}" for number in range(7)], f"of 7 transactions these came: {found}")
    await client.finds_nothing(because="all was handed out")


@check("CNN-01")
async def an_empty_queue_answers_with_nothing(sitting: CheckContext) -> None:
    client = await sitting.client()
    expect(not await client.fetch(5), "a new queue is not empty")
    began = time.monotonic()
    expect(not await client.fetch(5, wait=0.2), "a new queue is not empty")
    took = time.monotonic() - began
    expect(took < SOON, f"a fetch that was to wait 0.2 s took {took:.1f} s")


@check("CNN-01")
async def a_waiting_fetch_brings_what_arrives(sitting: CheckContext) -> None:
    producer = await sitting.client()
    client = await sitting.client()
    waiting = asyncio.ensure_future(client.claim(within=SOON * 2))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await producer.dispatch(sitting.transaction())
    (delivery,) = await waiting
    took = time.monotonic() - began
    expect(delivery.transaction.id == "tx-0", f"{delivery.transaction.id} came and not tx-0")
    expect(took < SOON, f"it took {took:.1f} s from dispatch to delivery")


@check("CNN-01")
async def no_claim_is_handed_out_twice(sitting: CheckContext) -> None:
    count, rivals = 150, 8
    first = await sitting.client()
    queue = sitting.capabilities.mode == "queue"
    # The consumers of a log do not compete for a record; one of them is called concurrently.
    clients = [await sitting.client() for _ in range(rivals)] if queue else [first] * rivals
    await first.dispatch(*sitting.transactions(count))
    claimed: list[Delivery] = []

    async def take(client: Client) -> None:
        while len(claimed) < count:
            found = await client.fetch(4, wait=0.05)
            claimed.extend(found)
            if not found:
                break

    await asyncio.gather(*(take(client) for client in clients))
    claimed += await clients[0].claim(count - len(claimed)) if len(claimed) < count else []
    ids = [delivery.transaction.id for delivery in claimed]
    expect(len(set(ids)) == len(ids) == count, f"{count} transactions were handed out {len(ids)} times")
    receipts = {delivery.receipt for delivery in claimed}
    expect(len(receipts) == count, f"{count} deliveries have {len(receipts)} different receipts")


@check("CNN-01", needs=(ordered,))
async def the_order_of_a_key_is_kept(sitting: CheckContext) -> None:
    client = await sitting.client()
    sent = [sitting.transaction(f"{key}{number}", key=key) for number in range(4) for key in "ab"]
    await client.dispatch(*sent)
    # The connector may deliver several messages of a key together, or each after the previous one was settled.
    acked: list[Delivery] = []
    while len(acked) < len(sent):
        first = await client.claim(1)
        claimed = [*first, *await client.fetch(len(sent))]
        _expect_order(acked + claimed, "handed out")
        await client.settles(Release(), *reversed(claimed))
        first = await client.claim(1)
        again = [*first, *await client.fetch(len(sent))]
        _expect_order(acked + again, "handed out after a release")
        await client.ack(*again)
        acked += again


@check("CNN-01", needs=(ordered, queue_mode))
async def nothing_of_a_key_is_in_two_hands(sitting: CheckContext) -> None:
    one, other = await sitting.client(), await sitting.client()
    await one.dispatch(*(sitting.transaction(f"a{number}", key="a") for number in range(3)))
    (mine,) = await one.claim(1)
    theirs = [delivery.transaction.id for delivery in await other.fetch(3)]
    expect(not theirs, f"{mine.transaction.id} is in somebody's hands, and {theirs} of the same key were handed out")
    await one.ack(mine)
    (after,) = await other.claim(1)
    expect(after.transaction.id > mine.transaction.id, f"after {mine.transaction.id} came {after.transaction.id}")
    await other.ack(after)


def _expect_order(deliveries: list[Delivery], words: str) -> None:
    for key in "ab":
        ids = [delivery.transaction.id for delivery in deliveries if delivery.transaction.key == key]
        expect(ids == sorted(ids), f"the transactions of one key were {words} as {ids}")


@check("CNN-01", needs=(prioritised,))
async def the_urgent_comes_first(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(3))
    if not sitting.candidate.dispatch_urgent(client.connector, sitting.transaction("urgent")):
        raise NotApplicable("priority is True, but the candidate does not say how one is given")
    first = await client.claim_one()
    expect(first.transaction.id == "tx-urgent", f"{first.transaction.id} came before the urgent one")


@check("CNN-01")
async def a_listener_is_woken_by_a_dispatch(sitting: CheckContext) -> None:
    producer = await sitting.client()
    client = await sitting.client()
    if type(client.connector).listen in (Connector.listen, AsyncConnector.listen):
        raise NotApplicable("listen() is not written: this connector has no signals, its callers poll")
    ear = RecordingListener()
    unlisten = client.listen(ear)
    try:
        expect(not await client.fetch(1), "a new queue is not empty")
        before = ear.wakes
        await producer.dispatch(sitting.transaction())
        await sitting.until(lambda: ear.wakes > before, "a dispatch by another client wakes the listener", within=SOON)
    finally:
        unlisten()
    await client.ack(await client.claim_one())
    before = ear.wakes
    await producer.dispatch(sitting.transaction(1))
    await client.claim_one()
    expect(ear.wakes == before, "a listener was told after it had stopped listening")


@check("CNN-01", "CNN-07")
async def closing_ends_a_waiting_fetch(sitting: CheckContext) -> None:
    client = await sitting.client()
    waiting = asyncio.ensure_future(client.fetch(1, wait=SOON * 4))
    await asyncio.sleep(0.1)
    await client.close()
    done, _ = await asyncio.wait([waiting], timeout=SOON)
    expect(done, f"a fetch still waits {SOON:g} s after close()")
    with suppress(ConnectionLostError):
        expect(not waiting.result(), "a fetch of a closed client brought something")
    await client.open()
    await client.dispatch(sitting.transaction())
    await client.ack(await client.claim_one())


@check("CNN-01", needs=(queue_mode, free_release))
async def a_cancelled_fetch_keeps_nothing(sitting: CheckContext) -> None:
    if sitting.variant == "sync":
        raise NotApplicable("a thread cannot be cancelled; the loop gives back what comes late")
    client = await sitting.client()
    waiting = asyncio.ensure_future(client.fetch(1, wait=SOON))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    await client.dispatch(sitting.transaction())
    delivery = await client.claim_one()
    expect(delivery.deliveries == 1, f"a cancelled fetch cost {delivery.deliveries - 1} deliveries")
    await client.ack(delivery)
