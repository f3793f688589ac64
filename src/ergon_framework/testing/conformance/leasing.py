"""Checks of leases: their duration and renewal, and that a stale claim settles nothing."""

from __future__ import annotations

import asyncio
import time
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
from ergon_framework.testing.conformance.check import (
    SHORT,
    NotApplicable,
    check,
    expect,
    leased,
    log_mode,
    queue_mode,
    renewable,
)
from ergon_framework.testing.conformance.client import Client
from ergon_framework.testing.conformance.sitting import CheckContext

#: Seconds of a lease that must not end while the check verifies that its messages stay claimed, also under load.
WATCHED_LEASE: Final = 4 * SHORT
LOST = SettleResult.LOST
STALE: tuple[Settlement, ...] = (Ack(), Defer(0, attempts=5), Release(), DeadLetter("stale"))


@check("CNN-06", needs=(leased,))
async def a_claim_says_how_long_it_holds(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(sitting.transaction())
    began = time.monotonic()
    delivery = await client.claim_one()
    lease, until = client.capabilities.lease, delivery.lease_until
    expect(until is not None, "lease is a number, but lease_until is None")
    left = (until or 0.0) - began
    expect(
        0 < left <= (lease or 0.0) + sitting.candidate.patience,
        f"a claim of {lease:g} s ends in {left:.1f} s of the monotonic clock",
    )
    await client.ack(delivery)


@check("CNN-06", needs=(leased, renewable), lease=SHORT)
async def renewal_keeps_a_claim_beyond_its_lease(sitting: CheckContext) -> None:
    client = await sitting.client()
    rival = await sitting.client()
    await client.dispatch(*sitting.transactions(2))
    held = await client.claim(2)
    end = time.monotonic() + 2.5 * sitting.lease
    while time.monotonic() < end:
        for until in await client.extend(*held):
            expect(until is not None, "a renewal in time says that the claim is gone")
            expect((until or 0.0) > time.monotonic(), "a renewed claim ends in the past")
        await rival.finds_nothing(during=0.0, because="both claims are renewed in time")
        await asyncio.sleep(sitting.lease / 5)
    await client.ack(*held)
    await rival.finds_nothing(because="both were acked")


@check("CNN-06", needs=(leased, queue_mode), lease=SHORT)
async def a_claim_that_nobody_renews_goes_to_another(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(sitting.transaction())
    delivery = await client.claim_one()
    rival = await sitting.client()
    await rival.finds_nothing(during=0.0, because="it is claimed")
    heir = await sitting.crash_and_reconnect(client)
    again = await heir.claim_one()
    expect(
        again.transaction.id == delivery.transaction.id, f"{again.transaction.id} came, not {delivery.transaction.id}"
    )
    await heir.ack(again)


@check("CNN-12", needs=(leased, queue_mode), lease=WATCHED_LEASE)
async def a_stale_claim_settles_nothing(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(len(STALE)))
    stale = sorted(await client.claim(len(STALE)), key=lambda delivery: delivery.transaction.id)
    heir = await sitting.crash_and_reconnect(client)
    await sitting.let_leases_expire()
    held = await heir.claim(len(STALE))
    await _refused(client, stale)
    await _untouched(heir, held)


@check("CNN-12", needs=(leased, queue_mode), lease=WATCHED_LEASE)
async def a_stale_claim_of_the_same_client_settles_nothing(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(len(STALE)))
    stale = sorted(await client.claim(len(STALE)), key=lambda delivery: delivery.transaction.id)
    await sitting.let_leases_expire()
    held = await client.claim(len(STALE))
    await _refused(client, stale)
    await _untouched(client, held)


@check("CNN-12", needs=(log_mode,))
async def a_log_that_was_taken_over_refuses_the_old_consumer(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(len(STALE)))
    stale = sorted(await client.claim(len(STALE)), key=lambda delivery: delivery.transaction.id)
    heir = await sitting.crash_and_reconnect(client)
    held = await heir.claim(len(STALE))
    expect(await client.extend(stale[0]) == [None], "a claim of before the takeover can be renewed")
    await _refused(client, stale)
    await _untouched(heir, held)


async def _refused(client: Client, stale: list[Delivery]) -> None:
    pairs = list(zip(stale, STALE, strict=True))
    results = await client.settle(*pairs)
    for (_, settlement), result in zip(pairs, results, strict=True):
        expect(result is LOST, f"{type(settlement).__name__} with a stale claim answered {result}, not lost")


async def _untouched(client: Client, held: list[Delivery]) -> None:
    await client.finds_nothing(because="all is claimed, and what a stale claim asks for must change nothing")
    if client.capabilities.dead_letters:
        expect(not await client.list_dead(), "a stale claim made a dead letter")
    await client.ack(*held)


@check("CNN-06", needs=(leased, renewable), lease=SHORT)
async def a_lost_claim_is_reported(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(sitting.transaction())
    delivery = await client.claim_one()
    heir = await sitting.crash_and_reconnect(client)
    await sitting.let_leases_expire()
    held = await heir.claim_one()
    (until,) = await client.extend(delivery)
    expect(until is None, "a claim that another has by now was renewed")
    await heir.ack(held)


@check("CNN-06")
async def what_is_settled_cannot_be_renewed(sitting: CheckContext) -> None:
    client = await sitting.client()
    kind: Any = type(client.connector)
    if getattr(kind, "extend", kind) is Connector.extend or (
        getattr(kind, "extend_async", kind) is AsyncConnector.extend_async and not issubclass(kind, Connector)
    ):
        raise NotApplicable("extend() is not written: claims do not end by themselves, and nobody renews them")
    await client.dispatch(*sitting.transactions(2))
    gone, held = await client.claim(2)
    await client.ack(gone)
    answers = await client.extend(gone, held)
    expect(answers[0] is None, f"renewing an acked claim answered {answers[0]}, not None")
    expect(answers[1] is not None, "renewing a held claim beside a gone one says that it is gone")
    await client.ack(held)
