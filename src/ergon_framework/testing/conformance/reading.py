"""Cursors: where a reader goes on, what he may read again, and what is kept for him."""

from __future__ import annotations

from ergon_framework.facts.errors import OffsetAhead, OffsetGone, ReaderUnknown
from ergon_framework.facts.model import Cursor, Pair
from ergon_framework.testing.conformance.boundary_client import (
    PAIR,
    BoundarySitting,
    about,
    envelope,
    many,
    named,
    raised,
)
from ergon_framework.testing.conformance.check import expect, rule


@rule("FAC-16")
async def a_reader_goes_on_where_he_confirmed(sitting: BoundarySitting) -> None:
    client = sitting.client()
    await client.append_many(*many(6))
    first = await client.fetch(4)
    expect([each.offset for each in first] == [1, 2, 3, 4], "a fetch of 4 does not bring the first 4")
    again = await client.fetch(4)
    expect([each.offset for each in again] == [1, 2, 3, 4], "what was not confirmed does not come again")
    await client.confirm(first[2].cursor)
    # As after a crash: whoever comes next knows only the name.
    heir = sitting.client()
    expect(await heir.cursor() == first[2].cursor, f"the cursor is {await heir.cursor()}, not {first[2].cursor}")
    rest = await heir.fetch()
    expect([each.offset for each in rest] == [4, 5, 6], f"after a receipt for 3 came {[each.offset for each in rest]}")
    await heir.confirm(rest[-1].cursor)
    expect(not await heir.fetch(), "after a receipt for all something came")


@rule("FAC-16")
async def a_receipt_never_goes_back(sitting: BoundarySitting) -> None:
    client = sitting.client()
    await client.append_many(*many(3))
    facts = await client.fetch()
    await client.confirm(facts[2].cursor)
    await client.confirm(facts[0].cursor)
    expect(await client.cursor() == facts[2].cursor, "an older receipt has moved the cursor back")


@rule("FAC-16")
async def a_receipt_is_for_what_was_there(sitting: BoundarySitting) -> None:
    client = sitting.client()
    await client.append_many(*many(2))
    (first, _) = await client.fetch()
    beyond = Cursor(first.epoch, 3)
    await raised(OffsetAhead, client.confirm(beyond), "a receipt for a fact that does not exist")
    await raised(OffsetAhead, client.fetch(after=beyond), "reading behind a fact that does not exist")
    await raised(ReaderUnknown, client.confirm(first.cursor, reader="nobody"), "a receipt of somebody unknown")
    expect(await client.cursor() == Cursor(first.epoch, 0), "a refused receipt has moved the cursor")


@rule("FAC-16")
async def readers_have_cursors_of_their_own(sitting: BoundarySitting) -> None:
    client = sitting.client()
    elsewhere = Pair(PAIR.from_zone, "Elsewhere")
    await client.append_many(*many(3), (envelope("e-1", pair=elsewhere), many(1)[0][1]))
    facts = await client.fetch(reader="one")
    await client.fetch(reader="two")
    await client.confirm(facts[-1].cursor, reader="one")
    expect(len(await client.fetch(reader="two")) == 3, "one reader's receipt has moved another's cursor")
    expect(len(await client.fetch(reader="one", pair=elsewhere)) == 1, "a receipt for one pair counts for another")


@rule("FAC-16")
async def what_is_retained_can_be_read_again(sitting: BoundarySitting) -> None:
    client = sitting.client()
    await client.append_many(*many(5))
    facts = await client.fetch()
    await client.confirm(facts[-1].cursor)
    for offset in range(5):
        again = await client.fetch(after=Cursor(facts[0].epoch, offset))
        expect(
            [each.offset for each in again] == list(range(offset + 1, 6)), f"replaying behind {offset} brought others"
        )
    expect(await client.cursor() == facts[-1].cursor, "a replay has moved the cursor")


@rule("FAC-16")
async def nothing_is_dropped_that_a_reader_has_not_confirmed(sitting: BoundarySitting) -> None:
    client = sitting.client()
    await client.append_many(*many(4))
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
    await raised(OffsetGone, client.fetch(reader="fast", after=gone), "reading what is no longer retained")
    newcomer = await client.fetch(reader="late")
    expect([each.offset for each in newcomer] == [3, 4], "a new reader does not begin at the first retained fact")
    expect(await client.retire(reader="slow"), "a reader cannot be retired")
    await client.confirm(facts[3].cursor, reader="late")
    expect((await client.prune()).facts == 2, "a retired reader holds up retention")


@rule("FAC-16", "FAC-14")
async def what_is_young_is_kept(sitting: BoundarySitting) -> None:
    client = sitting.client()
    await client.append_many(*many(2))
    # Its fact has yet to come.
    await client.put("exam", "new", [b"abc"])
    facts = await client.fetch()
    await client.confirm(facts[-1].cursor)
    pruned = await client.prune(before=1)
    expect(pruned == (0, 0), f"of what was stored after the moment of retention {pruned} were removed")
    named_late = await client.append(envelope("late"), about(named("new", b"abc")))
    expect(named_late.offset == 3, "retention came between an artifact and its fact")


@rule("FAC-23")
async def retention_spares_what_a_retained_fact_names(sitting: BoundarySitting) -> None:
    client = sitting.client()
    for number in (1, 2):
        content = f"content {number}".encode()
        await client.put("exam", f"{number}", [content])
        await client.append(envelope(f"m-{number}"), about(named(f"{number}", content)))
    await client.put("exam", "unnamed", [b"nobody names it"])
    facts = await client.fetch()
    await client.confirm(facts[0].cursor)
    pruned = await client.prune()
    expect(
        pruned.artifacts == 2, f"of 3 artifacts, one of which a retained fact names, {pruned.artifacts} were removed"
    )
    expect(await client.read("exam", "2") == b"content 2", "an artifact that a retained fact names is gone")
