"""What a zone has to say: facts by number, some with artifacts, the same whoever makes them and whenever."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from ergon_framework.facts.model import Envelope, Fact, Pair, Stored

LARGEST = 50 * 1024 * 1024
PIECE = 256 * 1024


@dataclass(frozen=True)
class Mix:
    """So many facts from one zone to the other, with so many artifacts among them and bytes in these."""

    pair: Pair
    facts: int
    artifacts: int
    bytes: int
    seed: int

    def __post_init__(self) -> None:
        dice = random.Random(f"{self.seed}{self.pair}")
        drawn = [dice.random() ** 11 for _ in range(self.artifacts)]
        scale = min(self.bytes / max(1e-9, sum(drawn)), float(LARGEST))
        places = sorted(dice.sample(range(self.facts), self.artifacts))
        # One of the largest, one that is empty, and the rest as it comes.
        sizes = [int(share * scale) for share in drawn]
        if self.artifacts > 1:
            sizes[:2] = [min(LARGEST, self.bytes // 2), 0]
        object.__setattr__(self, "sizes", dict(zip(places, sizes, strict=True)))
        object.__setattr__(self, "_block", dice.randbytes(PIECE - 16))

    def envelope(self, number: int) -> Envelope:
        return Envelope(
            message_id=f"{self.pair.from_zone}-{number}",
            from_zone=self.pair.from_zone,
            to_zone=self.pair.to_zone,
            produced_at_unix_ms=number,
            labels={"n": str(number)},
        )

    def fact(self, number: int, stored: Stored | None) -> Fact:
        about = f"order:{number % 97}"
        if stored is None:
            return Fact.of(about, "noted", {"number": number, "text": "x" * (number % 211)})
        return Fact.of(
            about,
            "has_file",
            {"bucket": self.bucket, "key": self.key(number), "digest": stored.digest, "size": stored.size},
        )

    @property
    def bucket(self) -> str:
        return f"of-{self.pair.from_zone}"

    def key(self, number: int) -> str:
        return f"{self.pair.to_zone}/{number}.bin"

    def pieces(self, number: int, begin: int = 0) -> Iterator[bytes]:
        """The bytes of that fact's artifact."""
        size: int = self.sizes[number]  # type: ignore[attr-defined]
        for start in range(begin - begin % PIECE, size, PIECE):
            piece = number.to_bytes(8) + start.to_bytes(8) + self._block  # type: ignore[attr-defined]
            yield piece[max(0, begin - start) : size - start]

    def expected(self, number: int) -> Stored | None:
        """By what it is recognised; None if that fact has none."""
        if number not in self.sizes:  # type: ignore[attr-defined]
            return None
        made, size = hashlib.sha256(), 0
        for piece in self.pieces(number):
            made.update(piece)
            size += len(piece)
        return Stored(f"sha256:{made.hexdigest()}", size)
