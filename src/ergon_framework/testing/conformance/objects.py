"""Checks of artifacts: confirmations, immutability, interrupted uploads, and lost or damaged contents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from ergon_framework.facts.errors import (
    ArtifactConflict,
    ArtifactLost,
    ArtifactMismatch,
    ArtifactUnknown,
    FactError,
    InvalidFactError,
)
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.testing.conformance.boundary_client import (
    PAIR,
    BoundaryCheckContext,
    BoundaryClient,
    envelope,
    expect_raises,
    make_artifact_fact,
    make_reference,
)
from ergon_framework.testing.conformance.check import CheckFailed, NotApplicable, check, expect
from ergon_framework.testing.conformance.contents_words import stored_of

#: The largest chunk of an artifact.
LARGEST = 1024 * 1024


class BrokenOff(FactError):
    """The connection was lost during an upload."""


#: Attempts until an interrupted upload has stored some bytes: a lost connection may discard bytes in transit.
_TRIES: Final = 10


def _breaking(*pieces: bytes) -> Iterator[bytes]:
    yield from pieces
    raise BrokenOff("the line is gone")


@check("FAC-04")
async def what_is_stored_is_confirmed_by_its_digest(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    pieces = [os.urandom(300_000), b"", os.urandom(900_000), b"x"]
    content = b"".join(pieces)
    stored = await client.put("exam", "big/file.bin", pieces)
    expect(stored.digest == f"sha256:{hashlib.sha256(content).hexdigest()}", f"the digest is {stored.digest}")
    expect(stored.size == len(content), f"the size is {stored.size}, not {len(content)}")
    read = await sitting.client().pieces("exam", "big/file.bin")
    expect(b"".join(read) == content, "another client reads other bytes than were stored")
    largest = max(map(len, read))
    expect(len(read) > 1 and largest <= LARGEST, f"{len(content)} bytes came in {len(read)} pieces of up to {largest}")
    nothing = await client.put("exam", "empty", [])
    expect(nothing.size == 0 and await client.read("exam", "empty") == b"", "an empty artifact is not empty")


@check("FAC-04")
async def bytes_are_stored_as_they_are(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    for key, content in (
        ("bytes", os.urandom(600_000)),
        ("bytearray", bytearray(b"abc")),
        ("view", memoryview(b"abc")),
    ):
        stored = await client.put("exam", key, content)
        expect(stored == stored_of(bytes(content)), f"{key} given at once is confirmed as {stored}")
        expect(await client.read("exam", key) == bytes(content), f"{key} given at once is read as other bytes")


@check("FAC-21")
async def the_same_bytes_again_are_answered_as_the_first_time(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    first = await client.put("exam", "a", [b"abc"])
    expect(await client.put("exam", "a", [b"a", b"bc"]) == first, "the same bytes in other pieces are told otherwise")
    other = await client.put("exam", "b", [b"abc"])
    expect(other == first, "the same bytes under another key have another digest")
    expect(await client.read("exam", "b") == b"abc", "the same bytes under another key cannot be read")


@check("FAC-07")
async def other_bytes_under_the_same_name_are_a_conflict(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.put("exam", "a", [b"abc"])
    for other in (b"abd", b"abcd", b""):
        error = await expect_raises(ArtifactConflict, client.put("exam", "a", [other]), "other bytes for a stored name")
        expect(error.final, "a conflict looks as if trying again could help")
    expect(await client.read("exam", "a") == b"abc", "a stored artifact has changed")
    await client.put("other", "a", [b"abd"])
    expect(await client.read("exam", "a") == b"abc", "an artifact of one bucket is another's")


@check("FAC-21")
async def an_upload_that_breaks_off_leaves_nothing(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await expect_raises(BrokenOff, client.put("exam", "a", _breaking(b"half of ", b"it")), "an upload that breaks off")
    await expect_raises(ArtifactUnknown, client.read("exam", "a"), "reading half of an artifact")
    stored = await client.put("exam", "a", [b"all of it"])
    expect(stored.size == 9, "after an upload that broke off the whole one is refused")
    await expect_raises(BrokenOff, client.put("exam", "a", _breaking(b"all ")), "a second upload that breaks off")
    expect(await client.read("exam", "a") == b"all of it", "an upload that broke off has changed what was stored")


@check("FAC-21")
async def what_was_not_expected_is_not_kept(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    right = stored_of(b"all of it")
    for wrong in (stored_of(b"something else"), StoredArtifact(right.digest, right.size + 1)):
        await expect_raises(
            ArtifactMismatch, client.put("exam", "a", [b"all of it"], expected=wrong), "bytes that were not expected"
        )
        await expect_raises(ArtifactUnknown, client.read("exam", "a"), "reading what was not expected")
        expect(await client.received("exam", "a", wrong) == 0, "what was not expected can be gone on with")
    expect(await client.put("exam", "a", [b"all of it"], expected=right) == right, "what was expected is refused")
    # The store may answer without reading the bytes, because the expected content exists.
    with suppress(FactError):
        await client.put("exam", "a", [b"other"], expected=right)
    expect(await client.read("exam", "a") == b"all of it", "what was not expected has changed what was stored")


@check("FAC-21", "FAC-17")
async def an_upload_goes_on_after_a_break(sitting: BoundaryCheckContext) -> None:
    content = os.urandom(900_000)
    expected, half = stored_of(content), 600_000
    client = sitting.client()
    expect(await client.received("exam", "a", expected) == 0, "of an upload that nobody began something is here")
    for key in ("a", "b"):
        for _ in range(_TRIES):
            broken = client.put("exam", key, _breaking(content[:300_000], content[300_000:half]), expected=expected)
            await expect_raises(BrokenOff, broken, "an upload that breaks off")
            await expect_raises(ArtifactUnknown, client.read("exam", key), "reading half of an artifact")
            if await client.received("exam", key, expected):
                break
    # As after a crash: the next client knows the content to send, and asks how much of it is stored.
    heir = sitting.client()
    here = min([await heir.received("exam", key, expected) for key in ("a", "b")])
    expect(here <= half, f"{half} bytes came, and {here} are said to be here")
    expect(here > 0 or not sitting.candidate.resumes, "nothing is left of an upload that broke off")
    expect(await heir.received("exam", "a", stored_of(b"other")) == 0, "what came counts for another artifact")
    expect(await heir.received("exam", "c", expected) == 0, "what came counts under another name")
    for key, begin in (("a", here), ("b", here // 2)):
        stored = await heir.put("exam", key, [content[begin:]], expected=expected, begin=begin)
        expect(stored == expected, f"gone on with at byte {begin}, it was confirmed as {stored}")
        expect(await heir.read("exam", key) == content, f"gone on with at byte {begin}, other bytes are stored")
    if sitting.candidate.resumes:
        expect(await client.received("exam", "a", expected) == expected.size, "what is stored has to be sent again")


@check("FAC-21")
async def nobody_goes_on_where_nothing_came(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    content = b"all of it"
    await expect_raises(
        BrokenOff, client.put("exam", "a", _breaking(content[:3]), expected=stored_of(content)), "an upload that breaks"
    )
    here = await client.received("exam", "a", stored_of(content))
    for key, expected, begin in (("a", stored_of(content), here + 1), ("a", None, 3), ("new", stored_of(content), 1)):
        call = client.put("exam", key, [content[begin:]], expected=expected, begin=begin)
        await expect_raises(InvalidFactError, call, f"going on at byte {begin} with {here} bytes there")
        await expect_raises(ArtifactUnknown, client.read("exam", key), "reading what was never whole")
    stored = await client.put("exam", "a", [content], expected=stored_of(content))
    expect(stored.size == len(content), "an upload that could not be gone on with cannot begin anew")


@check("FAC-04")
async def an_artifact_is_read_from_any_byte(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    content = os.urandom(600_001)
    await client.put("exam", "a", [content])
    for begin in (0, 1, 262_144, 600_000, 600_001):
        read = await client.read("exam", "a", begin=begin)
        expect(read == content[begin:], f"from byte {begin} on came {len(read)} bytes, and not those that are stored")


@check("FAC-04")
async def no_name_leads_out_of_its_bucket(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    names = [
        ("exam", key) for key in ("../a", "a/../../b", "/a", "a//b", ".", "..", "a\\..\\b", "", "a\0b", "x" * 1025)
    ]
    for bucket, key in [*names, ("..", "a"), (".hidden", "a"), ("a/b", "c"), ("", "a"), ("x" * 64, "a")]:
        await expect_raises(InvalidFactError, client.put(bucket, key, [b"x"]), f"the name {bucket!r}, {key[:20]!r}")
        await expect_raises(InvalidFactError, client.read(bucket, key), f"the name {bucket!r}, {key[:20]!r}")
    await client.put("exam", "Grüße/7 🙂.pdf", [b"hello"])
    expect(await client.read("exam", "Grüße/7 🙂.pdf") == b"hello", "a name with blanks and umlauts cannot be read")


async def _named(sitting: BoundaryCheckContext) -> BoundaryClient:
    client = sitting.client()
    content = b"important" * 100
    await client.put("exam", "a/b", [content])
    await client.append(envelope(), make_artifact_fact(make_reference("a/b", content)))
    return client


def _blames(error: ArtifactLost) -> None:
    told = error.from_zone, error.message_id, error.bucket, error.key
    expect(told == (PAIR.from_zone, "m-1", "exam", "a/b"), f"the error names {told}")


@check("FAC-23")
async def a_lost_artifact_is_an_error_that_names_its_fact(sitting: BoundaryCheckContext) -> None:
    client = await _named(sitting)
    if not sitting.candidate.lose(sitting.store(), "exam", "a/b"):
        raise NotApplicable("the candidate cannot lose an artifact")
    _blames(await expect_raises(ArtifactLost, client.read("exam", "a/b"), "reading a lost artifact"))
    await expect_raises(ArtifactUnknown, client.read("exam", "never"), "reading what was never stored")


@check("FAC-23")
async def damage_is_found_when_it_is_read(sitting: BoundaryCheckContext) -> None:
    client = await _named(sitting)
    if not sitting.candidate.damage(sitting.store(), "exam", "a/b"):
        raise NotApplicable("the candidate cannot damage an artifact")
    _blames(await expect_raises(ArtifactLost, client.read("exam", "a/b"), "reading a damaged artifact"))


@check("FAC-14", "FAC-23")
async def a_fact_about_a_lost_artifact_is_refused(sitting: BoundaryCheckContext) -> None:
    client = sitting.client()
    await client.put("exam", "a/b", [b"abc"])
    if not sitting.candidate.lose(sitting.store(), "exam", "a/b"):
        raise NotApplicable("the candidate cannot lose an artifact")
    (result,) = await client.append_many((envelope(), make_artifact_fact(make_reference("a/b", b"abc"))))
    if not isinstance(result, FactError):
        raise CheckFailed("a fact about an artifact whose bytes are gone was stored")
