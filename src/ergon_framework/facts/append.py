"""Facts: the common way to append facts, inside a handler and elsewhere, and the script behind every append.

A fact is a statement that one zone, a site with its own store, sends to another; an artifact is a file that a fact
names. A zone's boundary is the interface to its store.

The script is a generator that yields the calls to make: it serves threads and asyncio, and does no I/O itself. The
artifact is stored first; the fact that names it is appended only when the store has the artifact. After an error the
same call is made again, with the same id and payload. The store knows the id, so no fact is appended twice. A blob
holds the bytes of an artifact, which can be read again when storing them has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol, Self

from ergon_framework import scope
from ergon_framework.clock import Clock
from ergon_framework.engine.effects import NEVER, Call, Err, Ok, Script, call, sleep
from ergon_framework.engine.inline import AsyncInlineRunner, InlineRunner
from ergon_framework.errors import Category, ConfigurationError, ErgonError, error_message
from ergon_framework.facts.boundary import CHUNK_BYTES, AsyncBoundary, BlobSource, Boundary
from ergon_framework.facts.errors import BufferFull, FactConflict, InvalidFactError, PublishError
from ergon_framework.facts.model import (
    ArtifactReference,
    Envelope,
    Fact,
    FactConfirmation,
    StoredArtifact,
    check_artifact_name,
    check_zone,
    fact_digest,
    with_trace,
)
from ergon_framework.facts.policy import AppendRetry
from ergon_framework.scope import Scope


def to_chunks(source: BlobSource) -> Iterable[bytes]:
    """Return *source* as an iterable of chunks; bytes are split into chunks."""
    return Blob.from_bytes(bytes(source)) if isinstance(source, bytes | bytearray | memoryview) else source


class Blob:
    """Bytes that are read in chunks, from the beginning each time, so that a retry sends the same bytes.

    Reading a file blocks for one chunk at a time, also on an event loop.
    """

    __slots__ = ("_open",)

    def __init__(self, open: Callable[[], Iterable[bytes]]) -> None:  # noqa: A002 - the name says what it does
        self._open = open

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Create a blob of bytes in memory."""
        return cls(lambda: (data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)))

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Create a blob of a file, which is opened each time it is read."""

        def read_chunks() -> Iterator[bytes]:
            with Path(path).open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk

        return cls(read_chunks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._open())


# -- publish script ---------------------------------------------------------------------------------


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
                "the blob of an upload must be readable more than once, because each attempt reads it from the "
                "beginning; pass bytes, Blob.from_file(path), or a list of bytes"
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
    #: Whether to check first if the fact is stored; set by a caller that does not know the outcome of an earlier one.
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
                "a fact has either an object or an artifact, not both; append a second fact for the other"
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
    """Return the confirmation of the fact if it is stored; raise FactConflict if its id has another payload."""
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
            "another payload; build ids from all fields that distinguish two facts",
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
        #: The end of the surrounding attempt, in the time of this clock; the scope may use another one.
        self._deadline = NEVER if remaining is None else clock.monotonic() + remaining
        self.interrupted = False

    def call(self, step: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Script[Any]:
        """Return the result of *fn* after retries; None, with ``interrupted`` set, when the caller was interrupted."""
        started_at, attempt = self._clock.monotonic(), 0
        while True:
            if self._is_abandoned():
                # The engine has abandoned this attempt, and may already have reported it as failed.
                raise PublishError(f"{step} was not started: its attempt was cancelled or timed out", code="not_begun")
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
            # With max_retries=0 the engine that runs the handler retries, so it gets the error unchanged.
            raise error
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
        f"{step} failed after {attempts} attempts: {type(error).__name__}: {error_message(error)}",
        temporary=True,
        code=getattr(error, "code", None),
    )


# -- facts ------------------------------------------------------------------------------------------

_caller: Final = InlineRunner()
_async_caller: Final = AsyncInlineRunner()


class _Facts:
    """The common part of the sync and async variants: everything except how a store is called."""

    def __init__(self, zone: str, max_retries: int | None) -> None:
        check_zone("the zone of Facts", zone)
        self._zone = zone
        self._retry = AppendRetry() if max_retries is None else AppendRetry.with_retries(max_retries)

    @property
    def zone(self) -> str:
        """The zone that the facts come from."""
        return self._zone

    def _build_publication(
        self,
        to_zone: str,
        subject: str,
        predicate: str,
        *,
        object: Any,  # noqa: A002 - the term of the source document
        artifact: Upload | None,
        name: str | None,
        message_id: str | None,
        labels: Mapping[str, str] | None,
        correlation_id: str | None,
        produced_at: datetime | None,
        clock: Clock,
    ) -> Publication:
        """Return the publication; inside a handler, missing values come from its transaction."""
        outer = scope.current()
        if message_id is None:
            if outer is None:
                raise ConfigurationError(
                    "a fact that is appended outside a handler has no transaction to derive its id from: pass "
                    "message_id=business_id(...) of the fields that identify the event, so that a retry has the same id"
                )
            message_id = outer.derive(name or f"{to_zone}/{subject}/{predicate}")
        created_at = None if outer is None else outer.transaction.created_at
        if correlation_id is None and outer is not None:
            correlation_id = outer.correlation
        envelope = Envelope(
            message_id=message_id,
            from_zone=self._zone,
            to_zone=to_zone,
            produced_at_unix_ms=_to_unix_ms(produced_at, clock.wall() if created_at is None else created_at),
            correlation_id=correlation_id,
            causation_id=None if outer is None else outer.transaction_id,
            labels=with_trace(labels or {}),
        )
        return Publication.create(envelope, subject=subject, predicate=predicate, object=object, artifact=artifact)


class Facts(_Facts):
    """Appends the facts of one zone to its boundary, from threads.

    A failed append is retried as ``AppendRetry`` says, within the handler's deadline. *max_retries* limits the number
    of retries; with 0 the error is raised immediately, for the calling engine to retry.
    """

    def __init__(
        self, boundary: Boundary, *, zone: str, max_retries: int | None = None, caller: InlineRunner | None = None
    ) -> None:
        super().__init__(zone, max_retries)
        self._calls = BoundaryCalls(boundary.put_object, boundary.append_fact, boundary.get_fact)
        self._caller = caller or _caller

    def append(
        self,
        to_zone: str,
        *,
        subject: str,
        predicate: str,
        object: Any = None,  # noqa: A002 - the term of the source document
        artifact: Upload | None = None,
        name: str | None = None,
        message_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        produced_at: datetime | None = None,
    ) -> FactConfirmation:
        """Append one fact; return when it is durable in this zone's store. Delivery to readers is not confirmed.

        Inside a handler the id is derived from the transaction, so that a second run appends the same fact. A second
        fact with the same subject and predicate in one handler needs its own *name*. An *artifact* is stored first,
        and the reference to it becomes the fact's object.

        *correlation_id* defaults to that of the transaction; *produced_at* defaults to the creation time of the
        transaction, or to now outside a handler. Neither is part of the fact's identity; the first envelope is kept.
        """
        clock = self._caller.clock
        publication = self._build_publication(
            to_zone,
            subject,
            predicate,
            object=object,
            artifact=artifact,
            name=name,
            message_id=message_id,
            labels=labels,
            correlation_id=correlation_id,
            produced_at=produced_at,
            clock=clock,
        )
        script = publish(publication, self._calls, retry=self._retry, clock=clock, outer=scope.current())
        return _require_confirmation(self._caller.run(script))


class AsyncFacts(_Facts):
    """Appends the facts of one zone to its boundary, from asyncio; same guarantees as ``Facts``."""

    def __init__(
        self,
        boundary: AsyncBoundary,
        *,
        zone: str,
        max_retries: int | None = None,
        caller: AsyncInlineRunner | None = None,
    ) -> None:
        super().__init__(zone, max_retries)
        self._calls = BoundaryCalls(boundary.put_object_async, boundary.append_fact_async, boundary.get_fact_async)
        self._caller = caller or _async_caller

    async def append(
        self,
        to_zone: str,
        *,
        subject: str,
        predicate: str,
        object: Any = None,  # noqa: A002 - the term of the source document
        artifact: Upload | None = None,
        name: str | None = None,
        message_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        produced_at: datetime | None = None,
    ) -> FactConfirmation:
        """Append one fact; see ``Facts.append``."""
        clock = self._caller.clock
        publication = self._build_publication(
            to_zone,
            subject,
            predicate,
            object=object,
            artifact=artifact,
            name=name,
            message_id=message_id,
            labels=labels,
            correlation_id=correlation_id,
            produced_at=produced_at,
            clock=clock,
        )
        script = publish(publication, self._calls, retry=self._retry, clock=clock, outer=scope.current())
        return _require_confirmation(await self._caller.run(script))


def _to_unix_ms(produced_at: datetime | None, default: float) -> int:
    if produced_at is None:
        return int(default * 1000)
    if produced_at.tzinfo is None:
        raise ConfigurationError(
            f"produced_at={produced_at.isoformat()} has no time zone: give datetime.now(UTC) or another aware datetime"
        )
    return int(produced_at.timestamp() * 1000)


def _require_confirmation(confirmation: FactConfirmation | None) -> FactConfirmation:
    # An interrupted script returns None, and then the runner has already raised the cause.
    if confirmation is None:
        raise ConfigurationError("append returned no confirmation although it was not stopped")
    return confirmation
