"""Helper functions for the checks of content stores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Final, TypeAlias, TypeVar

from ergon_framework.errors import ErgonError
from ergon_framework.facts.contents import ContentStore
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.testing.conformance.check import Check, CheckFailed, Run, check
from ergon_framework.testing.conformance.client import in_thread
from ergon_framework.testing.conformance.contents_candidate import ContentCheckContext

E = TypeVar("E", bound=Exception)
Blocking: TypeAlias = Callable[[ContentCheckContext], None]

#: A time after everything that a check does, in milliseconds.
LATER: Final = 2**42


class UploadInterrupted(ErgonError):
    """The connection was lost during an upload."""


def blocking(*ids: str) -> Callable[[Blocking], Check]:
    """Make a check from a blocking function; it runs on a thread, so that a hanging one blocks nothing else."""

    def make(run: Blocking) -> Check:
        @wraps(run)
        async def tried(sitting: ContentCheckContext) -> None:
            await in_thread(partial(run, sitting))

        made: Run = tried
        return check(*ids)(made)

    return make


def stored_of(content: bytes) -> StoredArtifact:
    """Return the digest and size that the store must confirm for *content*."""
    return StoredArtifact(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))


def sample_bytes(size: int) -> bytes:
    return os.urandom(size)


def store_content(contents: ContentStore, content: bytes, upload: str | None = None) -> StoredArtifact:
    """Store *content* in one upload."""
    with contents.begin_upload(upload) as receiving:
        for start in range(0, len(content), 100_000):
            receiving.add(content[start : start + 100_000])
        return receiving.commit()


def interrupt_upload(contents: ContentStore, content: bytes, upload: str | None = None) -> None:
    """Begin to store *content*, and never commit it."""
    with suppress(UploadInterrupted), contents.begin_upload(upload) as receiving:
        receiving.add(content)
        raise UploadInterrupted("the line is gone")


def read(contents: ContentStore, digest: str, begin: int = 0) -> bytes:
    return b"".join(contents.read(digest, begin=begin))


def raises(kind: type[E], call: Callable[[], Any], words: str) -> E:
    """Return the error of the given class that *call* must raise."""
    try:
        answer = call()
    except kind as error:
        return error
    except Exception as error:
        raise CheckFailed(f"{words} was refused with {type(error).__name__}, not with {kind.__name__}") from error
    raise CheckFailed(f"{words} was answered with {answer!r:.100}, and must be {kind.__name__}")
