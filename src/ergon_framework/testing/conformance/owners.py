"""Checks of zones that share a store: their own artifact names, and the limit of readers."""

from __future__ import annotations

import asyncio
from typing import Final

from ergon_framework.facts.errors import ArtifactConflict, ArtifactRefused, ArtifactUnknown, TooManyReaders
from ergon_framework.facts.model import SENDER_PREFIX, BoundarySide, StoredFact, ZonePair, fact_digest
from ergon_framework.testing.conformance.boundary_client import (
    PAIR,
    BoundaryCheckContext,
    envelope,
    expect_error,
    expect_raises,
    make_artifact_fact,
    make_fact,
    make_reference,
)
from ergon_framework.testing.conformance.check import check, expect
from ergon_framework.testing.conformance.contents_words import stored_of

#: Facts of another zone, which a replicator forwards.
ARRIVING: Final = ZonePair(PAIR.to_zone, PAIR.from_zone)
PEER: Final = ARRIVING.from_zone


def _arriving(key: str, content: bytes, *, offset: int = 1) -> StoredFact:
    """Create a fact of the other zone that references an artifact."""
    around, fact = envelope(f"p-{offset}", pair=ARRIVING), make_artifact_fact(make_reference(key, content))
    return StoredFact(
        envelope=around,
        fact=fact,
        digest=fact_digest(around, fact),
        offset=offset,
        epoch="theirs",
        stored_at_unix_ms=around.produced_at_unix_ms,
    )


@check("SEC-10")
async def two_zones_have_the_same_name_apart(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.put("exam", "a", [b"theirs"], zone=PEER)
    stored = await client.put("exam", "a", [b"our own"])
    expect(stored == stored_of(b"our own"), "a name that another zone has is taken")
    expect(await client.read("exam", "a") == b"our own", "an artifact of another zone is read under the store's name")
    await expect_raises(
        ArtifactConflict, client.put("exam", "a", [b"more"], zone=PEER), "other bytes of the other zone"
    )
    await client.forwarded(_arriving("a", b"theirs"))
    expect(await client.read("exam", "a", zone=PEER) == b"theirs", "the artifact of the other zone is another")
    expect(await client.read("exam", "a") == b"our own", "a fact of another zone has changed what is read")


@check("SEC-10")
async def bytes_of_one_zone_are_not_here_for_another(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    secret = b"the payroll of November"
    await client.put("exam", "payroll", [secret])
    here = await client.received("exam", "payroll", stored_of(secret), zone=PEER)
    expect(here == 0, f"a zone that knows a digest need not send {here} of the bytes")
    await client.put("exam", "theirs", [b"from the other zone"], zone=PEER)
    here = await client.received("exam", "theirs", stored_of(b"from the other zone"))
    expect(here == 0, f"of an artifact of another zone {here} bytes need not be sent")
    await expect_raises(
        ArtifactUnknown, client.read("exam", "theirs"), "reading another zone's artifact without its zone"
    )


@check("SEC-10", "FAC-14")
async def a_fact_that_arrives_names_artifacts_of_its_zone_only(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    secret = b"the payroll of November"
    await client.put("exam", "payroll", [secret])
    (result,) = await client.forward(_arriving("payroll", secret))
    expect_error(result, ArtifactRefused, "a fact that names an artifact of another zone")
    await expect_raises(
        ArtifactUnknown, client.read("exam", "payroll", zone=PEER), "reading what that zone has not stored"
    )
    await client.put("exam", "payroll", [secret], zone=PEER)
    await client.forwarded(_arriving("payroll", secret))
    expect(await client.read("exam", "payroll", zone=PEER) == secret, "what the zone has stored cannot be read")


@check("SEC-10", "FAC-14")
async def a_fact_of_this_zone_names_no_artifact_of_another(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.put("exam", "a", [b"theirs"], zone=PEER)
    (result,) = await client.append_many((envelope(), make_artifact_fact(make_reference("a", b"theirs"))))
    expect_error(result, ArtifactRefused, "a fact that names an artifact of another zone")
    await client.put("exam", "a", [b"theirs"])
    await client.append(envelope(), make_artifact_fact(make_reference("a", b"theirs")))
    expect(await client.read("exam", "a", zone=PAIR.from_zone) == b"theirs", "an own artifact has another owner")


@check("SEC-10", "FAC-23")
async def retention_tells_owners_apart(sitting: BoundaryCheckContext) -> None:
    client = sitting.client(side=BoundarySide.INNER)
    content = b"the same bytes"
    await client.put("exam", "a", [content])
    await client.put("exam", "a", [content], zone=PEER)
    await client.forwarded(_arriving("a", content))
    pruned = await client.prune()
    expect(pruned.artifacts == 1, f"{pruned.artifacts} artifacts were removed, and one of two is named by a fact")
    await expect_raises(ArtifactUnknown, client.read("exam", "a"), "reading what retention has removed")
    expect(await client.read("exam", "a", zone=PEER) == content, "what a fact of its owner names is gone")


@check("SEC-11")
async def a_zone_has_so_many_readers_and_no_more(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    # A pair with facts and one without: both belong to the zone, and so does the reader of what it has sent.
    await client.append(envelope(), make_fact())
    elsewhere = ZonePair("Elsewhere", PAIR.to_zone)
    for pair, reader in ((PAIR, "one"), (elsewhere, "two"), (ARRIVING, f"{SENDER_PREFIX}three")):
        await client.fetch(reader=reader, pair=pair, max_readers=3)
    for pair in (PAIR, elsewhere, ZonePair("Never", PAIR.to_zone)):
        more = client.fetch(reader="four", pair=pair, max_readers=3)
        error = await expect_raises(TooManyReaders, more, "a fourth reader of a zone that may have three")
        expect("3" in str(error) and PAIR.to_zone in str(error), f"the limit or the zone is not told: {error}")
    await client.fetch(reader="one", max_readers=3)
    await client.fetch(reader="theirs", pair=ARRIVING, max_readers=3)
    expect(not any("four" in state.readers for state in (await client.survey()).values()), "it was registered")
    expect(ZonePair("Never", PAIR.to_zone) not in await client.survey(), "a refused reader has left a pair of zones")
    await client.retire(reader="two", pair=elsewhere)
    await client.fetch(reader="four", max_readers=3)


@check("SEC-11")
async def readers_that_come_at_once_are_counted(sitting: BoundaryCheckContext) -> None:
    clients = [sitting.client() for _ in range(4)]
    await clients[0].append(envelope(), make_fact())
    calls = [client.fetch(reader=f"r{number}", max_readers=3) for number in range(4) for client in clients]
    results = await asyncio.gather(*calls, return_exceptions=True)
    readers = (await clients[0].survey())[PAIR].readers
    expect(len(readers) == 3, f"{len(readers)} readers are registered, and 3 may be")
    refusals = [result for result in results if isinstance(result, TooManyReaders)]
    expect(len(refusals) == 4, f"{len(refusals)} of 16 calls were refused, and one reader of four is too many")
