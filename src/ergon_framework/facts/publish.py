"""Publishing: the one script behind every append of a producer, for threads and for asyncio. It never acts.

The artifact first, and only when the store has it the fact that names it; after an error the same call
again, with the same id and payload. What was appended before is never appended twice, because the store
knows its id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ergon_framework.engine.effects import NEVER, Call, Script, call, sleep
from ergon_framework.engine.outcome import Err, Ok
from ergon_framework.errors import Category, ErgonError, text
from ergon_framework.facts.boundary import BlobSource
from ergon_framework.facts.errors import BufferFull, FactConflict, InvalidFactError, PublishError
from ergon_framework.facts.model import (
    ArtifactReference,
    Envelope,
    Fact,
    FactConfirmation,
    Stored,
    check_place,
    digest_of,
)
from ergon_framework.scope import Scope

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Senses


class Retry(Protocol):
    """The part of a retry policy that is read here."""

    @property
    def max_attempts(self) -> int: ...
    @property
    def within(self) -> float: ...
    def delay(self, attempt: int, dice: Callable[[], float] | None = None) -> float: ...


@dataclass(frozen=True, slots=True)
class Upload:
    """An artifact that is to be stored before its fact: its name, and bytes that can be read again."""

    bucket: str
    key: str
    blob: BlobSource
    media_type: str | None = None
    file_name: str | None = None

    def __post_init__(self) -> None:
        check_place(self.bucket, self.key)
        if iter(self.blob) is self.blob:
            raise InvalidFactError(
                "the blob of an upload is read from its beginning at each attempt, and this one can be read only "
                "once; give bytes, Blob.file(path), or a list of bytes"
            )

    def reference(self, stored: Stored) -> ArtifactReference:
        """What a fact says of it, once it is stored."""
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
    """What is to be published: a fact, or an artifact whose reference will be the fact's object."""

    envelope: Envelope
    subject: str
    predicate: str
    fact: Fact | None = None
    upload: Upload | None = None
    #: Ask first whether it is there: nobody knows how an earlier attempt has ended.
    asks: bool = False

    @classmethod
    def of(
        cls,
        envelope: Envelope,
        *,
        subject: str,
        predicate: str,
        object: Any = None,  # noqa: A002 - the document's word
        artifact: Upload | None = None,
        asks: bool = False,
    ) -> Publication:
        """A fact with *object*, or with a reference to *artifact* as its object."""
        if artifact is None:
            return cls(envelope, subject, predicate, Fact.of(subject, predicate, object), None, asks)
        if object is not None:
            raise InvalidFactError(
                "a fact has an object or refers to an artifact, and was given both; append a second fact for the other"
            )
        return cls(envelope, subject, predicate, None, artifact, asks)


@dataclass(frozen=True, slots=True)
class Means:
    """By what the script is carried out: a store's three calls, of either flavour."""

    put_object: Callable[[str, str, BlobSource], Any]
    append_fact: Callable[[Envelope, Fact], Any]
    get_fact: Callable[[str, str], Any]


def publish(
    publication: Publication, means: Means, *, retry: Retry, senses: Senses, outer: Scope | None = None
) -> Script[FactConfirmation | None]:
    """Store the artifact, if there is one, and then append the fact. None when its caller was stopped.

    *outer* is the attempt that it is part of: nothing is begun when nobody waits for that any more.
    """
    trying = _Trying(retry, senses, outer)
    envelope = publication.envelope
    if publication.asks:
        found = yield from _found(publication, means, trying)
        if found is not None or trying.stopped:
            return found
    fact = publication.fact
    if publication.upload is not None:
        upload = publication.upload
        stored: Stored | None = yield from trying.call(
            "put_object", means.put_object, (upload.bucket, upload.key, upload.blob)
        )
        if stored is None:
            return None
        fact = Fact.of(publication.subject, publication.predicate, upload.reference(stored).as_object())
    # The same two objects each time: a retry cannot say anything else than the first attempt.
    confirmation: FactConfirmation | None = yield from trying.call("append_fact", means.append_fact, (envelope, fact))
    return confirmation


def _found(publication: Publication, means: Means, trying: _Trying) -> Script[FactConfirmation | None]:
    envelope, fact = publication.envelope, publication.fact
    found: FactConfirmation | None = yield from trying.call(
        "get_fact", means.get_fact, (envelope.from_zone, envelope.message_id)
    )
    # The digest of a fact about an artifact is known only once the artifact was read: there the append compares.
    if found is None or fact is None:
        return None
    if found.digest != digest_of(envelope, fact):
        raise FactConflict(
            f"the fact {envelope.message_id!r} of {envelope.from_zone!r} is stored at offset {found.offset} with "
            "another payload; make ids of all that tells two facts apart",
            from_zone=envelope.from_zone,
            message_id=envelope.message_id,
        )
    return found


class _Trying:
    """One call after the other, each tried again under one policy. Each call has the policy's time for itself."""

    def __init__(self, retry: Retry, senses: Senses, outer: Scope | None) -> None:
        self._retry = retry
        self._senses = senses
        self._outer = outer
        left = None if outer is None else outer.remaining()
        #: By our own clock: that of the scope may be another.
        self._until = NEVER if left is None else senses.clock() + left
        self.stopped = False

    def call(self, step: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Script[Any]:
        """What *fn* answers at last; None, and ``stopped``, when the caller was struck meanwhile."""
        began, attempt = self._senses.clock(), 0
        while True:
            if self._left_alone():
                # The engine has gone on without this attempt, and may have told others that it failed.
                raise PublishError(f"{step} was not begun: nobody waits for it any more", code="not_begun")
            answer = yield from call(Call(step, fn, args))
            if isinstance(answer, Ok):
                return answer.value
            if not isinstance(answer, Err):
                self.stopped = True
                return None
            delay = self._delay(answer.error, attempt, began)
            if delay is None:
                raise _given_up(step, answer.error, attempt + 1) from answer.error
            if (yield from sleep(self._senses.clock() + delay)) is not None:
                self.stopped = True
                return None
            attempt += 1

    def _left_alone(self) -> bool:
        return self._senses.clock() >= self._until or (self._outer is not None and self._outer.cancelled)

    def _delay(self, error: BaseException, attempt: int, began: float) -> float | None:
        """Seconds until the next attempt; None when there is none. What another attempt cannot change is raised."""
        if not isinstance(error, Exception) or _hopeless(error):
            raise error
        if self._retry.max_attempts == 1:
            raise error  # whoever is above tries again
        delay = self._retry.delay(attempt, self._senses.dice)
        if isinstance(error, ErgonError) and error.retry_after is not None:
            delay = max(delay, error.retry_after)
        due = self._senses.clock() + delay
        over = due - began > self._retry.within or due >= self._until
        return None if over or attempt + 1 >= self._retry.max_attempts else delay


def _hopeless(error: BaseException) -> bool:
    # A full buffer is told at once: it empties in minutes or days, and the engine above can wait for it.
    if isinstance(error, BufferFull):
        return True
    return isinstance(error, ErgonError) and (error.final or error.category is Category.BUSINESS)


def _given_up(step: str, error: BaseException, attempts: int) -> PublishError:
    return PublishError(
        f"{step} failed {attempts} times and is given up: {type(error).__name__}: {text(error)}",
        temporary=True,
        code=getattr(error, "code", None),
    )
