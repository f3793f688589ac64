"""The contract of a boundary store: what keeps facts and artifacts for a zone, and what it promises.

A store is written in one flavour or in both. The sync flavour has the plain names, the async flavour
the same names with ``_async``. Every method may raise ``ConnectionLost`` when the line is down; then
nobody knows whether it was done, and the same call may be made again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ergon_framework.facts.errors import FactError, NotOffered
from ergon_framework.facts.model import (
    Buffer,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    Pair,
    Side,
    Stored,
    StoredFact,
)

if TYPE_CHECKING:
    from ergon_framework.facts.side import FactSide

#: Bytes that an artifact is read and written in, at a time.
CHUNK: Final = 256 * 1024

#: What can be stored as an artifact: bytes, or pieces of them.
BlobSource = bytes | bytearray | memoryview | Iterable[bytes]
AsyncBlobSource = BlobSource | AsyncIterable[bytes]

Appending: TypeAlias = tuple[Envelope, Fact]
#: What came of one of many; an error is that fact's alone.
Appended: TypeAlias = FactConfirmation | FactError
Unlisten: TypeAlias = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class BoundaryCapabilities:
    """What a store is; the exam reads it."""

    #: What was confirmed survives a loss of power; None means that nobody knows.
    durable: bool | None
    #: On which side of the boundary it is, and so which buffers it holds.
    side: Side = Side.INNER
    #: Whether it keeps artifacts.
    artifacts: bool = True

    @property
    def strict(self) -> bool:
        """Whether it may be called strict: what nobody knows is not."""
        return self.durable is True


class Pruned(NamedTuple):
    """What retention has removed."""

    facts: int
    artifacts: int


class Behind(NamedTuple):
    """What a reader has not confirmed yet."""

    #: The last offset that he has confirmed.
    offset: int
    facts: int
    #: Of their objects as JSON text, in UTF-8.
    bytes: int
    #: When the first of them was stored; None if there is none.
    since_unix_ms: int | None


class KnownObject(NamedTuple):
    """What a store knows of an artifact without reading it."""

    stored: Stored
    #: The pairs of zones of the retained facts that name it.
    named_by: frozenset[Pair]
    #: Its owner: the zone that stored it; empty for the zones of the store.
    zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The facts of one pair of zones as a store has them."""

    pair: Pair
    buffer: Buffer
    epoch: str
    #: The offset of the first fact that is retained, and the last that was given: first is last + 1 when none is.
    first: int
    last: int
    #: Of the retained facts' objects.
    bytes: int
    readers: Mapping[str, Behind] = field(default_factory=dict)


class _Described(ABC):
    @property
    @abstractmethod
    def epoch(self) -> str:
        """Names this life of the store: another one means that a backup was put back, and offsets were given anew."""

    @property
    @abstractmethod
    def capabilities(self) -> BoundaryCapabilities: ...

    def listen(self, wake: Callable[[], None]) -> Unlisten:  # noqa: ARG002 - a store without signals has no use for it
        """Have *wake* called when facts may have come, from any thread, until the returned function is called."""
        return _nothing

    def fact_side(self) -> FactSide | None:
        """Where consumers keep what it does not keep for them; None if there is no room for it here."""
        return None


def _nothing() -> None: ...


