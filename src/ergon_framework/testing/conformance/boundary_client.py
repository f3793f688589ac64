"""BoundaryCheckClient: one client of a store with the same calls in both variants; and the check context."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from ergon_framework import scope
from ergon_framework.errors import ConfigurationError
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
from ergon_framework.facts.facts import AsyncFacts, Facts
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
from ergon_framework.testing.conformance.boundary_candidate import BoundaryUnderTest
from ergon_framework.testing.conformance.check import CheckFailed, expect
from ergon_framework.testing.conformance.client import Variant, in_thread

E = TypeVar("E", bound=FactError)

#: The zones of most checks; one name contains a blank on purpose.
PAIR: Final = ZonePair("Plant A", "Enterprise")
READER: Final = "exam"
#: A time after everything that a check stores, in milliseconds: retention up to it spares nothing by age.
LATER: Final = 2**52


class BoundaryClient:
    """A store with one coroutine per call; no call may take longer than *patience*."""

    def __init__(self, store: Boundary | AsyncBoundary, variant: Variant, *, patience: float) -> None:
        wanted = Boundary if variant == "sync" else AsyncBoundary
        if not isinstance(store, wanted):
            raise ConfigurationError(f"{type(store).__name__} has no {variant} flavour; leave that variant out")
        self.store = store
        self._flavour: Any = store
        self._is_sync = variant == "sync"
        self._patience = patience

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

    async def forwarded(self, *facts: StoredFact) -> list[FactConfirmation]:
        return [raise_if_error(result) for result in await self.forward(*facts)]

    async def get(self, message_id: str, *, from_zone: str = PAIR.from_zone) -> FactConfirmation | None:
        found: FactConfirmation | None = await self._call("get_fact", from_zone, message_id)
        return found

    async def fetch(
        self, limit: int = 1000, *, reader: str = READER, pair: ZonePair = PAIR, **how: Any
    ) -> list[StoredFact]:
        found: Sequence[StoredFact] = await self._call("fetch_facts", reader, pair, limit, **how)
        expect(len(found) <= limit, f"a fetch of {limit} brought {len(found)}")
        return list(found)

    async def confirm(self, cursor: Cursor, *, reader: str = READER, pair: ZonePair = PAIR) -> None:
        await self._call("confirm_receipt", reader, pair, cursor)

    async def cursor(self, *, reader: str = READER, pair: ZonePair = PAIR) -> Cursor | None:
        found: Cursor | None = await self._call("get_cursor", reader, pair)
        return found

    async def end(self, *, pair: ZonePair = PAIR) -> Cursor | None:
        found: Cursor | None = await self._call("last_offset", pair)
        return found

    async def retire(self, *, reader: str = READER, pair: ZonePair = PAIR, by: str = "exam") -> bool:
        retired: bool = await self._call("retire_reader", reader, pair, by=by)
        return retired

    async def cursor_at(self, unix_ms: int, *, pair: ZonePair = PAIR) -> Cursor | None:
        found: Cursor | None = await self._call("cursor_at_time", pair, unix_ms)
        return found

    async def survey(self) -> dict[ZonePair, LogState]:
        states: Sequence[LogState] = await self._call("list_logs")
        expect(len({state.pair for state in states}) == len(states), "a pair of zones is told of twice")
        return {state.pair: state for state in states}

    async def prune(self, before: int = LATER) -> PruneResult:
        pruned: PruneResult = await self._call("prune", before)
        return pruned

    async def facts_append(self, below: scope.Scope, **stated: Any) -> FactConfirmation:
        """Append through Facts inside a handler."""
        store: Any = self.store
        token = scope.current()
        scope.set_scope(below)
        try:
            if self._is_sync:
                facts = Facts(store, zone=PAIR.from_zone)
                return await in_thread(lambda: facts.append(PAIR.to_zone, **stated))
            return await AsyncFacts(store, zone=PAIR.from_zone).append(PAIR.to_zone, **stated)
        finally:
            scope.set_scope(token)

    # -- artifacts ------------------------------------------------------------------------------------

    async def put(self, bucket: str, key: str, blob: BlobSource, **how: Any) -> StoredArtifact:
        stored: StoredArtifact = await self._call("put_object", bucket, key, blob, **how)
        return stored

    async def received(self, bucket: str, key: str, expected: StoredArtifact, **how: Any) -> int:
        here: int = await self._call("uploaded_bytes", bucket, key, expected, **how)
        return here

    async def pieces(self, bucket: str, key: str, **how: Any) -> list[bytes]:
        """Read an artifact and return its chunks."""
        async with asyncio.timeout(self._patience):
            if self._is_sync:
                return await in_thread(lambda: list(self._flavour.get_object(bucket, key, **how)))
            stream: AsyncIterator[bytes] = self._flavour.get_object_async(bucket, key, **how)
            return [piece async for piece in stream]

    async def read(self, bucket: str, key: str, **how: Any) -> bytes:
        return b"".join(await self.pieces(bucket, key, **how))

    async def _call(self, name: str, *args: Any, **extra: Any) -> Any:
        try:
            async with asyncio.timeout(self._patience):
                if self._is_sync:
                    return await in_thread(partial(getattr(self._flavour, name), *args, **extra))
                return await getattr(self._flavour, f"{name}_async")(*args, **extra)
        except TimeoutError as error:
            raise CheckFailed(
                f"{name} did not come back within {self._patience:g} s, or raised a bare TimeoutError"
            ) from error


class BoundaryCheckContext:
    """The context of one check on one system in one variant, with its own stores."""

    def __init__(self, candidate: BoundaryUnderTest, variant: Variant) -> None:
        self.candidate = candidate
        self.variant: Variant = variant
        self._name = f"exam-{uuid.uuid4().hex[:12]}"

    def store(self, which: str = "") -> str:
        """Return the name of one of the stores of this check."""
        return self._name + which

    def client(
        self, which: str = "", *, side: BoundarySide = BoundarySide.INNER, room: int | None = None
    ) -> BoundaryClient:
        """Create a new client of one of the stores."""
        store = self.candidate.client(self.store(which), side=side, room=room)
        return BoundaryClient(store, self.variant, patience=self.candidate.patience)


def envelope(message_id: str = "m-1", *, pair: ZonePair = PAIR, **fields: Any) -> Envelope:
    """Create an envelope with defaults for all fields that are not given."""
    given = {"produced_at_unix_ms": 1_741_248_600_000} | fields
    return Envelope(message_id=message_id, from_zone=pair.from_zone, to_zone=pair.to_zone, **given)


def make_fact(number: int = 1, **fields: Any) -> Fact:
    """Create a fact with defaults for all fields that are not given."""
    given = {"subject": "work_order:WO-1", "predicate": "has_step", "object_json": f'{{"number": {number}}}'} | fields
    return Fact(**given)


def make_facts(count: int, *, first: int = 1, pair: ZonePair = PAIR) -> list[NewFact]:
    """Create the facts m-1, m-2 and so on."""
    return [(envelope(f"m-{number}", pair=pair), make_fact(number)) for number in range(first, first + count)]


def make_reference(key: str, content: bytes, **fields: Any) -> ArtifactReference:
    """Create a reference to an artifact in the bucket of the suite."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    given: dict[str, Any] = {"bucket": "exam", "key": key, "digest": digest, "size": len(content)}
    return ArtifactReference(**given | fields)


def make_artifact_fact(reference: ArtifactReference, predicate: str = "has_file") -> Fact:
    """Create a fact that references an artifact."""
    return Fact.create("work_order:WO-1", predicate, reference.to_object())


def expect_error(result: object, kind: type[E], words: str) -> E:
    """Return *result*, which must be an error of the given class."""
    if not isinstance(result, kind):
        raise CheckFailed(f"{words} was answered with {type(result).__name__}, not with {kind.__name__}")
    return result


async def expect_raises(kind: type[E], call: Any, words: str) -> E:
    """Return the error of the given class that *call*, an awaitable, must raise."""
    try:
        answer = await call
    except kind as error:
        return error
    except FactError as error:
        raise CheckFailed(f"{words} was refused with {type(error).__name__}, not with {kind.__name__}") from error
    raise CheckFailed(f"{words} was answered with {answer!r:.100}, and must be {kind.__name__}")
