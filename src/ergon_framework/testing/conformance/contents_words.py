"""The words in which the exam of contents is written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Final, TypeAlias, TypeVar

from ergon_framework.errors import ErgonError
from ergon_framework.facts.contents import Contents
from ergon_framework.facts.model import Stored
from ergon_framework.testing.conformance.check import Check, Failed, Run, rule
from ergon_framework.testing.conformance.client import in_thread
from ergon_framework.testing.conformance.contents_candidate import ContentsSitting

E = TypeVar("E", bound=Exception)
Blocking: TypeAlias = Callable[[ContentsSitting], None]

#: A moment behind everything that a check does, in milliseconds.
LATER: Final = 2**42


class BrokenOff(ErgonError):
    """The line broke in the middle of an upload."""


def blocking(*ids: str) -> Callable[[Blocking], Check]:
    """Make a check of a function that blocks: it is tried on a thread, where one that hangs holds up nobody."""

    def make(run: Blocking) -> Check:
        @wraps(run)
        async def tried(sitting: ContentsSitting) -> None:
            await in_thread(partial(run, sitting))

        made: Run = tried
        return rule(*ids)(made)

    return make


def stored_of(content: bytes) -> Stored:
    """What must be confirmed of *content*."""
    return Stored(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))


def some(size: int) -> bytes:
    return os.urandom(size)


def keep(contents: Contents, content: bytes, upload: str | None = None) -> Stored:
    """Store *content* in one go."""
    with contents.receive(upload) as receiving:
        for start in range(0, len(content), 100_000):
            receiving.add(content[start : start + 100_000])
        return receiving.seal()


def break_off(contents: Contents, content: bytes, upload: str | None = None) -> None:
    """Begin to store *content*, and never seal it."""
    with suppress(BrokenOff), contents.receive(upload) as receiving:
        receiving.add(content)
        raise BrokenOff("the line is gone")


def read(contents: Contents, digest: str, begin: int = 0) -> bytes:
    return b"".join(contents.read(digest, begin=begin))


def raises(kind: type[E], call: Callable[[], Any], words: str) -> E:
    """The error of that kind which *call* must raise."""
    try:
        answer = call()
    except kind as error:
        return error
    except Exception as error:
        raise Failed(f"{words} was refused with {type(error).__name__}, not with {kind.__name__}") from error
    raise Failed(f"{words} was answered with {answer!r:.100}, and must be {kind.__name__}")
