"""Checks of settlements: the effect of each, and its independence of the others in a batch."""

from __future__ import annotations

import time
from typing import Any

from ergon_framework.connectors.base import (
    Ack,
    DeadLetter,
    Defer,
    Delivery,
    Release,
    Settlement,
    SettlementRequest,
    SettleResult,
)
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Deferral
from ergon_framework.testing.conformance.check import (
    SHORT,
    check,
    dead_letters,
    delays,
    encoded,
    expect,
    free_release,
    leased,
)
from ergon_framework.testing.conformance.client import Client
from ergon_framework.testing.conformance.sitting import CheckContext

SETTLED, LOST, FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED
HISTORY = (
    Attempt(attempt=0, category=Category.SYSTEM, code="first", error="it broke", at=1_700_000_000.5, delay=1.0),
    Attempt(attempt=1, category=Category.TIMEOUT, error="zu spät", at=1_700_000_002.0),
)
DEFERRAL = Deferral(
    count=2, since=1_700_000_000.5, at=1_700_000_003.25, until=1_700_003_600.5, code="timeout", error="zu spät"
)


async def _held(sitting: CheckContext, count: int) -> tuple[Client, list[Delivery]]:
    """Return a client with *count* claims, sorted by id."""
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(count))
    found = await client.claim(count)
    return client, sorted(found, key=lambda delivery: delivery.transaction.id)


@check("CNN-01", "CNN-02")
async def what_is_acked_never_comes_again(sitting: CheckContext) -> None:
    client, held = await _held(sitting, 3)
    await client.ack(*held)
    await client.finds_nothing(because="all was acked")
    heir = await sitting.crash_and_reconnect(client)
    await heir.finds_nothing(because="all was acked before the crash")


@check("CNN-02", needs=(leased,), lease=SHORT)
async def what_is_acked_stays_away_when_its_lease_would_have_ended(sitting: CheckContext) -> None:
    client, held = await _held(sitting, 2)
    await client.ack(*held)
    await client.finds_nothing(during=sitting.lease * 1.5, because="all was acked")


@check("CNN-01")
async def what_is_released_comes_again_at_once(sitting: CheckContext) -> None:
    client, (delivery,) = await _held(sitting, 1)
    await client.settles(Release(), delivery)
    again = await client.claim_one(within=5.0)
    expect(again.transaction.id == "tx-0", f"{again.transaction.id} came and not what was released")
    expect(again.receipt != delivery.receipt, "a second delivery has the receipt of the first")
    await client.ack(again)


@check("CNN-04", needs=(free_release,))
async def a_release_costs_nothing(sitting: CheckContext) -> None:
    client, (delivery,) = await _held(sitting, 1)
    for _ in range(3):
        await client.settles(Release(), delivery)
        delivery = await client.claim_one()
        seen = delivery.deliveries, delivery.transaction.attempts
        expect(seen == (1, 0), f"after a release deliveries and attempts are {seen}, not (1, 0)")
    await client.ack(delivery)


@check("CNN-01", "CNN-09")
async def what_is_put_off_comes_after_its_delay(sitting: CheckContext) -> None:
    client, (delivery,) = await _held(sitting, 1)
    delay, began = 0.4, time.monotonic()
    await client.settles(Defer(delay), delivery)
    again = await client.claim_one()
    took = time.monotonic() - began
    expect(again.transaction.id == "tx-0", f"{again.transaction.id} came and not what was put off")
    # Clocks of two machines are compared, with the resolution of the coarser one.
    expect(took >= delay - 0.05, f"put off for {delay} s, it came after {took:.2f} s")
    await client.ack(again)
    await client.finds_nothing(because="it was acked after its delay")


@check("CNN-01")
async def what_is_put_off_for_no_time_comes_at_once(sitting: CheckContext) -> None:
    client, (delivery,) = await _held(sitting, 1)
    await client.settles(Defer(0), delivery)
    again = await client.claim_one(within=5.0)
    expect(again.transaction.id == "tx-0", f"{again.transaction.id} came and not what was put off")
    await client.ack(again)


@check("CNN-04")
async def what_is_put_off_keeps_attempts_and_history(sitting: CheckContext) -> None:
    client, (delivery,) = await _held(sitting, 1)
    await client.settles(Defer(0.05, attempts=2, history=HISTORY, deferral=DEFERRAL), delivery)
    again = await client.claim_one()
    expect(again.transaction.attempts == 2, f"attempts are {again.transaction.attempts}, not 2")
    expect(again.transaction.history == HISTORY, f"the history is {again.transaction.history}, not {HISTORY}")
    expect(again.transaction.deferral == DEFERRAL, f"the deferral is {again.transaction.deferral}, not {DEFERRAL}")
    expect(again.transaction.payload == delivery.transaction.payload, "the payload changed")
    await client.settles(Release(), again)
    third = await client.claim_one()
    expect(third.transaction.attempts == 2, f"a release made {third.transaction.attempts} of 2 attempts")
    expect(third.transaction.deferral == DEFERRAL, f"a release changed the deferral to {third.transaction.deferral}")
    await client.settles(Defer(0, attempts=2), third)
    fourth = await client.claim_one()
    expect(fourth.transaction.deferral is None, f"a Later without a deferral left {fourth.transaction.deferral}")
    await client.ack(fourth)


@check("CNN-04", needs=(free_release,))
async def putting_off_costs_no_delivery(sitting: CheckContext) -> None:
    client, (delivery,) = await _held(sitting, 1)
    for attempts in range(1, 4):
        await client.settles(Defer(0.02, attempts=attempts), delivery)
        delivery = await client.claim_one()
        expect(delivery.deliveries == 1, f"put off {attempts} times, it has {delivery.deliveries} deliveries")
    await client.ack(delivery)


