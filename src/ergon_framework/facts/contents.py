"""Contents: where the bytes of artifacts are kept, each content once and by its digest.

Names, facts and who may read are the boundary store's, which calls this from several threads at once. All
of it blocks, for disks have no other form: the async flavour of a store calls it in threads of its own.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from ergon_framework.facts.errors import ArtifactMismatch, InvalidFactError, UploadLost
from ergon_framework.facts.model import Stored

_UPLOAD: Final = re.compile(r"[0-9A-Za-z]{1,128}").fullmatch
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})").fullmatch


class Receiving(ABC):
    """An upload as it comes in; nothing of it can be read before it is sealed."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes that are here."""

    @abstractmethod
    def add(self, piece: bytes) -> None:
        """Take the next bytes; BufferFull if there is no room for them."""

    @abstractmethod
    def seal(self, expected: Stored | None = None) -> Stored:
        """Keep it under its digest; returns when it is durable.

        If it is not what was *expected* it is an ArtifactMismatch, and nothing is kept. A content that is
        here already stays one; where the one that is here is damaged, what was uploaded takes its place.
        """


class Contents(ABC):
    """A place for bytes that never change."""

    @property
    @abstractmethod
    def durable(self) -> bool | None:
        """Whether what was sealed survives a loss of power; None means that nobody knows."""

    @abstractmethod
    def receive(self, upload: str | None = None, *, begin: int = 0) -> AbstractContextManager[Receiving]:
        """Take an upload in. Left without a seal, one without a name is gone, and a named one is kept to go on with.

        *upload* is made by the caller, of digits and letters. It goes on behind the first *begin* bytes
        that came before; with 0 it begins anew. Somebody else who has the same upload in hand loses it: what
        he adds is refused with UploadLost, at the latest when he seals.
        """

    @abstractmethod
    def received(self, upload: str) -> int:
        """Bytes of a named upload that are here, and stay here; 0 if it is not known."""

    @abstractmethod
    def size_of(self, digest: str) -> int | None:
        """How large the content is; None if it is not here."""

    @abstractmethod
    def read(self, digest: str, *, begin: int = 0) -> Iterator[bytes]:
        """The content from *begin* on, in pieces of at most CHUNK and unchecked; a missing one is a KeyError."""

    @abstractmethod
    def remove(self, digest: str) -> bool:
        """Take it away; False if it was not here.

        The caller sees to it that nobody seals the same content meanwhile, for it would be taken from him.
        """

    @abstractmethod
    def sweep(self, before_unix_ms: int) -> int:
        """Remove uploads that nobody has added to since; how many. Who has one of them in hand loses it."""

    @abstractmethod
    def upload_bytes(self) -> int:
        """Return the bytes of all uploads that are not sealed: those that arrive, and those that broke off."""


class ByteBudget:
    """How many bytes may still be written: counted as they come, and measured anew before any are refused."""

    #: Seconds between two measurements while uploads are refused: a measurement looks at every upload.
    INTERVAL_SECONDS: Final = 1.0

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._used: int | None = None
        self._measured = float("-inf")

    def measure(self, measure: Callable[[], int]) -> int:
        """Return the bytes that are used, as *measure* finds them now."""
        with self._lock:
            return self._look(measure)

    def take(self, size: int, measure: Callable[[], int]) -> int | None:
        """Count *size* bytes more; if they are too many, count nothing and return the bytes that are used."""
        if self._limit is None:
            return None
        with self._lock:
            used = self._look(measure) if self._used is None else self._used
            if used + size > self._limit and time.monotonic() - self._measured > self.INTERVAL_SECONDS:
                used = self._look(measure)
            if used + size > self._limit:
                return used
            self._used = used + size
            return None

    def _look(self, measure: Callable[[], int]) -> int:
        self._used = measure()
        self._measured = time.monotonic()
        return self._used


# -- what all of them say --------------------------------------------------------------------------------


def check_upload(upload: str) -> str:
    """*upload*, if an upload can have that name: it becomes part of a path."""
    given: Any = upload
    if not isinstance(given, str) or not is_upload(given):
        raise InvalidFactError(f"an upload is named by 1 to 128 ASCII digits and letters, not by {given!r:.60}")
    return upload


def is_upload(name: str) -> bool:
    """Whether an upload can have that name."""
    return _UPLOAD(name) is not None


def hexadecimal(digest: str) -> str | None:
    """The digits of *digest*, which become part of a path; None if it is none, and so names nothing."""
    found = _DIGEST(digest)
    return None if found is None else found.group(1)


def check_piece(piece: bytes) -> None:
    """Whether it is something to store."""
    given: Any = piece
    if not isinstance(given, bytes | bytearray | memoryview):
        raise InvalidFactError(f"a blob yields bytes, not {type(given).__name__}")


def not_as_expected(expected: Stored, found: Stored) -> ArtifactMismatch:
    """What is said of an upload that is not what it was said to be."""
    return ArtifactMismatch(
        f"the upload was to be {expected.digest} with {expected.size} bytes, and {found.digest} with {found.size} "
        "came: nothing of it is kept, send all of it again"
    )


def not_so_far(upload: str | None, begin: int, here: int) -> InvalidFactError:
    """What is said to somebody who goes on where nothing is."""
    return InvalidFactError(
        f"the upload {upload or 'without a name'} goes on at byte {begin}, and {here} bytes of it are here; ask "
        "received() first"
    )


def lost(upload: str) -> UploadLost:
    """What is said to somebody whose upload is in other hands."""
    return UploadLost(
        f"somebody else has gone on with the upload {upload}, or it was swept because nothing had been added for long; "
        "ask received(), and go on from there"
    )
