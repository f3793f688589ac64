"""The adapter to a boundary store under test, the client that calls the store, and the context of a check.

A boundary store keeps the facts that one zone, a site, sends to another (a pair of zones), and the files that these
facts name, called artifacts. It is on the inner or the outer side between the two zones. A reader is a named consumer
of a pair with a cursor: the epoch of the store (new after each restored backup) and the last confirmed offset. The
client has one coroutine per call for both variants of a store, sync and async. A store has two buffers: one for the
facts that its own zone appends, and one for the facts of the other zone, which a replicator forwards to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from ergon_framework import scope
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.append import AsyncFacts, Facts
from ergon_framework.facts.boundary import (
    AppendResult,
    AsyncBoundary,
    BlobSource,
    Boundary,
    BoundaryCapabilities,
    LogState,
    NewFact,
    PruneResult,
    raise_if_error,
)
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import (
    ArtifactReference,
    BoundarySide,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    StoredArtifact,
    StoredFact,
    ZonePair,
)
from ergon_framework.testing.conformance.check import CheckFailed, expect
from ergon_framework.testing.conformance.connector.adapter import UNKNOWN_DURABILITY
from ergon_framework.testing.conformance.connector.client import Variant, run_in_thread


class BoundaryUnderTest(ABC):
    """A store under test; only ``client`` is required. The suite skips checks of optional features that are missing."""

    #: Seconds within which every call must return.
    call_timeout: float = 20.0
    #: The expected value of ``capabilities.durable`` for the store's setup.
    durable: Any = UNKNOWN_DURABILITY

    @abstractmethod
    def client(
        self, store_name: str, *, side: BoundarySide = BoundarySide.INNER, max_facts: int | None = None
    ) -> Boundary | AsyncBoundary:
        """Create a new client of the store *store_name*, as another process would.

        The store is empty when its name is used for the first time; *max_facts* is the number of facts that it retains.
        """

    #: Whether ``client`` supports *max_facts*.
    bounded: bool = False

    #: Whether an interrupted upload can be resumed instead of starting from scratch.
    resumes: bool = False

    def backup(self, store_name: str) -> Callable[[], None] | None:  # noqa: ARG002 - optional
        """Make a backup and return a function that restores it; None if this is not supported."""
        return None

    def lose(self, store_name: str, bucket: str, key: str) -> bool:  # noqa: ARG002 - optional
        """Remove the bytes of an artifact without using the store; False if this is not supported."""
        return False

    def damage(self, store_name: str, bucket: str, key: str) -> bool:  # noqa: ARG002 - optional
        """Change some bytes of an artifact without using the store; False if this is not supported."""
        return False

    def close(self) -> None:  # noqa: B027 - optional
        """Release all resources after the suite."""


# -- client and context of a check ------------------------------------------------------------------

E = TypeVar("E", bound=FactError)

#: The zones of most checks; one name contains a blank on purpose.
PAIR: Final = ZonePair("Plant A", "Enterprise")
READER_NAME: Final = "conformance"
#: A time after everything that a check stores, in milliseconds: retention up to it spares nothing by age.
FAR_FUTURE_MS: Final = 2**52


class BoundaryCheckClient:
    """A store with one coroutine per call; no call may take longer than *call_timeout*."""

    def __init__(self, store: Boundary | AsyncBoundary, variant: Variant, *, call_timeout: float) -> None:
        expected_type = Boundary if variant == "sync" else AsyncBoundary
        if not isinstance(store, expected_type):
            raise ConfigurationError(f"{type(store).__name__} has no {variant} variant; leave that variant out")
        self.store = store
        self._untyped_store: Any = store
        self._is_sync = variant == "sync"
        self._call_timeout = call_timeout

    @property
    def capabilities(self) -> BoundaryCapabilities:
        return self.store.capabilities

    @property
    def epoch(self) -> str:
        return self.store.epoch

    # -- facts ----------------------------------------------------------------------------------------

    async def append(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        confirmation: FactConfirmation = await self._call("append_fact", envelope, fact)
        return confirmation

    async def append_many(self, *facts: NewFact) -> list[AppendResult]:
        results = list(await self._call("append_facts", list(facts)))
        expect(len(results) == len(facts), f"{len(facts)} facts had {len(results)} answers")
        return results

    async def forward(self, *facts: StoredFact) -> list[AppendResult]:
        results = list(await self._call("forward_facts", list(facts)))
        expect(len(results) == len(facts), f"{len(facts)} facts had {len(results)} answers")
        return results

    async def forward_or_raise(self, *facts: StoredFact) -> list[FactConfirmation]:
        return [raise_if_error(result) for result in await self.forward(*facts)]

    async def get(self, message_id: str, *, from_zone: str = PAIR.from_zone) -> FactConfirmation | None:
        confirmation: FactConfirmation | None = await self._call("get_fact", from_zone, message_id)
        return confirmation

    async def fetch(
        self, limit: int = 1000, *, reader: str = READER_NAME, pair: ZonePair = PAIR, **options: Any
    ) -> list[StoredFact]:
        facts: Sequence[StoredFact] = await self._call("fetch_facts", reader, pair, limit, **options)
        expect(len(facts) <= limit, f"a fetch of {limit} returned {len(facts)}")
        return list(facts)

    async def confirm(self, cursor: Cursor, *, reader: str = READER_NAME, pair: ZonePair = PAIR) -> None:
        await self._call("confirm_receipt", reader, pair, cursor)

    async def get_cursor(self, *, reader: str = READER_NAME, pair: ZonePair = PAIR) -> Cursor | None:
        cursor: Cursor | None = await self._call("get_cursor", reader, pair)
        return cursor

    async def last_offset(self, *, pair: ZonePair = PAIR) -> Cursor | None:
        cursor: Cursor | None = await self._call("last_offset", pair)
        return cursor

    async def retire_reader(self, *, reader: str = READER_NAME, pair: ZonePair = PAIR, by: str = "conformance") -> bool:
        retired: bool = await self._call("retire_reader", reader, pair, by=by)
        return retired

    async def get_cursor_at(self, unix_ms: int, *, pair: ZonePair = PAIR) -> Cursor | None:
        cursor: Cursor | None = await self._call("cursor_at_time", pair, unix_ms)
        return cursor

    async def list_logs(self) -> dict[ZonePair, LogState]:
        states: Sequence[LogState] = await self._call("list_logs")
        expect(len({state.pair for state in states}) == len(states), "a pair of zones is listed twice")
        return {state.pair: state for state in states}

    async def prune(self, before: int = FAR_FUTURE_MS) -> PruneResult:
        pruned: PruneResult = await self._call("prune", before)
        return pruned

    async def append_through_facts(self, handler_scope: scope.Scope, **fields: Any) -> FactConfirmation:
        """Append through Facts, the API for handlers, in *handler_scope*: the id is derived from its transaction."""
        store: Any = self.store
        token = scope.current()
        scope.set_scope(handler_scope)
        try:
            if self._is_sync:
                facts = Facts(store, zone=PAIR.from_zone)
                return await run_in_thread(lambda: facts.append(PAIR.to_zone, **fields))
            return await AsyncFacts(store, zone=PAIR.from_zone).append(PAIR.to_zone, **fields)
        finally:
            scope.set_scope(token)

    # -- artifacts ------------------------------------------------------------------------------------

    async def put(self, bucket: str, key: str, blob: BlobSource, **options: Any) -> StoredArtifact:
        stored: StoredArtifact = await self._call("put_object", bucket, key, blob, **options)
        return stored

    async def get_uploaded_bytes(self, bucket: str, key: str, expected: StoredArtifact, **options: Any) -> int:
        uploaded: int = await self._call("uploaded_bytes", bucket, key, expected, **options)
        return uploaded

    async def read_chunks(self, bucket: str, key: str, **options: Any) -> list[bytes]:
        """Read an artifact and return its chunks."""
        async with asyncio.timeout(self._call_timeout):
            if self._is_sync:
                return await run_in_thread(lambda: list(self._untyped_store.get_object(bucket, key, **options)))
            stream: AsyncIterator[bytes] = self._untyped_store.get_object_async(bucket, key, **options)
            return [chunk async for chunk in stream]

    async def read(self, bucket: str, key: str, **options: Any) -> bytes:
        return b"".join(await self.read_chunks(bucket, key, **options))

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        try:
            async with asyncio.timeout(self._call_timeout):
                if self._is_sync:
                    return await run_in_thread(partial(getattr(self._untyped_store, name), *args, **options))
                return await getattr(self._untyped_store, f"{name}_async")(*args, **options)
        except TimeoutError as error:
            raise CheckFailed(
                f"{name} did not return within {self._call_timeout:g} s, or raised a bare TimeoutError"
            ) from error


class BoundaryCheckContext:
    """The context of one check on one system in one variant, with its own stores."""

    def __init__(self, system: BoundaryUnderTest, variant: Variant) -> None:
        self.system = system
        self.variant: Variant = variant
        self._name = f"conformance-{uuid.uuid4().hex[:12]}"

    def store(self, suffix: str = "") -> str:
        """Return the name of one of the stores of this check."""
        return self._name + suffix

    def client(
        self, suffix: str = "", *, side: BoundarySide = BoundarySide.INNER, max_facts: int | None = None
    ) -> BoundaryCheckClient:
        """Create a new client of one of the stores."""
        store = self.system.client(self.store(suffix), side=side, max_facts=max_facts)
        return BoundaryCheckClient(store, self.variant, call_timeout=self.system.call_timeout)


def make_envelope(message_id: str = "m-1", *, pair: ZonePair = PAIR, **fields: Any) -> Envelope:
    """Create an envelope with defaults for all fields that are not given."""
    values = {"produced_at_unix_ms": 1_741_248_600_000} | fields
    return Envelope(message_id=message_id, from_zone=pair.from_zone, to_zone=pair.to_zone, **values)


def make_fact(number: int = 1, **fields: Any) -> Fact:
    """Create a fact with defaults for all fields that are not given."""
    values = {"subject": "work_order:WO-1", "predicate": "has_step", "object_json": f'{{"number": {number}}}'} | fields
    return Fact(**values)


def make_facts(count: int, *, first: int = 1, pair: ZonePair = PAIR) -> list[NewFact]:
    """Create the facts m-1, m-2 and so on."""
    return [(make_envelope(f"m-{number}", pair=pair), make_fact(number)) for number in range(first, first + count)]


def make_reference(key: str, content: bytes, **fields: Any) -> ArtifactReference:
    """Create a reference to an artifact in the bucket of the suite."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    values: dict[str, Any] = {"bucket": "files", "key": key, "digest": digest, "size": len(content)}
    return ArtifactReference(**values | fields)


def make_artifact_fact(reference: ArtifactReference, predicate: str = "has_file") -> Fact:
    """Create a fact that references an artifact."""
    return Fact.create("work_order:WO-1", predicate, reference.to_object())


def expect_error(result: object, error_type: type[E], description: str) -> E:
    """Return *result*, which must be an error of the given class."""
    if not isinstance(result, error_type):
        raise CheckFailed(f"{description} returned {type(result).__name__}, not {error_type.__name__}")
    return result


async def expect_raises(error_type: type[E], call: Any, description: str) -> E:
    """Return the error of the given class that *call*, an awaitable, must raise."""
    try:
        result = await call
    except error_type as error:
        return error
    except FactError as error:
        raise CheckFailed(
            f"{description} was rejected with {type(error).__name__}, not with {error_type.__name__}"
        ) from error
    raise CheckFailed(f"{description} returned {result!r:.100}, expected {error_type.__name__}")
