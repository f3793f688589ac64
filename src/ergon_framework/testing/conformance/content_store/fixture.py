"""The adapter to a content store under test, the context of a check, and helper functions for checks.

A content store keeps the bytes of artifacts, and finds them by their SHA-256 digest. A check tests rules of the
specification, which have ids such as FAC-04.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Final, TypeAlias, TypeVar

from ergon_framework.errors import ErgonError
from ergon_framework.facts.content_store import ContentStore
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.testing.conformance.check import Check, CheckFailed, CheckFunction, check
from ergon_framework.testing.conformance.connector.adapter import UNKNOWN_DURABILITY
from ergon_framework.testing.conformance.connector.client import run_in_thread


class ContentStoreUnderTest(ABC):
    """A content store under test; only ``open`` is required. The suite skips checks of missing features."""

    #: The expected value of ``durable`` for the store's setup; with UNKNOWN_DURABILITY any value passes.
    durable: Any = UNKNOWN_DURABILITY
    #: Number of bytes of a test artifact that is large enough for the store to split it, if it splits any, and to be
    #: read in several chunks.
    large: int = 1_000_017
    #: Whether ``open`` supports *max_bytes*.
    bounded: bool = False

    @abstractmethod
    def open(self, store_name: str, *, max_bytes: int | None = None) -> ContentStore:
        """Open the store *store_name*, as another process would; it is empty when its name is used first.

        *max_bytes* is the number of bytes that it may hold.
        """

    def truncate(self, store_name: str, digest: str) -> bool:  # noqa: ARG002 - optional
        """Remove the last bytes of the stored artifact *digest*, bypassing the store's code; False if not supported."""
        return False

    def close(self) -> None:  # noqa: B027 - optional
        """Release all resources after the suite."""


class ContentCheckContext:
    """The context of one check, with its own store."""

    def __init__(self, system: ContentStoreUnderTest) -> None:
        self.system = system
        self.store_name = f"conformance{uuid.uuid4().hex[:12]}"

    def open(self, *, max_bytes: int | None = None) -> ContentStore:
        """Open the store again."""
        return self.system.open(self.store_name, max_bytes=max_bytes)


E = TypeVar("E", bound=Exception)
BlockingCheck: TypeAlias = Callable[[ContentCheckContext], None]

#: A time after everything that a check does, in milliseconds.
FAR_FUTURE_MS: Final = 2**42


class UploadInterrupted(ErgonError):
    """The connection was lost during an upload."""


def blocking_check(*rule_ids: str) -> Callable[[BlockingCheck], Check]:
    """Make a check from a blocking function; it runs on a thread, so that a hanging one blocks nothing else."""

    def decorate(run: BlockingCheck) -> Check:
        @wraps(run)
        async def run_blocking(context: ContentCheckContext) -> None:
            await run_in_thread(partial(run, context))

        # The annotation is for the type checker, which does not see it through ``wraps``.
        function: CheckFunction = run_blocking
        return check(*rule_ids)(function)

    return decorate


def compute_stored(content: bytes) -> StoredArtifact:
    """Return the digest and size that the store must confirm for *content*."""
    return StoredArtifact(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))


def sample_bytes(size: int) -> bytes:
    return os.urandom(size)


def store_content(contents: ContentStore, content: bytes, upload_name: str | None = None) -> StoredArtifact:
    """Store *content* in one upload."""
    with contents.begin_upload(upload_name) as upload:
        for start in range(0, len(content), 100_000):
            upload.add(content[start : start + 100_000])
        return upload.commit()


def interrupt_upload(contents: ContentStore, content: bytes, upload_name: str | None = None) -> None:
    """Begin to store *content*, and never commit it."""
    with suppress(UploadInterrupted), contents.begin_upload(upload_name) as upload:
        upload.add(content)
        raise UploadInterrupted("the connection was lost")


def read_content(contents: ContentStore, digest: str, begin: int = 0) -> bytes:
    return b"".join(contents.read(digest, begin=begin))


def expect_raises(error_type: type[E], call: Callable[[], Any], description: str) -> E:
    """Return the error of the given class that *call* must raise."""
    try:
        result = call()
    except error_type as error:
        return error
    except Exception as error:
        raise CheckFailed(
            f"{description} was rejected with {type(error).__name__}, not with {error_type.__name__}"
        ) from error
    raise CheckFailed(f"{description} returned {result!r:.100}, expected {error_type.__name__}")
