"""The contract of a boundary store, which keeps the facts and artifacts of a zone, and its guarantees.

A zone is a site with its own store. The facts that one zone sends to another, a zone pair, are numbered with offsets. A
reader is a named consumer of a zone pair; its cursor is the offset up to which it has confirmed, in an epoch, the
incarnation of the store that assigned the offsets. A store holds two buffers: the store buffer for the facts of its own
zones, and the forward buffer for facts that were copied from the store of the other side.

A store implements the sync variant, the async variant or both. Sync methods have plain names, async methods the same
names with ``_async``. Every method may raise ``ConnectionLostError`` when the connection is lost; the outcome is then
unknown, and the same call may be made again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ergon_framework.facts.errors import FactError, NotSupportedRemotely
from ergon_framework.facts.model import (
    BoundarySide,
    Buffer,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    StoredArtifact,
    StoredFact,
    ZonePair,
)

if TYPE_CHECKING:
    from ergon_framework.facts.consumer_state import FactConsumerStore

#: Chunk size, in bytes, for reading and writing artifacts.
CHUNK_BYTES: Final = 256 * 1024

#: Content that can be stored as an artifact: bytes, or an iterable of chunks.
BlobSource = bytes | bytearray | memoryview | Iterable[bytes]
AsyncBlobSource = BlobSource | AsyncIterable[bytes]

NewFact: TypeAlias = tuple[Envelope, Fact]
#: The result for one fact of a batch; an error concerns that fact only.
AppendResult: TypeAlias = FactConfirmation | FactError
Unlisten: TypeAlias = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class BoundaryCapabilities:
    """The properties of a store; the conformance suite reads them."""

    #: Whether confirmed data survives a power loss; None if unknown.
    durable: bool | None
    #: The side of the boundary that the store is on, which decides the buffers it holds.
    side: BoundarySide = BoundarySide.INNER
    #: Whether the store keeps artifacts.
    artifacts: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether the store is strict: confirmed data certainly survives a power loss."""
        return self.durable is True


class PruneResult(NamedTuple):
    """The numbers of facts and artifacts that retention has removed."""

    facts: int
    artifacts: int


class ReaderLag(NamedTuple):
    """The facts that a reader has not confirmed yet."""

    #: The last offset that the reader has confirmed.
    offset: int
    facts: int
    #: Size of the facts' objects as JSON text, in UTF-8.
    bytes: int
    #: When the first of the facts was stored; None if there is none.
    since_unix_ms: int | None


class ObjectInfo(NamedTuple):
    """The metadata of an artifact that a store returns without reading its content."""

    stored: StoredArtifact
    #: The zone pairs of the retained facts that refer to the artifact.
    referenced_by: frozenset[ZonePair]
    #: The owner: the zone that stored the artifact; empty for the zones of the store.
    zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The state of one zone pair's facts in a store."""

    pair: ZonePair
    buffer: Buffer
    epoch: str
    #: The first retained offset and the last assigned offset; first is last + 1 when no fact is retained.
    first: int
    last: int
    #: Size of the retained facts' objects.
    bytes: int
    readers: Mapping[str, ReaderLag] = field(default_factory=dict)


class _BoundaryBase(ABC):
    @property
    @abstractmethod
    def epoch(self) -> str:
        """The identifier of this incarnation; it changes when a backup is restored and offsets are assigned again."""

    @property
    @abstractmethod
    def capabilities(self) -> BoundaryCapabilities: ...

    def listen(self, wake: Callable[[], None]) -> Unlisten:  # noqa: ARG002 - a store without notifications ignores it
        """Call *wake*, from any thread, when facts may have arrived, until the returned function is called."""
        return _do_nothing

    def consumer_store(self) -> FactConsumerStore | None:
        """Return the store for consumer state that the boundary itself does not keep; None if it offers none."""
        return None


def _do_nothing() -> None: ...


