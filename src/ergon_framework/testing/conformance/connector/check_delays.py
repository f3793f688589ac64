"""Checks of delayed dispatch, and of a connector that has no delays or no priorities.

A transaction with a ``not_before`` is delivered no earlier than that time. Until then the queue counts it as delayed,
also through a restart of the server. A connector without delays or priorities rejects such a transaction. Ids such as
CNN-09 name the requirements in docs/spec.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial

from ergon_framework.connectors.base import Delivery
from ergon_framework.errors import ConfigurationError
from ergon_framework.testing.conformance.check import (
    Check,
    CheckFailed,
    CheckFunction,
    NotApplicable,
    Precondition,
    check,
    expect,
    require_delays,
    require_queue_mode,
    require_server_fault,
)
from ergon_framework.testing.conformance.connector.client import CheckContext, Client
from ergon_framework.transaction import MAX_DELAY_SECONDS, Transaction

#: Seconds by which these checks delay a transaction.
DELAY_SECONDS = 1.2
#: Seconds by which a check delays transactions through a restart of the server; some brokers take seconds to start.
RESTART_DELAY_SECONDS = 6.0
RESTART_COUNT = 20
#: A delay that does not end during a check.
LONG_DELAY_SECONDS = 3_600.0

_NEEDS: tuple[Precondition, ...] = (require_delays, require_queue_mode)


def _expect_due(delivery: Delivery, not_before: float | None, now: float) -> None:
    expect(
        not_before is not None and now >= not_before,
        f"{delivery.transaction.id} came {0.0 if not_before is None else not_before - now:.6f} s early",
    )


def _delayed(name: str, delay: float) -> Transaction:
    return Transaction.new({"name": name}, id=f"tx-{name}", delay=delay)


@check("CNN-01", "CNN-09", needs=_NEEDS)
async def a_delayed_dispatch_is_not_delivered_early(context: CheckContext) -> None:
    client = await context.client()
    late, soon = _delayed("late", 2 * DELAY_SECONDS), _delayed("soon", DELAY_SECONDS)
    confirmed_ids = [each.transaction_id for each in await client.dispatch(late, context.transaction("now"), soon)]
    expect(confirmed_ids == ["tx-late", "tx-now", "tx-soon"], f"the dispatch of three confirmed {confirmed_ids}")
    now = await client.claim_one()
    expect(now.transaction.id == "tx-now", f"{now.transaction.id} came first, not the one without a delay")
    for expected in (soon, late):
        delivery = await client.claim_one()
        _expect_due(delivery, expected.not_before, time.time())
        expect(delivery.transaction.id == expected.id, f"{delivery.transaction.id} came instead of {expected.id}")
        expect(delivery.deliveries == 1, f"a delay counted as a delivery: it is number {delivery.deliveries}")
        expect(delivery.transaction.attempts == 0, "a delay counted as an attempt")
        expect(delivery.transaction.payload == expected.payload, "a delay changed the payload")
        await client.ack(delivery)
    await client.ack(now)
    await client.expect_nothing(reason="all were settled")


@check("CNN-01", "CNN-09", needs=_NEEDS)
async def a_delayed_dispatch_is_counted_as_delayed(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*(_delayed(str(number), LONG_DELAY_SECONDS) for number in range(3)))
    await client.dispatch(context.transaction("now"))
    for moment in ("before a fetch", "after a fetch"):
        depth = await client.depth()
        if depth is None:
            raise NotApplicable("depth() returns None: the broker cannot report it")
        actual = depth.ready + depth.in_flight, depth.delayed
        expect(actual == (1, 3), f"{moment}, ready and delayed are {actual}, not (1, 3): {depth}")
        if moment == "before a fetch":
            claimed = await client.claim_one()
            expect(claimed.transaction.id == "tx-now", f"{claimed.transaction.id} came early")
            await client.expect_nothing(reason="all others are delayed")
    await client.ack(claimed)


@check("CNN-01", "CNN-09", needs=_NEEDS)
async def a_time_in_the_past_is_immediate(context: CheckContext) -> None:
    client = await context.client()
    past = datetime(2020, 1, 1, tzinfo=UTC)
    await client.dispatch(Transaction.new({}, id="tx-past", at=past), Transaction.new({}, id="tx-zero", delay=0))
    deliveries = await client.claim(2, within=5.0)
    depth = await client.depth()
    expect(depth is None or depth.delayed == 0, f"transactions that are due count as delayed: {depth}")
    await client.ack(*deliveries)


@check("CNN-01", "CNN-09", needs=_NEEDS)
async def the_longest_delay_is_kept_and_a_longer_one_is_rejected(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(_delayed("longest", MAX_DELAY_SECONDS))
    await client.expect_nothing(reason="it is due in 30 days")
    far = context.transaction("far", not_before=time.time() + 2 * MAX_DELAY_SECONDS)
    try:
        await client.dispatch(far)
    except ValueError:
        pass
    else:
        raise CheckFailed("a dispatch with a delay of 60 days was confirmed; it must raise ValueError")
    await client.expect_nothing(reason="it is due in 30 days")


@check("CNN-01", "CNN-09", needs=_NEEDS)
async def a_delayed_dispatch_outlives_its_client(context: CheckContext) -> None:
    producer = await context.client()
    sent = _delayed("one", DELAY_SECONDS)
    await producer.dispatch(sent)
    early = await context.client()
    await early.expect_nothing(reason="it is delayed")
    await producer.close()
    await early.close()
    client = await context.client()
    delivery = await client.claim_one()
    _expect_due(delivery, sent.not_before, time.time())
    expect(delivery.deliveries == 1, f"a delay counted as a delivery: it is number {delivery.deliveries}")
    await client.ack(delivery)


async def _expect_rejected(client: Client, transaction: Transaction, feature: str) -> None:
    try:
        await client.dispatch(transaction)
    except ConfigurationError as error:
        expect(
            client.connector.name in str(error), f"the error about a missing {feature} does not name the queue: {error}"
        )
    else:
        raise CheckFailed(f"a dispatch with a {feature} was confirmed, but the connector has none; it must raise")


@check("CNN-01", "CNN-09")
async def a_delay_is_rejected_where_there_is_none(context: CheckContext) -> None:
    client = await context.client()
    capabilities = client.capabilities
    if capabilities.delays and capabilities.mode == "queue":
        raise NotApplicable("the connector has delays")
    await _expect_rejected(client, _delayed("one", LONG_DELAY_SECONDS), "delay")
    await client.dispatch(Transaction.new({}, id="tx-due", delay=0))
    await client.ack(await client.claim_one())


@check("CNN-01")
async def a_priority_is_rejected_where_there_is_none(context: CheckContext) -> None:
    client = await context.client()
    if client.capabilities.priority is not False:
        raise NotApplicable("the connector has priorities")
    await _expect_rejected(client, context.transaction("urgent", priority=1), "priority")
    await client.expect_nothing(reason="the only dispatch was rejected")


async def _check_restart(fault: str, context: CheckContext) -> None:
    client = await context.client()
    sent = {
        each.id: each.not_before
        for each in [
            _delayed(str(number), RESTART_DELAY_SECONDS * (0.5 + number / RESTART_COUNT))
            for number in range(RESTART_COUNT)
        ]
    }
    await client.dispatch(*(Transaction({}, id=name, not_before=due) for name, due in sent.items()))
    # Some brokers hold a message back only once a client has fetched it.
    await client.expect_nothing(reason="all are delayed")
    async with context.outage(fault):
        pass
    missing = set(sent)
    deadline = time.monotonic() + 2 * RESTART_DELAY_SECONDS + context.lease + context.system.arrival
    while missing:
        expect(time.monotonic() < deadline, f"{sorted(missing)} were lost in the outage")
        for delivery in await context.retry_until_connected(partial(client.fetch, 10, wait=0.1)):
            _expect_due(delivery, sent[delivery.transaction.id], time.time())
            missing.discard(delivery.transaction.id)
            await context.retry_until_connected(partial(client.ack, delivery))


def _make_restart_checks() -> list[Check]:
    checks = []
    for fault, state in (("stop", "stopped"), ("kill", "killed")):
        function: CheckFunction = partial(_check_restart, fault)
        name = f"delays_are_kept_when_the_server_is_{state}"
        checks.append(Check(name, ("CNN-07", "CNN-09"), (require_server_fault(fault), *_NEEDS), function, None))
    return checks


CHECKS: tuple[Check, ...] = tuple(_make_restart_checks())
