"""Checks of contents: confirmation, reading and removal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.errors import ArtifactMismatch, BufferFull, InvalidFactError
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.testing.conformance.candidate import UNSAID
from ergon_framework.testing.conformance.check import NotApplicable, expect
from ergon_framework.testing.conformance.contents_candidate import ContentCheckContext
from ergon_framework.testing.conformance.contents_words import (
    blocking,
    raises,
    read,
    sample_bytes,
    store_content,
    stored_of,
)


@blocking("FAC-04")
def what_is_sealed_has_its_digest(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    for content in (sample_bytes(sitting.candidate.large), b"x", b""):
        stored = store_content(contents, content)
        expect(stored == stored_of(content), f"{len(content)} bytes were confirmed as {stored}")
        other = sitting.contents()
        expect(other.size_of(stored.digest) == len(content), f"others find {other.size_of(stored.digest)} bytes")
        expect(read(other, stored.digest) == content, f"of {len(content)} bytes others read something else")


@blocking("FAC-04")
def it_is_read_in_small_pieces(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    stored = store_content(contents, sample_bytes(sitting.candidate.large))
    pieces = [len(piece) for piece in contents.read(stored.digest)]
    expect(max(pieces) <= CHUNK_BYTES, f"{stored.size} bytes came in pieces of up to {max(pieces)}")


@blocking("FAC-04")
def reading_begins_anywhere(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    content = sample_bytes(sitting.candidate.large)
    stored = store_content(contents, content)
    for begin in (1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, stored.size // 2, stored.size - 1, stored.size):
        got = read(contents, stored.digest, begin)
        expect(got == content[begin:], f"from byte {begin} on came {len(got)} bytes, and not those that are there")


@blocking("FAC-21")
def nothing_can_be_read_before_the_seal(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    content = sample_bytes(sitting.candidate.large)
    digest = stored_of(content).digest
    with contents.begin_upload() as receiving:
        receiving.add(content)
        expect(receiving.size == len(content), f"of {len(content)} bytes {receiving.size} are said to be here")
        expect(contents.size_of(digest) is None, "a content is there before it was sealed")
        raises(KeyError, lambda: read(contents, digest), "reading before the seal")
        receiving.commit()
    expect(contents.size_of(digest) == len(content), "a content is not there after it was sealed")


@blocking("FAC-21")
def what_was_not_expected_is_not_kept(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    content = sample_bytes(sitting.candidate.large)
    right = stored_of(content)
    for number, expected in enumerate((stored_of(b"other"), StoredArtifact(right.digest, right.size + 1))):
        for name in (None, f"upload{number}"):
            _mismatched(sitting, name, content, expected)
            expect(contents.size_of(right.digest) is None, "what was not expected is kept under its own digest")
            expect(contents.size_of(expected.digest) is None, "what was not expected is kept as what was")
            if name is not None:
                expect(contents.uploaded_bytes(name) == 0, "what was not expected can be gone on with")
    with contents.begin_upload() as receiving:
        receiving.add(content)
        expect(receiving.commit(right) == right, "what was expected is confirmed as something else")


def _mismatched(sitting: ContentCheckContext, name: str | None, content: bytes, expected: StoredArtifact) -> None:
    with sitting.contents().begin_upload(name) as receiving:
        receiving.add(content)
        raises(ArtifactMismatch, lambda: receiving.commit(expected), "an upload that is not what was expected")


@blocking("FAC-21")
def the_same_content_is_kept_once(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    content = sample_bytes(sitting.candidate.large)
    first = store_content(contents, content)
    expect(store_content(contents, content) == first, "the same bytes again are confirmed otherwise")
    expect(
        store_content(contents, content, "named") == first, "the same bytes in a named upload are confirmed otherwise"
    )
    expect(contents.remove(first.digest), "a content that was stored three times is not there")
    expect(contents.size_of(first.digest) is None, "a content that was stored three times is there when it is removed")


@blocking("FAC-21")
def what_was_cut_short_is_replaced(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    content = sample_bytes(sitting.candidate.large)
    stored = store_content(contents, content)
    if not sitting.candidate.cut(sitting.place, stored.digest):
        raise NotApplicable("the candidate cannot cut a content")
    expect(contents.size_of(stored.digest) != stored.size, "a content that was cut seems to be whole")
    store_content(contents, content)
    expect(read(contents, stored.digest) == content, "a damaged content stays, although a good one was sealed")


@blocking("FAC-23")
def what_is_removed_is_gone(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    one, other = store_content(contents, b"one"), store_content(contents, b"other")
    expect(contents.remove(one.digest), "removing a content is answered as if it were not there")
    expect(contents.size_of(one.digest) is None, "what was removed is there")
    raises(KeyError, lambda: read(contents, one.digest), "reading what was removed")
    expect(not contents.remove(one.digest), "removing it again is answered as if it were there")
    expect(read(contents, other.digest) == b"other", "with one content another was removed")
    expect(read(contents, store_content(contents, b"one").digest) == b"one", "what was removed cannot be stored again")


@blocking("FAC-04")
def only_a_digest_names_a_content(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    digits = store_content(contents, b"x").digest.removeprefix("sha256:")
    for hostile in ("", digits, "sha256:", f"sha256:{digits.upper()}", f"md5:{digits}", f"sha256:{digits}/../{digits}"):
        _names_nothing(sitting, hostile)
    _names_nothing(sitting, f"sha256:../../../../../../etc/passwd{digits}"[:71])


def _names_nothing(sitting: ContentCheckContext, hostile: str) -> None:
    contents = sitting.contents()
    expect(contents.size_of(hostile) is None, f"{hostile!r} names a content")
    raises(KeyError, lambda: read(contents, hostile), f"reading {hostile!r}")
    expect(not contents.remove(hostile), f"{hostile!r} was removed")


@blocking("FAC-04")
def only_bytes_are_taken(sitting: ContentCheckContext) -> None:
    wrong: Any
    with sitting.contents().begin_upload() as receiving:
        _adding(receiving.add, bytearray(b"a"))()
        _adding(receiving.add, memoryview(b"b"))()
        for wrong in ("text", 7, None):
            raises(InvalidFactError, _adding(receiving.add, wrong), f"a piece that is {wrong!r}")
        expect(receiving.commit() == stored_of(b"ab"), "what was refused has left something")


def _adding(add: Callable[[Any], None], piece: Any) -> Callable[[], None]:
    return lambda: add(piece)


@blocking("FAC-21")
def many_at_once_store_what_each_has(sitting: ContentCheckContext) -> None:
    # Half of them are equal and have the same digest.
    same = sample_bytes(300_000)
    own = [same if number % 2 else sample_bytes(300_000 + number) for number in range(12)]
    opened = [sitting.contents() for _ in range(3)]

    # No upload is committed before all are running.
    together = threading.Barrier(len(own), timeout=60)

    def store(number: int) -> StoredArtifact:
        with opened[number % 3].begin_upload() as receiving:
            receiving.add(own[number][:100_000])
            together.wait()
            receiving.add(own[number][100_000:])
            return receiving.commit()

    with ThreadPoolExecutor(len(own)) as threads:
        told = list(threads.map(store, range(len(own))))
    for content, stored in zip(own, told, strict=True):
        expect(stored == stored_of(content), f"among many, {len(content)} bytes were confirmed as {stored}")
        expect(read(opened[0], stored.digest) == content, "among many, other bytes are kept than were sent")


@blocking("FAC-16")
def a_full_place_refuses_before_anything_is_lost(sitting: ContentCheckContext) -> None:
    if not sitting.candidate.bounded:
        raise NotApplicable("the candidate has places without bounds only")
    contents = sitting.contents(room=1_000_000)
    first = store_content(contents, sample_bytes(600_000))
    second = sample_bytes(500_000)
    raises(BufferFull, lambda: store_content(contents, second), "500,000 bytes more than there is room for")
    expect(contents.size_of(stored_of(second).digest) is None, "what there was no room for is there")
    expect(contents.size_of(first.digest) == first.size, "what was there before is gone")


@blocking("FAC-26")
def it_knows_whether_it_is_durable(sitting: ContentCheckContext) -> None:
    durable, known = sitting.contents().durable, sitting.candidate.durable
    expect(durable in (True, False, None), f"durable is {durable!r}")
    expect(known is UNSAID or durable is known, f"durable is {durable}, and the candidate knows it to be {known}")
