"""ContentStore: stores the bytes of artifacts, each content once, addressed by its digest.

An artifact is a file that a fact refers to. Names, facts and access rights belong to the boundary store, the store of a
site's facts, which calls this from several threads concurrently. All calls block, because disks have no other
interface; the async variant of a boundary store runs them in dedicated threads.
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
from ergon_framework.facts.model import StoredArtifact

_UPLOAD: Final = re.compile(r"[0-9A-Za-z]{1,128}").fullmatch
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})").fullmatch


class ContentUpload(ABC):
    """An upload in progress; nothing of it can be read before it is committed."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of bytes received so far."""

    @abstractmethod
    def add(self, piece: bytes) -> None:
        """Append the next bytes; raise BufferFull if there is no space for them."""

    @abstractmethod
    def commit(self, expected: StoredArtifact | None = None) -> StoredArtifact:
        """Store the upload under its digest; return when it is durable.

        If it differs from *expected*, ArtifactMismatch is raised and nothing is kept. A content that exists already is
        not stored twice; if the existing one is damaged, the upload replaces it.
        """


class ContentStore(ABC):
    """A store for immutable bytes."""

    @property
    @abstractmethod
    def durable(self) -> bool | None:
        """Whether committed content survives a power loss; None if unknown."""

    @abstractmethod
    def begin_upload(self, upload: str | None = None, *, begin: int = 0) -> AbstractContextManager[ContentUpload]:
        """Begin an upload. When it ends without a commit, an unnamed one is discarded and a named one can be resumed.

        The caller chooses *upload*, of digits and letters. The upload resumes after the first *begin* bytes that were
        received before; 0 starts from scratch. Another caller that has the same upload open loses it: its further
        bytes are rejected with UploadLost, at the latest by its commit.
        """

    @abstractmethod
    def uploaded_bytes(self, upload: str) -> int:
        """Return the bytes of a named upload that are stored and stay stored; 0 if it is unknown."""

    @abstractmethod
    def size_of(self, digest: str) -> int | None:
        """Return the size of the content; None if it is missing."""

    @abstractmethod
    def read(self, digest: str, *, begin: int = 0) -> Iterator[bytes]:
        """Yield the content from *begin* on, unverified, in chunks of at most CHUNK_BYTES; KeyError if missing."""

    @abstractmethod
    def remove(self, digest: str) -> bool:
        """Remove the content; return False if it was missing.

        The caller makes sure that no upload commits the same content meanwhile, because that content would be lost.
        """

    @abstractmethod
    def delete_stale_uploads(self, before_unix_ms: int) -> int:
        """Delete uploads without new bytes since then and return their number; callers with an open one lose it."""

    @abstractmethod
    def upload_bytes(self) -> int:
        """Return the bytes of all uncommitted uploads: those in progress and those that broke off."""


class ByteBudget:
    """The bytes that may still be written: counted as they arrive, and measured again before any are rejected."""

    #: Minimum seconds between two measurements while uploads are rejected: a measurement reads every upload.
    INTERVAL_SECONDS: Final = 1.0

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._used: int | None = None
        self._measured_at = float("-inf")

    def measure(self, measure: Callable[[], int]) -> int:
        """Measure and return the used bytes."""
        with self._lock:
            return self._update(measure)

    def reserve(self, size: int, measure: Callable[[], int]) -> int | None:
        """Count *size* more bytes; if they exceed the limit, count nothing and return the used bytes."""
        if self._limit is None:
            return None
        with self._lock:
            used = self._update(measure) if self._used is None else self._used
            if used + size > self._limit and time.monotonic() - self._measured_at > self.INTERVAL_SECONDS:
                used = self._update(measure)
            if used + size > self._limit:
                return used
            self._used = used + size
            return None

    def _update(self, measure: Callable[[], int]) -> int:
        self._used = measure()
        self._measured_at = time.monotonic()
        return self._used


# -- checks and errors of all content stores -------------------------------------------------------------


def check_upload(upload: str) -> str:
    """Return *upload* if an upload can have that name, which becomes part of a path; else raise InvalidFactError."""
    unchecked: Any = upload
    if not isinstance(unchecked, str) or not is_upload(unchecked):
        raise InvalidFactError(f"upload name {unchecked!r:.60} is invalid: use 1 to 128 ASCII digits and letters")
    return upload


def is_upload(name: str) -> bool:
    """Return whether an upload can have that name."""
    return _UPLOAD(name) is not None


def digest_hex(digest: str) -> str | None:
    """Return the hex digits of *digest*, which become part of a path; None if it is not a digest."""
    match = _DIGEST(digest)
    return None if match is None else match.group(1)


def check_chunk(piece: bytes) -> None:
    """Raise InvalidFactError unless *piece* is bytes."""
    unchecked: Any = piece
    if not isinstance(unchecked, bytes | bytearray | memoryview):
        raise InvalidFactError(f"a blob yields bytes, not {type(unchecked).__name__}")


def digest_mismatch_error(expected: StoredArtifact, actual: StoredArtifact) -> ArtifactMismatch:
    """Return the error for an upload that differs from what was expected."""
    return ArtifactMismatch(
        f"upload mismatch: expected {expected.digest}, {expected.size} bytes, received {actual.digest}, {actual.size} "
        "bytes: nothing of it is kept; upload all of it again"
    )


def offset_error(upload: str | None, begin: int, received: int) -> InvalidFactError:
    """Return the error for an upload that resumes after bytes that are missing."""
    return InvalidFactError(
        f"upload {upload or 'without a name'} cannot resume at byte {begin}: {received} bytes are stored; call "
        "uploaded_bytes() first"
    )


def upload_lost_error(upload: str) -> UploadLost:
    """Return the error for an upload that another caller has resumed."""
    return UploadLost(
        f"upload {upload} is lost: another caller has resumed it, or it expired without progress; "
        "call uploaded_bytes() and resume there"
    )
