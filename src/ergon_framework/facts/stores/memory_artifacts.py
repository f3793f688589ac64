"""Artifacts in memory: named once and for ever, kept by their content, and watched by the facts that name them."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.errors import (
    ArtifactLost,
    ArtifactUnknown,
    InvalidFactError,
)
from ergon_framework.facts.model import ArtifactReference, Envelope, ObjectName, Stored
from ergon_framework.facts.stores import refusals


class Upload:
    """The bytes of an artifact as they come; nothing of it can be read before it is complete."""

    def __init__(self, content: bytes = b"") -> None:
        self._pieces = [content]
        self._hash = hashlib.sha256(content)
        self.size = len(content)
        #: Without room, what may be stored already is only compared.
        self.is_kept = True

    def add(self, piece: bytes) -> None:
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise InvalidFactError(f"a blob yields bytes, not {type(piece).__name__}")
        if self.is_kept:
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
        #: What was confirmed for each name, and when it was stored.
        self._names: dict[ObjectName, tuple[Stored, int]] = {}
        self._contents: dict[str, bytes] = {}
        #: Uploads that broke off, by name and what was expected; and since when.
        self._partial: dict[tuple[ObjectName, Stored], tuple[bytes, int]] = {}
        #: Which retained facts name it, the oldest first; and what each of these facts names.
        self._named_by: dict[ObjectName, dict[tuple[str, str], None]] = {}
        self._uses: dict[tuple[str, str], ObjectName] = {}
        #: Those that are coming in.
        self.arriving: set[Upload] = set()

    def copy_stored(self) -> Artifacts:
        """Return a copy of what is stored, without the uploads that are coming in."""
        twin = copy.copy(self)
        twin.arriving = set()
        return copy.deepcopy(twin)

    def begin(self, name: ObjectName, expected: Stored | None, begin: int) -> Upload:
        """A new upload, or what is here of one that broke off."""
        if begin == 0:
            if expected is not None:
                self._partial.pop((name, expected), None)
            return Upload()
        here = 0 if expected is None else self.received(name, expected)
        if expected is None or not 0 < begin <= here:
            raise refusals.too_far(name, begin, here)
        partial = self._partial.pop((name, expected), None)
        content = self._contents[expected.digest] if partial is None else partial[0]
        return Upload(content[:begin])

    def interrupt(self, name: ObjectName, expected: Stored, upload: Upload, now: int) -> None:
        """It broke off, and may be gone on with."""
        self._partial[name, expected] = upload.content(), now

    def received(self, name: ObjectName, expected: Stored) -> int:
        known = self._names.get(name)
        if known is not None and known[0] == expected and expected.digest in self._contents:
            return expected.size
        partial = self._partial.get((name, expected))
        return 0 if partial is None else len(partial[0])

    def locate(self, name: ObjectName) -> ObjectName:
        """Return the name under which it is kept: the store's own zones keep what their facts name without an owner."""
        shared = name._replace(zone="")
        if name not in self._names and any(zone == name.zone for zone, _ in self.namers(shared)):
            return shared
        return name

    def known(self, name: ObjectName) -> Stored | None:
        """What was confirmed for that name."""
        known = self._names.get(name)
        return None if known is None else known[0]

    def namers(self, name: ObjectName) -> Collection[tuple[str, str]]:
        """The retained facts that name it, each as zone and message_id."""
        return self._named_by.get(name, {})

    def found(self, name: ObjectName, stored: Stored) -> Stored | None:
        """What was confirmed for these bytes before; other bytes are a conflict."""
        known = self._names.get(name)
        if known is None:
            return None
        if known[0] != stored:
            raise refusals.taken(name, known[0], stored)
        return known[0]

    def keep(self, name: ObjectName, upload: Upload, now: int) -> Stored:
        stored = upload.stored
        self._names[name] = stored, now
        self._contents.setdefault(stored.digest, upload.content())
        return stored

    def mend(self, upload: Upload) -> None:
        """Somebody has sent once more what is named already: should it be missing or damaged, it is right again."""
        self._contents[upload.stored.digest] = upload.content()

    def check(self, reference: ArtifactReference, owners: Iterable[str]) -> ObjectName:
        """Return the artifact that a fact names, of the first of *owners* that has one; refuse what is not so."""
        names = (ObjectName(zone, reference.bucket, reference.key) for zone in owners)
        name = next((name for name in names if name in self._names), None)
        known = None if name is None else self._names[name][0]
        if name is None or known is None or known.digest not in self._contents:
            raise refusals.not_stored(reference)
        if known != (reference.digest, reference.size):
            raise refusals.another(reference, known)
        return name

    def name(self, name: ObjectName, envelope: Envelope) -> None:
        """A retained fact names it from now on."""
        fact = envelope.from_zone, envelope.message_id
        self._named_by.setdefault(name, {})[fact] = None
        self._uses[fact] = name

    def unname(self, envelope: Envelope) -> None:
        """That fact is no longer retained."""
        fact = envelope.from_zone, envelope.message_id
        name = self._uses.pop(fact)
        self._named_by[name].pop(fact)
        if not self._named_by[name]:
            del self._named_by[name]

    def prune(self, before: int) -> int:
        """Remove what was stored before and no retained fact names."""
        gone = [name for name, (_, at) in self._names.items() if at < before and name not in self._named_by]
        for name in gone:
            del self._names[name]
        self.sweep(before)
        used = Counter(stored.digest for stored, _ in self._names.values())
        for digest in [digest for digest in self._contents if not used[digest]]:
            del self._contents[digest]
        return len(gone)

    def read(self, name: ObjectName, begin: int = 0) -> Iterator[bytes]:
        """The content, piece by piece, and at the end an error if it is not what was stored."""
        known = self._names.get(name)
        content = None if known is None else self._contents.get(known[0].digest)
        if known is None or content is None:
            raise self._missing(name, "is missing")
        return self._pieces(name, content, known[0].digest, begin)

    def _pieces(self, name: ObjectName, content: bytes, digest: str, begin: int) -> Iterator[bytes]:
        made = hashlib.sha256(content[:begin])
        for start in range(begin, len(content), CHUNK):
            piece = content[start : start + CHUNK]
            made.update(piece)
            yield piece
        if f"sha256:{made.hexdigest()}" != digest:
            raise self._missing(name, "is damaged")

    def _missing(self, name: ObjectName, what: str) -> ArtifactLost | ArtifactUnknown:
        return refusals.missing(name, what, next(iter(self.namers(name)), None))

    def sweep(self, before: int) -> None:
        """Remove uploads that broke off before."""
        self._partial = {upload: kept for upload, kept in self._partial.items() if kept[1] >= before}

    @property
    def size(self) -> int:
        return sum(map(len, self._contents.values()))

    @property
    def upload_bytes(self) -> int:
        """Bytes of uploads that are not complete."""
        broken = sum(len(content) for content, _ in self._partial.values())
        return broken + sum(upload.size for upload in self.arriving if upload.is_kept)
