"""Checks of the envelope across deliveries, of delivery counts, and of the reported depth and durability.

The envelope is the fields of a message around its payload. A delivery is one fetch of the message; the broker counts
deliveries, and an attempt is one call of the handler. Ids such as CNN-03 name the requirements in docs/spec. A client
is a new connector of the check's queue, like that of another process; ``crash_and_reconnect`` makes one stop as a
killed process does, and returns a new one.
"""

from __future__ import annotations

import asyncio

from ergon_framework.connectors.base import DeadLetter, Defer, Delivery, Release
from ergon_framework.failure import Deferral
from ergon_framework.testing.conformance.check import (
    SHORT_LEASE_SECONDS,
    NotApplicable,
    check,
    expect,
    require_uncounted_release,
)
from ergon_framework.testing.conformance.connector.adapter import UNKNOWN_DURABILITY
from ergon_framework.testing.conformance.connector.client import CheckContext
from ergon_framework.transaction import Transaction

TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=value",
    "baggage": "user=7",
}
COUNTED_DEFERRAL = Deferral(
    count=3,
    since=1_700_000_000.5,
    at=1_700_000_007.25,
    until=1_700_003_630.5,
    exempt=30.0,
    code="timeout",
    error="zu spät",
)


def _make_full_transaction() -> Transaction:
    return Transaction(
        {"text": "Grüße", "number": 1.5, "list": [1, None, True], "deep": {"er": []}},
        id="tx:full/1",
        source="shop",
        type="order.placed",
        schema_version=3,
        key="customer 7",
        tenant="tenant-ä",
        correlation="corr-1",
        causation="cause-1",
        created_at=1_700_000_000.25,
        expires_at=4_000_000_000.5,
        attempts=1,
        trace=TRACE,
    )


def _expect_same(delivery: Delivery, description: str, **changed: object) -> None:
    sent, received = _make_full_transaction().replace(**changed), delivery.transaction
    # The base class of Transaction has its fields as slots.
    for name in Transaction.__base__.__slots__:  # type: ignore[union-attr]
        expected, actual = getattr(sent, name), getattr(received, name)
        expect(actual == expected, f"{description} {name} is {actual!r}, not {expected!r}")


@check("CNN-03", lease=SHORT_LEASE_SECONDS)
async def the_envelope_arrives_and_stays_the_same(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(_make_full_transaction())
    delivery = await client.claim_one()
    _expect_same(delivery, "at the first delivery")
    await client.settle_successfully(Release(), delivery)
    delivery = await client.claim_one()
    _expect_same(delivery, "after a release")
    await client.settle_successfully(Defer(0, attempts=2, deferral=COUNTED_DEFERRAL), delivery)
    delivery = await client.claim_one()
    _expect_same(delivery, "after a Defer", attempts=2, deferral=COUNTED_DEFERRAL)
    successor = await context.crash_and_reconnect(client)
    delivery = await successor.claim_one()
    _expect_same(delivery, "after a crash", attempts=2, deferral=COUNTED_DEFERRAL)
    await successor.ack(delivery)


@check("CNN-04", lease=SHORT_LEASE_SECONDS)
async def a_crash_costs_exactly_one_delivery(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(context.transaction())
    for deliveries in (1, 2, 3):
        delivery = await client.claim_one()
        expect(
            delivery.deliveries == deliveries,
            f"after {deliveries - 1} crashes it is delivery {delivery.deliveries}, not {deliveries}",
        )
        expect(delivery.transaction.attempts == 0, f"a crash counted as {delivery.transaction.attempts} attempts")
        client = await context.crash_and_reconnect(client)
    await client.ack(await client.claim_one())


@check("CNN-04", needs=(require_uncounted_release,), lease=SHORT_LEASE_SECONDS)
async def the_delivery_of_a_crash_stays_counted(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(context.transaction())
    await client.claim_one()
    client = await context.crash_and_reconnect(client)
    for settlement in (Release(), Defer(0, attempts=1)):
        delivery = await client.claim_one()
        expect(delivery.deliveries == 2, f"after one crash it is delivery {delivery.deliveries}, not 2")
        await client.settle_successfully(settlement, delivery)
    delivery = await client.claim_one()
    expect(delivery.deliveries == 2, f"release and defer changed deliveries from 2 to {delivery.deliveries}")
    await client.ack(delivery)


#: Seconds that the messages wait before the depth reports the age of the oldest.
MESSAGE_AGE_SECONDS = 0.2


@check("CNN-01")
async def the_depth_is_what_is_there(context: CheckContext) -> None:
    client = await context.client()
    empty = await client.depth()
    if empty is None:
        raise NotApplicable("depth() returns None: the broker cannot report it")
    expect((empty.ready, empty.oldest_age) == (0, None), f"the depth of an empty queue is {empty}")
    await client.dispatch(*context.transactions(6))
    later, dead, claimed, done = await client.claim(4)
    await client.settle_successfully(Defer(60.0), later)
    await client.ack(done)
    has_dead_letters = client.capabilities.dead_letters
    if has_dead_letters:
        await client.settle_successfully(DeadLetter("why"), dead)
    await asyncio.sleep(MESSAGE_AGE_SECONDS)
    depth = await client.depth()
    expected = (2, 1, 1, 1) if has_dead_letters else (2, 1, 2, 0)
    actual = None if depth is None else (depth.ready, depth.delayed, depth.in_flight, depth.dead)
    expect(actual == expected, f"ready, delayed, in flight and dead are {actual}, not {expected}")
    age = None if depth is None else depth.oldest_age
    expect(
        age is not None and MESSAGE_AGE_SECONDS * 0.9 <= age < 60,
        f"the oldest has waited for {MESSAGE_AGE_SECONDS} s, its age is {age}",
    )
    await client.ack(claimed)


@check("CNN-17")
async def the_connector_reports_its_durability(context: CheckContext) -> None:
    client = await context.client()
    reported, expected = client.capabilities.durable, context.system.durable
    expect(reported in (True, False, None), f"durable is {reported!r}, not True, False or None")
    if expected is UNKNOWN_DURABILITY:
        raise NotApplicable(f"durable is {reported}, and the system under test does not state the expected value")
    expect(reported is expected, f"durable is {reported}, but with this server's settings it is {expected}")
