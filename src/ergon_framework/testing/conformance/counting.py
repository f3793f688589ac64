"""Checks of the envelope across deliveries, and of delivery counts."""

from __future__ import annotations

from ergon_framework.connectors.base import Defer, Delivery, Release
from ergon_framework.failure import Deferral
from ergon_framework.testing.conformance.check import SHORT, check, expect, free_release
from ergon_framework.testing.conformance.sitting import CheckContext
from ergon_framework.transaction import Transaction

TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=value",
    "baggage": "user=7",
}
DEFERRAL = Deferral(
    count=3,
    since=1_700_000_000.5,
    at=1_700_000_007.25,
    until=1_700_003_630.5,
    exempt=30.0,
    code="timeout",
    error="zu spät",
)


def _full() -> Transaction:
    return Transaction(
        "tx:full/1",
        {"text": "Grüße", "number": 1.5, "list": [1, None, True], "deep": {"er": []}},
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


def _same(delivery: Delivery, words: str, **changed: object) -> None:
    sent, came = _full().replace(**changed), delivery.transaction
    for name in Transaction.__base__.__slots__:  # type: ignore[union-attr]
        was, is_now = getattr(sent, name), getattr(came, name)
        expect(is_now == was, f"{words} {name} is {is_now!r}, not {was!r}")


@check("CNN-03", lease=SHORT)
async def the_envelope_arrives_and_stays_the_same(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(_full())
    delivery = await client.claim_one()
    _same(delivery, "at the first delivery")
    await client.settles(Release(), delivery)
    delivery = await client.claim_one()
    _same(delivery, "after a release")
    await client.settles(Defer(0, attempts=2, deferral=DEFERRAL), delivery)
    delivery = await client.claim_one()
    _same(delivery, "after a Later", attempts=2, deferral=DEFERRAL)
    heir = await sitting.crash_and_reconnect(client)
    delivery = await heir.claim_one()
    _same(delivery, "after a crash", attempts=2, deferral=DEFERRAL)
    await heir.ack(delivery)


@check("CNN-04", lease=SHORT)
async def a_crash_costs_exactly_one_delivery(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(sitting.transaction())
    for deliveries in (1, 2, 3):
        delivery = await client.claim_one()
        expect(
            delivery.deliveries == deliveries,
            f"after {deliveries - 1} crashes it is delivery {delivery.deliveries}, not {deliveries}",
        )
        expect(delivery.transaction.attempts == 0, f"a crash made {delivery.transaction.attempts} attempts")
        client = await sitting.crash_and_reconnect(client)
    await client.ack(await client.claim_one())


@check("CNN-04", needs=(free_release,), lease=SHORT)
async def what_a_crash_has_cost_stays_counted(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(sitting.transaction())
    await client.claim_one()
    client = await sitting.crash_and_reconnect(client)
    for settlement in (Release(), Defer(0, attempts=1)):
        delivery = await client.claim_one()
        expect(delivery.deliveries == 2, f"after one crash it is delivery {delivery.deliveries}, not 2")
        await client.settles(settlement, delivery)
    delivery = await client.claim_one()
    expect(delivery.deliveries == 2, f"release and Later made {delivery.deliveries} of 2 deliveries")
    await client.ack(delivery)
