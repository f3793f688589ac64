"""The facts of a zone by number, some with artifacts; every process generates the same ones at any time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from ergon_framework.facts.model import Envelope, Fact, StoredArtifact, ZonePair

MAX_ARTIFACT_BYTES = 50 * 1024 * 1024
PIECE_BYTES = 256 * 1024


@dataclass(frozen=True)
class Mix:
    """A number of facts from one zone to the other, with a number of artifacts among them and of bytes in these."""

    pair: ZonePair
    facts: int
    artifacts: int
    bytes: int
    seed: int

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.seed}{self.pair}")
        weights = [rng.random() ** 11 for _ in range(self.artifacts)]
        scale = min(self.bytes / max(1e-9, sum(weights)), float(MAX_ARTIFACT_BYTES))
        numbers = sorted(rng.sample(range(self.facts), self.artifacts))
        # One of the largest, an empty one, and the rest at random.
        sizes = [int(weight * scale) for weight in weights]
        if self.artifacts > 1:
            sizes[:2] = [min(MAX_ARTIFACT_BYTES, self.bytes // 2), 0]
        object.__setattr__(self, "sizes", dict(zip(numbers, sizes, strict=True)))
        object.__setattr__(self, "_block", rng.randbytes(PIECE_BYTES - 16))

    def make_envelope(self, number: int) -> Envelope:
        return Envelope(
            message_id=f"{self.pair.from_zone}-{number}",
            from_zone=self.pair.from_zone,
            to_zone=self.pair.to_zone,
            produced_at_unix_ms=number,
            labels={"n": str(number)},
        )

    def make_fact(self, number: int, stored: StoredArtifact | None) -> Fact:
        subject = f"order:{number % 97}"
        if stored is None:
            return Fact.create(subject, "noted", {"number": number, "text": "x" * (number % 211)})
        return Fact.create(
            subject,
            "has_file",
            {"bucket": self.bucket, "key": self.key(number), "digest": stored.digest, "size": stored.size},
        )

    @property
    def bucket(self) -> str:
        return f"of-{self.pair.from_zone}"

    def key(self, number: int) -> str:
        return f"{self.pair.to_zone}/{number}.bin"

    def iter_pieces(self, number: int, begin: int = 0) -> Iterator[bytes]:
        """Yield the bytes of that fact's artifact."""
        size: int = self.sizes[number]  # type: ignore[attr-defined]
        for start in range(begin - begin % PIECE_BYTES, size, PIECE_BYTES):
            piece = number.to_bytes(8) + start.to_bytes(8) + self._block  # type: ignore[attr-defined]
            yield piece[max(0, begin - start) : size - start]

    def describe_artifact(self, number: int) -> StoredArtifact | None:
        """Return the digest and size of the artifact; None if that fact has none."""
        if number not in self.sizes:  # type: ignore[attr-defined]
            return None
        hasher, size = hashlib.sha256(), 0
        for piece in self.iter_pieces(number):
            hasher.update(piece)
            size += len(piece)
        return StoredArtifact(f"sha256:{hasher.hexdigest()}", size)
