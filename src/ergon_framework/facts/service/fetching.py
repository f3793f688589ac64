"""Fetch as many facts as fit into one answer, without loading many more."""

from __future__ import annotations

from typing import Final

from ergon_framework.facts.boundary import AsyncBoundary
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import StoredFact
from ergon_framework.facts.service.batches import max_encoded_size
from ergon_framework.facts.service.requests import MAX_MESSAGE_BYTES, FetchRequest

#: Facts in the first fetch, before their size is known; each has at most about 3 MiB.
FIRST_FETCH_FACTS: Final = 64


async def fetch_within_limit(
    store: AsyncBoundary, request: FetchRequest, *, max_readers: int | None = None
) -> list[StoredFact]:
    """Return at most ``request.limit`` facts and MAX_MESSAGE_BYTES bytes; at least one fact, if there is one."""
    facts: list[StoredFact] = []
    size, after = 0, request.after
    count = min(request.limit, FIRST_FETCH_FACTS)
    while True:
        try:
            stored = await store.fetch_facts_async(
                request.reader, request.pair, count, after=after, max_readers=max_readers
            )
        except FactError:
            if not facts:
                raise
            return facts  # the facts before the error are valid, and the next call receives the error
        for each in stored:
            size += max_encoded_size(each.envelope, each.fact) + 4 * len(each.epoch)
            if facts and size > MAX_MESSAGE_BYTES:
                return facts
            facts.append(each)
        if len(stored) < count or len(facts) >= request.limit:
            return facts
        after = stored[-1].cursor
        # As many more as fit if the rest has the size of the first ones.
        capacity = (MAX_MESSAGE_BYTES - size) * len(facts) // size
        count = max(1, min(request.limit - len(facts), capacity))
