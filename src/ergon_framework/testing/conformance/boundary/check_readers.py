"""Checks of readers: cursors, replay, retention, and lag.

A boundary store keeps the facts that one zone, a site, sends to another (a pair of zones). A reader is a named consumer
of a pair. Its receipt confirms all facts up to an offset and moves its cursor there; the facts after the cursor are its
lag. Retention (``prune``) removes facts that all readers have confirmed, and artifacts (files) that no fact names any
more. Ids such as FAC-16 name the requirements in docs/spec. ``context.client()`` is a new client of the same store,
like that of another process. The text of ``expect`` says what is wrong if its condition is false.
"""

from __future__ import annotations

import asyncio

from ergon_framework.facts.boundary import ReaderLag
from ergon_framework.facts.errors import OffsetAhead, OffsetGone, ReaderUnknown
from ergon_framework.facts.model import Cursor, StoredFact, ZonePair
from ergon_framework.testing.conformance.boundary.client import (
    FAR_FUTURE_MS,
    PAIR,
    BoundaryCheckClient,
    BoundaryCheckContext,
    expect_raises,
    make_artifact_fact,
    make_envelope,
    make_fact,
    make_facts,
    make_reference,
)
from ergon_framework.testing.conformance.check import check, expect


@check("FAC-16")
async def a_reader_resumes_after_its_receipt(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.append_many(*make_facts(6))
    first = await client.fetch(4)
    expect([each.offset for each in first] == [1, 2, 3, 4], "a fetch of 4 does not bring the first 4")
    again = await client.fetch(4)
    expect([each.offset for each in again] == [1, 2, 3, 4], "unconfirmed facts are not delivered again")
    await client.confirm(first[2].cursor)
    # As after a crash: the next client knows only the name.
    successor = context.client()
    expect(
        await successor.get_cursor() == first[2].cursor,
        f"the cursor is {await successor.get_cursor()}, not {first[2].cursor}",
    )
    remaining = await successor.fetch()
    expect(
        [each.offset for each in remaining] == [4, 5, 6],
        f"after a receipt for 3 these came: {[each.offset for each in remaining]}",
    )
    await successor.confirm(remaining[-1].cursor)
    expect(not await successor.fetch(), "after a receipt for all the fetch returned facts")


@check("FAC-16")
async def a_receipt_never_goes_back(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.append_many(*make_facts(3))
    facts = await client.fetch()
    await client.confirm(facts[2].cursor)
    await client.confirm(facts[0].cursor)
    expect(await client.get_cursor() == facts[2].cursor, "an older receipt has moved the cursor back")


@check("FAC-16")
async def a_receipt_is_for_what_was_there(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.append_many(*make_facts(2))
    (first, _) = await client.fetch()
    beyond = Cursor(first.epoch, 3)
    await expect_raises(OffsetAhead, client.confirm(beyond), "a receipt for a fact that does not exist")
    await expect_raises(OffsetAhead, client.fetch(after=beyond), "reading after a fact that does not exist")
    await expect_raises(ReaderUnknown, client.confirm(first.cursor, reader="unknown"), "a receipt of an unknown reader")
    expect(await client.get_cursor() == Cursor(first.epoch, 0), "a rejected receipt has moved the cursor")


@check("FAC-16")
async def readers_have_cursors_of_their_own(context: BoundaryCheckContext) -> None:
    client = context.client()
    other_pair = ZonePair(PAIR.from_zone, "Elsewhere")
    await client.append_many(*make_facts(3), (make_envelope("e-1", pair=other_pair), make_facts(1)[0][1]))
    facts = await client.fetch(reader="one")
    await client.fetch(reader="two")
    await client.confirm(facts[-1].cursor, reader="one")
    expect(len(await client.fetch(reader="two")) == 3, "one reader's receipt has moved another's cursor")
    expect(len(await client.fetch(reader="one", pair=other_pair)) == 1, "a receipt for one pair counts for another")


@check("FAC-16")
async def what_is_retained_can_be_read_again(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.append_many(*make_facts(5))
    facts = await client.fetch()
    await client.confirm(facts[-1].cursor)
    for offset in range(5):
        again = await client.fetch(after=Cursor(facts[0].epoch, offset))
        expect(
            [each.offset for each in again] == list(range(offset + 1, 6)), f"a replay after {offset} returned others"
        )
    expect(await client.get_cursor() == facts[-1].cursor, "a replay has moved the cursor")


@check("FAC-16")
async def nothing_is_dropped_that_a_reader_has_not_confirmed(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.append_many(*make_facts(4))
    first_prune = await client.prune()
    expect(first_prune.facts == 0, "facts were removed before any reader registered")
    facts = await client.fetch(reader="fast")
    await client.fetch(reader="slow")
    await client.confirm(facts[3].cursor, reader="fast")
    await client.confirm(facts[1].cursor, reader="slow")
    pruned = await client.prune()
    expect(pruned.facts == 2, f"of 4 facts, 2 of which all have confirmed, {pruned.facts} were removed")
    expect([each.offset for each in await client.fetch(reader="slow")] == [3, 4], "the slow reader has lost facts")
    pruned_cursor = Cursor(facts[0].epoch, 0)
    await expect_raises(
        OffsetGone, client.fetch(reader="fast", after=pruned_cursor), "reading what is no longer retained"
    )
    new_reader_facts = await client.fetch(reader="late")
    expect(
        [each.offset for each in new_reader_facts] == [3, 4], "a new reader does not begin at the first retained fact"
    )
    expect(await client.retire_reader(reader="slow"), "a reader cannot be retired")
    await client.confirm(facts[3].cursor, reader="late")
    expect((await client.prune()).facts == 2, "a retired reader holds up retention")


@check("FAC-16", "FAC-14")
async def what_is_young_is_kept(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.append_many(*make_facts(2))
    # The fact that references it is appended later.
    await client.put("files", "new", [b"abc"])
    facts = await client.fetch()
    await client.confirm(facts[-1].cursor)
    pruned = await client.prune(before=1)
    expect(pruned == (0, 0), f"{pruned} were removed of what was stored after the retention time")
    confirmation = await client.append(make_envelope("late"), make_artifact_fact(make_reference("new", b"abc")))
    expect(confirmation.offset == 3, "retention came between an artifact and its fact")


@check("FAC-23")
async def retention_spares_what_a_retained_fact_names(context: BoundaryCheckContext) -> None:
    client = context.client()
    for number in (1, 2):
        content = f"content {number}".encode()
        await client.put("files", f"{number}", [content])
        await client.append(make_envelope(f"m-{number}"), make_artifact_fact(make_reference(f"{number}", content)))
    await client.put("files", "unnamed", [b"no fact names it"])
    facts = await client.fetch()
    await client.confirm(facts[0].cursor)
    pruned = await client.prune()
    expect(
        pruned.artifacts == 2, f"of 3 artifacts, one of which a retained fact names, {pruned.artifacts} were removed"
    )
    expect(await client.read("files", "2") == b"content 2", "an artifact that a retained fact names is gone")


@check("FAC-16")
async def a_moment_is_a_place_in_the_line(context: BoundaryCheckContext) -> None:
    client = context.client()
    expect(await client.get_cursor_at(FAR_FUTURE_MS) is None, "an empty log has a position")
    facts = await _append_at_several_times(client)
    epoch = facts[0].epoch
    for moment in {fact.stored_at_unix_ms for fact in facts} | {1, FAR_FUTURE_MS}:
        later_offsets = [fact.offset for fact in facts if fact.stored_at_unix_ms >= moment]
        expected = Cursor(epoch, min(later_offsets, default=len(facts) + 1) - 1)
        cursor = await client.get_cursor_at(moment)
        expect(
            cursor == expected,
            f"of {len(facts)} facts, {len(later_offsets)} of them since then, the position is {cursor}",
        )
    await client.confirm(facts[0].cursor)
    await client.prune()
    expect(await client.get_cursor_at(1) == facts[0].cursor, "a fact that is no longer retained has a position")


async def _append_at_several_times(client: BoundaryCheckClient) -> list[StoredFact]:
    """Append facts that are stored in at least three different milliseconds."""
    for number in range(1, 20):
        await client.append_many(*make_facts(1, first=number))
        await asyncio.sleep(0.002)  # stores have their own clocks, so only time helps
    facts = await client.fetch(19)
    moments = {fact.stored_at_unix_ms for fact in facts}
    expect(len(moments) >= 3, f"{len(facts)} facts, 2 ms apart, have {len(moments)} moments")
    return facts


@check("FAC-16", "FAC-17")
async def a_survey_reports_how_far_every_reader_is(context: BoundaryCheckContext) -> None:
    client = context.client()
    expect(not await client.list_logs(), "an unused store lists logs")
    objects = ['{"a": 1}', '"Grüße"', "[1, 2, 3]"]
    await client.append_many(
        *((make_envelope(f"m-{n}"), make_fact(object_json=text)) for n, text in enumerate(objects, 1)),
    )
    facts = await client.fetch(reader="one")
    await client.fetch(reader="two")
    await client.confirm(facts[0].cursor, reader="one")
    await client.confirm(facts[2].cursor, reader="two")
    empty_pair = ZonePair("Elsewhere", PAIR.from_zone)
    await client.fetch(reader="early", pair=empty_pair)
    sizes = [len(text.encode()) for text in objects]
    logs = await context.client().list_logs()
    expect(logs.keys() == {PAIR, empty_pair}, f"of two pairs {len(logs)} are listed")
    state = logs[PAIR]
    actual = state.buffer, state.epoch, state.first, state.last, state.bytes
    expected = client.capabilities.side.store_buffer, facts[0].epoch, 1, 3, sum(sizes)
    expect(actual == expected, f"the log state is {actual}, not {expected}")
    expect(
        state.readers
        == {
            "one": ReaderLag(1, 2, sum(sizes[1:]), facts[1].stored_at_unix_ms),
            "two": ReaderLag(3, 0, 0, None),
        },
        f"the readers are {state.readers}",
    )
    empty = logs[empty_pair]
    expect((empty.first, empty.last, empty.bytes) == (1, 0, 0), f"a pair without facts is listed as {empty}")
    expect(empty.readers == {"early": ReaderLag(0, 0, 0, None)}, f"the waiting readers are {empty.readers}")
    await client.prune()
    expect((await client.list_logs())[PAIR].first == 2, "removed facts are reported as stored")


@check("FAC-16")
async def a_retired_reader_is_forgotten(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.append_many(*make_facts(2))
    facts = await client.fetch(reader="old")
    await client.confirm(facts[0].cursor, reader="old")
    expect(await client.retire_reader(reader="old", by="operator"), "a reader cannot be retired")
    expect(not await context.client().retire_reader(reader="old", by="operator"), "a reader can be retired twice")
    expect(await client.get_cursor(reader="old") is None, "a retired reader has a cursor")
    expect("old" not in (await client.list_logs())[PAIR].readers, "a retired reader is listed")
    await expect_raises(ReaderUnknown, client.confirm(facts[1].cursor, reader="old"), "a receipt of a retired reader")
    again = await client.fetch(reader="old")
    expect([each.offset for each in again] == [1, 2], "a retired reader that returns does not start at the first fact")