class Boundary(_Described):
    """The sync flavour; it is called from several threads at once."""

    # -- facts ----------------------------------------------------------------------------------------

    def append_fact(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        """Store one fact, or answer for the one that has its id; an id with another payload is a FactConflict."""
        return confirmed(self.append_facts([(envelope, fact)])[0])

    @abstractmethod
    def append_facts(self, facts: Sequence[Appending]) -> Sequence[Appended]:
        """Store many in as few commits as may be; one answer each, in order. One that is refused spoils no other.

        It returns when all that it confirms is durable. Offsets count from 1 for each pair of zones, in
        the order of commits and without a gap. No consumer and no other zone has a part in it.
        """

    @abstractmethod
    def forward_facts(self, facts: Sequence[StoredFact]) -> Sequence[Appended]:
        """Put facts of another store into the forward buffer, if they are not there; they keep offset and epoch.

        A repeat is answered with the first confirmation. One that leaves a gap is OffsetAhead, and one
        from another epoch EpochChanged. A pair of zones is either appended to or forwarded to, in one store.
        """

    @abstractmethod
    def get_fact(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        """What was confirmed for that id, for as long as ids are kept; None if there is nothing."""

    # -- reading --------------------------------------------------------------------------------------

    @abstractmethod
    def fetch_facts(
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        """At most *limit* facts of *pair*, in order, behind what *reader* has confirmed or behind *after*.

        A reader that fetches is registered: from then on nothing is dropped that it has not confirmed. With
        *max_readers*, one that is not registered yet is refused with TooManyReaders if its zone has that many in this
        store, also if many come at once.
        """

    @abstractmethod
    def confirm_receipt(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        """*reader* has done with all up to *cursor*. What he confirmed before stays confirmed."""

    @abstractmethod
    def cursor_of(self, reader: str, pair: Pair) -> Cursor | None:
        """What *reader* has confirmed; None if he is not registered."""

    @abstractmethod
    def end_of(self, pair: Pair) -> Cursor | None:
        """The last offset that was given for *pair*, and in which epoch; None if there never was a fact."""

    @abstractmethod
    def cursor_at(self, pair: Pair, unix_ms: int) -> Cursor | None:
        """The last retained fact that was stored before that moment: fetching *after* it replays from then on.

        When the first that is retained was stored later, it is the cursor before that one; None if there
        never was a fact.
        """

    @abstractmethod
    def retire_reader(self, reader: str, pair: Pair, *, by: str = "") -> bool:
        """Forget *reader*, so that he holds up nothing any more; False if there was none.

        *by* is the operator; a store that lasts keeps who did it and when.
        """

    def adopt_epoch(self, pair: Pair, cursor: Cursor, *, by: str) -> None:  # noqa: ARG002 - one that forwards nothing
        """Have the forward buffer of *pair*, which ends at *cursor*, go on in the epoch of *cursor*.

        An operator says so where the origin has another epoch, after he has seen that both have the same facts up to
        there. An end elsewhere is OffsetAhead, and nothing is changed. *by* is the operator.
        """
        raise NotOffered("this boundary takes over no epoch; it is done where the forward buffer is")

    @abstractmethod
    def survey(self) -> Sequence[LogState]:
        """All pairs of zones that have facts here or readers waiting for some, and how far these have come."""

    # -- artifacts ------------------------------------------------------------------------------------

    @abstractmethod
    def put_object(
        self,
        bucket: str,
        key: str,
        blob: BlobSource,
        *,
        expected: Stored | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> Stored:
        """Store *blob*, bytes or what yields them, for ever; returns when it is durable.

        The same bytes again are answered as the first time; others are an ArtifactConflict. If *blob*
        raises, nothing of it can be read. Bytes that are not *expected* are ArtifactMismatch, and nothing
        is kept of them. Whoever says what he expects can go on after a break: *blob* then yields the bytes
        from *begin* on, which is at most what ``received`` says.

        The artifact belongs to the zones of this store, or to *zone* if one is given: a replicator names the zone that
        its facts come from. Names of two owners never meet, and a fact names artifacts of its own zone only.
        """

    def received(self, bucket: str, key: str, expected: Stored, *, zone: str = "") -> int:  # noqa: ARG002 - one without a memory for it
        """How many bytes of that upload are here and need not be sent again; all of them if it is stored.

        Bytes that another owner has stored count for nothing.
        """
        return 0

    @abstractmethod
    def get_object(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> Iterator[bytes]:
        """The artifact, piece by piece; damage is found by its digest at the end, and raised there.

        With *begin* it comes from that byte on, and its digest is for the caller to check. *zone* is the owner: for an
        artifact that a fact names, the zone that the fact comes from. Without it, the store's own zones are meant.
        """

    def known_object(self, bucket: str, key: str, *, zone: str = "") -> KnownObject | None:  # noqa: ARG002 - one that cannot tell
        """By what that artifact is recognised and who names it; None if it is not here, or if the store cannot tell.

        A service asks it before it lets another zone read an artifact: to None nobody from outside is let.
        """
        return None

    def artifact_bytes(self) -> int | None:
        """Bytes of all artifacts that are here, each content once: they share a limit with facts. None if unknown."""
        return None

    # -- retention ------------------------------------------------------------------------------------

    @abstractmethod
    def prune(self, before_unix_ms: int) -> Pruned:
        """Remove what was stored before, unless a registered reader has not confirmed it, or a retained fact names it.

        While nobody is registered for a pair, nothing of it is removed: who is to read it may not have come yet.
        """


class AsyncBoundary(_Described):
    """The async flavour of the same contract."""

    async def append_fact_async(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        return confirmed((await self.append_facts_async([(envelope, fact)]))[0])

    @abstractmethod
    async def append_facts_async(self, facts: Sequence[Appending]) -> Sequence[Appended]: ...

    @abstractmethod
    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[Appended]: ...

    @abstractmethod
    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None: ...

    @abstractmethod
    async def fetch_facts_async(
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]: ...

    @abstractmethod
    async def confirm_receipt_async(self, reader: str, pair: Pair, cursor: Cursor) -> None: ...

    @abstractmethod
    async def cursor_of_async(self, reader: str, pair: Pair) -> Cursor | None: ...

    @abstractmethod
    async def end_of_async(self, pair: Pair) -> Cursor | None: ...

    @abstractmethod
    async def cursor_at_async(self, pair: Pair, unix_ms: int) -> Cursor | None: ...

    @abstractmethod
    async def retire_reader_async(self, reader: str, pair: Pair, *, by: str = "") -> bool: ...

    async def adopt_epoch_async(self, pair: Pair, cursor: Cursor, *, by: str) -> None:  # noqa: ARG002 - as above
        raise NotOffered("this boundary takes over no epoch; it is done where the forward buffer is")

    @abstractmethod
    async def survey_async(self) -> Sequence[LogState]: ...

    @abstractmethod
    async def put_object_async(
        self,
        bucket: str,
        key: str,
        blob: AsyncBlobSource,
        *,
        expected: Stored | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> Stored: ...

    async def received_async(self, bucket: str, key: str, expected: Stored, *, zone: str = "") -> int:  # noqa: ARG002 - as above
        return 0

    @abstractmethod
    def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]: ...

    async def known_object_async(self, bucket: str, key: str, *, zone: str = "") -> KnownObject | None:  # noqa: ARG002 - as above
        return None

    async def artifact_bytes_async(self) -> int | None:
        return None

    @abstractmethod
    async def prune_async(self, before_unix_ms: int) -> Pruned: ...


def confirmed(result: Appended) -> FactConfirmation:
    """The confirmation; an error is raised."""
    if isinstance(result, FactError):
        raise result
    return result
