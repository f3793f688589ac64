"""Checks of real consume loops over the connector: every transaction ends exactly once, and a stop costs no delivery.

The broker counts deliveries; a loop dead-letters a transaction that was delivered more than ``max_deliveries`` times.
An inbox is a connector's record of processed ids, an outbox dispatches within a database transaction of the caller. Ids
such as CNN-04 name the requirements in docs/spec. ``running_loop`` runs a consume loop over a client with a handler:
``runs`` counts the handler calls of each transaction, and ``outcomes`` has one entry for each delivery that was
handled. A handler may return a settlement: the delivery has then succeeded, also if the settlement is a deferral.
"""

from __future__ import annotations

import asyncio
import threading
import time

from ergon_framework.connectors.base import Ack, DeadLetter, Defer
from ergon_framework.testing.conformance.check import (
    SHORT_LEASE_SECONDS,
    NotApplicable,
    check,
    expect,
    require_dead_letters,
    require_external_messages,
    require_leases,
    require_queue_mode,
    require_renewal,
    require_uncounted_release,
)
from ergon_framework.testing.conformance.connector.check_dispatch import BROKEN_BODY, HEADERS
from ergon_framework.testing.conformance.connector.client import CheckContext, Client, run_in_thread
from ergon_framework.testing.conformance.connector.loop_fixture import running_loop
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, TransactionException

TRANSACTION_COUNT = 40
#: How transaction n ends, in turn: succeed, fail as BUSINESS, fail every time, be deferred once, fail once, be
#: dead-lettered by the handler, be acked by the handler.
ENDINGS = ("plain", "business", "broken", "later", "retry", "aside", "acked", "plain")


def _get_ending(transaction: Transaction) -> str:
    return ENDINGS[int(transaction.id.removeprefix("tx-")) % len(ENDINGS)]


