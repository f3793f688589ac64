"""Conformance suite of content stores: contents and interrupted uploads.

A content store keeps bytes under their SHA-256 digest. An upload adds chunks, and its commit makes them readable; an
upload with a name can be resumed after an interruption. Ids such as FAC-21 name the requirements in docs/spec.
``context.open()`` opens the check's store again, as another process would; ``system.large`` is the number of bytes of a
content that a store may split; ``interrupt_upload`` sends bytes and never commits them.
In a program ``run_suite(system)`` returns the results; in a test file one line creates a test per check::

    test_my_store = pytest_suite(MyContentStoreUnderTest)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.content_store import ContentUpload
from ergon_framework.facts.errors import ArtifactMismatch, BufferFull, InvalidFactError, UploadLost
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.testing.conformance.check import Check, CheckOutcome, CheckResult, NotApplicable, expect
from ergon_framework.testing.conformance.connector.adapter import UNKNOWN_DURABILITY
from ergon_framework.testing.conformance.connector.client import Variant
from ergon_framework.testing.conformance.content_store.fixture import (
    FAR_FUTURE_MS,
    ContentCheckContext,
    ContentStoreUnderTest,
    blocking_check,
    compute_stored,
    expect_raises,
    interrupt_upload,
    read_content,
    sample_bytes,
    store_content,
)
from ergon_framework.testing.conformance.runner import make_pytest_suite, run_check_in_context


@blocking_check("FAC-04")
def a_committed_content_has_its_digest(context: ContentCheckContext) -> None:
    contents = context.open()
    for content in (sample_bytes(context.system.large), b"x", b""):
        stored = store_content(contents, content)
        expect(stored == compute_stored(content), f"{len(content)} bytes were confirmed as {stored}")
        other = context.open()
        expect(
            other.size_of(stored.digest) == len(content), f"another client finds {other.size_of(stored.digest)} bytes"
        )
        expect(
            read_content(other, stored.digest) == content,
            f"another client reads other bytes than the {len(content)} stored ones",
        )


@blocking_check("FAC-04")
def a_content_is_read_in_small_chunks(context: ContentCheckContext) -> None:
    contents = context.open()
    stored = store_content(contents, sample_bytes(context.system.large))
    chunk_sizes = [len(chunk) for chunk in contents.read(stored.digest)]
    expect(max(chunk_sizes) <= CHUNK_BYTES, f"{stored.size} bytes arrived in chunks of up to {max(chunk_sizes)}")


@blocking_check("FAC-04")
def reading_starts_at_any_byte(context: ContentCheckContext) -> None:
    contents = context.open()
    content = sample_bytes(context.system.large)
    stored = store_content(contents, content)
    for begin in (1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, stored.size // 2, stored.size - 1, stored.size):
        actual = read_content(contents, stored.digest, begin)
        expect(
            actual == content[begin:],
            f"from byte {begin} on {len(actual)} bytes were read that differ from the stored ones",
        )


@blocking_check("FAC-21")
def nothing_can_be_read_before_the_commit(context: ContentCheckContext) -> None:
    contents = context.open()
    content = sample_bytes(context.system.large)
    digest = compute_stored(content).digest
    with contents.begin_upload() as upload:
        upload.add(content)
        expect(upload.size == len(content), f"of {len(content)} bytes {upload.size} are reported as received")
        expect(contents.size_of(digest) is None, "a content exists before its commit")
        expect_raises(KeyError, lambda: read_content(contents, digest), "reading before the commit")
        upload.commit()
    expect(contents.size_of(digest) == len(content), "a content does not exist after its commit")


@blocking_check("FAC-21")
def what_was_not_expected_is_not_kept(context: ContentCheckContext) -> None:
    contents = context.open()
    content = sample_bytes(context.system.large)
    correct = compute_stored(content)
    for number, expected in enumerate((compute_stored(b"other"), StoredArtifact(correct.digest, correct.size + 1))):
        for name in (None, f"upload{number}"):
            _expect_mismatch(context, name, content, expected)
            expect(contents.size_of(correct.digest) is None, "unexpected bytes are stored under their own digest")
            expect(contents.size_of(expected.digest) is None, "unexpected bytes are stored as the expected ones")
            if name is not None:
                expect(contents.uploaded_bytes(name) == 0, "an upload of unexpected bytes can be resumed")
    with contents.begin_upload() as upload:
        upload.add(content)
        expect(upload.commit(correct) == correct, "the expected bytes are confirmed as something else")


def _expect_mismatch(context: ContentCheckContext, name: str | None, content: bytes, expected: StoredArtifact) -> None:
    with context.open().begin_upload(name) as upload:
        upload.add(content)
        expect_raises(ArtifactMismatch, lambda: upload.commit(expected), "an upload of unexpected bytes")


@blocking_check("FAC-21")
def the_same_content_is_kept_once(context: ContentCheckContext) -> None:
    contents = context.open()
    content = sample_bytes(context.system.large)
    first = store_content(contents, content)
    expect(store_content(contents, content) == first, "the same bytes again are confirmed differently")
    expect(
        store_content(contents, content, "named") == first, "the same bytes in a named upload are confirmed differently"
    )
    expect(contents.remove(first.digest), "a content that was stored three times does not exist")
    expect(
        contents.size_of(first.digest) is None, "a content that was stored three times still exists after its removal"
    )


@blocking_check("FAC-21")
def a_truncated_content_is_replaced(context: ContentCheckContext) -> None:
    contents = context.open()
    content = sample_bytes(context.system.large)
    stored = store_content(contents, content)
    if not context.system.truncate(context.store_name, stored.digest):
        raise NotApplicable("the system under test cannot truncate a content")
    expect(contents.size_of(stored.digest) != stored.size, "a truncated content is reported as complete")
    store_content(contents, content)
    expect(
        read_content(contents, stored.digest) == content,
        "a damaged content remains, although a valid one was committed",
    )


@blocking_check("FAC-23")
def a_removed_content_is_gone(context: ContentCheckContext) -> None:
    contents = context.open()
    one, other = store_content(contents, b"one"), store_content(contents, b"other")
    expect(contents.remove(one.digest), "removing an existing content reports it as missing")
    expect(contents.size_of(one.digest) is None, "a removed content exists")
    expect_raises(KeyError, lambda: read_content(contents, one.digest), "reading a removed content")
    expect(not contents.remove(one.digest), "removing it again reports it as existing")
    expect(read_content(contents, other.digest) == b"other", "removing one content removed another")
    expect(
        read_content(contents, store_content(contents, b"one").digest) == b"one",
        "a removed content cannot be stored again",
    )


@blocking_check("FAC-04")
def only_a_digest_names_a_content(context: ContentCheckContext) -> None:
    contents = context.open()
    digits = store_content(contents, b"x").digest.removeprefix("sha256:")
    for hostile in ("", digits, "sha256:", f"sha256:{digits.upper()}", f"md5:{digits}", f"sha256:{digits}/../{digits}"):
        _expect_no_content(context, hostile)
    _expect_no_content(context, f"sha256:../../../../../../etc/passwd{digits}"[:71])


def _expect_no_content(context: ContentCheckContext, hostile: str) -> None:
    contents = context.open()
    expect(contents.size_of(hostile) is None, f"{hostile!r} names a content")
    expect_raises(KeyError, lambda: read_content(contents, hostile), f"reading {hostile!r}")
    expect(not contents.remove(hostile), f"{hostile!r} was removed")


@blocking_check("FAC-04")
def only_bytes_are_accepted(context: ContentCheckContext) -> None:
    wrong: Any
    with context.open().begin_upload() as upload:
        _bind_add(upload.add, bytearray(b"a"))()
        _bind_add(upload.add, memoryview(b"b"))()
        for wrong in ("text", 7, None):
            expect_raises(InvalidFactError, _bind_add(upload.add, wrong), f"a chunk that is {wrong!r}")
        expect(upload.commit() == compute_stored(b"ab"), "rejected chunks were stored")


def _bind_add(add: Callable[[Any], None], chunk: Any) -> Callable[[], None]:
    return lambda: add(chunk)


@blocking_check("FAC-21")
def concurrent_uploads_store_their_own_bytes(context: ContentCheckContext) -> None:
    # Half of them are equal and have the same digest.
    same = sample_bytes(300_000)
    own_contents = [same if number % 2 else sample_bytes(300_000 + number) for number in range(12)]
    stores = [context.open() for _ in range(3)]

    # No upload is committed before all are running.
    barrier = threading.Barrier(len(own_contents), timeout=60)

    def store(number: int) -> StoredArtifact:
        with stores[number % 3].begin_upload() as upload:
            upload.add(own_contents[number][:100_000])
            barrier.wait()
            upload.add(own_contents[number][100_000:])
            return upload.commit()

    with ThreadPoolExecutor(len(own_contents)) as threads:
        results = list(threads.map(store, range(len(own_contents))))
    for content, stored in zip(own_contents, results, strict=True):
        expect(
            stored == compute_stored(content), f"in concurrent uploads, {len(content)} bytes were confirmed as {stored}"
        )
        expect(
            read_content(stores[0], stored.digest) == content,
            "in concurrent uploads, other bytes are stored than were sent",
        )


@blocking_check("FAC-16")
def a_full_store_rejects_before_anything_is_lost(context: ContentCheckContext) -> None:
    if not context.system.bounded:
        raise NotApplicable("the system under test has no bounded stores")
    contents = context.open(max_bytes=1_000_000)
    first = store_content(contents, sample_bytes(600_000))
    second = sample_bytes(500_000)
    expect_raises(BufferFull, lambda: store_content(contents, second), "500,000 bytes that exceed the free space")
    expect(contents.size_of(compute_stored(second).digest) is None, "bytes that exceed the free space are stored")
    expect(contents.size_of(first.digest) == first.size, "the earlier content is gone")


@blocking_check("FAC-26")
def a_content_store_reports_its_durability(context: ContentCheckContext) -> None:
    durable, expected = context.open().durable, context.system.durable
    expect(durable in (True, False, None), f"durable is {durable!r}")
    expect(
        expected is UNKNOWN_DURABILITY or durable is expected,
        f"durable is {durable}, but the system under test expects {expected}",
    )


@blocking_check("FAC-21")
def an_unnamed_upload_leaves_nothing(context: ContentCheckContext) -> None:
    contents = context.open()
    half = sample_bytes(context.system.large)
    interrupt_upload(contents, half)
    expect(contents.size_of(compute_stored(half).digest) is None, "an interrupted upload can be read")
    expect(context.open().delete_stale_uploads(FAR_FUTURE_MS) == 0, "an unnamed upload has left bytes to delete")


@blocking_check("FAC-21")
def a_named_upload_resumes(context: ContentCheckContext) -> None:
    content = sample_bytes(context.system.large)
    half = context.system.large * 2 // 3
    interrupt_upload(context.open(), content[:half], "goeson")
    digest = compute_stored(content[:half]).digest
    expect(context.open().size_of(digest) is None, "an interrupted upload can be read")
    # As after a crash: the next client knows only the name.
    successor = context.open()
    uploaded = successor.uploaded_bytes("goeson")
    expect(0 < uploaded <= half, f"of {half} bytes sent before the interruption {uploaded} are reported as stored")
    for begin in (uploaded, uploaded - 1, uploaded // 2):
        _resume_and_interrupt(context, content, begin)


def _resume_and_interrupt(context: ContentCheckContext, content: bytes, begin: int) -> None:
    """Resume after *begin*, interrupt once more, and complete the upload under the same name."""
    successor = context.open()
    with successor.begin_upload("goeson", begin=begin) as upload:
        expect(upload.size == begin, f"an upload resumed at {begin} has {upload.size} bytes")
    expect(successor.uploaded_bytes("goeson") == begin, f"after byte {begin} earlier bytes remain")
    with successor.begin_upload("goeson", begin=begin) as upload:
        upload.add(content[begin:])
        stored = upload.commit(compute_stored(content))
    expect(read_content(context.open(), stored.digest) == content, f"resumed at {begin}, other bytes are stored")
    expect(successor.uploaded_bytes("goeson") == 0, "a committed upload can be resumed")
    successor.remove(stored.digest)
    interrupt_upload(successor, content[: len(content) * 2 // 3], "goeson")


@blocking_check("FAC-21")
def a_named_upload_cannot_resume_beyond_its_received_bytes(context: ContentCheckContext) -> None:
    contents = context.open()
    interrupt_upload(contents, b"abc", "short")
    for name, begin in (("short", 4), ("short", -1), ("unknown", 1), (None, 1)):
        expect_raises(InvalidFactError, _bind_resume(context, name, begin), f"resuming {name} at byte {begin}")
    expect(contents.uploaded_bytes("short") == 3, "a rejected upload has changed the stored bytes")
    expect(contents.uploaded_bytes("unknown") == 0, "an unknown upload has stored bytes")


def _bind_resume(context: ContentCheckContext, name: str | None, begin: int) -> Callable[[], None]:
    def resume() -> None:
        with context.open().begin_upload(name, begin=begin):
            pass

    return resume


@blocking_check("FAC-21")
def a_named_upload_can_start_from_scratch(context: ContentCheckContext) -> None:
    contents = context.open()
    interrupt_upload(contents, sample_bytes(context.system.large), "again")
    stored = store_content(contents, b"something else", "again")
    expect(stored == compute_stored(b"something else"), "bytes of the earlier upload remain")


@blocking_check("FAC-21")
def a_later_upload_takes_over(context: ContentCheckContext) -> None:
    earlier, later = context.open(), context.open()
    content, other = sample_bytes(context.system.large), sample_bytes(context.system.large)
    with earlier.begin_upload("wanted") as first:
        first.add(other)
        with later.begin_upload("wanted") as second:
            second.add(content[:1000])
            expect_raises(
                UploadLost, lambda: _finish(first, other), "resuming an upload that another client has taken over"
            )
            second.add(content[1000:])
            stored = second.commit()
    expect(stored == compute_stored(content), "bytes of the earlier uploader are in the content")
    expect(read_content(context.open(), stored.digest) == content, "other bytes are kept than were confirmed")


def _finish(upload: ContentUpload, content: bytes) -> None:
    upload.add(content)
    upload.commit()


@blocking_check("FAC-21")
def clean_up_deletes_stale_uploads(context: ContentCheckContext) -> None:
    contents = context.open()
    stored = store_content(contents, b"sealed")
    for name in ("one", "two"):
        interrupt_upload(contents, b"left behind", name)
    expect(
        contents.delete_stale_uploads(1) == 0 and contents.uploaded_bytes("one") == 11, "a recent upload was deleted"
    )
    with contents.begin_upload("held") as upload:
        upload.add(b"in hand")
        deleted_count = context.open().delete_stale_uploads(FAR_FUTURE_MS)
        expect(deleted_count == 3, f"of 3 uploads {deleted_count} were deleted")
        expect_raises(UploadLost, lambda: _finish(upload, b"more"), "continuing an upload that was deleted")
    expect(contents.uploaded_bytes("one") == contents.uploaded_bytes("two") == 0, "a deleted upload can be resumed")
    expect(read_content(contents, stored.digest) == b"sealed", "a content was deleted with the uploads")


@blocking_check("FAC-04")
def no_upload_name_leads_out_of_the_store(context: ContentCheckContext) -> None:
    contents = context.open()
    for name in ("", ".", "..", "../a", "a/b", "a\\b", "a.part", "a\0b", "a b", "ä", "a\n", "x" * 129):
        expect_raises(InvalidFactError, _bind_resume(context, name, 0), f"an upload called {name[:20]!r}")
        expect_raises(InvalidFactError, partial(contents.uploaded_bytes, name), f"asking for {name[:20]!r}")
    expect(
        store_content(contents, b"x", "aZ09" * 32) == compute_stored(b"x"),
        "a name of 128 letters and digits is rejected",
    )


@blocking_check("SEC-12")
def bytes_of_uploads_are_counted(context: ContentCheckContext) -> None:
    contents = context.open()
    half = sample_bytes(context.system.large)
    expect(contents.upload_bytes() == 0, "a store without uploads counts bytes")
    interrupt_upload(contents, half, "counted")
    successor = context.open()
    expect(successor.upload_bytes() >= len(half), f"{len(half)} interrupted bytes count as {successor.upload_bytes()}")
    with successor.begin_upload("counted", begin=successor.uploaded_bytes("counted")) as upload:
        upload.commit()
    expect(contents.upload_bytes() == 0, "a committed content counts as an upload")


__all__ = [
    "CHECKS",
    "Check",
    "CheckOutcome",
    "CheckResult",
    "ContentCheckContext",
    "ContentStoreUnderTest",
    "pytest_suite",
    "run_check",
    "run_suite",
]

#: Every check, in the order of execution.
CHECKS: Final[tuple[Check, ...]] = tuple(value for value in list(globals().values()) if isinstance(value, Check))


def run_suite(system: ContentStoreUnderTest) -> list[CheckResult]:
    """Run all checks on *system*; must not be called on an event loop."""
    return [run_check(check, system) for check in CHECKS]


def run_check(check: Check, system: ContentStoreUnderTest, variant: Variant = "sync") -> CheckResult:
    """Run one check on *system*; there is one variant, because content stores block."""
    return run_check_in_context(check, ContentCheckContext(system), variant)


def pytest_suite(
    system: Callable[[], ContentStoreUnderTest] | str,
    *,
    checks: Iterable[Check] = CHECKS,
    marks: Callable[[Check], Any] | None = None,
) -> Callable[..., None]:
    """Create a pytest test function: one test per check, with a new system under test or the fixture of that name.

    *marks* returns the pytest marks of a check. A check that does not apply passes and reports the reason.
    """
    return make_pytest_suite(system, run_check, variants=("sync",), checks=checks, marks=marks)
