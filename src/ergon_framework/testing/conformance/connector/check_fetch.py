"""Check fetch and leases: results, waiting and notification; duration, renewal and stale claims.

A fetch claims messages: no other client gets them until they are settled, or until the lease of the claim ends without
a renewal. A stale claim is one that another client has taken over. In queue mode clients compete for messages; in log
mode one consumer at a time reads a log. Ids such as CNN-06 name the requirements in docs/spec. A client is a new
connector of the check's queue, like that of another process; ``crash_and_reconnect`` makes one stop as a killed process
does, and returns a new one.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final

from ergon_framework.connectors.base import (
    Ack,
    AsyncConnector,
    Connector,
    DeadLetter,
    Defer,
    Delivery,
    Release,
    Settlement,
    SettleResult,
)
from ergon_framework.errors import ConnectionLostError
from ergon_framework.testing.conformance.check import (
    SHORT_LEASE_SECONDS,
    NotApplicable,
    check,
    expect,
    require_key_order,
    require_leases,
    require_log_mode,
    require_priority,
    require_queue_mode,
    require_renewal,
    require_uncounted_release,
)
from ergon_framework.testing.conformance.connector.client import CheckContext, Client, RecordingListener

#: Seconds of a lease that must not end while the check verifies that its messages stay claimed, also under load.
WATCHED_LEASE_SECONDS: Final = 4 * SHORT_LEASE_SECONDS
LOST = SettleResult.LOST
#: One settlement of each kind; each must be rejected for a stale claim.
STALE_SETTLEMENTS: tuple[Settlement, ...] = (Ack(), Defer(0, attempts=5), Release(), DeadLetter("stale"))


@check("CNN-06", needs=(require_leases,))
async def a_claim_reports_its_lease_time(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(context.transaction())
    started_at = time.monotonic()
    delivery = await client.claim_one()
    lease, until = client.capabilities.lease, delivery.lease_until
    expect(until is not None, "lease is a number, but lease_until is None")
    seconds_left = (until or 0.0) - started_at
    expect(
        0 < seconds_left <= (lease or 0.0) + context.system.call_timeout,
        f"a claim of {lease:g} s ends in {seconds_left:.1f} s of the monotonic clock",
    )
    await client.ack(delivery)


@check("CNN-06", needs=(require_leases, require_renewal), lease=SHORT_LEASE_SECONDS)
async def renewal_keeps_a_claim_beyond_its_lease(context: CheckContext) -> None:
    client = await context.client()
    rival = await context.client()
    await client.dispatch(*context.transactions(2))
    claimed = await client.claim(2)
    deadline = time.monotonic() + 2.5 * context.lease
    while time.monotonic() < deadline:
        for until in await client.extend(*claimed):
            expect(until is not None, "a renewal in time reports the claim as lost")
            expect((until or 0.0) > time.monotonic(), "a renewed claim ends in the past")
        await rival.expect_nothing(during=0.0, reason="both claims are renewed in time")
        await asyncio.sleep(context.lease / 5)
    await client.ack(*claimed)
    await rival.expect_nothing(reason="both were acked")


@check("CNN-06", needs=(require_leases, require_queue_mode), lease=SHORT_LEASE_SECONDS)
async def an_unrenewed_claim_goes_to_another_client(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(context.transaction())
    delivery = await client.claim_one()
    rival = await context.client()
    await rival.expect_nothing(during=0.0, reason="it is claimed")
    successor = await context.crash_and_reconnect(client)
    again = await successor.claim_one()
    expect(
        again.transaction.id == delivery.transaction.id, f"{again.transaction.id} came, not {delivery.transaction.id}"
    )
    await successor.ack(again)


@check("CNN-12", needs=(require_leases, require_queue_mode), lease=WATCHED_LEASE_SECONDS)
async def a_stale_claim_settles_nothing(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*context.transactions(len(STALE_SETTLEMENTS)))
    stale = sorted(await client.claim(len(STALE_SETTLEMENTS)), key=lambda delivery: delivery.transaction.id)
    successor = await context.crash_and_reconnect(client)
    await context.let_leases_expire()
    claimed = await successor.claim(len(STALE_SETTLEMENTS))
    await _expect_lost(client, stale)
    await _expect_unchanged(successor, claimed)


@check("CNN-12", needs=(require_leases, require_queue_mode), lease=WATCHED_LEASE_SECONDS)
async def a_stale_claim_of_the_same_client_settles_nothing(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*context.transactions(len(STALE_SETTLEMENTS)))
    stale = sorted(await client.claim(len(STALE_SETTLEMENTS)), key=lambda delivery: delivery.transaction.id)
    await context.let_leases_expire()
    claimed = await client.claim(len(STALE_SETTLEMENTS))
    await _expect_lost(client, stale)
    await _expect_unchanged(client, claimed)


@check("CNN-12", needs=(require_log_mode,))
async def a_log_that_was_taken_over_refuses_the_old_consumer(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*context.transactions(len(STALE_SETTLEMENTS)))
    stale = sorted(await client.claim(len(STALE_SETTLEMENTS)), key=lambda delivery: delivery.transaction.id)
    successor = await context.crash_and_reconnect(client)
    claimed = await successor.claim(len(STALE_SETTLEMENTS))
    expect(await client.extend(stale[0]) == [None], "a claim from before the takeover can be renewed")
    await _expect_lost(client, stale)
    await _expect_unchanged(successor, claimed)


async def _expect_lost(client: Client, stale: list[Delivery]) -> None:
    pairs = list(zip(stale, STALE_SETTLEMENTS, strict=True))
    results = await client.settle(*pairs)
    for (_, settlement), result in zip(pairs, results, strict=True):
        expect(result is LOST, f"{type(settlement).__name__} with a stale claim returned {result}, not lost")


async def _expect_unchanged(client: Client, claimed: list[Delivery]) -> None:
    await client.expect_nothing(reason="all are claimed, and a stale claim must change nothing")
    if client.capabilities.dead_letters:
        expect(not await client.list_dead(), "a stale claim dead-lettered a message")
    await client.ack(*claimed)


@check("CNN-06", needs=(require_leases, require_renewal), lease=SHORT_LEASE_SECONDS)
async def a_lost_claim_is_reported(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(context.transaction())
    delivery = await client.claim_one()
    successor = await context.crash_and_reconnect(client)
    await context.let_leases_expire()
    claimed = await successor.claim_one()
    (until,) = await client.extend(delivery)
    expect(until is None, "a claim that another client has taken over was renewed")
    await successor.ack(claimed)


@check("CNN-06")
async def a_settled_claim_cannot_be_renewed(context: CheckContext) -> None:
    client = await context.client()
    connector_class: Any = type(client.connector)
    if getattr(connector_class, "extend", connector_class) is Connector.extend or (
        getattr(connector_class, "extend_async", connector_class) is AsyncConnector.extend_async
        and not issubclass(connector_class, Connector)
    ):
        raise NotApplicable("extend() is not implemented: claims do not expire and need no renewal")
    await client.dispatch(*context.transactions(2))
    acked, claimed = await client.claim(2)
    await client.ack(acked)
    answers = await client.extend(acked, claimed)
    expect(answers[0] is None, f"renewing an acked claim returned {answers[0]}, not None")
    expect(answers[1] is not None, "renewing a current claim next to a lost one reports it as lost")
    await client.ack(claimed)


#: Seconds within which a waiting client must be notified of an arrival.
NOTIFY_TIMEOUT_SECONDS = 5.0


@check("CNN-01", "CNN-10")
async def a_fetch_brings_no_more_than_it_asks_for(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*context.transactions(7))
    expect(not await client.fetch(0), "a fetch of 0 returned deliveries")
    first = await client.fetch(3, wait=1.0)
    expect(0 < len(first) <= 3, f"a fetch of 3 from 7 returned {len(first)}")
    remaining = await client.claim(7 - len(first))
    ids = sorted(delivery.transaction.id for delivery in [*first, *remaining])
    expect(ids == [f"tx-{number}" for number in range(7)], f"of 7 transactions these were delivered: {ids}")
    await client.expect_nothing(reason="all was delivered")


@check("CNN-01")
async def an_empty_queue_answers_with_nothing(context: CheckContext) -> None:
    client = await context.client()
    expect(not await client.fetch(5), "a new queue is not empty")
    started_at = time.monotonic()
    expect(not await client.fetch(5, wait=0.2), "a new queue is not empty")
    elapsed = time.monotonic() - started_at
    expect(elapsed < NOTIFY_TIMEOUT_SECONDS, f"a fetch that was to wait 0.2 s took {elapsed:.1f} s")


@check("CNN-01")
async def a_waiting_fetch_brings_what_arrives(context: CheckContext) -> None:
    producer = await context.client()
    client = await context.client()
    waiting = asyncio.ensure_future(client.claim(within=NOTIFY_TIMEOUT_SECONDS * 2))
    await asyncio.sleep(0.1)
    started_at = time.monotonic()
    await producer.dispatch(context.transaction())
    (delivery,) = await waiting
    elapsed = time.monotonic() - started_at
    expect(delivery.transaction.id == "tx-0", f"{delivery.transaction.id} was delivered, not tx-0")
    expect(elapsed < NOTIFY_TIMEOUT_SECONDS, f"it took {elapsed:.1f} s from dispatch to delivery")


@check("CNN-01")
async def no_claim_is_handed_out_twice(context: CheckContext) -> None:
    count, client_count = 150, 8
    first = await context.client()
    is_queue = context.capabilities.mode == "queue"
    # The consumers of a log do not compete for a record; one of them is called concurrently.
    clients = [await context.client() for _ in range(client_count)] if is_queue else [first] * client_count
    await first.dispatch(*context.transactions(count))
    claimed: list[Delivery] = []

    async def claim_all(client: Client) -> None:
        while len(claimed) < count:
            deliveries = await client.fetch(4, wait=0.05)
            claimed.extend(deliveries)
            if not deliveries:
                break

    await asyncio.gather(*(claim_all(client) for client in clients))
    claimed += await clients[0].claim(count - len(claimed)) if len(claimed) < count else []
    ids = [delivery.transaction.id for delivery in claimed]
    expect(len(set(ids)) == len(ids) == count, f"{count} transactions were delivered {len(ids)} times")
    receipts = {delivery.receipt for delivery in claimed}
    expect(len(receipts) == count, f"{count} deliveries have {len(receipts)} different receipts")


@check("CNN-01", needs=(require_key_order,))
async def the_order_of_a_key_is_kept(context: CheckContext) -> None:
    client = await context.client()
    sent = [context.transaction(f"{key}{number}", key=key) for number in range(4) for key in "ab"]
    await client.dispatch(*sent)
    # The connector may deliver several messages of a key together, or each after the previous one was settled.
    acked: list[Delivery] = []
    while len(acked) < len(sent):
        first = await client.claim(1)
        claimed = [*first, *await client.fetch(len(sent))]
        _expect_order(acked + claimed, "delivered")
        await client.settle_successfully(Release(), *reversed(claimed))
        first = await client.claim(1)
        again = [*first, *await client.fetch(len(sent))]
        _expect_order(acked + again, "delivered after a release")
        await client.ack(*again)
        acked += again


@check("CNN-01", needs=(require_key_order, require_queue_mode))
async def transactions_of_a_key_never_overlap(context: CheckContext) -> None:
    one, other = await context.client(), await context.client()
    await one.dispatch(*(context.transaction(f"a{number}", key="a") for number in range(3)))
    (mine,) = await one.claim(1)
    theirs = [delivery.transaction.id for delivery in await other.fetch(3)]
    expect(not theirs, f"{mine.transaction.id} is claimed, but {theirs} of the same key were delivered")
    await one.ack(mine)
    (after,) = await other.claim(1)
    expect(after.transaction.id > mine.transaction.id, f"after {mine.transaction.id} came {after.transaction.id}")
    await other.ack(after)


def _expect_order(deliveries: list[Delivery], description: str) -> None:
    for key in "ab":
        ids = [delivery.transaction.id for delivery in deliveries if delivery.transaction.key == key]
        expect(ids == sorted(ids), f"the transactions of one key were {description} as {ids}")


@check("CNN-01", needs=(require_priority,))
async def a_higher_priority_is_delivered_first(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*context.transactions(3))
    await client.dispatch(context.transaction("urgent", priority=1))
    first = await client.claim_one()
    expect(first.transaction.id == "tx-urgent", f"{first.transaction.id} came before the urgent one")
    expect(first.transaction.priority == 1, f"the priority became {first.transaction.priority}")


@check("CNN-01")
async def a_listener_is_woken_by_a_dispatch(context: CheckContext) -> None:
    producer = await context.client()
    client = await context.client()
    if type(client.connector).listen in (Connector.listen, AsyncConnector.listen):
        raise NotApplicable("listen() is not implemented: this connector has no notifications, its callers poll")
    listener = RecordingListener()
    unlisten = client.listen(listener)
    try:
        expect(not await client.fetch(1), "a new queue is not empty")
        wakes_before = listener.wake_count
        await producer.dispatch(context.transaction())
        await context.wait_until(
            lambda: listener.wake_count > wakes_before,
            "a dispatch by another client wakes the listener",
            within=NOTIFY_TIMEOUT_SECONDS,
        )
    finally:
        unlisten()
    await client.ack(await client.claim_one())
    wakes_before = listener.wake_count
    await producer.dispatch(context.transaction(1))
    await client.claim_one()
    expect(listener.wake_count == wakes_before, "a listener was notified after it was removed")


@check("CNN-01", "CNN-07")
async def closing_ends_a_waiting_fetch(context: CheckContext) -> None:
    client = await context.client()
    waiting = asyncio.ensure_future(client.fetch(1, wait=NOTIFY_TIMEOUT_SECONDS * 4))
    await asyncio.sleep(0.1)
    await client.close()
    done, _ = await asyncio.wait([waiting], timeout=NOTIFY_TIMEOUT_SECONDS)
    expect(done, f"a fetch still waits {NOTIFY_TIMEOUT_SECONDS:g} s after close()")
    with suppress(ConnectionLostError):
        expect(not waiting.result(), "a fetch of a closed client returned deliveries")
    await client.open()
    await client.dispatch(context.transaction())
    await client.ack(await client.claim_one())


@check("CNN-01", needs=(require_queue_mode, require_uncounted_release))
async def a_cancelled_fetch_keeps_nothing(context: CheckContext) -> None:
    if context.variant == "sync":
        raise NotApplicable("a thread cannot be cancelled; the loop releases late deliveries")
    client = await context.client()
    waiting = asyncio.ensure_future(client.fetch(1, wait=NOTIFY_TIMEOUT_SECONDS))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    await client.dispatch(context.transaction())
    delivery = await client.claim_one()
    expect(delivery.deliveries == 1, f"a cancelled fetch counted as {delivery.deliveries - 1} deliveries")
    await client.ack(delivery)