class _MixedHandler:
    """A handler whose transactions end in every possible way."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, transaction: Transaction) -> object:
        ending, first = _get_ending(transaction), transaction.id not in self._seen
        self._seen.add(transaction.id)
        if ending == "business":
            raise BusinessError("no", code="no")
        if ending == "broken" or (ending == "retry" and first):
            raise TransactionException("it broke")
        if ending == "later" and first:
            return Defer(0.05)
        return {"aside": DeadLetter("aside"), "acked": Ack()}.get(ending)


@check("CNN-01", "CNN-02", "CNN-13", needs=(require_dead_letters,))
async def each_transaction_of_a_loop_ends_exactly_once(context: CheckContext) -> None:
    client = await context.client()
    sent = context.transactions(TRANSACTION_COUNT)
    await client.dispatch(*sent)
    deferred_count = sum(_get_ending(each) == "later" for each in sent)
    async with running_loop(context, client, _MixedHandler()) as loop:
        await loop.wait_until(
            lambda: len(loop.outcomes) >= TRANSACTION_COUNT + deferred_count, f"{TRANSACTION_COUNT} transactions end"
        )
    for each in sent:
        # The default policy makes three attempts, and a deferral by the handler causes a second delivery.
        expected_runs = {"broken": 3, "later": 2, "retry": 2}.get(_get_ending(each), 1)
        expect(
            loop.runs[each.id] == expected_runs,
            f"the {_get_ending(each)} one ran {loop.runs[each.id]} times, not {expected_runs}",
        )
    dead_ids = sorted(record.id for record in await client.list_dead())
    expected_dead_ids = sorted(each.id for each in sent if _get_ending(each) in ("business", "broken", "aside"))
    expect(dead_ids == expected_dead_ids, f"the dead letters are {dead_ids}, not {expected_dead_ids}")
    failed_ids = sorted(loop.list_ids("failed"))
    expected_failed_ids = sorted(each.id for each in sent if _get_ending(each) in ("business", "broken"))
    expect(failed_ids == expected_failed_ids, f"failed are {failed_ids}, not {expected_failed_ids}")
    await client.expect_nothing(reason="every transaction has ended")


@check("DX-10", needs=(require_dead_letters,))
async def what_a_handler_does_to_a_payload_is_not_kept(context: CheckContext) -> None:
    client = await context.client()
    failing, deferred = context.transactions(2)
    await client.dispatch(failing, deferred)
    seen: list[tuple[str, object]] = []

    def handle(transaction: Transaction) -> object:
        is_first = not any(name == transaction.id for name, _ in seen)
        seen.append((transaction.id, dict(transaction.payload)))
        transaction.payload.clear()
        transaction.payload["changed"] = True
        if transaction.id == failing.id:
            raise TransactionException("it broke")
        return Defer(0.05) if is_first else None

    async with running_loop(context, client, handle) as loop:
        await loop.wait_until(
            lambda: len(loop.list_ids("succeeded")) >= 2 and len(loop.list_ids("failed")) >= 1,
            "one fails, one is deferred and succeeds",
        )
        await _wait_for_dead_letters(context, client, 1)
    for sent, runs in ((failing, 3), (deferred, 2)):
        payloads = [payload for name, payload in seen if name == sent.id]
        expect(payloads == [sent.payload] * runs, f"{sent.id} was handled with {payloads}, sent with {sent.payload}")
    (record,) = await client.list_dead()
    expect(record.payload == failing.payload, f"the dead letter holds {record.payload}, sent was {failing.payload}")


@check("CNN-04", "CNN-10", needs=(require_uncounted_release,))
async def a_stop_releases_the_rest_at_no_cost(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*context.transactions(10))
    proceed = threading.Event()
    async with running_loop(
        context,
        client,
        lambda _: None,
        delay=lambda _: proceed,
        concurrency={"value": 2},
        batch={"size": 6},
        prefetch=4,
    ) as loop:
        await loop.wait_until(lambda: len(loop.runs) == 2, "two of ten run")
        loop.stop()
        proceed.set()
    done = len(loop.list_ids("succeeded"))
    expect(done == len(loop.runs), f"{len(loop.runs)} ran, {done} succeeded")
    remaining = await client.claim(10 - done)
    ids = {delivery.transaction.id for delivery in remaining}
    expect(not ids & set(loop.runs), f"{sorted(ids & set(loop.runs))} succeeded and were redelivered")
    for delivery in remaining:
        seen = delivery.deliveries, delivery.transaction.attempts
        expect(seen == (1, 0), f"a stop left {delivery.transaction.id} with deliveries and attempts {seen}, not (1, 0)")
    await client.ack(*remaining)
    await client.expect_nothing(reason="two were done, the rest was acked")


@check("CNN-04", needs=(require_dead_letters,), lease=SHORT_LEASE_SECONDS)
async def a_transaction_beyond_max_deliveries_is_dead_lettered(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(context.transaction())
    for _ in range(2):
        await client.claim_one()
        client = await context.crash_and_reconnect(client)
    async with running_loop(context, client, lambda _: None, max_deliveries=2) as loop:
        await _wait_for_dead_letters(context, client, 1)
    expect(not loop.runs, "beyond max_deliveries the handler ran")
    (record,) = await client.list_dead()
    actual = record.id, record.reason, record.deliveries
    expect(actual == ("tx-0", "max_deliveries", 3), f"id, reason and deliveries of the dead letter are {actual}")


@check("CNN-04")
async def deferrals_do_not_count_toward_max_deliveries(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(context.transaction())
    remaining = 5

    def handle(_: Transaction) -> object:
        nonlocal remaining
        remaining -= 1
        return Defer(0) if remaining else None

    async with running_loop(context, client, handle, max_deliveries=2) as loop:
        # One that is redelivered while its last run still exits is deferred again, which is not a run.
        await loop.wait_until(lambda: remaining == 0 and len(loop.list_ids("succeeded")) == 5, "five deliveries end")
    expect(loop.runs["tx-0"] == 5, f"deferred four times, it ran {loop.runs['tx-0']} times")


@check("CNN-05", needs=(require_external_messages, require_dead_letters))
async def an_undecodable_message_stops_no_loop(context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(context.transaction(0))
    await run_in_thread(lambda: context.system.receive(context.queue, BROKEN_BODY, HEADERS))
    await client.dispatch(context.transaction(1))
    async with running_loop(context, client, lambda _: None) as loop:
        await loop.wait_until(lambda: len(loop.list_ids("succeeded")) == 2, "the two readable ones end")
        await _wait_for_dead_letters(context, client, 1)
    expect(set(loop.runs) == {"tx-0", "tx-1"}, f"the handler ran for {sorted(loop.runs)}")
    (record,) = await client.list_dead()
    expect(
        (record.reason, record.raw) == ("undecodable", BROKEN_BODY), f"the dead letter's reason is {record.reason!r}"
    )


async def _wait_for_dead_letters(context: CheckContext, client: Client, count: int) -> None:
    """Wait until there are *count* dead letters."""
    within = context.system.arrival
    deadline = time.monotonic() + within
    while len(await client.list_dead()) < count:
        expect(time.monotonic() < deadline, f"{count} dead letters: not within {within:g} s")
        await asyncio.sleep(0.01)


@check("CNN-06", needs=(require_leases, require_renewal), lease=SHORT_LEASE_SECONDS)
async def a_loop_renews_claims_of_long_calls(context: CheckContext) -> None:
    producer = await context.client()
    client = await context.client()
    await producer.dispatch(*context.transactions(3))
    async with running_loop(
        context, client, lambda _: None, delay=lambda _: 3 * context.lease, concurrency={"value": 3}
    ) as loop:
        await loop.wait_until(lambda: len(loop.runs) == 3, "three run")
        if context.capabilities.mode == "queue":
            await producer.expect_nothing(during=2 * context.lease, reason="the loop renews its claims")
        await loop.wait_until(lambda: len(loop.outcomes) == 3, "three end")
    duplicates = [name for name, runs in loop.runs.items() if runs > 1]
    expect(not duplicates, f"{duplicates} ran twice")
    expect(len(loop.list_ids("succeeded")) == 3, f"{loop.list_ids('succeeded')} succeeded, not all three")


@check("CNN-01", "CNN-02", needs=(require_queue_mode,))
async def two_loops_share_the_work(context: CheckContext) -> None:
    first = await context.client()
    second = await context.client()
    await first.dispatch(*context.transactions(TRANSACTION_COUNT))
    async with (
        running_loop(context, first, lambda _: None, delay=lambda _: 0.002) as one,
        running_loop(context, second, lambda _: None, delay=lambda _: 0.002) as two,
    ):
        await one.wait_until(
            lambda: len(one.outcomes) + len(two.outcomes) >= TRANSACTION_COUNT, f"{TRANSACTION_COUNT} transactions end"
        )
    runs = one.runs + two.runs
    expect(len(runs) == TRANSACTION_COUNT, f"{len(runs)} of {TRANSACTION_COUNT} transactions ran")
    duplicates = [name for name, count in runs.items() if count > 1]
    expect(not duplicates, f"{duplicates} ran in both loops")
    await first.expect_nothing(reason="every transaction has ended")


@check("CNN-14")
async def an_inbox_runs_a_succeeded_transaction_once(context: CheckContext) -> None:
    client = await context.client()

    def prepare(task: object) -> object:
        prepared = context.system.inbox(task)
        if prepared is None:
            raise NotApplicable("the system under test supports no inbox")
        return prepared

    await client.dispatch(context.transaction())
    async with running_loop(context, client, lambda _: None, prepare=prepare) as loop:
        await loop.wait_until(lambda: len(loop.outcomes) == 1, "it has run and is settled")
        await client.dispatch(context.transaction())
        await client.dispatch(context.transaction("other"))
        await loop.wait_until(lambda: loop.runs["tx-other"] == 1, "another runs")
    await client.expect_nothing(reason="a delivery whose id has succeeded is acked")
    expect(loop.runs["tx-0"] == 1, f"delivered twice, it ran {loop.runs['tx-0']} times")


@check("CNN-15")
async def an_outbox_dispatches_with_the_callers_transaction(context: CheckContext) -> None:
    client = await context.client()
    outbox = context.system.outbox(context.queue)
    if outbox is None:
        raise NotApplicable("the system under test supports no outbox")
    with outbox as open_outbox:
        await run_in_thread(lambda: open_outbox.dispatch([context.transaction("undone")]))
        await client.expect_nothing(reason="the caller has not committed")
        await run_in_thread(open_outbox.rollback)
        await client.expect_nothing(reason="the caller rolled back")
        await run_in_thread(lambda: open_outbox.dispatch([context.transaction("done")]))
        await run_in_thread(open_outbox.commit)
    delivery = await client.claim_one()
    expect(
        delivery.transaction.id == "tx-done", f"{delivery.transaction.id} was delivered, not the committed transaction"
    )
    await client.ack(delivery)
    await client.expect_nothing(reason="one was committed")
