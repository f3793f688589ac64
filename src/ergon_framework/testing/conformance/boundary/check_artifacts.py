"""Check artifacts: confirmations, immutability, interrupted uploads, and lost or damaged contents.

Zones that share a store have their own artifact names and their own limit of readers. The store under test belongs to
``PAIR.from_zone``. ``PEER_ZONE`` is the other zone: ``put(zone=PEER_ZONE)`` stores an artifact of that zone, and
``forward`` stores a fact of that zone as a replicator does.

The arguments of ``check`` are the ids of requirements. The text of ``expect`` says what is wrong if its condition is
false; the text of ``expect_raises`` says what was attempted.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from ergon_framework.facts.errors import (
    ArtifactConflict,
    ArtifactLost,
    ArtifactMismatch,
    ArtifactRefused,
    ArtifactUnknown,
    FactError,
    InvalidFactError,
    TooManyReaders,
)
from ergon_framework.facts.model import SENDER_PREFIX, StoredArtifact, StoredFact, ZonePair, fact_digest
from ergon_framework.testing.conformance.boundary.client import (
    PAIR,
    BoundaryCheckClient,
    BoundaryCheckContext,
    expect_error,
    expect_raises,
    make_artifact_fact,
    make_envelope,
    make_fact,
    make_reference,
)
from ergon_framework.testing.conformance.check import CheckFailed, NotApplicable, check, expect
from ergon_framework.testing.conformance.content_store.fixture import compute_stored

#: The zones of facts that arrive from the other zone; a replicator forwards them to this store.
ARRIVING_PAIR: Final = ZonePair(PAIR.to_zone, PAIR.from_zone)
PEER_ZONE: Final = ARRIVING_PAIR.from_zone


def _make_arriving_fact(key: str, content: bytes, *, offset: int = 1) -> StoredFact:
    """Create a fact of the other zone that references an artifact."""
    envelope, fact = make_envelope(f"p-{offset}", pair=ARRIVING_PAIR), make_artifact_fact(make_reference(key, content))
    return StoredFact(
        envelope=envelope,
        fact=fact,
        digest=fact_digest(envelope, fact),
        offset=offset,
        epoch="theirs",
        stored_at_unix_ms=envelope.produced_at_unix_ms,
    )


@check("SEC-10")
async def two_zones_have_the_same_name_apart(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.put("files", "a", [b"theirs"], zone=PEER_ZONE)
    stored = await client.put("files", "a", [b"our own"])
    expect(stored == compute_stored(b"our own"), "a name that another zone uses cannot be used, or stores other bytes")
    expect(await client.read("files", "a") == b"our own", "an artifact of another zone is read under the store's name")
    await expect_raises(
        ArtifactConflict, client.put("files", "a", [b"more"], zone=PEER_ZONE), "other bytes of the other zone"
    )
    await client.forward_or_raise(_make_arriving_fact("a", b"theirs"))
    expect(await client.read("files", "a", zone=PEER_ZONE) == b"theirs", "the artifact of the other zone has changed")
    expect(await client.read("files", "a") == b"our own", "a fact of another zone has changed what is read")


@check("SEC-10")
async def bytes_of_one_zone_are_not_here_for_another(context: BoundaryCheckContext) -> None:
    client = context.client()
    secret = b"the payroll of November"
    await client.put("files", "payroll", [secret])
    uploaded = await client.get_uploaded_bytes("files", "payroll", compute_stored(secret), zone=PEER_ZONE)
    expect(uploaded == 0, f"a zone that knows a digest can skip {uploaded} of the bytes")
    await client.put("files", "theirs", [b"from the other zone"], zone=PEER_ZONE)
    uploaded = await client.get_uploaded_bytes("files", "theirs", compute_stored(b"from the other zone"))
    expect(uploaded == 0, f"{uploaded} bytes of another zone's artifact can be skipped")
    await expect_raises(
        ArtifactUnknown, client.read("files", "theirs"), "reading another zone's artifact without its zone"
    )


@check("SEC-10", "FAC-14")
async def a_fact_that_arrives_names_artifacts_of_its_zone_only(context: BoundaryCheckContext) -> None:
    client = context.client()
    secret = b"the payroll of November"
    await client.put("files", "payroll", [secret])
    (result,) = await client.forward(_make_arriving_fact("payroll", secret))
    expect_error(result, ArtifactRefused, "a fact that names an artifact of another zone")
    await expect_raises(
        ArtifactUnknown, client.read("files", "payroll", zone=PEER_ZONE), "reading what that zone has not stored"
    )
    await client.put("files", "payroll", [secret], zone=PEER_ZONE)
    await client.forward_or_raise(_make_arriving_fact("payroll", secret))
    expect(await client.read("files", "payroll", zone=PEER_ZONE) == secret, "what the zone has stored cannot be read")


@check("SEC-10", "FAC-14")
async def a_fact_of_this_zone_names_no_artifact_of_another(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.put("files", "a", [b"theirs"], zone=PEER_ZONE)
    (result,) = await client.append_many((make_envelope(), make_artifact_fact(make_reference("a", b"theirs"))))
    expect_error(result, ArtifactRefused, "a fact that names an artifact of another zone")
    await client.put("files", "a", [b"theirs"])
    await client.append(make_envelope(), make_artifact_fact(make_reference("a", b"theirs")))
    expect(
        await client.read("files", "a", zone=PAIR.from_zone) == b"theirs",
        "the zone's own artifact is read from another owner",
    )


@check("SEC-10", "FAC-23")
async def retention_tells_owners_apart(context: BoundaryCheckContext) -> None:
    client = context.client()
    content = b"the same bytes"
    await client.put("files", "a", [content])
    await client.put("files", "a", [content], zone=PEER_ZONE)
    await client.forward_or_raise(_make_arriving_fact("a", content))
    pruned = await client.prune()
    expect(pruned.artifacts == 1, f"{pruned.artifacts} artifacts were removed, and one of two is named by a fact")
    await expect_raises(ArtifactUnknown, client.read("files", "a"), "reading what retention has removed")
    expect(await client.read("files", "a", zone=PEER_ZONE) == content, "what a fact of its owner names is gone")


@check("SEC-11")
async def a_zone_has_so_many_readers_and_no_more(context: BoundaryCheckContext) -> None:
    client = context.client()
    # All three readers count for PEER_ZONE: one of a pair with facts, one of a pair without facts, and one that reads
    # back what PEER_ZONE has sent.
    await client.append(make_envelope(), make_fact())
    other_pair = ZonePair("Elsewhere", PAIR.to_zone)
    for pair, reader in ((PAIR, "one"), (other_pair, "two"), (ARRIVING_PAIR, f"{SENDER_PREFIX}three")):
        await client.fetch(reader=reader, pair=pair, max_readers=3)
    for pair in (PAIR, other_pair, ZonePair("Never", PAIR.to_zone)):
        call = client.fetch(reader="four", pair=pair, max_readers=3)
        error = await expect_raises(TooManyReaders, call, "a fourth reader of a zone that may have three")
        expect(
            "3" in str(error) and PAIR.to_zone in str(error), f"the error does not name the limit and the zone: {error}"
        )
    await client.fetch(reader="one", max_readers=3)
    # This reader belongs to the other end of the pair, so it does not count for PEER_ZONE.
    await client.fetch(reader="theirs", pair=ARRIVING_PAIR, max_readers=3)
    expect(
        not any("four" in state.readers for state in (await client.list_logs()).values()),
        "a rejected reader is registered",
    )
    expect(
        ZonePair("Never", PAIR.to_zone) not in await client.list_logs(), "a rejected reader has created a pair of zones"
    )
    await client.retire_reader(reader="two", pair=other_pair)
    await client.fetch(reader="four", max_readers=3)


@check("SEC-11")
async def readers_that_come_at_once_are_counted(context: BoundaryCheckContext) -> None:
    clients = [context.client() for _ in range(4)]
    await clients[0].append(make_envelope(), make_fact())
    calls = [client.fetch(reader=f"r{number}", max_readers=3) for number in range(4) for client in clients]
    results = await asyncio.gather(*calls, return_exceptions=True)
    readers = (await clients[0].list_logs())[PAIR].readers
    expect(len(readers) == 3, f"{len(readers)} readers are registered, but 3 are allowed")
    rejections = [result for result in results if isinstance(result, TooManyReaders)]
    expect(
        len(rejections) == 4, f"{len(rejections)} of 16 calls were rejected, expected 4: one reader of four is too many"
    )


#: The largest chunk of an artifact.
MAX_CHUNK_BYTES = 1024 * 1024


class ArtifactUploadInterrupted(FactError):
    """The connection was lost during an upload."""


#: Attempts until an interrupted upload has stored some bytes: a lost connection may discard bytes in transit.
_MAX_INTERRUPTIONS: Final = 10


def _interrupt_after(*chunks: bytes) -> Iterator[bytes]:
    yield from chunks
    raise ArtifactUploadInterrupted("the connection was lost")


@check("FAC-04")
async def what_is_stored_is_confirmed_by_its_digest(context: BoundaryCheckContext) -> None:
    client = context.client()
    chunks = [os.urandom(300_000), b"", os.urandom(900_000), b"x"]
    content = b"".join(chunks)
    stored = await client.put("files", "big/file.bin", chunks)
    expect(stored.digest == f"sha256:{hashlib.sha256(content).hexdigest()}", f"the digest is {stored.digest}")
    expect(stored.size == len(content), f"the size is {stored.size}, not {len(content)}")
    read_chunks = await context.client().read_chunks("files", "big/file.bin")
    expect(b"".join(read_chunks) == content, "another client reads other bytes than were stored")
    largest = max(map(len, read_chunks))
    expect(
        len(read_chunks) > 1 and largest <= MAX_CHUNK_BYTES,
        f"{len(content)} bytes arrived in {len(read_chunks)} chunks of up to {largest}",
    )
    empty = await client.put("files", "empty", [])
    expect(empty.size == 0 and await client.read("files", "empty") == b"", "an empty artifact is not empty")


@check("FAC-04")
async def bytes_are_stored_as_they_are(context: BoundaryCheckContext) -> None:
    client = context.client()
    for key, content in (
        ("bytes", os.urandom(600_000)),
        ("bytearray", bytearray(b"abc")),
        ("view", memoryview(b"abc")),
    ):
        stored = await client.put("files", key, content)
        expect(stored == compute_stored(bytes(content)), f"{key} passed as one value is confirmed as {stored}")
        expect(await client.read("files", key) == bytes(content), f"{key} passed as one value is read as other bytes")


@check("FAC-21")
async def the_same_bytes_again_are_answered_as_the_first_time(context: BoundaryCheckContext) -> None:
    client = context.client()
    first = await client.put("files", "a", [b"abc"])
    expect(
        await client.put("files", "a", [b"a", b"bc"]) == first,
        "the same bytes in other chunks are confirmed differently",
    )
    other = await client.put("files", "b", [b"abc"])
    expect(other == first, "the same bytes under another key have another digest")
    expect(await client.read("files", "b") == b"abc", "the same bytes under another key cannot be read")


@check("FAC-07")
async def other_bytes_under_the_same_name_are_a_conflict(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.put("files", "a", [b"abc"])
    for other in (b"abd", b"abcd", b""):
        error = await expect_raises(
            ArtifactConflict, client.put("files", "a", [other]), "other bytes for a stored name"
        )
        expect(error.final, "a conflict is classified as retryable")
    expect(await client.read("files", "a") == b"abc", "a stored artifact has changed")
    await client.put("other", "a", [b"abd"])
    expect(await client.read("files", "a") == b"abc", "storing in one bucket has changed another bucket")


@check("FAC-21")
async def an_upload_that_breaks_off_leaves_nothing(context: BoundaryCheckContext) -> None:
    client = context.client()
    await expect_raises(
        ArtifactUploadInterrupted,
        client.put("files", "a", _interrupt_after(b"half of ", b"it")),
        "an interrupted upload",
    )
    await expect_raises(ArtifactUnknown, client.read("files", "a"), "reading half of an artifact")
    stored = await client.put("files", "a", [b"all of it"])
    expect(stored.size == 9, "after an interrupted upload the complete one is rejected")
    await expect_raises(
        ArtifactUploadInterrupted, client.put("files", "a", _interrupt_after(b"all ")), "a second interrupted upload"
    )
    expect(await client.read("files", "a") == b"all of it", "an interrupted upload has changed the stored bytes")


@check("FAC-21")
async def what_was_not_expected_is_not_kept(context: BoundaryCheckContext) -> None:
    client = context.client()
    right = compute_stored(b"all of it")
    for wrong in (compute_stored(b"something else"), StoredArtifact(right.digest, right.size + 1)):
        await expect_raises(
            ArtifactMismatch, client.put("files", "a", [b"all of it"], expected=wrong), "bytes that were not expected"
        )
        await expect_raises(ArtifactUnknown, client.read("files", "a"), "reading unexpected bytes")
        expect(
            await client.get_uploaded_bytes("files", "a", wrong) == 0, "an upload of unexpected bytes can be resumed"
        )
    expect(await client.put("files", "a", [b"all of it"], expected=right) == right, "the expected bytes are rejected")
    # The store may answer without reading the bytes, because the expected content exists.
    with suppress(FactError):
        await client.put("files", "a", [b"other"], expected=right)
    expect(await client.read("files", "a") == b"all of it", "unexpected bytes have changed the stored artifact")


@check("FAC-21", "FAC-17")
async def an_upload_goes_on_after_a_break(context: BoundaryCheckContext) -> None:
    content = os.urandom(900_000)
    expected, half = compute_stored(content), 600_000
    client = context.client()
    expect(await client.get_uploaded_bytes("files", "a", expected) == 0, "a new upload already has stored bytes")
    for key in ("a", "b"):
        for _ in range(_MAX_INTERRUPTIONS):
            interrupted = client.put(
                "files", key, _interrupt_after(content[:300_000], content[300_000:half]), expected=expected
            )
            await expect_raises(ArtifactUploadInterrupted, interrupted, "an interrupted upload")
            await expect_raises(ArtifactUnknown, client.read("files", key), "reading half of an artifact")
            if await client.get_uploaded_bytes("files", key, expected):
                break
    # As after a crash: the next client knows the content to send, and asks how much of it is stored.
    successor = context.client()
    uploaded = min([await successor.get_uploaded_bytes("files", key, expected) for key in ("a", "b")])
    expect(uploaded <= half, f"{half} bytes were sent, but {uploaded} are reported as stored")
    expect(uploaded > 0 or not context.system.resumes, "no bytes of an interrupted upload are stored")
    expect(
        await successor.get_uploaded_bytes("files", "a", compute_stored(b"other")) == 0,
        "uploaded bytes count for another artifact",
    )
    expect(await successor.get_uploaded_bytes("files", "c", expected) == 0, "uploaded bytes count under another name")
    for key, begin in (("a", uploaded), ("b", uploaded // 2)):
        stored = await successor.put("files", key, [content[begin:]], expected=expected, begin=begin)
        expect(stored == expected, f"resumed at byte {begin}, it was confirmed as {stored}")
        expect(await successor.read("files", key) == content, f"resumed at byte {begin}, other bytes are stored")
    if context.system.resumes:
        expect(
            await client.get_uploaded_bytes("files", "a", expected) == expected.size,
            "a stored artifact must be sent again",
        )


@check("FAC-21")
async def an_upload_cannot_resume_beyond_its_received_bytes(context: BoundaryCheckContext) -> None:
    client = context.client()
    content = b"all of it"
    await expect_raises(
        ArtifactUploadInterrupted,
        client.put("files", "a", _interrupt_after(content[:3]), expected=compute_stored(content)),
        "an upload that breaks",
    )
    uploaded = await client.get_uploaded_bytes("files", "a", compute_stored(content))
    for key, expected, begin in (
        ("a", compute_stored(content), uploaded + 1),
        ("a", None, 3),
        ("new", compute_stored(content), 1),
    ):
        call = client.put("files", key, [content[begin:]], expected=expected, begin=begin)
        await expect_raises(InvalidFactError, call, f"resuming at byte {begin} with {uploaded} stored bytes")
        await expect_raises(ArtifactUnknown, client.read("files", key), "reading an incomplete artifact")
    stored = await client.put("files", "a", [content], expected=compute_stored(content))
    expect(stored.size == len(content), "an upload that could not be resumed cannot start from scratch")


@check("FAC-04")
async def an_artifact_is_read_from_any_byte(context: BoundaryCheckContext) -> None:
    client = context.client()
    content = os.urandom(600_001)
    await client.put("files", "a", [content])
    for begin in (0, 1, 262_144, 600_000, 600_001):
        read = await client.read("files", "a", begin=begin)
        expect(
            read == content[begin:],
            f"from byte {begin} on {len(read)} bytes were read that differ from the stored ones",
        )


@check("FAC-04")
async def no_name_leads_out_of_its_bucket(context: BoundaryCheckContext) -> None:
    client = context.client()
    names = [
        ("files", key) for key in ("../a", "a/../../b", "/a", "a//b", ".", "..", "a\\..\\b", "", "a\0b", "x" * 1025)
    ]
    for bucket, key in [*names, ("..", "a"), (".hidden", "a"), ("a/b", "c"), ("", "a"), ("x" * 64, "a")]:
        await expect_raises(InvalidFactError, client.put(bucket, key, [b"x"]), f"the name {bucket!r}, {key[:20]!r}")
        await expect_raises(InvalidFactError, client.read(bucket, key), f"the name {bucket!r}, {key[:20]!r}")
    await client.put("files", "Grüße/7 🙂.pdf", [b"hello"])
    expect(await client.read("files", "Grüße/7 🙂.pdf") == b"hello", "a name with blanks and umlauts cannot be read")


async def _store_with_fact(context: BoundaryCheckContext) -> BoundaryCheckClient:
    client = context.client()
    content = b"important" * 100
    await client.put("files", "a/b", [content])
    await client.append(make_envelope("m-1"), make_artifact_fact(make_reference("a/b", content)))
    return client


def _expect_fact_named(error: ArtifactLost) -> None:
    actual = error.from_zone, error.message_id, error.bucket, error.key
    expect(actual == (PAIR.from_zone, "m-1", "files", "a/b"), f"the error names {actual}")


@check("FAC-23")
async def a_lost_artifact_is_an_error_that_names_its_fact(context: BoundaryCheckContext) -> None:
    client = await _store_with_fact(context)
    if not context.system.lose(context.store(), "files", "a/b"):
        raise NotApplicable("the system under test offers no way to lose an artifact")
    _expect_fact_named(await expect_raises(ArtifactLost, client.read("files", "a/b"), "reading a lost artifact"))
    await expect_raises(ArtifactUnknown, client.read("files", "never"), "reading what was never stored")


@check("FAC-23")
async def damage_is_found_when_it_is_read(context: BoundaryCheckContext) -> None:
    client = await _store_with_fact(context)
    if not context.system.damage(context.store(), "files", "a/b"):
        raise NotApplicable("the system under test offers no way to damage an artifact")
    _expect_fact_named(await expect_raises(ArtifactLost, client.read("files", "a/b"), "reading a damaged artifact"))


@check("FAC-14", "FAC-23")
async def a_fact_about_a_lost_artifact_is_refused(context: BoundaryCheckContext) -> None:
    client = context.client()
    await client.put("files", "a/b", [b"abc"])
    if not context.system.lose(context.store(), "files", "a/b"):
        raise NotApplicable("the system under test offers no way to lose an artifact")
    (result,) = await client.append_many((make_envelope(), make_artifact_fact(make_reference("a/b", b"abc"))))
    if not isinstance(result, FactError):
        raise CheckFailed(
            "the store accepted a fact whose artifact files/a/b has lost its bytes; it must reject the fact"
        )
