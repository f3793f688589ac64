"""Check settlements and dead letters: the effect of each in a batch; contents, listing, replay and discard.

A settlement ends a claim, a client's right to a fetched message: Ack, Defer (redeliver after a delay), Release
(redeliver now) or DeadLetter. Its result is settled, lost (the claim was not valid any more) or failed. Ids such as
CNN-08 name the requirements in docs/spec. A client is a new connector of the check's queue, like that of another
process; ``crash_and_reconnect`` makes one stop as a killed process does, and returns a new one.
"""

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
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.errors import Category
from ergon_framework.failure import MAX_TRACEBACK_BYTES, Attempt, Deferral, Failure, HandlerError
from ergon_framework.testing.conformance.check import (
    SHORT_LEASE_SECONDS,
    check,
    expect,
    require_dead_letters,
    require_delays,
    require_encoding,
    require_leases,
    require_queue_mode,
    require_repeatable_ids,
    require_uncounted_release,
)
from ergon_framework.testing.conformance.connector.check_counts import COUNTED_DEFERRAL, TRACE
from ergon_framework.testing.conformance.connector.client import CheckContext, Client

OCCURRED_AT_UNIX_SECONDS = 1_700_000_000.5


def _make_failure(transaction_id: str) -> Failure:
    return Failure(
        task_name="Conformance",
        reason_code="sold_out",
        error_type="BusinessError",
        error_message="nichts übrig",
        attempts=2,
        occurred_at=OCCURRED_AT_UNIX_SECONDS,
        transaction_id=transaction_id,
        category=Category.BUSINESS,
        history=(Attempt(attempt=0, category=Category.SYSTEM, error="it broke", at=OCCURRED_AT_UNIX_SECONDS),),
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


async def _dead_letter(context: CheckContext, client: Client, count: int) -> None:
    """Dead-letter *count* transactions one after the other, so that their order is known."""
    for number in range(count):
        await client.dispatch(
            context.transaction(
                number, correlation=f"corr-{number}", attempts=1, trace=TRACE, deferral=COUNTED_DEFERRAL
            )
        )
        delivery = await client.claim_one()
        await client.settle_successfully(DeadLetter("sold_out", _make_failure(delivery.transaction.id)), delivery)


@check("CNN-08", needs=(require_dead_letters,), lease=SHORT_LEASE_SECONDS)
async def a_dead_letter_keeps_the_message_and_the_reason(context: CheckContext) -> None:
    client = await context.client()
    started_at = time.time()
    await _dead_letter(context, client, 1)
    client = await context.crash_and_reconnect(client)
    await client.expect_nothing(reason="it is a dead letter")
    (record,) = await client.list_dead()
    failure = _make_failure("tx-0")
    for label, actual, expected in (
        ("id", record.id, "tx-0"),
        ("payload", record.payload, {"number": 0}),
        ("queue", record.queue, client.connector.name),
        ("reason", record.reason, "sold_out"),
        ("failure", record.failure, failure),
        ("deliveries", record.deliveries, 1),
        ("attempts", record.envelope.attempts, 1),
        ("deferral", record.envelope.deferral, COUNTED_DEFERRAL),
        ("correlation", record.envelope.correlation, "corr-0"),
        ("trace id", record.trace_id, TRACE["traceparent"].split("-")[1]),
    ):
        expect(actual == expected, f"the {label} of the dead letter is {actual!r}, not {expected!r}")
    expect(abs(record.at - started_at) < 60, f"the time of the dead letter is {record.at}, now is {started_at}")
    expect(record.handle, "a stored dead letter has no handle")


@check("CNN-08", needs=(require_dead_letters,))
async def dead_letters_are_listed_page_by_page(context: CheckContext) -> None:
    client = await context.client()
    await _dead_letter(context, client, 5)
    all_ids = [record.id for record in await client.list_dead()]
    expect(all_ids == [f"tx-{number}" for number in range(5)], f"listed oldest first, the dead letters are {all_ids}")
    pages: list[str] = []
    after: str | None = None
    while page := await client.list_dead(after=after, limit=2):
        expect(len(page) <= 2, f"a page of 2 has {len(page)}")
        pages += [record.id for record in page]
        after = page[-1].handle
        expect(len(pages) <= len(all_ids), f"paging does not end: {pages}")
    expect(pages == all_ids, f"listed by page, the dead letters are {pages}, not {all_ids}")
    for query, expected in (
        (DeadLetterQuery(id="tx-3"), ["tx-3"]),
        (DeadLetterQuery(correlation="corr-1"), ["tx-1"]),
        (DeadLetterQuery(reason="no such"), []),
        (DeadLetterQuery(category=Category.BUSINESS, task="Conformance", error_type="BusinessError"), all_ids),
        (DeadLetterQuery(category=Category.TIMEOUT), []),
        (DeadLetterQuery(until=1.0), []),
        (DeadLetterQuery(since=1.0), all_ids),
    ):
        ids = [record.id for record in await client.list_dead(query)]
        criteria = query.model_dump(exclude_none=True)
        expect(ids == expected, f"the query {criteria} finds {ids}, not {expected}")


@check("CNN-08", needs=(require_dead_letters,))
async def a_replayed_dead_letter_starts_from_scratch(context: CheckContext) -> None:
    client = await context.client()
    await _dead_letter(context, client, 2)
    first, second = await client.list_dead()
    (result,) = await client.replay_dead(first.handle)
    expect(result.outcome is DeadLetterResult.REPLAYED, f"a replay returned {result.outcome}: {result.message}")
    expect(result.handle == first.handle, f"the handle of the result is {result.handle!r}, not {first.handle!r}")
    delivery = await client.claim_one()
    transaction = delivery.transaction
    for label, actual, expected in (
        ("id", transaction.id, "tx-0"),
        ("correlation", transaction.correlation, "corr-0"),
        ("payload", transaction.payload, {"number": 0}),
        ("attempts", transaction.attempts, 0),
        ("history", transaction.history, ()),
        ("deferral", transaction.deferral, None),
        ("delivery", delivery.deliveries, 1),
    ):
        expect(actual == expected, f"the {label} of a replayed transaction is {actual!r}, not {expected!r}")
    remaining_ids = [record.id for record in await client.list_dead()]
    expect(remaining_ids == [second.id], f"after the replay of tx-0 the dead letters are {remaining_ids}")
    (result,) = await client.replay_dead(first.handle)
    expect(result.outcome is DeadLetterResult.GONE, f"a second replay returned {result.outcome}, not gone")
    await client.ack(delivery)
    await client.expect_nothing(reason="it was replayed once")


@check("CNN-08", needs=(require_dead_letters,))
async def a_discarded_dead_letter_is_gone(context: CheckContext) -> None:
    client = await context.client()
    await _dead_letter(context, client, 3)
    records = await client.list_dead()
    await client.discard_dead(records[1].handle)
    results = [result.outcome for result in await client.discard_dead(*(record.handle for record in records))]
    expected = [DeadLetterResult.DISCARDED, DeadLetterResult.GONE, DeadLetterResult.DISCARDED]
    expect(results == expected, f"discarding an existing, a missing and an existing dead letter returned {results}")
    expect(not await client.list_dead(), "a discarded dead letter is still listed")
    await client.expect_nothing(reason="all were discarded")


@check("CNN-08", "SEC-21", needs=(require_queue_mode, require_dead_letters))
async def a_replaced_dead_letter_is_sent_once(context: CheckContext) -> None:
    client = await context.client()
    await _dead_letter(context, client, 2)
    first, second = await client.list_dead()
    corrected = first.to_new_transaction().replace(payload={"number": 7})
    result = await client.replace_dead(first.handle, corrected)
    expect(result.outcome is DeadLetterResult.REPLAYED, f"a replacement returned {result.outcome}: {result.message}")
    result = await client.replace_dead(first.handle, corrected.replace(payload={"number": 8}))
    expect(result.outcome is DeadLetterResult.GONE, f"a second replacement returned {result.outcome}, not gone")
    delivery = await client.claim_one()
    transaction = delivery.transaction
    expect(
        (transaction.id, transaction.payload) == ("tx-0", {"number": 7}),
        f"a replaced dead letter was delivered as {transaction.payload!r}",
    )
    remaining_ids = [record.id for record in await client.list_dead()]
    expect(remaining_ids == [second.id], f"after the replacement of tx-0 the dead letters are {remaining_ids}")
    await client.ack(delivery)
    await client.expect_nothing(reason="it was replaced once")


@check("CNN-08", needs=(require_dead_letters, require_repeatable_ids))
async def a_transaction_can_be_dead_lettered_twice(context: CheckContext) -> None:
    client = await context.client()
    for reason in ("once", "twice"):
        await client.dispatch(context.transaction())
        await client.settle_successfully(DeadLetter(reason), await client.claim_one())
    first, second = await client.list_dead(DeadLetterQuery(id="tx-0"))
    expect(first.handle != second.handle, "two dead letters have the same handle")
    await client.discard_dead(first.handle)
    remaining_reasons = [record.reason for record in await client.list_dead()]
    expect(remaining_reasons == ["twice"], f"after the first of two was discarded, these remain: {remaining_reasons}")


SETTLED, LOST, FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED
HISTORY = (
    Attempt(attempt=0, category=Category.SYSTEM, code="first", error="it broke", at=1_700_000_000.5, delay=1.0),
    Attempt(attempt=1, category=Category.TIMEOUT, error="zu spät", at=1_700_000_002.0),
)
DEFERRAL = Deferral(
    count=2, since=1_700_000_000.5, at=1_700_000_003.25, until=1_700_003_600.5, code="timeout", error="zu spät"
)


async def _claim_sorted(context: CheckContext, count: int) -> tuple[Client, list[Delivery]]:
    """Return a client with *count* claims, sorted by id."""
    client = await context.client()
    await client.dispatch(*context.transactions(count))
    deliveries = await client.claim(count)
    return client, sorted(deliveries, key=lambda delivery: delivery.transaction.id)


@check("CNN-01", "CNN-02")
async def an_acked_transaction_is_not_redelivered(context: CheckContext) -> None:
    client, claimed = await _claim_sorted(context, 3)
    await client.ack(*claimed)
    await client.expect_nothing(reason="all was acked")
    successor = await context.crash_and_reconnect(client)
    await successor.expect_nothing(reason="all was acked before the crash")


@check("CNN-02", needs=(require_leases,), lease=SHORT_LEASE_SECONDS)
async def an_acked_transaction_is_not_redelivered_after_its_lease(context: CheckContext) -> None:
    client, claimed = await _claim_sorted(context, 2)
    await client.ack(*claimed)
    await client.expect_nothing(during=context.lease * 1.5, reason="all was acked")


@check("CNN-01")
async def a_released_transaction_is_redelivered_immediately(context: CheckContext) -> None:
    client, (delivery,) = await _claim_sorted(context, 1)
    await client.settle_successfully(Release(), delivery)
    again = await client.claim_one(within=5.0)
    expect(again.transaction.id == "tx-0", f"{again.transaction.id} was delivered, not the released one")
    expect(again.receipt != delivery.receipt, "a second delivery has the receipt of the first")
    await client.ack(again)


@check("CNN-04", needs=(require_uncounted_release,))
async def a_release_costs_nothing(context: CheckContext) -> None:
    client, (delivery,) = await _claim_sorted(context, 1)
    for _ in range(3):
        await client.settle_successfully(Release(), delivery)
        delivery = await client.claim_one()
        seen = delivery.deliveries, delivery.transaction.attempts
        expect(seen == (1, 0), f"after a release deliveries and attempts are {seen}, not (1, 0)")
    await client.ack(delivery)


@check("CNN-01", "CNN-09")
async def what_is_deferred_comes_after_its_delay(context: CheckContext) -> None:
    client, (delivery,) = await _claim_sorted(context, 1)
    delay, started_at = 0.4, time.monotonic()
    await client.settle_successfully(Defer(delay), delivery)
    again = await client.claim_one()
    elapsed = time.monotonic() - started_at
    expect(again.transaction.id == "tx-0", f"{again.transaction.id} was delivered, not the deferred one")
    # Clocks of two machines are compared, with the resolution of the coarser one.
    expect(elapsed >= delay - 0.05, f"deferred for {delay} s, it was redelivered after {elapsed:.2f} s")
    await client.ack(again)
    await client.expect_nothing(reason="it was acked after its delay")


@check("CNN-01")
async def a_deferral_without_delay_is_redelivered_immediately(context: CheckContext) -> None:
    client, (delivery,) = await _claim_sorted(context, 1)
    await client.settle_successfully(Defer(0), delivery)
    again = await client.claim_one(within=5.0)
    expect(again.transaction.id == "tx-0", f"{again.transaction.id} was delivered, not the deferred one")
    await client.ack(again)


@check("CNN-04")
async def a_deferral_keeps_attempts_and_history(context: CheckContext) -> None:
    client, (delivery,) = await _claim_sorted(context, 1)
    await client.settle_successfully(Defer(0.05, attempts=2, history=HISTORY, deferral=DEFERRAL), delivery)
    again = await client.claim_one()
    expect(again.transaction.attempts == 2, f"attempts are {again.transaction.attempts}, not 2")
    expect(again.transaction.history == HISTORY, f"the history is {again.transaction.history}, not {HISTORY}")
    expect(again.transaction.deferral == DEFERRAL, f"the deferral is {again.transaction.deferral}, not {DEFERRAL}")
    expect(again.transaction.payload == delivery.transaction.payload, "the payload changed")
    await client.settle_successfully(Release(), again)
    third = await client.claim_one()
    expect(third.transaction.attempts == 2, f"a release changed attempts from 2 to {third.transaction.attempts}")
    expect(third.transaction.deferral == DEFERRAL, f"a release changed the deferral to {third.transaction.deferral}")
    await client.settle_successfully(Defer(0, attempts=2), third)
    fourth = await client.claim_one()
    expect(fourth.transaction.deferral is None, f"a Defer without a deferral left {fourth.transaction.deferral}")
    await client.ack(fourth)


@check("CNN-04", needs=(require_uncounted_release,))
async def a_deferral_costs_no_delivery(context: CheckContext) -> None:
    client, (delivery,) = await _claim_sorted(context, 1)
    for attempts in range(1, 4):
        await client.settle_successfully(Defer(0.02, attempts=attempts), delivery)
        delivery = await client.claim_one()
        expect(delivery.deliveries == 1, f"deferred {attempts} times, it has {delivery.deliveries} deliveries")
    await client.ack(delivery)


@check("CNN-09", needs=(require_delays,))
async def a_delay_outlives_its_client(context: CheckContext) -> None:
    client, (delivery,) = await _claim_sorted(context, 1)
    started_at = time.monotonic()
    await client.settle_successfully(Defer(0.4, attempts=1, history=HISTORY[:1], deferral=DEFERRAL), delivery)
    successor = await context.crash_and_reconnect(client)
    again = await successor.claim_one()
    elapsed = time.monotonic() - started_at
    expect(elapsed >= 0.35, f"deferred for 0.4 s, it was delivered to another client after {elapsed:.2f} s")
    expect(again.transaction.attempts == 1, f"another client sees {again.transaction.attempts} attempts, not 1")
    expect(again.transaction.history == HISTORY[:1], "another client sees another history")
    expect(again.transaction.deferral == DEFERRAL, "another client sees another deferral")
    await successor.ack(again)


@check("CNN-13", needs=(require_dead_letters,))
async def each_settlement_has_its_own_result(context: CheckContext) -> None:
    client, claimed = await _claim_sorted(context, 5)
    await client.ack(claimed[1])
    results = await client.settle(
        (claimed[0], Ack()),
        (claimed[1], Ack()),  # gone
        (claimed[2], DeadLetter("why")),
        (claimed[3], Defer(0)),
        (claimed[4], Release()),
    )
    expect(
        results == [SETTLED, LOST, SETTLED, SETTLED, SETTLED],
        f"ack, ack of a lost claim, dead letter, defer and release returned {[str(result) for result in results]}",
    )
    again = await client.claim(2)
    ids = sorted(delivery.transaction.id for delivery in again)
    expect(ids == ["tx-3", "tx-4"], f"{ids} were redelivered, not the deferred and the released one")
    await client.ack(*again)


@check("CNN-01", "CNN-13")
async def settling_twice_changes_nothing(context: CheckContext) -> None:
    client, (delivery,) = await _claim_sorted(context, 1)
    await client.ack(delivery)
    second: Settlement
    for second in (Ack(), Release(), Defer(0), DeadLetter("why")):
        (result,) = await client.settle((delivery, second))
        name = type(second).__name__
        expect(result is LOST, f"{name} of an acked delivery returned {result}, not lost")
    await client.expect_nothing(reason="it was acked first")
    if client.capabilities.dead_letters:
        expect(not await client.list_dead(), "an acked transaction became a dead letter")


class _UnknownSettlement(Settlement):
    """A settlement that no connector knows."""


@check("CNN-13")
async def an_unknown_settlement_affects_no_other(context: CheckContext) -> None:
    client, claimed = await _claim_sorted(context, 3)
    results = await client.settle((claimed[0], Ack()), (claimed[1], _UnknownSettlement()), (claimed[2], Ack()))
    expect(
        results == [SETTLED, FAILED, SETTLED],
        f"ack, an unknown settlement and ack returned {[str(result) for result in results]}",
    )
    await client.ack(claimed[1])  # it is still claimed


@check("CNN-13")
async def an_unknown_delivery_affects_no_other(context: CheckContext) -> None:
    client, claimed = await _claim_sorted(context, 2)
    receipt: Any
    foreign_requests: list[SettlementRequest] = []
    for receipt in (None, object(), [], "unknown", -1):
        foreign_requests.append((Delivery(context.transaction("odd"), receipt), Ack()))
        foreign_requests.append((Delivery(context.transaction("odd"), receipt), Defer(0)))
    results = await client.settle((claimed[0], Ack()), *foreign_requests, (claimed[1], Ack()))
    expect(results[0] is SETTLED, f"next to an external delivery an ack returned {results[0]}")
    expect(results[-1] is SETTLED, f"after an external delivery an ack returned {results[-1]}")
    unexpected_results = {result for result in results[1:-1] if result not in (LOST, FAILED)}
    expect(not unexpected_results, "a delivery that was never claimed was settled")
    await client.expect_nothing(reason="nothing was left")


@check("CNN-13", needs=(require_dead_letters,))
async def an_invalid_failure_affects_no_other(context: CheckContext) -> None:
    client, claimed = await _claim_sorted(context, 3)
    invalid_failure: Any = {"not": "a failure"}
    results = await client.settle(
        (claimed[0], Ack()), (claimed[1], DeadLetter("odd", invalid_failure)), (claimed[2], Ack())
    )
    expect(
        (results[0], results[2]) == (SETTLED, SETTLED),
        f"next to a dead letter with an invalid failure acks returned {results[0]} and {results[2]}",
    )
    if results[1] is not SETTLED:
        await client.settle_successfully(DeadLetter("plain"), claimed[1])
    (record,) = await client.list_dead()
    expect(record.id == "tx-1", f"the dead letter is {record.id}, not tx-1")


@check("CNN-13", needs=(require_encoding,))
async def an_unencodable_delivery_affects_no_other(context: CheckContext) -> None:
    client, claimed = await _claim_sorted(context, 3)
    unencodable = Delivery(
        claimed[1].transaction.replace(payload=object()),
        claimed[1].receipt,
        claimed[1].deliveries,
        claimed[1].lease_until,
    )
    results = await client.settle((claimed[0], Ack()), (unencodable, Defer(0)), (claimed[2], Ack()))
    expect(
        (results[0], results[2]) == (SETTLED, SETTLED),
        f"next to an unencodable delivery acks returned {results[0]} and {results[2]}",
    )
    expect(results[1] in (SETTLED, FAILED), f"deferring an unencodable delivery returned {results[1]}")
    if results[1] is FAILED:
        await client.settle_successfully(Defer(0), claimed[1])
    again = await client.claim_one()
    expect(again.transaction.payload == claimed[1].transaction.payload, "the payload changed")
    await client.ack(again)


@check("CNN-13")
async def empty_calls_are_accepted(context: CheckContext) -> None:
    client = await context.client()
    expect(await client.settle() == [], "settling nothing returned results")
    expect(await client.extend() == [], "renewing nothing returned results")
    expect(await client.dispatch() == [], "dispatching nothing returned results")