@check("CNN-09", needs=(delays,))
async def a_delay_outlives_the_client_that_asked_for_it(sitting: CheckContext) -> None:
    client, (delivery,) = await _held(sitting, 1)
    began = time.monotonic()
    await client.settles(Defer(0.4, attempts=1, history=HISTORY[:1], deferral=DEFERRAL), delivery)
    heir = await sitting.crash_and_reconnect(client)
    again = await heir.claim_one()
    took = time.monotonic() - began
    expect(took >= 0.35, f"put off for 0.4 s, it came to another client after {took:.2f} s")
    expect(again.transaction.attempts == 1, f"another client sees {again.transaction.attempts} attempts, not 1")
    expect(again.transaction.history == HISTORY[:1], "another client sees another history")
    expect(again.transaction.deferral == DEFERRAL, "another client sees another deferral")
    await heir.ack(again)


@check("CNN-13", needs=(dead_letters,))
async def each_settlement_has_its_own_result(sitting: CheckContext) -> None:
    client, held = await _held(sitting, 5)
    await client.ack(held[1])
    results = await client.settle(
        (held[0], Ack()),
        (held[1], Ack()),  # gone
        (held[2], DeadLetter("why")),
        (held[3], Defer(0)),
        (held[4], Release()),
    )
    expect(
        results == [SETTLED, LOST, SETTLED, SETTLED, SETTLED],
        f"ack, ack of what is gone, dead letter, later and release answered {[str(result) for result in results]}",
    )
    again = await client.claim(2)
    ids = sorted(delivery.transaction.id for delivery in again)
    expect(ids == ["tx-3", "tx-4"], f"{ids} came again, not what was put off and what was released")
    await client.ack(*again)


@check("CNN-01", "CNN-13")
async def settling_twice_changes_nothing(sitting: CheckContext) -> None:
    client, (delivery,) = await _held(sitting, 1)
    await client.ack(delivery)
    second: Settlement
    for second in (Ack(), Release(), Defer(0), DeadLetter("why")):
        (result,) = await client.settle((delivery, second))
        name = type(second).__name__
        expect(result is LOST, f"{name} of an acked delivery answered {result}, not lost")
    await client.finds_nothing(because="it was acked first")
    if client.capabilities.dead_letters:
        expect(not await client.list_dead(), "what was acked became a dead letter afterwards")


class _Odd(Settlement):
    """A settlement that no connector knows."""


@check("CNN-13")
async def an_unknown_settlement_spoils_no_neighbour(sitting: CheckContext) -> None:
    client, held = await _held(sitting, 3)
    results = await client.settle((held[0], Ack()), (held[1], _Odd()), (held[2], Ack()))
    expect(
        results == [SETTLED, FAILED, SETTLED],
        f"ack, an unknown settlement and ack answered {[str(result) for result in results]}",
    )
    await client.ack(held[1])  # it is still claimed


@check("CNN-13")
async def an_odd_delivery_spoils_no_neighbour(sitting: CheckContext) -> None:
    client, held = await _held(sitting, 2)
    odd: Any
    strangers: list[SettlementRequest] = []
    for odd in (None, object(), [], "nobody's", -1):
        strangers.append((Delivery(sitting.transaction("odd"), odd), Ack()))
        strangers.append((Delivery(sitting.transaction("odd"), odd), Defer(0)))
    results = await client.settle((held[0], Ack()), *strangers, (held[1], Ack()))
    expect(results[0] is SETTLED, f"beside a delivery that is not ours an ack answered {results[0]}")
    expect(results[-1] is SETTLED, f"behind a delivery that is not ours an ack answered {results[-1]}")
    taken = {result for result in results[1:-1] if result not in (LOST, FAILED)}
    expect(not taken, "a delivery that was never handed out was settled")
    await client.finds_nothing(because="nothing was left")


@check("CNN-13", needs=(dead_letters,))
async def an_odd_failure_spoils_no_neighbour(sitting: CheckContext) -> None:
    client, held = await _held(sitting, 3)
    odd: Any = {"not": "a failure"}
    results = await client.settle((held[0], Ack()), (held[1], DeadLetter("odd", odd)), (held[2], Ack()))
    expect(
        (results[0], results[2]) == (SETTLED, SETTLED),
        f"beside a dead letter with an odd failure acks answered {results[0]} and {results[2]}",
    )
    if results[1] is not SETTLED:
        await client.settles(DeadLetter("plain"), held[1])
    (record,) = await client.list_dead()
    expect(record.id == "tx-1", f"the dead letter is {record.id}, not tx-1")


@check("CNN-13", needs=(encoded,))
async def what_cannot_be_written_spoils_no_neighbour(sitting: CheckContext) -> None:
    client, held = await _held(sitting, 3)
    odd = Delivery(
        held[1].transaction.replace(payload=object()), held[1].receipt, held[1].deliveries, held[1].lease_until
    )
    results = await client.settle((held[0], Ack()), (odd, Defer(0)), (held[2], Ack()))
    expect(
        (results[0], results[2]) == (SETTLED, SETTLED),
        f"beside one that cannot be written acks answered {results[0]} and {results[2]}",
    )
    expect(results[1] in (SETTLED, FAILED), f"putting off what cannot be written answered {results[1]}")
    if results[1] is FAILED:
        await client.settles(Defer(0), held[1])
    again = await client.claim_one()
    expect(again.transaction.payload == held[1].transaction.payload, "the payload changed")
    await client.ack(again)


@check("CNN-13")
async def nothing_to_do_is_done(sitting: CheckContext) -> None:
    client = await sitting.client()
    expect(await client.settle() == [], "settling nothing answered something")
    expect(await client.extend() == [], "renewing nothing answered something")
    expect(await client.dispatch() == [], "dispatching nothing answered something")
