"""Checks of interrupted uploads: resumption, takeover and cleanup."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ergon_framework.facts.contents import ContentUpload
from ergon_framework.facts.errors import InvalidFactError, UploadLost
from ergon_framework.testing.conformance.check import expect
from ergon_framework.testing.conformance.contents_candidate import ContentCheckContext
from ergon_framework.testing.conformance.contents_words import (
    LATER,
    blocking,
    interrupt_upload,
    raises,
    read,
    sample_bytes,
    store_content,
    stored_of,
)


@blocking("FAC-21")
def one_without_a_name_leaves_nothing(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    half = sample_bytes(sitting.candidate.large)
    interrupt_upload(contents, half)
    expect(contents.size_of(stored_of(half).digest) is None, "an upload that broke off can be read")
    expect(sitting.contents().delete_stale_uploads(LATER) == 0, "an upload without a name has left something to sweep")


@blocking("FAC-21")
def one_with_a_name_goes_on(sitting: ContentCheckContext) -> None:
    content = sample_bytes(sitting.candidate.large)
    half = sitting.candidate.large * 2 // 3
    interrupt_upload(sitting.contents(), content[:half], "goeson")
    digest = stored_of(content[:half]).digest
    expect(sitting.contents().size_of(digest) is None, "an upload that broke off can be read")
    # As after a crash: the next client knows only the name.
    heir = sitting.contents()
    here = heir.uploaded_bytes("goeson")
    expect(0 < here <= half, f"of {half} bytes that came before the break {here} are said to be here")
    for begin in (here, here - 1, here // 2):
        _goes_on(sitting, content, begin)


def _goes_on(sitting: ContentCheckContext, content: bytes, begin: int) -> None:
    """Resume after *begin*, interrupt once more, and complete the upload under the same name."""
    heir = sitting.contents()
    with heir.begin_upload("goeson", begin=begin) as receiving:
        expect(receiving.size == begin, f"an upload that goes on at {begin} has {receiving.size} bytes")
    expect(heir.uploaded_bytes("goeson") == begin, f"behind byte {begin} something is left of what came before")
    with heir.begin_upload("goeson", begin=begin) as receiving:
        receiving.add(content[begin:])
        stored = receiving.commit(stored_of(content))
    expect(read(sitting.contents(), stored.digest) == content, f"gone on with at {begin}, other bytes are kept")
    expect(heir.uploaded_bytes("goeson") == 0, "what was sealed can be gone on with")
    heir.remove(stored.digest)
    interrupt_upload(heir, content[: len(content) * 2 // 3], "goeson")


@blocking("FAC-21")
def nobody_goes_on_where_nothing_is(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    interrupt_upload(contents, b"abc", "short")
    for name, begin in (("short", 4), ("short", -1), ("unknown", 1), (None, 1)):
        raises(InvalidFactError, _going_on(sitting, name, begin), f"going on with {name} at byte {begin}")
    expect(contents.uploaded_bytes("short") == 3, "a refused one has changed what is there")
    expect(contents.uploaded_bytes("unknown") == 0, "of an upload that nobody began something is here")


def _going_on(sitting: ContentCheckContext, name: str | None, begin: int) -> Callable[[], None]:
    def go() -> None:
        with sitting.contents().begin_upload(name, begin=begin):
            pass

    return go


@blocking("FAC-21")
def one_with_a_name_can_begin_anew(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    interrupt_upload(contents, sample_bytes(sitting.candidate.large), "again")
    stored = store_content(contents, b"something else", "again")
    expect(stored == stored_of(b"something else"), "of what came before the beginning something is left")


@blocking("FAC-21")
def whoever_comes_later_has_it(sitting: ContentCheckContext) -> None:
    earlier, later = sitting.contents(), sitting.contents()
    content, other = sample_bytes(sitting.candidate.large), sample_bytes(sitting.candidate.large)
    with earlier.begin_upload("wanted") as first:
        first.add(other)
        with later.begin_upload("wanted") as second:
            second.add(content[:1000])
            raises(UploadLost, lambda: _finish(first, other), "going on with an upload that somebody else has taken")
            second.add(content[1000:])
            stored = second.commit()
    expect(stored == stored_of(content), "somebody from whom the upload was taken has had a part in it")
    expect(read(sitting.contents(), stored.digest) == content, "other bytes are kept than were confirmed")


def _finish(receiving: ContentUpload, content: bytes) -> None:
    receiving.add(content)
    receiving.commit()


@blocking("FAC-21")
def sweeping_takes_what_lies_too_long(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    stored = store_content(contents, b"sealed")
    for name in ("one", "two"):
        interrupt_upload(contents, b"left behind", name)
    expect(contents.delete_stale_uploads(1) == 0 and contents.uploaded_bytes("one") == 11, "what is young was swept")
    with contents.begin_upload("held") as receiving:
        receiving.add(b"in hand")
        swept = sitting.contents().delete_stale_uploads(LATER)
        expect(swept == 3, f"of 3 uploads {swept} were swept")
        raises(UploadLost, lambda: _finish(receiving, b"more"), "going on with an upload that was swept")
    expect(contents.uploaded_bytes("one") == contents.uploaded_bytes("two") == 0, "what was swept can be gone on with")
    expect(read(contents, stored.digest) == b"sealed", "with uploads a content was swept")


@blocking("FAC-04")
def no_name_of_an_upload_leads_anywhere(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    for name in ("", ".", "..", "../a", "a/b", "a\\b", "a.part", "a\0b", "a b", "ä", "a\n", "x" * 129):
        raises(InvalidFactError, _going_on(sitting, name, 0), f"an upload called {name[:20]!r}")
        raises(InvalidFactError, partial(contents.uploaded_bytes, name), f"asking for {name[:20]!r}")
    expect(store_content(contents, b"x", "aZ09" * 32) == stored_of(b"x"), "a name of 128 letters and digits is refused")


@blocking("SEC-12")
def bytes_of_uploads_are_counted(sitting: ContentCheckContext) -> None:
    contents = sitting.contents()
    half = sample_bytes(sitting.candidate.large)
    expect(contents.upload_bytes() == 0, "a place without uploads counts some")
    interrupt_upload(contents, half, "counted")
    heir = sitting.contents()
    expect(heir.upload_bytes() >= len(half), f"{len(half)} bytes that broke off count as {heir.upload_bytes()}")
    with heir.begin_upload("counted", begin=heir.uploaded_bytes("counted")) as receiving:
        receiving.commit()
    expect(contents.upload_bytes() == 0, "what is sealed counts as an upload")
