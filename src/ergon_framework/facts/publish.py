"""Publish: the script behind every append of a producer, for threads and for asyncio. It does no I/O itself.

The artifact is stored first; the fact that names it is appended only when the store has the artifact. After an error
the same call is made again, with the same id and payload. The store knows the id, so no fact is appended twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ergon_framework.engine.effects import NEVER, Call, Script, call, sleep
from ergon_framework.engine.outcome import Err, Ok
from ergon_framework.errors import Category, ErgonError, error_message
from ergon_framework.facts.boundary import BlobSource
from ergon_framework.facts.errors import BufferFull, FactConflict, InvalidFactError, PublishError
from ergon_framework.facts.model import (
    ArtifactReference,
    Envelope,
    Fact,
    FactConfirmation,
    StoredArtifact,
    check_artifact_name,
    fact_digest,
)
from ergon_framework.scope import Scope

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Clock


class RetrySchedule(Protocol):
    """The part of a retry policy that this module reads."""

    @property
    def max_attempts(self) -> int: ...
    @property
    def within(self) -> float: ...
    def delay(self, attempt: int, random: Callable[[], float] | None = None) -> float: ...


@dataclass(frozen=True, slots=True)
class Upload:
    """An artifact to store before its fact: its name, and bytes that can be read more than once."""

    bucket: str
    key: str
    blob: BlobSource
    media_type: str | None = None
    file_name: str | None = None

    def __post_init__(self) -> None:
        check_artifact_name(self.bucket, self.key)
        if iter(self.blob) is self.blob:
            raise InvalidFactError(
                "the blob of an upload is read from its beginning at each attempt, and this one can be read only "
                "once; give bytes, Blob.file(path), or a list of bytes"
            )

    def to_reference(self, stored: StoredArtifact) -> ArtifactReference:
        """Return the reference that a fact contains once the artifact is stored."""
        return ArtifactReference(
            bucket=self.bucket,
            key=self.key,
            digest=stored.digest,
            size=stored.size,
            media_type=self.media_type,
            file_name=self.file_name,
        )


@dataclass(frozen=True, slots=True)
class Publication:
    """A fact to publish, or an artifact whose reference becomes the fact's object."""

    envelope: Envelope
    subject: str
    predicate: str
    fact: Fact | None = None
    upload: Upload | None = None
    #: Check first whether the fact is stored, because the outcome of an earlier attempt is unknown.
    check_first: bool = False

    @classmethod
    def create(
        cls,
        envelope: Envelope,
        *,
        subject: str,
        predicate: str,
        object: Any = None,  # noqa: A002 - the term of the source document
        artifact: Upload | None = None,
        check_first: bool = False,
    ) -> Publication:
        """Create a publication of a fact with *object*, or with a reference to *artifact* as its object."""
        if artifact is None:
            return cls(envelope, subject, predicate, Fact.create(subject, predicate, object), None, check_first)
        if object is not None:
            raise InvalidFactError(
                "a fact has an object or refers to an artifact, and was given both; append a second fact for the other"
            )
        return cls(envelope, subject, predicate, None, artifact, check_first)


@dataclass(frozen=True, slots=True)
class BoundaryCalls:
    """The three calls of a store that the script makes, sync or async."""

    put_object: Callable[[str, str, BlobSource], Any]
    append_fact: Callable[[Envelope, Fact], Any]
    get_fact: Callable[[str, str], Any]


def publish(
    publication: Publication, calls: BoundaryCalls, *, retry: RetrySchedule, clock: Clock, outer: Scope | None = None
) -> Script[FactConfirmation | None]:
    """Store the artifact, if there is one, and then append the fact. Return None when the caller was interrupted.

    *outer* is the attempt that this publication is part of: no call starts after that attempt has been abandoned.
    """
    caller = _RetryingCaller(retry, clock, outer)
    envelope = publication.envelope
    if publication.check_first:
        existing = yield from _find_stored_fact(publication, calls, caller)
        if existing is not None or caller.interrupted:
            return existing
    fact = publication.fact
    if publication.upload is not None:
        upload = publication.upload
        stored: StoredArtifact | None = yield from caller.call(
            "put_object", calls.put_object, (upload.bucket, upload.key, upload.blob)
        )
        if stored is None:
            return None
        fact = Fact.create(publication.subject, publication.predicate, upload.to_reference(stored).to_object())
    # The same two objects each time, so that a retry sends exactly what the first attempt sent.
    confirmation: FactConfirmation | None = yield from caller.call("append_fact", calls.append_fact, (envelope, fact))
    return confirmation


