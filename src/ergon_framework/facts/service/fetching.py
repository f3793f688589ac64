"""Fetching: as many facts as fit into one answer, without loading many more than that."""

from __future__ import annotations

from typing import Final

from ergon_framework.facts.boundary import AsyncBoundary
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import StoredFact
from ergon_framework.facts.service.batches import weight
from ergon_framework.facts.service.requests import MESSAGE, Fetch

#: Facts that are asked for before anybody knows how large they are; each has at most some 3 MiB.
FIRST: Final = 64


async def fetched(store: AsyncBoundary, fetch: Fetch, *, max_readers: int | None = None) -> list[StoredFact]:
    """At most ``fetch.limit`` facts and MESSAGE bytes; at least one, if there is one."""
    found: list[StoredFact] = []
    size, after = 0, fetch.after
    wanted = min(fetch.limit, FIRST)
    while True:
        try:
            stored = await store.fetch_facts_async(
                fetch.reader, fetch.pair, wanted, after=after, max_readers=max_readers
            )
        except FactError:
            if not found:
                raise
            return found  # those before it are good, and the next call is told
        for each in stored:
            size += weight(each.envelope, each.fact) + 4 * len(each.epoch)
            if found and size > MESSAGE:
                return found
            found.append(each)
        if len(stored) < wanted or len(found) >= fetch.limit:
            return found
        after = stored[-1].cursor
        # As many more as fit if the rest is like the first.
        room = (MESSAGE - size) * len(found) // size
        wanted = max(1, min(fetch.limit - len(found), room))