class Boundary(_BoundaryBase):
    """The sync variant; several threads may call it concurrently."""

    # -- facts ----------------------------------------------------------------------------------------

    def append_fact(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        """Store one fact, or return the confirmation of its id; raise FactConflict if the id has another payload."""
        return raise_if_error(self.append_facts([(envelope, fact)])[0])

    @abstractmethod
    def append_facts(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]:
        """Store many facts in as few commits as possible; return one result each, in order.

        A rejected fact does not affect the others. The call returns when all confirmed facts are durable. Offsets
        count from 1 for each zone pair, in commit order and without a gap. The call involves no consumer and no
        other zone.
        """

    @abstractmethod
    def forward_facts(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]:
        """Store facts of another store in the forward buffer unless present; they keep their offset and epoch.

        A repeated fact gets the first confirmation. A fact that would leave a gap gets OffsetAhead, one from another
        epoch EpochChanged. In one store, the facts of a zone pair are either appended or forwarded, never both.
        """

    @abstractmethod
    def get_fact(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        """Return the confirmation of that id, for as long as the store keeps ids; None if there is none."""

    # -- reading --------------------------------------------------------------------------------------

    @abstractmethod
    def fetch_facts(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        """Return up to *limit* facts of *pair*, in order, after what *reader* has confirmed or after *after*.

        A fetch registers the reader: from then on the store keeps every fact that the reader has not confirmed. With
        *max_readers*, an unregistered reader is rejected with TooManyReaders if its zone already has that many readers
        in this store, also when several register concurrently.
        """

    @abstractmethod
    def confirm_receipt(self, reader: str, pair: ZonePair, cursor: Cursor) -> None:
        """Confirm that *reader* has processed everything up to *cursor*; earlier confirmations stay valid."""

    @abstractmethod
    def get_cursor(self, reader: str, pair: ZonePair) -> Cursor | None:
        """Return the cursor that *reader* has confirmed; None if it is not registered."""

    @abstractmethod
    def last_offset(self, pair: ZonePair) -> Cursor | None:
        """Return the last offset assigned for *pair*, with its epoch; None if the pair never had a fact."""

    @abstractmethod
    def cursor_at_time(self, pair: ZonePair, unix_ms: int) -> Cursor | None:
        """Return the cursor of the last retained fact stored before that time; fetching *after* it replays from there.

        When the first retained fact was stored later, the result is the cursor before that fact; None if the pair
        never had a fact.
        """

    @abstractmethod
    def retire_reader(self, reader: str, pair: ZonePair, *, by: str = "") -> bool:
        """Remove *reader*, so that it no longer blocks retention; return False if it was not registered.

        *by* is the operator; a persistent store records who removed the reader and when.
        """

    def adopt_epoch(self, pair: ZonePair, cursor: Cursor, *, by: str) -> None:  # noqa: ARG002 - without a forward buffer
        """Make the forward buffer of *pair*, which ends at *cursor*, continue in the epoch of *cursor*.

        An operator does this when the origin has another epoch, after checking that both hold the same facts up to
        *cursor*. A buffer that ends elsewhere raises OffsetAhead and is not changed. *by* is the operator.
        """
        raise NotSupportedRemotely("this boundary cannot adopt an epoch: call adopt_epoch where the forward buffer is")

    @abstractmethod
    def list_logs(self) -> Sequence[LogState]:
        """Return all zone pairs that have facts or waiting readers here, with the position of each reader."""

    # -- artifacts ------------------------------------------------------------------------------------

    @abstractmethod
    def put_object(
        self,
        bucket: str,
        key: str,
        blob: BlobSource,
        *,
        expected: StoredArtifact | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> StoredArtifact:
        """Store *blob*, bytes or an iterable of bytes, permanently; return when it is durable.

        The same bytes again return the same result; other bytes raise ArtifactConflict. If *blob* raises, nothing of it
        becomes readable. Bytes that differ from *expected* raise ArtifactMismatch, and nothing of them is kept. With
        *expected*, an interrupted upload can be resumed: *blob* then yields the bytes from *begin* on, which is at most
        the result of ``uploaded_bytes``.

        The artifact belongs to the zones of this store, or to *zone* if given: a replicator passes the zone that its
        facts come from. Owners have separate namespaces, and a fact refers to artifacts of its own zone only.
        """

    def uploaded_bytes(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:  # noqa: ARG002 - keeps none
        """Return how many bytes of that upload the store already has; the full size if the artifact is stored.

        Bytes that another owner has stored do not count.
        """
        return 0

    @abstractmethod
    def get_object(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> Iterator[bytes]:
        """Yield the artifact in chunks; damage is detected by the digest and raised at the end.

        With *begin* the artifact is read from that byte on, and the caller checks the digest. *zone* is the owner: for
        an artifact that a fact refers to, the zone that the fact comes from. Default: the zones of the store.
        """

    def stat_object(self, bucket: str, key: str, *, zone: str = "") -> ObjectInfo | None:  # noqa: ARG002 - unknown
        """Return the identity and referencing zone pairs of an artifact; None if it is missing or this is unknown.

        A service calls this before it lets another zone read an artifact; with None it denies access to other zones.
        """
        return None

    def artifact_bytes(self) -> int | None:
        """Return the bytes of all artifacts, each content once; they share a limit with facts. None if unknown."""
        return None

    # -- retention ------------------------------------------------------------------------------------

    @abstractmethod
    def prune(self, before_unix_ms: int) -> PruneResult:
        """Remove data stored before that time, except what a registered reader has not confirmed or a fact refers to.

        While a zone pair has no registered reader, none of its facts are removed: its reader may register later.
        """


class AsyncBoundary(_BoundaryBase):
    """The async variant of the same contract."""

    async def append_fact_async(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        return raise_if_error((await self.append_facts_async([(envelope, fact)]))[0])

    @abstractmethod
    async def append_facts_async(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]: ...

    @abstractmethod
    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]: ...

    @abstractmethod
    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None: ...

    @abstractmethod
    async def fetch_facts_async(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]: ...

    @abstractmethod
    async def confirm_receipt_async(self, reader: str, pair: ZonePair, cursor: Cursor) -> None: ...

    @abstractmethod
    async def get_cursor_async(self, reader: str, pair: ZonePair) -> Cursor | None: ...

    @abstractmethod
    async def last_offset_async(self, pair: ZonePair) -> Cursor | None: ...

    @abstractmethod
    async def cursor_at_time_async(self, pair: ZonePair, unix_ms: int) -> Cursor | None: ...

    @abstractmethod
    async def retire_reader_async(self, reader: str, pair: ZonePair, *, by: str = "") -> bool: ...

    async def adopt_epoch_async(self, pair: ZonePair, cursor: Cursor, *, by: str) -> None:  # noqa: ARG002 - as in Boundary
        raise NotSupportedRemotely("this boundary cannot adopt an epoch: call adopt_epoch where the forward buffer is")

    @abstractmethod
    async def list_logs_async(self) -> Sequence[LogState]: ...

    @abstractmethod
    async def put_object_async(
        self,
        bucket: str,
        key: str,
        blob: AsyncBlobSource,
        *,
        expected: StoredArtifact | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> StoredArtifact: ...

    async def uploaded_bytes_async(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:  # noqa: ARG002 - as in Boundary
        return 0

    @abstractmethod
    def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]: ...

    async def stat_object_async(self, bucket: str, key: str, *, zone: str = "") -> ObjectInfo | None:  # noqa: ARG002 - as in Boundary
        return None

    async def artifact_bytes_async(self) -> int | None:
        return None

    @abstractmethod
    async def prune_async(self, before_unix_ms: int) -> PruneResult: ...


def raise_if_error(result: AppendResult) -> FactConfirmation:
    """Return the confirmation, or raise the error."""
    if isinstance(result, FactError):
        raise result
    return result