def _find_stored_fact(
    publication: Publication, calls: BoundaryCalls, caller: _RetryingCaller
) -> Script[FactConfirmation | None]:
    envelope, fact = publication.envelope, publication.fact
    existing: FactConfirmation | None = yield from caller.call(
        "get_fact", calls.get_fact, (envelope.from_zone, envelope.message_id)
    )
    # The digest of a fact about an artifact is known only after the artifact is read; there the append compares it.
    if existing is None or fact is None:
        return None
    if existing.digest != fact_digest(envelope, fact):
        raise FactConflict(
            f"the fact {envelope.message_id!r} of {envelope.from_zone!r} is stored at offset {existing.offset} with "
            "another payload; make ids of all that tells two facts apart",
            from_zone=envelope.from_zone,
            message_id=envelope.message_id,
        )
    return existing


class _RetryingCaller:
    """Makes calls one after another and retries each under one policy. The policy's time applies to each call."""

    def __init__(self, retry: RetrySchedule, clock: Clock, outer: Scope | None) -> None:
        self._retry = retry
        self._clock = clock
        self._outer = outer
        remaining = None if outer is None else outer.remaining()
        #: In the time of this clock; the scope may use another one.
        self._deadline = NEVER if remaining is None else clock.monotonic() + remaining
        self.interrupted = False

    def call(self, step: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Script[Any]:
        """Return the result of *fn* after retries; None, with ``interrupted`` set, when the caller was interrupted."""
        started_at, attempt = self._clock.monotonic(), 0
        while True:
            if self._is_abandoned():
                # The engine has abandoned this attempt, and may already have reported it as failed.
                raise PublishError(f"{step} was not begun: nobody waits for it any more", code="not_begun")
            answer = yield from call(Call(step, fn, args))
            if isinstance(answer, Ok):
                return answer.value
            if not isinstance(answer, Err):
                self.interrupted = True
                return None
            delay = self._next_delay(answer.error, attempt, started_at)
            if delay is None:
                raise _exhausted_error(step, answer.error, attempt + 1) from answer.error
            if (yield from sleep(self._clock.monotonic() + delay)) is not None:
                self.interrupted = True
                return None
            attempt += 1

    def _is_abandoned(self) -> bool:
        return self._clock.monotonic() >= self._deadline or (self._outer is not None and self._outer.cancelled)

    def _next_delay(self, error: BaseException, attempt: int, started_at: float) -> float | None:
        """Return the seconds until the next attempt; None for no further one. Permanent errors are raised."""
        if not isinstance(error, Exception) or _is_permanent(error):
            raise error
        if self._retry.max_attempts == 1:
            raise error  # the caller retries
        delay = self._retry.delay(attempt, self._clock.random)
        if isinstance(error, ErgonError) and error.retry_after is not None:
            delay = max(delay, error.retry_after)
        due = self._clock.monotonic() + delay
        is_exhausted = due - started_at > self._retry.within or due >= self._deadline
        return None if is_exhausted or attempt + 1 >= self._retry.max_attempts else delay


def _is_permanent(error: BaseException) -> bool:
    # A full buffer is reported immediately: it empties in minutes or days, and the calling engine can wait for that.
    if isinstance(error, BufferFull):
        return True
    return isinstance(error, ErgonError) and (error.final or error.category is Category.BUSINESS)


def _exhausted_error(step: str, error: BaseException, attempts: int) -> PublishError:
    return PublishError(
        f"{step} failed {attempts} times and is given up: {type(error).__name__}: {error_message(error)}",
        temporary=True,
        code=getattr(error, "code", None),
    )
