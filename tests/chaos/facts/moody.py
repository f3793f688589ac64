"""A boundary that loses answers after the effect and makes calls twice, whatever the line does."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

from ergon_framework.errors import ConnectionLost

#: Calls whose effect must count once.
_WRITING = frozenset(("append_facts", "forward_facts", "confirm_receipt", "put_object"))


class Moody:
    """Stands before *boundary*, of either flavour; the share of its answers that is lost, and of calls made twice."""

    def __init__(self, boundary: Any, *, seed: int, lost: float = 0.02, twice: float = 0.02) -> None:
        self._boundary = boundary
        self._dice = random.Random(seed)
        self._lost = lost
        self._twice = twice
        self.counts = {"lost": 0, "twice": 0}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._boundary, name)
        plain = name.removesuffix("_async")
        if plain not in _WRITING:
            return found
        return partial(self._call_async if name != plain else self._call, plain, found)

    def _call(self, name: str, act: Any, *args: Any, **kwargs: Any) -> Any:
        answer = act(*args, **kwargs)
        # The bytes of an upload can be had once only.
        if name != "put_object" and self._rolled("twice", self._twice):
            answer = act(*args, **kwargs)
        if self._rolled("lost", self._lost):
            raise ConnectionLost("the answer was lost on purpose, after the effect")
        return answer

    async def _call_async(self, name: str, act: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await act(*args, **kwargs)
        if name != "put_object" and self._rolled("twice", self._twice):
            answer, _ = await asyncio.gather(act(*args, **kwargs), act(*args, **kwargs))
        if self._rolled("lost", self._lost):
            raise ConnectionLost("the answer was lost on purpose, after the effect")
        return answer

    def _rolled(self, kind: str, share: float) -> bool:
        rolled = self._dice.random() < share
        self.counts[kind] += rolled
        return rolled
