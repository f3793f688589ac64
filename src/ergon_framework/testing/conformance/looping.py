"""Checks of real loops over the connector: every transaction ends exactly once, and a stop costs no delivery."""

from __future__ import annotations

import asyncio
import threading
import time

from ergon_framework.connectors.base import Ack, DeadLetter, Defer
from ergon_framework.task.exceptions import BusinessError, TransactionException
from ergon_framework.testing.conformance.check import (
    SHORT,
    NotApplicable,
    check,
    dead_letters,
    expect,
    foreign,
    free_release,
    leased,
    queue_mode,
    renewable,
)
from ergon_framework.testing.conformance.client import Client, in_thread
from ergon_framework.testing.conformance.consuming import running_loop
from ergon_framework.testing.conformance.messages import BROKEN, HEADERS
from ergon_framework.testing.conformance.sitting import CheckContext
from ergon_framework.transaction import Transaction

COUNT = 40
WAYS = ("plain", "business", "broken", "later", "retry", "aside", "acked", "plain")


def _way(transaction: Transaction) -> str:
    return WAYS[int(transaction.id.removeprefix("tx-")) % len(WAYS)]


class _Mixed:
    """A handler whose transactions end in every possible way."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, transaction: Transaction) -> object:
        way, first = _way(transaction), transaction.id not in self._seen
        self._seen.add(transaction.id)
        if way == "business":
            raise BusinessError("no", code="no")
        if way == "broken" or (way == "retry" and first):
            raise TransactionException("it broke")
        if way == "later" and first:
            return Defer(0.05)
        return {"aside": DeadLetter("aside"), "acked": Ack()}.get(way)


@check("CNN-01", "CNN-02", "CNN-13", needs=(dead_letters,))
async def each_transaction_of_a_loop_ends_exactly_once(sitting: CheckContext) -> None:
    client = await sitting.client()
    sent = sitting.transactions(COUNT)
    await client.dispatch(*sent)
    put_off = sum(_way(each) == "later" for each in sent)
    async with running_loop(sitting, client, _Mixed()) as loop:
        await loop.until(lambda: len(loop.outcomes) >= COUNT + put_off, f"{COUNT} transactions end")
    for each in sent:
        wanted = {"broken": 3, "later": 2, "retry": 2}.get(_way(each), 1)
        expect(loop.runs[each.id] == wanted, f"the {_way(each)} one ran {loop.runs[each.id]} times, not {wanted}")
    dead = sorted(record.id for record in await client.list_dead())
    wanted_dead = sorted(each.id for each in sent if _way(each) in ("business", "broken", "aside"))
    expect(dead == wanted_dead, f"the dead letters are {dead}, not {wanted_dead}")
    failed = sorted(loop.ended("failed"))
    wanted_failed = sorted(each.id for each in sent if _way(each) in ("business", "broken"))
    expect(failed == wanted_failed, f"failed are {failed}, not {wanted_failed}")
    await client.finds_nothing(because="every transaction has ended")


@check("DX-10", needs=(dead_letters,))
async def what_a_handler_does_to_a_payload_is_not_kept(sitting: CheckContext) -> None:
    client = await sitting.client()
    failing, deferred = sitting.transactions(2)
    await client.dispatch(failing, deferred)
    seen: list[tuple[str, object]] = []

    def body(transaction: Transaction) -> object:
        is_first = not any(name == transaction.id for name, _ in seen)
        seen.append((transaction.id, dict(transaction.payload)))
        transaction.payload.clear()
        transaction.payload["changed"] = True
        if transaction.id == failing.id:
            raise TransactionException("it broke")
        return Defer(0.05) if is_first else None

    async with running_loop(sitting, client, body) as loop:
        await loop.until(
            lambda: len(loop.ended("succeeded")) >= 2 and len(loop.ended("failed")) >= 1,
            "one fails, one is put off and succeeds",
        )
        await _dead(sitting, client, 1)
    for sent, runs in ((failing, 3), (deferred, 2)):
        payloads = [payload for name, payload in seen if name == sent.id]
        expect(payloads == [sent.payload] * runs, f"{sent.id} was handled with {payloads}, sent with {sent.payload}")
    (record,) = await client.list_dead()
    expect(record.payload == failing.payload, f"the dead letter holds {record.payload}, sent was {failing.payload}")


@check("CNN-04", "CNN-10", needs=(free_release,))
async def a_stop_gives_the_rest_back_at_no_cost(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(10))
    go = threading.Event()
    async with running_loop(
        sitting, client, lambda _: None, stay=lambda _: go, concurrency={"value": 2}, batch={"size": 6}, prefetch=4
    ) as loop:
        await loop.until(lambda: len(loop.runs) == 2, "two of ten run")
        loop.stop()
        go.set()
    done = len(loop.ended("succeeded"))
    expect(done == len(loop.runs), f"{len(loop.runs)} ran, {done} succeeded")
    rest = await client.claim(10 - done)
    ids = {delivery.transaction.id for delivery in rest}
    expect(not ids & set(loop.runs), f"{sorted(ids & set(loop.runs))} succeeded and came again")
    for delivery in rest:
        seen = delivery.deliveries, delivery.transaction.attempts
        expect(seen == (1, 0), f"a stop left {delivery.transaction.id} with deliveries and attempts {seen}, not (1, 0)")
    await client.ack(*rest)
    await client.finds_nothing(because="two were done, the rest was acked")


@check("CNN-04", needs=(dead_letters,), lease=SHORT)
async def past_the_cap_of_deliveries_it_is_a_dead_letter(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(sitting.transaction())
    for _ in range(2):
        await client.claim_one()
        client = await sitting.crash_and_reconnect(client)
    async with running_loop(sitting, client, lambda _: None, max_deliveries=2) as loop:
        await _dead(sitting, client, 1)
    expect(not loop.runs, "beyond max_deliveries the handler ran")
    (record,) = await client.list_dead()
    found = record.id, record.reason, record.deliveries
    expect(found == ("tx-0", "max_deliveries", 3), f"id, reason and deliveries of the dead letter are {found}")


@check("CNN-04")
async def releases_do_not_lead_to_the_cap(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(sitting.transaction())
    left = 5

    def body(_: Transaction) -> object:
        nonlocal left
        left -= 1
        return Defer(0) if left else None

    async with running_loop(sitting, client, body, max_deliveries=2) as loop:
        # One that is redelivered while its last run still exits is deferred again, which is not a run.
        await loop.until(lambda: left == 0 and len(loop.ended("succeeded")) == 5, "five deliveries end")
    expect(loop.runs["tx-0"] == 5, f"put off four times, it ran {loop.runs['tx-0']} times")


@check("CNN-05", needs=(foreign, dead_letters))
async def what_cannot_be_read_stops_no_loop(sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(sitting.transaction(0))
    await in_thread(lambda: sitting.candidate.receive(sitting.queue, BROKEN, HEADERS))
    await client.dispatch(sitting.transaction(1))
    async with running_loop(sitting, client, lambda _: None) as loop:
        await loop.until(lambda: len(loop.ended("succeeded")) == 2, "the two readable ones end")
        await _dead(sitting, client, 1)
    expect(set(loop.runs) == {"tx-0", "tx-1"}, f"the handler ran for {sorted(loop.runs)}")
    (record,) = await client.list_dead()
    expect((record.reason, record.raw) == ("undecodable", BROKEN), f"the dead letter's reason is {record.reason!r}")


async def _dead(sitting: CheckContext, client: Client, count: int) -> None:
    """Wait until there are *count* dead letters."""
    within = sitting.candidate.arrival
    end = time.monotonic() + within
    while len(await client.list_dead()) < count:
        expect(time.monotonic() < end, f"{count} dead letters: not within {within:g} s")
        await asyncio.sleep(0.01)


@check("CNN-06", needs=(leased, renewable), lease=SHORT)
async def a_loop_renews_what_takes_longer_than_its_lease(sitting: CheckContext) -> None:
    producer = await sitting.client()
    client = await sitting.client()
    await producer.dispatch(*sitting.transactions(3))
    async with running_loop(
        sitting, client, lambda _: None, stay=lambda _: 3 * sitting.lease, concurrency={"value": 3}
    ) as loop:
        await loop.until(lambda: len(loop.runs) == 3, "three run")
        if sitting.capabilities.mode == "queue":
            await producer.finds_nothing(during=2 * sitting.lease, because="the loop renews what it holds")
        await loop.until(lambda: len(loop.outcomes) == 3, "three end")
    twice = [name for name, runs in loop.runs.items() if runs > 1]
    expect(not twice, f"{twice} ran twice")
    expect(len(loop.ended("succeeded")) == 3, f"{loop.ended('succeeded')} succeeded, not all three")


@check("CNN-01", "CNN-02", needs=(queue_mode,))
async def two_loops_share_the_work(sitting: CheckContext) -> None:
    first = await sitting.client()
    second = await sitting.client()
    await first.dispatch(*sitting.transactions(COUNT))
    async with (
        running_loop(sitting, first, lambda _: None, stay=lambda _: 0.002) as one,
        running_loop(sitting, second, lambda _: None, stay=lambda _: 0.002) as two,
    ):
        await one.until(lambda: len(one.outcomes) + len(two.outcomes) >= COUNT, f"{COUNT} transactions end")
    runs = one.runs + two.runs
    expect(len(runs) == COUNT, f"{len(runs)} of {COUNT} transactions ran")
    twice = [name for name, count in runs.items() if count > 1]
    expect(not twice, f"{twice} ran in both loops")
    await first.finds_nothing(because="every transaction has ended")


@check("CNN-14")
async def with_an_inbox_what_has_succeeded_runs_once(sitting: CheckContext) -> None:
    client = await sitting.client()

    def prepare(task: object) -> object:
        prepared = sitting.candidate.inbox(task)
        if prepared is None:
            raise NotApplicable("the candidate offers no inbox")
        return prepared

    await client.dispatch(sitting.transaction())
    async with running_loop(sitting, client, lambda _: None, prepare=prepare) as loop:
        await loop.until(lambda: len(loop.outcomes) == 1, "it has run and is settled")
        await client.dispatch(sitting.transaction())
        await client.dispatch(sitting.transaction("other"))
        await loop.until(lambda: loop.runs["tx-other"] == 1, "another runs")
    await client.finds_nothing(because="a delivery whose id has succeeded is acked")
    expect(loop.runs["tx-0"] == 1, f"delivered twice, it ran {loop.runs['tx-0']} times")


@check("CNN-15")
async def an_outbox_dispatches_with_the_callers_transaction(sitting: CheckContext) -> None:
    client = await sitting.client()
    outbox = sitting.candidate.outbox(sitting.queue)
    if outbox is None:
        raise NotApplicable("the candidate offers no outbox")
    with outbox as opened:
        await in_thread(lambda: opened.dispatch([sitting.transaction("undone")]))
        await client.finds_nothing(because="the caller has not committed")
        await in_thread(opened.rollback)
        await client.finds_nothing(because="the caller rolled back")
        await in_thread(lambda: opened.dispatch([sitting.transaction("done")]))
        await in_thread(opened.commit)
    delivery = await client.claim_one()
    expect(delivery.transaction.id == "tx-done", f"{delivery.transaction.id} came, not what was committed")
    await client.ack(delivery)
    await client.finds_nothing(because="one was committed")
