"""Checks of appends: confirmations, duplicates, conflicts, forwarding, and offsets."""

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
from ergon_framework.testing.conformance.boundary_client import (
    PAIR,
    BoundaryCheckContext,
    BoundaryClient,
    envelope,
    expect_error,
    expect_raises,
    make_artifact_fact,
    make_fact,
    make_facts,
    make_reference,
)
from ergon_framework.testing.conformance.candidate import UNSAID
from ergon_framework.testing.conformance.check import CheckFailed, NotApplicable, check, expect
from ergon_framework.transaction import Transaction


@check("FAC-01")
async def what_is_fetched_is_what_was_appended(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    sent = envelope(
        "id:!~/" + "x" * 250,
        pair=ZonePair("Werk Süd 2", "z" * 64),
        correlation_id="order:12345",
        causation_id="cause-1",
        labels={f"label-{number}": "Grüße 🙂" * number for number in range(32)},
    )
    fact = make_fact(object_json='{ "b": 1.50, "a": [null, true, "\\u00fc", 1e3] }', subject="Auftrag 7")
    confirmation = await client.append(sent, fact)
    expect(confirmation.offset == 1, f"the first fact of a pair has offset {confirmation.offset}, not 1")
    (found,) = await client.fetch(pair=sent.pair)
    expect(found.envelope == sent, f"the envelope came back as {found.envelope}")
    expect(found.fact == fact, "the fact came back with another subject, predicate or object_json")
    expect(found.digest == fact_digest(sent, fact) == confirmation.digest, "the digest is not that of the document")
    expect((found.offset, found.epoch) == (confirmation.offset, confirmation.epoch), "fetched at another offset")


@check("FAC-01", "FAC-02")
async def what_is_confirmed_is_there_for_others(sitting: BoundaryCheckContext) -> None:
    confirmation = await sitting.client().append(envelope(), make_fact())
    other = sitting.client()
    found = await other.get("m-1")
    expect(found is not None, "another client does not find what was confirmed")
    expect(found is not None and found.offset == confirmation.offset, "another client finds it at another offset")
    expect(len(await other.fetch()) == 1, "another client does not fetch what was confirmed")


@check("FAC-24")
async def a_confirmation_is_about_the_store_buffer(sitting: BoundaryCheckContext) -> None:
    for side, store, forward in (
        (BoundarySide.INNER, Buffer.ESB, Buffer.IFB),
        (BoundarySide.OUTER, Buffer.ISB, Buffer.EFB),
    ):
        client = sitting.client(f"-{side}", side=side)
        expect(client.capabilities.side is side, f"the side is {client.capabilities.side}, not {side}")
        confirmation = await client.append(envelope(), make_fact())
        expect(confirmation.buffer is store, f"on the {side} side an append is confirmed for {confirmation.buffer}")
        other = sitting.client(
            f"-{side}-peer", side=BoundarySide.OUTER if side is BoundarySide.INNER else BoundarySide.INNER
        )
        (forwarded,) = await other.forwarded(*await client.fetch())
        expect(forwarded.buffer is store, f"what was forwarded from the {store} is confirmed for {forwarded.buffer}")
        expect(forwarded.buffer is not forward, f"a confirmation is about the {forward}")


@check("FAC-03", "FAC-25")
async def an_id_that_comes_again_is_the_same_fact(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    first = await client.append(envelope(labels={"try": "first"}), make_fact(object_json='{"a":1,"b":2.0}'))
    again = await client.append(
        envelope(produced_at_unix_ms=1, labels={"try": "second"}, correlation_id="other"),
        make_fact(object_json='{ "b": 2, "a": 1 }'),
    )
    expect((first.duplicate, again.duplicate) == (False, True), "the second append is not told to be a duplicate")
    expect(
        (again.offset, again.epoch, again.digest) == (first.offset, first.epoch, first.digest),
        f"the first append was told {first}, the second {again}",
    )
    found = await client.fetch()
    expect(len(found) == 1, f"one id was stored {len(found)} times")
    expect(dict(found[0].envelope.labels) == {"try": "first"}, "the second envelope has replaced the first")
    (batch,) = {
        raise_if_error(each).offset
        for each in await client.append_many(*[(envelope(), make_fact(object_json='{"a":1,"b":2}'))] * 3)
    }
    expect(batch == first.offset, f"three times in one call it has offset {batch}")


@check("FAC-03")
async def the_ids_of_two_zones_are_apart(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    elsewhere = ZonePair("Plant B", PAIR.to_zone)
    await client.append(envelope(), make_fact(1))
    other = await client.append(envelope(pair=elsewhere), make_fact(2))
    expect((other.offset, other.duplicate) == (1, False), "an id of one zone is taken for that of another")
    expect(await client.get("m-1", from_zone="Plant C") is None, "an id is found in a zone that never used it")


@check("FAC-03")
async def an_id_is_known_after_its_fact_is_gone(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    first = await client.append(envelope(), make_fact())
    await client.append(*make_facts(1, first=2)[0])
    found = await client.fetch()
    await client.confirm(found[-1].cursor)
    pruned = await client.prune()
    expect(pruned.facts == 2, f"of 2 confirmed facts retention has removed {pruned.facts}")
    again = await client.append(envelope(), make_fact())
    expect(again.duplicate and again.offset == first.offset, f"after retention an id is told {again}, not {first}")
    third = await client.append(*make_facts(1, first=3)[0])
    expect(third.offset == 3, f"after retention the next offset is {third.offset}, not 3")
    expect_error(
        (await client.append_many((envelope(), make_fact(9))))[0], FactConflict, "another payload after retention"
    )


@check("FAC-13")
async def another_payload_is_a_conflict_of_its_own(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    first = await client.append(envelope("m-2"), make_fact(2))
    one, conflict, three = await client.append_many(
        (envelope("m-1"), make_fact(1)), (envelope("m-2"), make_fact(99)), (envelope("m-3"), make_fact(3))
    )
    error = expect_error(conflict, FactConflict, "an id with another payload")
    expect((error.from_zone, error.message_id) == (PAIR.from_zone, "m-2"), "the conflict names another fact")
    expect(error.final and error.category is Category.BUSINESS, "a conflict looks as if trying again could help")
    offsets = [first.offset, raise_if_error(one).offset, raise_if_error(three).offset]
    expect(offsets == [1, 2, 3], f"around a conflict the offsets are {offsets}")
    await expect_raises(
        FactConflict,
        client.append(envelope("m-2", pair=ZonePair(PAIR.from_zone, "Elsewhere")), make_fact(2)),
        "an id for another zone",
    )
    for changed in (make_fact(2, subject="other"), make_fact(2, predicate="other"), make_fact(2, object_json="null")):
        await expect_raises(FactConflict, client.append(envelope("m-2"), changed), "an id with another payload")
    kept = {each.envelope.message_id: each.fact.object for each in await client.fetch()}
    expect(kept == {"m-1": {"number": 1}, "m-2": {"number": 2}, "m-3": {"number": 3}}, f"stored is {kept}")


@check("FAC-09")
async def a_producer_can_ask_what_became_of_an_id(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    expect(await client.get("m-1") is None, "an id that nobody has used is found")
    first = await client.append(envelope(), make_fact())
    found = await sitting.client().get("m-1")
    expect(
        found is not None and (found.offset, found.digest, found.epoch) == (first.offset, first.digest, first.epoch),
        f"asked for m-1, the store answers {found}, and had confirmed {first}",
    )


@check("FAC-25")
async def a_handler_that_runs_again_appends_the_same_fact(sitting: BoundaryCheckContext) -> None:
    order = Transaction("order-7", {"total": 12}, source="orders", created_at=1_700_000_000.25)
    told = []
    for attempt in range(2):
        # A new client, like that of another process that runs the handler again.
        client = sitting.client()
        below = Scope(order, "process", attempt)
        told.append(await client.facts_append(below, subject="order:7", predicate="paid", object={"charge": "c-1"}))
    expect(told[0].offset == told[1].offset, f"two runs of one handler append at {[each.offset for each in told]}")
    expect(told[1].duplicate, "the second run has appended something")
    (found,) = await client.fetch()
    expect(found.envelope.message_id == order.derive("Enterprise/order:7/paid"), "the id is not the transaction's")
    expect(found.envelope.produced_at_unix_ms == 1_700_000_000_250, "produced_at is not the transaction's")


@check("FAC-11")
async def an_append_waits_for_nobody(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.fetch(reader="away")
    confirmations = [raise_if_error(each) for each in await client.append_many(*make_facts(50))]
    expect(confirmations[-1].offset == 50, "with a reader that never confirms an append is not confirmed")
    nobody = ZonePair("Plant A", "A zone that nobody has heard of")
    expect(
        (await client.append(envelope(pair=nobody, message_id="n-1"), make_fact())).offset == 1,
        "no other zone, no append",
    )


@check("FAC-15")
async def offsets_have_no_gaps(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    missing = make_artifact_fact(make_reference("missing", b"never stored"))
    offsets = []
    for number in range(1, 11):
        results: list[Any] = await client.append_many(
            (envelope(f"m-{number}"), make_fact(number)),
            (envelope(f"m-{number}"), make_fact(-number)),
            (envelope(f"r-{number}"), missing),
        )
        offsets.append(results[0].offset)
        expect(all(isinstance(each, FactError) for each in results[1:]), "a conflict or a missing artifact was stored")
    expect(offsets == list(range(1, 11)), f"between refusals the offsets are {offsets}")
    other = await client.append(envelope("o-1", pair=ZonePair("Plant A", "Elsewhere")), make_fact())
    expect(other.offset == 1, f"the first offset of another pair is {other.offset}")
    expect(await client.end() == Cursor(client.epoch, 10), f"the end is {await client.end()}")


@check("FAC-15", "FAC-03")
async def many_at_once_make_one_line(sitting: BoundaryCheckContext) -> None:
    writers, each = 8, 12
    clients = [sitting.client() for _ in range(writers)]
    seen: list[int] = []
    over = asyncio.Event()

    async def write(client: BoundaryClient, number: int) -> list[FactConfirmation]:
        told = []
        for step in range(each):
            # All writers write every second fact.
            name = f"all-{step}" if step % 2 else f"w{number}-{step}"
            told.append(await client.append(envelope(name), make_fact(step)))
        return told

    async def read() -> None:
        reader = sitting.client()
        while not over.is_set():
            offsets = [found.offset for found in await reader.fetch(reader="watch")]
            expect(offsets == list(range(1, len(offsets) + 1)), f"whoever reads while others append sees {offsets}")
            seen.append(len(offsets))
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(read())
    told = await asyncio.gather(*(write(client, number) for number, client in enumerate(clients)))
    over.set()
    await watching
    total = writers * each // 2 + each // 2
    facts = await clients[0].fetch()
    ids = [found.envelope.message_id for found in facts]
    expect(len(ids) == len(set(ids)) == total, f"{total} ids were stored as {len(ids)} facts")
    expect([found.offset for found in facts] == list(range(1, total + 1)), "the offsets have gaps")
    shared = {(one.message_id, one.offset) for line in told for one in line if one.message_id.startswith("all-")}
    expect(len(shared) == each // 2, "one id was confirmed at two offsets")


@check("FAC-10", "FAC-15")
async def a_forward_buffer_keeps_the_offset_of_the_origin(sitting: BoundaryCheckContext) -> None:
    origin, other = sitting.client("-origin"), sitting.client("-other", side=BoundarySide.OUTER)
    await origin.append_many(*make_facts(4))
    facts = await origin.fetch(reader="peer")
    first = await other.forwarded(*facts[:2])
    again = await other.forwarded(*facts[:3])
    expect([each.duplicate for each in again] == [True, True, False], "a repeat is put in again")
    expect([each.offset for each in first + again] == [1, 2, 1, 2, 3], "a forwarded fact has another offset")
    found = await other.fetch()
    expect(
        [(each.offset, each.epoch) for each in found] == [(n, origin.epoch) for n in (1, 2, 3)],
        "offset or epoch changed",
    )
    expect([each.envelope for each in found] == [each.envelope for each in facts[:3]], "an envelope changed on the way")
    expect([each.fact for each in found] == [each.fact for each in facts[:3]], "a fact changed on the way")


@check("FAC-10", "FAC-13")
async def a_forward_buffer_takes_no_second_payload(sitting: BoundaryCheckContext) -> None:
    liar, origin = sitting.client("-liar"), sitting.client("-origin")
    other = sitting.client("-other", side=BoundarySide.OUTER)
    await origin.append(envelope(), make_fact(1))
    await liar.append(envelope(), make_fact(2))
    await other.forwarded(*await origin.fetch())
    (result,) = await other.forward(*await liar.fetch())
    expect_error(result, FactConflict, "another payload for a forwarded id")
    (kept,) = await other.fetch()
    expect(kept.fact.object == {"number": 1}, "the second payload has replaced the first")


@check("FAC-15")
async def a_forward_buffer_takes_no_gap_and_no_other_epoch(sitting: BoundaryCheckContext) -> None:
    origin, other = sitting.client("-origin"), sitting.client("-other", side=BoundarySide.OUTER)
    stranger = sitting.client("-stranger")
    await origin.append_many(*make_facts(3))
    facts = await origin.fetch(reader="peer")
    (gap,) = await other.forward(facts[1])
    expect_error(gap, OffsetAhead, "the second fact before the first")
    await other.forwarded(facts[0])
    await stranger.append_many(*make_facts(1, first=8), *make_facts(1, first=9))
    (changed,) = await other.forward((await stranger.fetch(reader="peer"))[1])
    expect_error(changed, EpochChanged, "a fact of another epoch")
    expect([each.offset for each in await other.fetch()] == [1], "what was refused is there")


@check("FAC-15")
async def a_pair_has_one_buffer_in_a_store(sitting: BoundaryCheckContext) -> None:
    origin, other = sitting.client("-origin"), sitting.client("-other", side=BoundarySide.OUTER)
    await origin.append_many(*make_facts(1))
    await other.forwarded(*await origin.fetch(reader="peer"))
    (result,) = await other.append_many((envelope("m-2"), make_fact(2)))
    expect(isinstance(result, FactError), "a fact was appended to a pair whose offsets another store gives")
    expect(len(await other.fetch()) == 1, "what was refused is there")


@check("FAC-15")
async def a_restored_backup_is_noticed(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.append_many(*make_facts(2))
    put_back = sitting.candidate.backup(sitting.store())
    if put_back is None:
        raise NotApplicable("the candidate offers no backup")
    await client.append(envelope("lost"), make_fact(3))
    facts = await client.fetch()
    cursor, epoch = facts[-1].cursor, client.epoch
    await client.confirm(cursor)
    put_back()
    client = sitting.client()
    expect(client.epoch != epoch, "the store has the epoch that it had before it was put back")
    told = await client.append(envelope("other"), make_fact(4))
    expect(told.epoch == client.epoch, "an append after the backup is confirmed in another epoch than the store's")
    await expect_raises(EpochChanged, client.fetch(after=cursor), "reading on with a cursor from before")
    await expect_raises(EpochChanged, client.confirm(cursor), "confirming with a cursor from before")
    expect(await client.get("lost") is None, "what is lost is confirmed")


@check("FAC-16")
async def a_full_buffer_refuses_before_anything_is_lost(sitting: BoundaryCheckContext) -> None:
    if not sitting.candidate.bounded:
        raise NotApplicable("the candidate has stores without bounds only")
    client = sitting.client(room=3)
    results = await client.append_many(*make_facts(5))
    offsets = [raise_if_error(each).offset for each in results[:3]]
    expect(offsets == [1, 2, 3], f"with room for three facts the offsets are {offsets}")
    for result in results[3:]:
        error = expect_error(result, BufferFull, "a fact too many")
        expect(not error.final and error.category is not Category.BUSINESS, "a full buffer is told to be hopeless")
    again = await client.append(*make_facts(1)[0])
    expect(again.duplicate and again.offset == 1, "a repeat in a full buffer is not answered")
    found = await client.fetch()
    expect([each.offset for each in found] == [1, 2, 3], "a full buffer has lost what it confirmed")
    await client.confirm(found[1].cursor)
    await client.prune()
    fourth = await client.append(*make_facts(1, first=4)[0])
    expect(fourth.offset == 4, f"with room again the next offset is {fourth.offset}, not 4")


@check("FAC-14")
async def an_artifact_is_there_before_its_fact(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    content = b"the order"
    reference = make_reference("orders/7.pdf", content)
    await expect_raises(
        ArtifactRefused, client.append(envelope(), make_artifact_fact(reference)), "a fact about nothing"
    )
    await client.put("exam", "orders/7.pdf", [content])
    for wrong in (
        make_reference("orders/7.pdf", b"other bytes"),
        make_reference("orders/7.pdf", content, size=8),
        make_reference("orders/8.pdf", content),
    ):
        await expect_raises(
            ArtifactRefused, client.append(envelope(), make_artifact_fact(wrong)), "a fact about another artifact"
        )
    confirmation = await client.append(envelope(), make_artifact_fact(reference))
    expect(confirmation.offset == 1, f"after refusals the first offset is {confirmation.offset}")


@check("FAC-20")
async def a_reference_has_four_fields(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    reference = make_reference("a.pdf", b"abc", media_type="application/pdf", file_name="Auftrag 7.pdf").to_object()
    for number, name in enumerate(("bucket", "key", "digest", "size")):
        object_without = {key: value for key, value in reference.items() if key != name}
        result = (await client.append_many((envelope(f"w-{number}"), about_object(object_without))))[0]
        expect(isinstance(result, FactConfirmation), f"an object without {name} was taken for a reference")
    await expect_raises(
        ArtifactRefused, client.append(envelope(), about_object(reference)), "a reference to what is not there"
    )
    await client.put("exam", "a.pdf", [b"abc"])
    await client.append(envelope(), about_object(reference | {"pages": 3}))
    found = (await client.fetch())[-1]
    expect(found.fact.object == reference | {"pages": 3}, "fields of a reference were not kept")
    expect(found.fact.artifact is not None, "the fact is no reference any more")


def about_object(value: object) -> Any:
    return type(make_fact()).create("work_order:WO-1", "has_file", value)


@check("FAC-12")
async def a_correction_links_two_artifacts(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    old, new = make_reference("v1.pdf", b"first"), make_reference("v2.pdf", b"second")
    await client.put("exam", "v1.pdf", [b"first"])
    await client.append(envelope("m-1"), make_artifact_fact(old))
    await client.put("exam", "v2.pdf", [b"second"])
    await client.append(envelope("m-2"), make_artifact_fact(new))
    link = {"old": old.to_object(), "new": new.to_object(), "corrects": "m-1"}
    confirmation = await client.append(envelope("m-3"), about_object(link))
    expect(confirmation.offset == 3, "a correction is not a fact like others")
    expect((await client.fetch())[2].fact.object == link, "the link of a correction has changed")
    expect(await client.read("exam", "v1.pdf") == b"first", "the corrected artifact has changed")


@check("FAC-26")
async def only_what_survives_a_power_loss_is_strict(sitting: BoundaryCheckContext) -> None:
    capabilities = sitting.client().capabilities
    expect(
        capabilities.is_strict == (capabilities.durable is True),
        f"durable is {capabilities.durable}, and strict {capabilities.is_strict}",
    )
    known = sitting.candidate.durable
    if known is not UNSAID and capabilities.durable is not known:
        raise CheckFailed(f"durable is {capabilities.durable}, and the candidate knows it to be {known}")
