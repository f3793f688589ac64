"""Uploads to S3: parts as objects of their own, and one object of them at the seal.

Nothing in S3 can be locked. Whoever takes an upload writes his mark, and looks before each part whether it is
still there; what is written between the two is a part of his own, under a name that holds the mark, and nobody
else puts it into an object. What is sealed was read again and has the digest, whoever has written in between.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from ergon_framework.errors import ErgonError
from ergon_framework.facts.contents import Receiving, check_piece, lost, not_as_expected, not_so_far
from ergon_framework.facts.model import Stored
from ergon_framework.facts.stores.s3_bucket import READ, Bucket


class Part(NamedTuple):
    """An object of an upload, from the byte on that its path says."""

    begin: int
    size: int
    path: str


def listed(bucket: Bucket, upload: str) -> list[Part]:
    """All parts of an upload, of whoever had it in hand."""
    found = []
    for file in bucket.list(f"uploads/{upload}/"):
        begin = file["path"].rpartition("/")[2].partition("-")[0]
        if begin.isdigit():
            found.append(Part(int(begin), file["size"], file["path"]))
    return found


def chain(parts: Iterable[Part]) -> list[tuple[str, int]]:
    """Those that follow each other from the first byte on, as far as they go, each with its path and size."""
    largest: dict[int, Part] = {}
    for each in sorted(parts):
        largest[each.begin] = each
    found, end = [], 0
    while (part := largest.get(end)) is not None and part.size:
        found.append((part.path, part.size))
        end += part.size
    return found


def place_of(digits: str) -> str:
    """Where the content with that digest is."""
    return f"objects/{digits[:2]}/{digits[2:4]}/{digits}"


class S3Upload(Receiving):
    """An upload as parts; the last one is in memory until it is full."""

    def __init__(self, bucket: Bucket, name: str, *, resumable: bool, part_bytes: int) -> None:
        self._bucket = bucket
        self._name = name
        self._resumable = resumable
        self._part_bytes = part_bytes
        self._mark = uuid.uuid4().hex
        self._parts: list[tuple[str, int]] = []
        self._written = 0
        self._rest = bytearray()
        self._hash = hashlib.sha256()
        self._over = False

    @property
    def size(self) -> int:
        return self._written + len(self._rest)

    # -- beginning ------------------------------------------------------------------------------------

    def take(self, begin: int) -> None:
        """Have it in these hands, behind the first *begin* bytes."""
        before = listed(self._bucket, self._name) if self._resumable else []
        here = sum(size for _, size in chain(before))
        if not 0 <= begin <= here:
            raise not_so_far(self._name, begin, here)
        if self._resumable:
            self._bucket.replace(self._claim, self._mark.encode())
        for path, size in chain(before):
            if self._written + size > begin:
                self._recall_half(path, begin - self._written)
                break
            self._parts.append((path, size))
            self._written += size
        for piece in self._recalled():
            self._hash.update(piece)
        self._hash.update(self._rest)
        kept = {path for path, _ in self._parts}
        self._bucket.delete([part.path for part in before if part.path not in kept])

    def _recall_half(self, path: str, length: int) -> None:
        if length:
            found = self._bucket.read(path, 0, length)
            if found is None:
                raise lost(self._name)
            self._rest += found

    @property
    def _claim(self) -> str:
        return f"uploads/{self._name}/claim"

    # -- adding ---------------------------------------------------------------------------------------

    def add(self, piece: bytes) -> None:
        check_piece(piece)
        rest = memoryview(piece).cast("B")
        while rest:
            now = rest[: self._part_bytes - len(self._rest)]
            self._rest += now
            self._hash.update(now)
            rest = rest[len(now) :]
            if len(self._rest) == self._part_bytes:
                self._put_down()

    def _put_down(self) -> None:
        """What is in memory becomes a part."""
        self._check()
        path = f"uploads/{self._name}/{self._written:020d}-{self._mark}"
        self._bucket.replace(path, bytes(self._rest))
        self._parts.append((path, len(self._rest)))
        self._written += len(self._rest)
        self._rest.clear()

    def _check(self) -> None:
        if self._resumable and self._bucket.read(self._claim, 0, len(self._mark)) != self._mark.encode():
            raise lost(self._name)

    # -- sealing --------------------------------------------------------------------------------------

    def seal(self, expected: Stored | None = None) -> Stored:
        stored = Stored(f"sha256:{self._hash.hexdigest()}", self.size)
        self._check()
        if expected is not None and stored != expected:
            self._discard()
            raise not_as_expected(expected, stored)
        self._keep(place_of(self._hash.hexdigest()), stored)
        self._discard()
        return stored

    def _keep(self, path: str, stored: Stored) -> None:
        if not self._parts and self._bucket.create(path, bytes(self._rest)):
            return
        # One that is there is as it was sealed, unless it is of another size.
        if self._bucket.size_of(path) == stored.size:
            return
        if self._parts:
            self._bucket.write(path, self._verified(stored), size=stored.size, part_bytes=self._part_bytes)
        else:
            self._bucket.replace(path, bytes(self._rest))

    def _verified(self, stored: Stored) -> Iterator[bytes]:
        """All of it, read again; an error before the end if it is not what was hashed on its way in."""
        made = hashlib.sha256()
        for piece in self._recalled():
            made.update(piece)
            yield piece
        made.update(self._rest)
        if f"sha256:{made.hexdigest()}" != stored.digest:
            raise lost(self._name)
        yield bytes(self._rest)

    def _recalled(self) -> Iterator[bytes]:
        for path, size in self._parts:
            for begin in range(0, size, READ):
                piece = self._bucket.read(path, begin, min(READ, size - begin))
                if piece is None:
                    raise lost(self._name)
                yield piece

    # -- ending ---------------------------------------------------------------------------------------

    def _discard(self) -> None:
        """Nothing is left of it; what cannot be deleted now is swept later."""
        self._over = True
        with suppress(ErgonError):
            self._check()  # whoever has it now may have gone on behind these parts
            # The claim last: as long as it is there, others know that there may be more.
            self._bucket.delete([part.path for part in listed(self._bucket, self._name)])
            if self._resumable:
                self._bucket.delete([self._claim])

    def close(self) -> None:
        """Let go of it: one without a name is gone, another can be gone on with."""
        if self._over:
            return
        if not self._resumable:
            self._discard()
        elif self._rest:
            # The line may be what broke it off: then the last part has to be sent again.
            with suppress(ErgonError):
                self._put_down()
