"""Checks of appends: confirmations, duplicates, conflicts, forwarding, and offsets.

A boundary store keeps the facts that one zone, a site, sends to another; the two zones form a pair. Facts of a pair
have offsets from 1, within an epoch: the store gets a new one when it is restored from a backup, because it has lost
facts then. A store is on the inner or the outer side between two zones: its store buffer (ESB or ISB) has the facts
that its own zone appends, its forward buffer (IFB or EFB) copies of the other zone's facts, with their offsets. A
reader is a named consumer; its cursor is the epoch and offset up to which it has confirmed. Ids such as FAC-01 name the
requirements in docs/spec. ``context.client(suffix)`` is a new client, like that of another process, of the store with
that suffix: without one, of the main store of the check. The text of ``expect`` says what is wrong if its condition is
false.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ergon_framework.errors import Category
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.errors import (
    ArtifactRefused,
    BufferFull,
    EpochChanged,
    FactConflict,
    FactError,
    OffsetAhead,
)
from ergon_framework.facts.model import BoundarySide, Buffer, Cursor, FactConfirmation, ZonePair, fact_digest
from ergon_framework.scope import Scope
from ergon_framework.testing.conformance.boundary.client import (
    PAIR,
    BoundaryCheckClient,
    BoundaryCheckContext,
    expect_error,
    expect_raises,
    make_artifact_fact,
    make_envelope,
    make_fact,
    make_facts,
    make_reference,
)
from ergon_framework.testing.conformance.check import CheckFailed, NotApplicable, check, expect
from ergon_framework.testing.conformance.connector.adapter import UNKNOWN_DURABILITY
from ergon_framework.transaction import Transaction


@check("FAC-01")
async def what_is_fetched_is_what_was_appended(context: BoundaryCheckContext) -> None:
    client = context.client()
    sent = make_envelope(
        "id:!~/" + "x" * 250,
        pair=ZonePair("Werk Süd 2", "z" * 64),
        correlation_id="order:12345",
        causation_id="cause-1",
        labels={f"label-{number}": "Grüße 🙂" * number for number in range(32)},
    )
    fact = make_fact(object_json='{ "b": 1.50, "a": [null, true, "\\u00fc", 1e3] }', subject="Auftrag 7")
    confirmation = await client.append(sent, fact)
    expect(confirmation.offset == 1, f"the first fact of a pair has offset {confirmation.offset}, not 1")
    (fetched,) = await client.fetch(pair=sent.pair)
    expect(fetched.envelope == sent, f"the envelope came back as {fetched.envelope}")
    expect(fetched.fact == fact, "the fact came back with another subject, predicate or object_json")
    expect(fetched.digest == fact_digest(sent, fact) == confirmation.digest, "the digest is not that of the document")
    expect((fetched.offset, fetched.epoch) == (confirmation.offset, confirmation.epoch), "fetched at another offset")


@check("FAC-01", "FAC-02")
async def what_is_confirmed_is_there_for_others(context: BoundaryCheckContext) -> None:
    confirmation = await context.client().append(make_envelope(), make_fact())
    other = context.client()
    stored = await other.get("m-1")
    expect(stored is not None, "another client does not find what was confirmed")
    expect(stored is not None and stored.offset == confirmation.offset, "another client finds it at another offset")
    expect(len(await other.fetch()) == 1, "another client does not fetch what was confirmed")


@check("FAC-24")
async def a_confirmation_is_about_the_store_buffer(context: BoundaryCheckContext) -> None:
    for side, store, forward in (
        (BoundarySide.INNER, Buffer.ESB, Buffer.IFB),
        (BoundarySide.OUTER, Buffer.ISB, Buffer.EFB),
    ):
        client = context.client(f"-{side}", side=side)
        expect(client.capabilities.side is side, f"the side is {client.capabilities.side}, not {side}")
        confirmation = await client.append(make_envelope(), make_fact())
        expect(confirmation.buffer is store, f"on the {side} side an append is confirmed for {confirmation.buffer}")
        other = context.client(
            f"-{side}-peer", side=BoundarySide.OUTER if side is BoundarySide.INNER else BoundarySide.INNER
        )
        (forwarded,) = await other.forward_or_raise(*await client.fetch())
        expect(forwarded.buffer is store, f"what was forwarded from the {store} is confirmed for {forwarded.buffer}")
        expect(forwarded.buffer is not forward, f"a confirmation is about the {forward}")


@check("FAC-03", "FAC-25")
async def an_id_that_comes_again_is_the_same_fact(context: BoundaryCheckContext) -> None:
    client = context.client()
    first = await client.append(make_envelope(labels={"try": "first"}), make_fact(object_json='{"a":1,"b":2.0}'))
    again = await client.append(
        make_envelope(produced_at_unix_ms=1, labels={"try": "second"}, correlation_id="other"),
        make_fact(object_json='{ "b": 2, "a": 1 }'),
    )
    expect((first.duplicate, again.duplicate) == (False, True), "the second append is not reported as a duplicate")
    expect(
        (again.offset, again.epoch, again.digest) == (first.offset, first.epoch, first.digest),
        f"the first append returned {first}, the second {again}",
    )
    facts = await client.fetch()
    expect(len(facts) == 1, f"one id was stored {len(facts)} times")
    expect(dict(facts[0].envelope.labels) == {"try": "first"}, "the second envelope has replaced the first")
    (batch_offset,) = {
        raise_if_error(each).offset
        for each in await client.append_many(*[(make_envelope(), make_fact(object_json='{"a":1,"b":2}'))] * 3)
    }
    expect(batch_offset == first.offset, f"three times in one call it has offset {batch_offset}")


@check("FAC-03")
async def the_ids_of_two_zones_are_apart(context: BoundaryCheckContext) -> None:
    client = context.client()
    other_pair = ZonePair("Plant B", PAIR.to_zone)
    await client.append(make_envelope(), make_fact(1))
    other = await client.append(make_envelope(pair=other_pair), make_fact(2))
    expect((other.offset, other.duplicate) == (1, False), "an id of one zone is taken for that of another")
    expect(await client.get("m-1", from_zone="Plant C") is None, "an id is found in a zone that never used it")


@check("FAC-03")
async def an_id_is_known_after_its_fact_is_gone(context: BoundaryCheckContext) -> None:
    client = context.client()
    first = await client.append(make_envelope(), make_fact())
    await client.append(*make_facts(1, first=2)[0])
    facts = await client.fetch()
    await client.confirm(facts[-1].cursor)
    pruned = await client.prune()
    expect(pruned.facts == 2, f"of 2 confirmed facts retention has removed {pruned.facts}")
    again = await client.append(make_envelope(), make_fact())
    expect(
        again.duplicate and again.offset == first.offset,
        f"after retention an append of the id returned {again}, not {first}",
    )
    third = await client.append(*make_facts(1, first=3)[0])
    expect(third.offset == 3, f"after retention the next offset is {third.offset}, not 3")
    expect_error(
        (await client.append_many((make_envelope(), make_fact(9))))[0], FactConflict, "another payload after retention"
    )


@check("FAC-13")
async def another_payload_is_a_conflict_of_its_own(context: BoundaryCheckContext) -> None:
    client = context.client()
    first = await client.append(make_envelope("m-2"), make_fact(2))
    one, conflict, three = await client.append_many(
        (make_envelope("m-1"), make_fact(1)),
        (make_envelope("m-2"), make_fact(99)),
        (make_envelope("m-3"), make_fact(3)),
    )
    error = expect_error(conflict, FactConflict, "an id with another payload")
    expect((error.from_zone, error.message_id) == (PAIR.from_zone, "m-2"), "the conflict names another fact")
    expect(error.final and error.category is Category.BUSINESS, "a conflict is classified as retryable")
    offsets = [first.offset, raise_if_error(one).offset, raise_if_error(three).offset]
    expect(offsets == [1, 2, 3], f"around a conflict the offsets are {offsets}")
    await expect_raises(
        FactConflict,
        client.append(make_envelope("m-2", pair=ZonePair(PAIR.from_zone, "Elsewhere")), make_fact(2)),
        "an id for another zone",
    )
    for changed_fact in (
        make_fact(2, subject="other"),
        make_fact(2, predicate="other"),
        make_fact(2, object_json="null"),
    ):
        await expect_raises(
            FactConflict, client.append(make_envelope("m-2"), changed_fact), "an id with another payload"
        )
    stored = {each.envelope.message_id: each.fact.object for each in await client.fetch()}
    expect(stored == {"m-1": {"number": 1}, "m-2": {"number": 2}, "m-3": {"number": 3}}, f"stored objects are {stored}")


@check("FAC-09")
async def a_producer_can_ask_what_became_of_an_id(context: BoundaryCheckContext) -> None:
    client = context.client()
    expect(await client.get("m-1") is None, "an unused id is found")
    first = await client.append(make_envelope(), make_fact())
    stored = await context.client().get("m-1")
    expect(
        stored is not None
        and (stored.offset, stored.digest, stored.epoch) == (first.offset, first.digest, first.epoch),
        f"for m-1 the store returned {stored}, but it confirmed {first}",
    )


@check("FAC-25")
async def a_handler_that_runs_again_appends_the_same_fact(context: BoundaryCheckContext) -> None:
    order = Transaction({"total": 12}, id="order-7", source="orders", created_at=1_700_000_000.25)
    confirmations = []
    for attempt in range(2):
        # A new client, like that of another process that runs the handler again.
        client = context.client()
        handler_scope = Scope(order, "process", attempt)
        confirmations.append(
            await client.append_through_facts(
                handler_scope, subject="order:7", predicate="paid", object={"charge": "c-1"}
            )
        )
    expect(
        confirmations[0].offset == confirmations[1].offset,
        f"two runs of one handler append at {[each.offset for each in confirmations]}",
    )
    expect(confirmations[1].duplicate, "the second run has appended something")
    (stored,) = await client.fetch()
    expect(stored.envelope.message_id == order.derive("Enterprise/order:7/paid"), "the id is not the transaction's")
    expect(stored.envelope.produced_at_unix_ms == 1_700_000_000_250, "produced_at is not the transaction's")


@check("FAC-11")
async def an_append_waits_for_no_reader(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.fetch(reader="away")
    confirmations = [raise_if_error(each) for each in await client.append_many(*make_facts(50))]
    expect(confirmations[-1].offset == 50, "with a reader that never confirms, an append is not confirmed")
    unread_pair = ZonePair("Plant A", "A zone without readers")
    expect(
        (await client.append(make_envelope(pair=unread_pair, message_id="n-1"), make_fact())).offset == 1,
        "an append needs a reader",
    )


@check("FAC-15")
async def offsets_have_no_gaps(context: BoundaryCheckContext) -> None:
    client = context.client()
    missing = make_artifact_fact(make_reference("missing", b"never stored"))
    offsets = []
    for number in range(1, 11):
        results: list[Any] = await client.append_many(
            (make_envelope(f"m-{number}"), make_fact(number)),
            (make_envelope(f"m-{number}"), make_fact(-number)),
            (make_envelope(f"r-{number}"), missing),
        )
        offsets.append(results[0].offset)
        expect(all(isinstance(each, FactError) for each in results[1:]), "a conflict or a missing artifact was stored")
    expect(offsets == list(range(1, 11)), f"between rejected appends the offsets are {offsets}")
    other = await client.append(make_envelope("o-1", pair=ZonePair("Plant A", "Elsewhere")), make_fact())
    expect(other.offset == 1, f"the first offset of another pair is {other.offset}")
    expect(await client.last_offset() == Cursor(client.epoch, 10), f"the end is {await client.last_offset()}")


@check("FAC-15", "FAC-03")
async def many_at_once_make_one_line(context: BoundaryCheckContext) -> None:
    writers, each = 8, 12
    clients = [context.client() for _ in range(writers)]
    seen: list[int] = []
    done = asyncio.Event()

    async def write(client: BoundaryCheckClient, number: int) -> list[FactConfirmation]:
        confirmations = []
        for step in range(each):
            # All writers write every second fact.
            name = f"all-{step}" if step % 2 else f"w{number}-{step}"
            confirmations.append(await client.append(make_envelope(name), make_fact(step)))
        return confirmations

    async def read() -> None:
        reader = context.client()
        while not done.is_set():
            offsets = [fact.offset for fact in await reader.fetch(reader="watch")]
            expect(
                offsets == list(range(1, len(offsets) + 1)),
                f"a reader during concurrent appends sees offsets {offsets}",
            )
            seen.append(len(offsets))
            await asyncio.sleep(0)

    reading = asyncio.ensure_future(read())
    confirmations = await asyncio.gather(*(write(client, number) for number, client in enumerate(clients)))
    done.set()
    await reading
    # Of its facts, each writer writes one half alone, and all writers together write the other half once.
    total = writers * each // 2 + each // 2
    facts = await clients[0].fetch()
    ids = [fact.envelope.message_id for fact in facts]
    expect(len(ids) == len(set(ids)) == total, f"{total} ids were stored as {len(ids)} facts")
    expect([fact.offset for fact in facts] == list(range(1, total + 1)), "the offsets have gaps")
    shared = {
        (confirmation.message_id, confirmation.offset)
        for batch in confirmations
        for confirmation in batch
        if confirmation.message_id.startswith("all-")
    }
    expect(len(shared) == each // 2, "one id was confirmed at two offsets")


@check("FAC-10", "FAC-15")
async def a_forward_buffer_keeps_the_offset_of_the_origin(context: BoundaryCheckContext) -> None:
    origin, other = context.client("-origin"), context.client("-other", side=BoundarySide.OUTER)
    await origin.append_many(*make_facts(4))
    facts = await origin.fetch(reader="peer")
    first = await other.forward_or_raise(*facts[:2])
    again = await other.forward_or_raise(*facts[:3])
    expect([each.duplicate for each in again] == [True, True, False], "a duplicate was stored again")
    expect([each.offset for each in first + again] == [1, 2, 1, 2, 3], "a forwarded fact has another offset")
    stored = await other.fetch()
    expect(
        [(each.offset, each.epoch) for each in stored] == [(n, origin.epoch) for n in (1, 2, 3)],
        "offset or epoch changed",
    )
    expect(
        [each.envelope for each in stored] == [each.envelope for each in facts[:3]], "an envelope changed on the way"
    )
    expect([each.fact for each in stored] == [each.fact for each in facts[:3]], "a fact changed on the way")


@check("FAC-10", "FAC-13")
async def a_forward_buffer_takes_no_second_payload(context: BoundaryCheckContext) -> None:
    other_origin, origin = context.client("-liar"), context.client("-origin")
    other = context.client("-other", side=BoundarySide.OUTER)
    await origin.append(make_envelope(), make_fact(1))
    await other_origin.append(make_envelope(), make_fact(2))
    await other.forward_or_raise(*await origin.fetch())
    (result,) = await other.forward(*await other_origin.fetch())
    expect_error(result, FactConflict, "another payload for a forwarded id")
    (stored,) = await other.fetch()
    expect(stored.fact.object == {"number": 1}, "the second payload has replaced the first")


@check("FAC-15")
async def a_forward_buffer_takes_no_gap_and_no_other_epoch(context: BoundaryCheckContext) -> None:
    origin, other = context.client("-origin"), context.client("-other", side=BoundarySide.OUTER)
    other_origin = context.client("-stranger")
    await origin.append_many(*make_facts(3))
    facts = await origin.fetch(reader="peer")
    (gap,) = await other.forward(facts[1])
    expect_error(gap, OffsetAhead, "the second fact before the first")
    await other.forward_or_raise(facts[0])
    await other_origin.append_many(*make_facts(1, first=8), *make_facts(1, first=9))
    (changed,) = await other.forward((await other_origin.fetch(reader="peer"))[1])
    expect_error(changed, EpochChanged, "a fact of another epoch")
    expect([each.offset for each in await other.fetch()] == [1], "a rejected fact was stored")


@check("FAC-15")
async def a_pair_has_one_buffer_in_a_store(context: BoundaryCheckContext) -> None:
    origin, other = context.client("-origin"), context.client("-other", side=BoundarySide.OUTER)
    await origin.append_many(*make_facts(1))
    await other.forward_or_raise(*await origin.fetch(reader="peer"))
    (result,) = await other.append_many((make_envelope("m-2"), make_fact(2)))
    expect(isinstance(result, FactError), "a fact was appended to a pair whose offsets another store assigns")
    expect(len(await other.fetch()) == 1, "a rejected fact was stored")


@check("FAC-15")
async def a_restored_backup_is_noticed(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.append_many(*make_facts(2))
    restore = context.system.backup(context.store())
    if restore is None:
        raise NotApplicable("the system under test supports no backup")
    await client.append(make_envelope("lost"), make_fact(3))
    facts = await client.fetch()
    cursor, epoch = facts[-1].cursor, client.epoch
    await client.confirm(cursor)
    restore()
    client = context.client()
    expect(client.epoch != epoch, "the store has the same epoch after its backup was restored")
    confirmation = await client.append(make_envelope("other"), make_fact(4))
    expect(
        confirmation.epoch == client.epoch, "an append after the backup is confirmed in another epoch than the store's"
    )
    await expect_raises(EpochChanged, client.fetch(after=cursor), "reading with a cursor from before the restore")
    await expect_raises(EpochChanged, client.confirm(cursor), "confirming with a cursor from before the restore")
    expect(await client.get("lost") is None, "a lost fact is reported as confirmed")


@check("FAC-16")
async def a_full_buffer_refuses_before_anything_is_lost(context: BoundaryCheckContext) -> None:
    if not context.system.bounded:
        raise NotApplicable("the system under test has no bounded stores")
    client = context.client(max_facts=3)
    results = await client.append_many(*make_facts(5))
    offsets = [raise_if_error(each).offset for each in results[:3]]
    expect(offsets == [1, 2, 3], f"with space for three facts the offsets are {offsets}")
    for result in results[3:]:
        error = expect_error(result, BufferFull, "a fact too many")
        expect(not error.final and error.category is not Category.BUSINESS, "a full buffer is classified as final")
    again = await client.append(*make_facts(1)[0])
    expect(again.duplicate and again.offset == 1, "a duplicate in a full buffer is not confirmed")
    facts = await client.fetch()
    expect([each.offset for each in facts] == [1, 2, 3], "a full buffer has lost what it confirmed")
    await client.confirm(facts[1].cursor)
    await client.prune()
    fourth = await client.append(*make_facts(1, first=4)[0])
    expect(fourth.offset == 4, f"with free space again the next offset is {fourth.offset}, not 4")


@check("FAC-14")
async def an_artifact_is_there_before_its_fact(context: BoundaryCheckContext) -> None:
    client = context.client()
    content = b"the order"
    reference = make_reference("orders/7.pdf", content)
    await expect_raises(
        ArtifactRefused,
        client.append(make_envelope(), make_artifact_fact(reference)),
        "a fact about a missing artifact",
    )
    await client.put("files", "orders/7.pdf", [content])
    for wrong in (
        make_reference("orders/7.pdf", b"other bytes"),
        make_reference("orders/7.pdf", content, size=8),
        make_reference("orders/8.pdf", content),
    ):
        await expect_raises(
            ArtifactRefused, client.append(make_envelope(), make_artifact_fact(wrong)), "a fact about another artifact"
        )
    confirmation = await client.append(make_envelope(), make_artifact_fact(reference))
    expect(confirmation.offset == 1, f"after rejections the first offset is {confirmation.offset}")


@check("FAC-20")
async def a_reference_has_four_fields(context: BoundaryCheckContext) -> None:
    client = context.client()
    reference = make_reference("a.pdf", b"abc", media_type="application/pdf", file_name="Auftrag 7.pdf").to_object()
    for number, name in enumerate(("bucket", "key", "digest", "size")):
        object_without = {key: value for key, value in reference.items() if key != name}
        result = (await client.append_many((make_envelope(f"w-{number}"), make_object_fact(object_without))))[0]
        expect(isinstance(result, FactConfirmation), f"an object without {name} was taken for a reference")
    await expect_raises(
        ArtifactRefused,
        client.append(make_envelope(), make_object_fact(reference)),
        "a reference to a missing artifact",
    )
    await client.put("files", "a.pdf", [b"abc"])
    await client.append(make_envelope(), make_object_fact(reference | {"pages": 3}))
    found = (await client.fetch())[-1]
    expect(found.fact.object == reference | {"pages": 3}, "fields of a reference were not kept")
    expect(found.fact.artifact is not None, "the fact is no longer a reference")


def make_object_fact(value: object) -> Any:
    """Create a fact whose object is any JSON value, for example an incomplete reference to an artifact."""
    return type(make_fact()).create("work_order:WO-1", "has_file", value)


@check("FAC-12")
async def a_correction_links_two_artifacts(context: BoundaryCheckContext) -> None:
    client = context.client()
    old, new = make_reference("v1.pdf", b"first"), make_reference("v2.pdf", b"second")
    await client.put("files", "v1.pdf", [b"first"])
    await client.append(make_envelope("m-1"), make_artifact_fact(old))
    await client.put("files", "v2.pdf", [b"second"])
    await client.append(make_envelope("m-2"), make_artifact_fact(new))
    link = {"old": old.to_object(), "new": new.to_object(), "corrects": "m-1"}
    confirmation = await client.append(make_envelope("m-3"), make_object_fact(link))
    expect(confirmation.offset == 3, "a correction has an unexpected offset")
    expect((await client.fetch())[2].fact.object == link, "the link of a correction has changed")
    expect(await client.read("files", "v1.pdf") == b"first", "the corrected artifact has changed")


@check("FAC-26")
async def only_what_survives_a_power_loss_is_strict(context: BoundaryCheckContext) -> None:
    capabilities = context.client().capabilities
    expect(
        capabilities.is_strict == (capabilities.durable is True),
        f"durable is {capabilities.durable}, but is_strict is {capabilities.is_strict}",
    )
    expected = context.system.durable
    if expected is not UNKNOWN_DURABILITY and capabilities.durable is not expected:
        raise CheckFailed(f"durable is {capabilities.durable}, but the system under test expects {expected}")
