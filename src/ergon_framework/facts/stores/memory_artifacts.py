"""Artifacts in memory: named once and for ever, kept by their content, and watched by the facts that name them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.errors import (
    ArtifactConflict,
    ArtifactLost,
    ArtifactRefused,
    ArtifactUnknown,
    InvalidFactError,
)
from ergon_framework.facts.model import ArtifactReference, Envelope, Stored


class Upload:
    """The bytes of an artifact as they come; nothing of it can be read before it is complete."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._hash = hashlib.sha256()
        self.size = 0

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
        #: Which retained facts name it, the oldest first.
        self._named_by: dict[tuple[str, str], dict[tuple[str, str], None]] = {}

    def found(self, bucket: str, key: str, stored: Stored) -> Stored | None:
        """What was confirmed for these bytes before; other bytes are a conflict."""
        known = self._names.get((bucket, key))
        if known is None:
            return None
        if known[0] != stored:
            raise ArtifactConflict(
                f"{bucket}/{key} is stored with digest {known[0].digest} and never changes, and this is "
                f"{stored.digest}; store a correction under another key, and append a fact that says so"
            )
        return known[0]

    def keep(self, bucket: str, key: str, upload: Upload, now: int) -> Stored:
        stored = upload.stored
        self._names[bucket, key] = stored, now
        self._contents.setdefault(stored.digest, upload.content())
        return stored

    def check(self, reference: ArtifactReference) -> None:
        """Whether what a fact says of an artifact is so."""
        known = self._names.get((reference.bucket, reference.key))
        if known is None or known[0].digest not in self._contents:
            raise ArtifactRefused(
                f"the fact names {reference.bucket}/{reference.key}, which is not stored; put the object, wait for "
                "its confirmation, and append then"
            )
        if known[0] != (reference.digest, reference.size):
            raise ArtifactRefused(
                f"the fact names {reference.bucket}/{reference.key} with {reference.digest} and {reference.size} "
                f"bytes, and stored is {known[0].digest} with {known[0].size}; say what put_object has confirmed"
            )

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
        used = Counter(stored.digest for stored, _ in self._names.values())
        for digest in [digest for digest in self._contents if not used[digest]]:
            del self._contents[digest]
        return len(gone)

    def read(self, bucket: str, key: str) -> Iterator[bytes]:
        """The content, piece by piece, and at the end an error if it is not what was stored."""
        known = self._names.get((bucket, key))
        content = None if known is None else self._contents.get(known[0].digest)
        if known is None or content is None:
            raise self._missing(bucket, key, "is missing")
        return self._pieces(bucket, key, content, known[0].digest)

    def _pieces(self, bucket: str, key: str, content: bytes, digest: str) -> Iterator[bytes]:
        made = hashlib.sha256()
        for start in range(0, len(content), CHUNK):
            piece = content[start : start + CHUNK]
            made.update(piece)
            yield piece
        if f"sha256:{made.hexdigest()}" != digest:
            raise self._missing(bucket, key, "is damaged")

    def _missing(self, bucket: str, key: str, what: str) -> ArtifactLost | ArtifactUnknown:
        by = next(iter(self._named_by.get((bucket, key), ())), None)
        if by is None:
            return ArtifactUnknown(f"the artifact {bucket}/{key} {what}, and no retained fact names it")
        from_zone, message_id = by
        return ArtifactLost(
            f"the artifact {bucket}/{key} {what}, and the fact {message_id!r} of zone {from_zone!r} names it: a "
            "defect of its producer, who has to store it again",
            from_zone=from_zone,
            message_id=message_id,
            bucket=bucket,
            key=key,
        )

    @property
    def size(self) -> int:
        return sum(map(len, self._contents.values()))
