"""Checks of dead letters: their contents, listing, replay and discard."""

from __future__ import annotations

import time

from ergon_framework.connectors.base import DeadLetter
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterResult
from ergon_framework.errors import Category
from ergon_framework.failure import MAX_TRACEBACK_BYTES, Attempt, Failure, HandlerError
from ergon_framework.testing.conformance.check import SHORT, check, dead_letters, expect, queue_mode, repeatable
from ergon_framework.testing.conformance.client import Client
from ergon_framework.testing.conformance.counting import DEFERRAL, TRACE
from ergon_framework.testing.conformance.sitting import CheckContext

NOW = 1_700_000_000.5


def _failure(transaction_id: str) -> Failure:
    return Failure(
        task_name="Exam",
        reason_code="sold_out",
        error_type="BusinessError",
        error_message="nichts übrig",
        attempts=2,
        occurred_at=NOW,
        transaction_id=transaction_id,
        category=Category.BUSINESS,
        history=(Attempt(attempt=0, category=Category.SYSTEM, error="it broke", at=NOW),),
        # The maximum size, in characters that some formats write with six bytes.
        traceback="ü" * (MAX_TRACEBACK_BYTES // 2),
        handler_error=HandlerError(
            error_type="OSError",
            error_message="kein Netz für \u0001",
            category=Category.SYSTEM,
            code="offline",
            traceback="x" * MAX_TRACEBACK_BYTES,
        ),
        detail={"left": 0},
    )


async def _buried(sitting: CheckContext, client: Client, count: int) -> None:
    """Dead-letter *count* transactions one after the other, so that their order is known."""
    for number in range(count):
        await client.dispatch(
            sitting.transaction(number, correlation=f"corr-{number}", attempts=1, trace=TRACE, deferral=DEFERRAL)
        )
        delivery = await client.claim_one()
        await client.settles(DeadLetter("sold_out", _failure(delivery.transaction.id)), delivery)


@check("CNN-08", needs=(dead_letters,), lease=SHORT)
async def a_dead_letter_keeps_the_message_and_the_reason(sitting: CheckContext) -> None:
    client = await sitting.client()
    began = time.time()
    await _buried(sitting, client, 1)
    client = await sitting.crash_and_reconnect(client)
    await client.finds_nothing(because="it is a dead letter")
    (record,) = await client.list_dead()
    failure = _failure("tx-0")
    for words, is_now, wanted in (
        ("id", record.id, "tx-0"),
        ("payload", record.payload, {"number": 0}),
        ("queue", record.queue, client.connector.name),
        ("reason", record.reason, "sold_out"),
        ("failure", record.failure, failure),
        ("deliveries", record.deliveries, 1),
        ("attempts", record.envelope.attempts, 1),
        ("deferral", record.envelope.deferral, DEFERRAL),
        ("correlation", record.envelope.correlation, "corr-0"),
        ("trace id", record.trace_id, TRACE["traceparent"].split("-")[1]),
    ):
        expect(is_now == wanted, f"the {words} of the dead letter is {is_now!r}, not {wanted!r}")
    expect(abs(record.at - began) < 60, f"the dead letter is of {record.at}, now is {began}")
    expect(record.handle, "a stored dead letter has no place")


@check("CNN-08", needs=(dead_letters,))
async def dead_letters_are_listed_page_by_page(sitting: CheckContext) -> None:
    client = await sitting.client()
    await _buried(sitting, client, 5)
    everything = [record.id for record in await client.list_dead()]
    expect(everything == [f"tx-{number}" for number in range(5)], f"the oldest first they are {everything}")
    pages: list[str] = []
    after: str | None = None
    while page := await client.list_dead(after=after, limit=2):
        expect(len(page) <= 2, f"a page of 2 has {len(page)}")
        pages += [record.id for record in page]
        after = page[-1].handle
        expect(len(pages) <= len(everything), f"paging does not end: {pages}")
    expect(pages == everything, f"page by page they are {pages}, not {everything}")
    for query, wanted in (
        (DeadLetterQuery(id="tx-3"), ["tx-3"]),
        (DeadLetterQuery(correlation="corr-1"), ["tx-1"]),
        (DeadLetterQuery(reason="no such"), []),
        (DeadLetterQuery(category=Category.BUSINESS, task="Exam", error_type="BusinessError"), everything),
        (DeadLetterQuery(category=Category.TIMEOUT), []),
        (DeadLetterQuery(until=1.0), []),
        (DeadLetterQuery(since=1.0), everything),
    ):
        found = [record.id for record in await client.list_dead(query)]
        given = query.model_dump(exclude_none=True)
        expect(found == wanted, f"the query {given} finds {found}, not {wanted}")


@check("CNN-08", needs=(dead_letters,))
async def a_replayed_dead_letter_starts_anew(sitting: CheckContext) -> None:
    client = await sitting.client()
    await _buried(sitting, client, 2)
    first, second = await client.list_dead()
    (result,) = await client.replay_dead(first.handle)
    expect(result.outcome is DeadLetterResult.REPLAYED, f"a replay answered {result.outcome}: {result.message}")
    expect(result.handle == first.handle, f"the result is of {result.handle!r}, not of {first.handle!r}")
    delivery = await client.claim_one()
    came = delivery.transaction
    for words, is_now, wanted in (
        ("id", came.id, "tx-0"),
        ("correlation", came.correlation, "corr-0"),
        ("payload", came.payload, {"number": 0}),
        ("attempts", came.attempts, 0),
        ("history", came.history, ()),
        ("deferral", came.deferral, None),
        ("delivery", delivery.deliveries, 1),
    ):
        expect(is_now == wanted, f"the {words} of a replayed transaction is {is_now!r}, not {wanted!r}")
    left = [record.id for record in await client.list_dead()]
    expect(left == [second.id], f"after the replay of tx-0 the dead letters are {left}")
    (result,) = await client.replay_dead(first.handle)
    expect(result.outcome is DeadLetterResult.GONE, f"a second replay answered {result.outcome}, not gone")
    await client.ack(delivery)
    await client.finds_nothing(because="one was replayed, once")


@check("CNN-08", needs=(dead_letters,))
async def a_discarded_dead_letter_is_gone(sitting: CheckContext) -> None:
    client = await sitting.client()
    await _buried(sitting, client, 3)
    records = await client.list_dead()
    await client.discard_dead(records[1].handle)
    results = [result.outcome for result in await client.discard_dead(*(record.handle for record in records))]
    wanted = [DeadLetterResult.DISCARDED, DeadLetterResult.GONE, DeadLetterResult.DISCARDED]
    expect(results == wanted, f"discarding one that is there, one that is gone and one that is there: {results}")
    expect(not await client.list_dead(), "a discarded dead letter is still listed")
    await client.finds_nothing(because="all was discarded")


@check("CNN-08", "SEC-21", needs=(queue_mode, dead_letters))
async def a_replaced_dead_letter_is_sent_once(sitting: CheckContext) -> None:
    client = await sitting.client()
    await _buried(sitting, client, 2)
    first, second = await client.list_dead()
    corrected = first.to_new_transaction().replace(payload={"number": 7})
    result = await client.replace_dead(first.handle, corrected)
    expect(result.outcome is DeadLetterResult.REPLAYED, f"a replacement answered {result.outcome}: {result.message}")
    result = await client.replace_dead(first.handle, corrected.replace(payload={"number": 8}))
    expect(result.outcome is DeadLetterResult.GONE, f"a second replacement answered {result.outcome}, not gone")
    delivery = await client.claim_one()
    came = delivery.transaction
    expect((came.id, came.payload) == ("tx-0", {"number": 7}), f"a replaced dead letter came as {came.payload!r}")
    left = [record.id for record in await client.list_dead()]
    expect(left == [second.id], f"after the replacement of tx-0 the dead letters are {left}")
    await client.ack(delivery)
    await client.finds_nothing(because="one was replaced, once")


@check("CNN-08", needs=(dead_letters, repeatable))
async def the_same_transaction_can_be_dead_twice(sitting: CheckContext) -> None:
    client = await sitting.client()
    for reason in ("once", "twice"):
        await client.dispatch(sitting.transaction())
        await client.settles(DeadLetter(reason), await client.claim_one())
    first, second = await client.list_dead(DeadLetterQuery(id="tx-0"))
    expect(first.handle != second.handle, "two dead letters have one place")
    await client.discard_dead(first.handle)
    left = [record.reason for record in await client.list_dead()]
    expect(left == ["twice"], f"after the first of two was discarded these are left: {left}")
