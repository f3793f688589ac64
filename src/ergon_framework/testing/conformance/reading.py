"""Checks of readers: cursors, replay, retention, and lag."""

from __future__ import annotations

import asyncio

from ergon_framework.facts.boundary import ReaderLag
from ergon_framework.facts.errors import OffsetAhead, OffsetGone, ReaderUnknown
from ergon_framework.facts.model import Cursor, StoredFact, ZonePair
from ergon_framework.testing.conformance.boundary_client import (
    LATER,
    PAIR,
    BoundaryCheckContext,
    BoundaryClient,
    envelope,
    expect_raises,
    make_artifact_fact,
    make_fact,
    make_facts,
    make_reference,
)
from ergon_framework.testing.conformance.check import check, expect


@check("FAC-16")
async def a_reader_goes_on_where_he_confirmed(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.append_many(*make_facts(6))
    first = await client.fetch(4)
    expect([each.offset for each in first] == [1, 2, 3, 4], "a fetch of 4 does not bring the first 4")
    again = await client.fetch(4)
    expect([each.offset for each in again] == [1, 2, 3, 4], "what was not confirmed does not come again")
    await client.confirm(first[2].cursor)
    # As after a crash: the next client knows only the name.
    heir = sitting.client()
    expect(await heir.cursor() == first[2].cursor, f"the cursor is {await heir.cursor()}, not {first[2].cursor}")
    rest = await heir.fetch()
    expect([each.offset for each in rest] == [4, 5, 6], f"after a receipt for 3 came {[each.offset for each in rest]}")
    await heir.confirm(rest[-1].cursor)
    expect(not await heir.fetch(), "after a receipt for all something came")


@check("FAC-16")
async def a_receipt_never_goes_back(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.append_many(*make_facts(3))
    facts = await client.fetch()
    await client.confirm(facts[2].cursor)
    await client.confirm(facts[0].cursor)
    expect(await client.cursor() == facts[2].cursor, "an older receipt has moved the cursor back")


@check("FAC-16")
async def a_receipt_is_for_what_was_there(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.append_many(*make_facts(2))
    (first, _) = await client.fetch()
    beyond = Cursor(first.epoch, 3)
    await expect_raises(OffsetAhead, client.confirm(beyond), "a receipt for a fact that does not exist")
    await expect_raises(OffsetAhead, client.fetch(after=beyond), "reading behind a fact that does not exist")
    await expect_raises(ReaderUnknown, client.confirm(first.cursor, reader="nobody"), "a receipt of somebody unknown")
    expect(await client.cursor() == Cursor(first.epoch, 0), "a refused receipt has moved the cursor")


@check("FAC-16")
async def readers_have_cursors_of_their_own(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    elsewhere = ZonePair(PAIR.from_zone, "Elsewhere")
    await client.append_many(*make_facts(3), (envelope("e-1", pair=elsewhere), make_facts(1)[0][1]))
    facts = await client.fetch(reader="one")
    await client.fetch(reader="two")
    await client.confirm(facts[-1].cursor, reader="one")
    expect(len(await client.fetch(reader="two")) == 3, "one reader's receipt has moved another's cursor")
    expect(len(await client.fetch(reader="one", pair=elsewhere)) == 1, "a receipt for one pair counts for another")


@check("FAC-16")
async def what_is_retained_can_be_read_again(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.append_many(*make_facts(5))
    facts = await client.fetch()
    await client.confirm(facts[-1].cursor)
    for offset in range(5):
        again = await client.fetch(after=Cursor(facts[0].epoch, offset))
        expect(
            [each.offset for each in again] == list(range(offset + 1, 6)), f"replaying behind {offset} brought others"
        )
    expect(await client.cursor() == facts[-1].cursor, "a replay has moved the cursor")


@check("FAC-16")
async def nothing_is_dropped_that_a_reader_has_not_confirmed(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.append_many(*make_facts(4))
    untouched = await client.prune()
    expect(untouched.facts == 0, "before anybody has come to read them, facts were removed")
    facts = await client.fetch(reader="fast")
    await client.fetch(reader="slow")
    await client.confirm(facts[3].cursor, reader="fast")
    await client.confirm(facts[1].cursor, reader="slow")
    pruned = await client.prune()
    expect(pruned.facts == 2, f"of 4 facts, 2 of which all have confirmed, {pruned.facts} were removed")
    expect([each.offset for each in await client.fetch(reader="slow")] == [3, 4], "the slow reader has lost facts")
    gone = Cursor(facts[0].epoch, 0)
    await expect_raises(OffsetGone, client.fetch(reader="fast", after=gone), "reading what is no longer retained")
    newcomer = await client.fetch(reader="late")
    expect([each.offset for each in newcomer] == [3, 4], "a new reader does not begin at the first retained fact")
    expect(await client.retire(reader="slow"), "a reader cannot be retired")
    await client.confirm(facts[3].cursor, reader="late")
    expect((await client.prune()).facts == 2, "a retired reader holds up retention")


@check("FAC-16", "FAC-14")
async def what_is_young_is_kept(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.append_many(*make_facts(2))
    # The fact that references it is appended later.
    await client.put("exam", "new", [b"abc"])
    facts = await client.fetch()
    await client.confirm(facts[-1].cursor)
    pruned = await client.prune(before=1)
    expect(pruned == (0, 0), f"of what was stored after the moment of retention {pruned} were removed")
    named_late = await client.append(envelope("late"), make_artifact_fact(make_reference("new", b"abc")))
    expect(named_late.offset == 3, "retention came between an artifact and its fact")


@check("FAC-23")
async def retention_spares_what_a_retained_fact_names(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    for number in (1, 2):
        content = f"content {number}".encode()
        await client.put("exam", f"{number}", [content])
        await client.append(envelope(f"m-{number}"), make_artifact_fact(make_reference(f"{number}", content)))
    await client.put("exam", "unnamed", [b"nobody names it"])
    facts = await client.fetch()
    await client.confirm(facts[0].cursor)
    pruned = await client.prune()
    expect(
        pruned.artifacts == 2, f"of 3 artifacts, one of which a retained fact names, {pruned.artifacts} were removed"
    )
    expect(await client.read("exam", "2") == b"content 2", "an artifact that a retained fact names is gone")


@check("FAC-16")
async def a_moment_is_a_place_in_the_line(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    expect(await client.cursor_at(LATER) is None, "there is a place in a line of nothing")
    facts = await _at_several_times(client)
    epoch = facts[0].epoch
    for moment in {fact.stored_at_unix_ms for fact in facts} | {1, LATER}:
        later = [fact.offset for fact in facts if fact.stored_at_unix_ms >= moment]
        wanted = Cursor(epoch, min(later, default=len(facts) + 1) - 1)
        found = await client.cursor_at(moment)
        expect(found == wanted, f"of {len(facts)} facts, {len(later)} of them since then, the place is {found}")
    await client.confirm(facts[0].cursor)
    await client.prune()
    expect(await client.cursor_at(1) == facts[0].cursor, "what is no longer retained has a place in the line")


async def _at_several_times(client: BoundaryClient) -> list[StoredFact]:
    """Append facts that are stored in at least three different milliseconds."""
    for number in range(1, 20):
        await client.append_many(*make_facts(1, first=number))
        await asyncio.sleep(0.002)  # stores have their own clocks, so only time helps
    facts = await client.fetch(19)
    moments = {fact.stored_at_unix_ms for fact in facts}
    expect(len(moments) >= 3, f"{len(facts)} facts, 2 ms apart, have {len(moments)} moments")
    return facts


@check("FAC-16", "FAC-17")
async def a_survey_says_how_far_everybody_is(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    expect(not await client.survey(), "a store that nobody has used tells of something")
    objects = ['{"a": 1}', '"Grüße"', "[1, 2, 3]"]
    await client.append_many(
        *((envelope(f"m-{n}"), make_fact(object_json=text)) for n, text in enumerate(objects, 1)),
    )
    facts = await client.fetch(reader="one")
    await client.fetch(reader="two")
    await client.confirm(facts[0].cursor, reader="one")
    await client.confirm(facts[2].cursor, reader="two")
    waiting = ZonePair("Elsewhere", PAIR.from_zone)
    await client.fetch(reader="early", pair=waiting)
    sizes = [len(text.encode()) for text in objects]
    surveyed = await sitting.client().survey()
    expect(surveyed.keys() == {PAIR, waiting}, f"of two pairs {len(surveyed)} were told of")
    state = surveyed[PAIR]
    told = state.buffer, state.epoch, state.first, state.last, state.bytes
    wanted = client.capabilities.side.store_buffer, facts[0].epoch, 1, 3, sum(sizes)
    expect(told == wanted, f"told is {told}, and not {wanted}")
    expect(
        state.readers
        == {
            "one": ReaderLag(1, 2, sum(sizes[1:]), facts[1].stored_at_unix_ms),
            "two": ReaderLag(3, 0, 0, None),
        },
        f"the readers are told to be {state.readers}",
    )
    empty = surveyed[waiting]
    expect((empty.first, empty.last, empty.bytes) == (1, 0, 0), f"a pair without facts is told of as {empty}")
    expect(empty.readers == {"early": ReaderLag(0, 0, 0, None)}, f"who waits for facts is told to be {empty.readers}")
    await client.prune()
    expect((await client.survey())[PAIR].first == 2, "what was removed is told to be there")


@check("FAC-16")
async def a_retired_reader_is_forgotten(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.append_many(*make_facts(2))
    facts = await client.fetch(reader="old")
    await client.confirm(facts[0].cursor, reader="old")
    expect(await client.retire(reader="old", by="operator"), "a reader cannot be retired")
    expect(not await sitting.client().retire(reader="old", by="operator"), "a reader can be retired twice")
    expect(await client.cursor(reader="old") is None, "a retired reader has a cursor")
    expect("old" not in (await client.survey())[PAIR].readers, "a retired reader is told of")
    await expect_raises(ReaderUnknown, client.confirm(facts[1].cursor, reader="old"), "a receipt of a retired reader")
    again = await client.fetch(reader="old")
    expect([each.offset for each in again] == [1, 2], "a retired reader who comes again does not begin anew")
