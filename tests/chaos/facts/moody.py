"""A boundary that loses answers after the effect and makes calls twice, independently of the link."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

from ergon_framework.errors import ConnectionLostError

#: Calls whose effect must count once.
_WRITE_CALLS = frozenset(("append_facts", "forward_facts", "confirm_receipt", "put_object"))


class UnreliableBoundary:
    """Wraps *boundary* of either variant; *lost* and *twice* are the shares of lost answers and repeated calls."""

    def __init__(self, boundary: Any, *, seed: int, lost: float = 0.02, twice: float = 0.02) -> None:
        self._boundary = boundary
        self._rng = random.Random(seed)
        self._lost_share = lost
        self._repeated_share = twice
        self.counts = {"lost": 0, "twice": 0}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._boundary, name)
        sync_name = name.removesuffix("_async")
        if sync_name not in _WRITE_CALLS:
            return attribute
        return partial(self._call_async if name != sync_name else self._call, sync_name, attribute)

    def _call(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        # The bytes of an upload can be read only once.
        if name != "put_object" and self._draw("twice", self._repeated_share):
            answer = method(*args, **kwargs)
        if self._draw("lost", self._lost_share):
            raise ConnectionLostError("the answer was lost on purpose, after the effect")
        return answer

    async def _call_async(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await method(*args, **kwargs)
        if name != "put_object" and self._draw("twice", self._repeated_share):
            answer, _ = await asyncio.gather(method(*args, **kwargs), method(*args, **kwargs))
        if self._draw("lost", self._lost_share):
            raise ConnectionLostError("the answer was lost on purpose, after the effect")
        return answer

    def _draw(self, kind: str, share: float) -> bool:
        is_drawn = self._rng.random() < share
        self.counts[kind] += is_drawn
        return is_drawn
