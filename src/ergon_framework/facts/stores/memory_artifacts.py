"""Artifacts in memory: named once and for ever, kept by their content, and watched by the facts that name them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator

from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.errors import (
    ArtifactLost,
    ArtifactUnknown,
    InvalidFactError,
)
from ergon_framework.facts.model import ArtifactReference, Envelope, Stored
from ergon_framework.facts.stores import refusals


class Upload:
    """The bytes of an artifact as they come; nothing of it can be read before it is complete."""

    def __init__(self, content: bytes = b"") -> None:
        self._pieces = [content]
        self._hash = hashlib.sha256(content)
        self.size = len(content)

    def add(self, piece: bytes) -> None:
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise InvalidFactError(f"a blob yields bytes, not {type(piece).__name__}")
        self._pieces.append(bytes(piece))
        self._hash.update(piece)
        self.size += len(piece)

    @property
    def stored(self) -> Stored:
        return Stored(f"sha256:{self._hash.hexdigest()}", self.size)

    def content(self) -> bytes:
        return b"".join(self._pieces)


class Artifacts:
    """All of one store; its owner calls it under a lock."""

    def __init__(self) -> None:
        #: By bucket and key: what was confirmed, and when it was stored.
        self._names: dict[tuple[str, str], tuple[Stored, int]] = {}
        self._contents: dict[str, bytes] = {}
        #: Uploads that broke off, by name and what was expected; and since when.
        self._partial: dict[tuple[str, str, Stored], tuple[bytes, int]] = {}
        #: Which retained facts name it, the oldest first.
        self._named_by: dict[tuple[str, str], dict[tuple[str, str], None]] = {}

    def begin(self, bucket: str, key: str, expected: Stored | None, begin: int) -> Upload:
        """A new upload, or what is here of one that broke off."""
        if begin == 0:
            return Upload()
        here = 0 if expected is None else self.received(bucket, key, expected)
        if expected is None or not 0 < begin <= here:
            raise refusals.too_far(bucket, key, begin, here)
        partial = self._partial.pop((bucket, key, expected), None)
        content = self._contents[expected.digest] if partial is None else partial[0]
        return Upload(content[:begin])

    def interrupt(self, bucket: str, key: str, expected: Stored, upload: Upload, now: int) -> None:
        """It broke off, and may be gone on with."""
        self._partial[bucket, key, expected] = upload.content(), now

    def received(self, bucket: str, key: str, expected: Stored) -> int:
        known = self._names.get((bucket, key))
        if known is not None and known[0] == expected and expected.digest in self._contents:
            return expected.size
        partial = self._partial.get((bucket, key, expected))
        return 0 if partial is None else len(partial[0])

    def known(self, bucket: str, key: str) -> Stored | None:
        """What was confirmed for that name."""
        known = self._names.get((bucket, key))
        return None if known is None else known[0]

    def namers(self, bucket: str, key: str) -> Collection[tuple[str, str]]:
        """The retained facts that name it, each as zone and message_id."""
        return self._named_by.get((bucket, key), {})

    def found(self, bucket: str, key: str, stored: Stored) -> Stored | None:
        """What was confirmed for these bytes before; other bytes are a conflict."""
        known = self._names.get((bucket, key))
        if known is None:
            return None
        if known[0] != stored:
            raise refusals.taken(bucket, key, known[0], stored)
        return known[0]

    def keep(self, bucket: str, key: str, upload: Upload, now: int) -> Stored:
        stored = upload.stored
        self._names[bucket, key] = stored, now
        self._contents.setdefault(stored.digest, upload.content())
        return stored

    def mend(self, upload: Upload) -> None:
        """Somebody has sent once more what is named already: should it be missing or damaged, it is right again."""
        self._contents[upload.stored.digest] = upload.content()

    def check(self, reference: ArtifactReference) -> None:
        """Whether what a fact says of an artifact is so."""
        known = self._names.get((reference.bucket, reference.key))
        if known is None or known[0].digest not in self._contents:
            raise refusals.not_stored(reference)
        if known[0] != (reference.digest, reference.size):
            raise refusals.another(reference, known[0])

    def name(self, reference: ArtifactReference, envelope: Envelope) -> None:
        """A retained fact names it from now on."""
        by = self._named_by.setdefault((reference.bucket, reference.key), {})
        by[envelope.from_zone, envelope.message_id] = None

    def unname(self, reference: ArtifactReference, envelope: Envelope) -> None:
        """That fact is no longer retained."""
        place = reference.bucket, reference.key
        self._named_by[place].pop((envelope.from_zone, envelope.message_id))
        if not self._named_by[place]:
            del self._named_by[place]

    def prune(self, before: int) -> int:
        """Remove what was stored before and no retained fact names."""
        gone = [place for place, (_, at) in self._names.items() if at < before and place not in self._named_by]
        for place in gone:
            del self._names[place]
        self._partial = {upload: kept for upload, kept in self._partial.items() if kept[1] >= before}
        used = Counter(stored.digest for stored, _ in self._names.values())
        for digest in [digest for digest in self._contents if not used[digest]]:
            del self._contents[digest]
        return len(gone)

    def read(self, bucket: str, key: str, begin: int = 0) -> Iterator[bytes]:
        """The content, piece by piece, and at the end an error if it is not what was stored."""
        known = self._names.get((bucket, key))
        content = None if known is None else self._contents.get(known[0].digest)
        if known is None or content is None:
            raise self._missing(bucket, key, "is missing")
        return self._pieces(bucket, key, content, known[0].digest, begin)

    def _pieces(self, bucket: str, key: str, content: bytes, digest: str, begin: int) -> Iterator[bytes]:
        made = hashlib.sha256(content[:begin])
        for start in range(begin, len(content), CHUNK):
            piece = content[start : start + CHUNK]
            made.update(piece)
            yield piece
        if f"sha256:{made.hexdigest()}" != digest:
            raise self._missing(bucket, key, "is damaged")

    def _missing(self, bucket: str, key: str, what: str) -> ArtifactLost | ArtifactUnknown:
        by = next(iter(self._named_by.get((bucket, key), ())), None)
        return refusals.missing(bucket, key, what, by)

    @property
    def size(self) -> int:
        return sum(map(len, self._contents.values()))
