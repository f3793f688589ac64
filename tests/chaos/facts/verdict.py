"""The verdict: both zones hold the same facts once, in order and without a gap, and all that was ever confirmed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Cursor, Pair, StoredFact, digest_of
from tests.chaos.facts.mix import Mix

SHOWN = 5


class Verdict:
    """What is wrong, by kind, with some examples; and what was counted."""

    def __init__(self) -> None:
        self.wrongs: dict[str, list[str]] = {}
        self.counts: Counter[str] = Counter()

    def wrong(self, kind: str, example: str) -> None:
        found = self.wrongs.setdefault(kind, [])
        if len(found) < SHOWN:
            found.append(example)
        self.counts[kind] += 1

    @property
    def ok(self) -> bool:
        return not self.wrongs


def judge(verdict: Verdict, mix: Mix, source: Any, destination: Any, confirmed: list[tuple[int, int]]) -> None:
    """Hold what two zones have of one pair against each other, and against what was to be said and was confirmed."""
    pair, offsets = mix.pair, {}
    ids: Counter[str] = Counter()
    count = 0
    for there, here in _both(source, destination, pair, verdict):
        count += 1
        if there.offset != count or here.offset != count:
            verdict.wrong("offsets have a gap", f"{pair}: {there.offset} and {here.offset} at place {count}")
        for stored in (there, here):
            if digest_of(stored.envelope, stored.fact) != stored.digest:
                verdict.wrong("a digest is wrong", f"{pair}: {stored.envelope.message_id} at {stored.offset}")
        if (there.envelope, there.fact, there.digest, there.epoch) != (
            *(here.envelope, here.fact),
            *(here.digest, here.epoch),
        ):
            verdict.wrong("zones differ", f"{pair}: {there.envelope.message_id} and {here.envelope.message_id}")
        ids[there.envelope.message_id] += 1
        offsets[there.envelope.message_id] = count
        _look(verdict, mix, destination, here)
    verdict.counts[f"facts from {pair.from_zone}"] = count
    if count != mix.facts:
        verdict.wrong("the number of facts is wrong", f"{pair}: {count}, not {mix.facts}")
    for message_id, times in ids.items():
        if times > 1:
            verdict.wrong("a fact is doubled", f"{pair}: {message_id} {times} times")
    for number, offset in confirmed:
        found = offsets.get(f"{pair.from_zone}-{number}")
        if found != offset:
            verdict.wrong("a confirmed fact is missing", f"{pair}: {number} was confirmed at {offset}, and is {found}")
    verdict.counts[f"confirmed to {pair.from_zone}"] = len(confirmed)


def _both(source: Any, destination: Any, pair: Pair, verdict: Verdict) -> Iterator[tuple[StoredFact, StoredFact]]:
    after = Cursor("", 0)
    while True:
        # Under a name of its own: it must not look like the replicator, nor move its cursor.
        there, here = (list(store.fetch_facts("judge", pair, 1000, after=after)) for store in (source, destination))
        if len(there) != len(here):
            verdict.wrong("a zone has more", f"{pair} behind {after.offset}: {len(there)} and {len(here)}")
        if not there or not here:
            return
        yield from zip(there, here, strict=False)
        after = there[min(len(there), len(here)) - 1].cursor


def _look(verdict: Verdict, mix: Mix, destination: Any, stored: StoredFact) -> None:
    reference = stored.fact.artifact
    if reference is None:
        return
    number = int(stored.envelope.message_id.rpartition("-")[2])
    made = hashlib.sha256()
    try:
        for piece in destination.get_object(reference.bucket, reference.key, zone=stored.envelope.from_zone):
            made.update(piece)
    except FactError as error:
        verdict.wrong("an artifact is missing", f"{reference.bucket}/{reference.key}: {error}")
        return
    expected = mix.expected(number)
    if expected is None or f"sha256:{made.hexdigest()}" != expected.digest or reference.digest != expected.digest:
        verdict.wrong("an artifact is another", f"{reference.bucket}/{reference.key}")
    verdict.counts[f"artifacts from {mix.pair.from_zone}"] += 1
    verdict.counts["bytes of artifacts"] += reference.size
