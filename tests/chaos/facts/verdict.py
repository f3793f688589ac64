"""The verdict: both zones hold the same facts once, in order and without a gap, and every confirmed one."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Cursor, StoredFact, ZonePair, fact_digest
from tests.chaos.facts.mix import Mix

MAX_EXAMPLES = 5


class Verdict:
    """Findings by kind, with some examples, and counters."""

    def __init__(self) -> None:
        self.findings: dict[str, list[str]] = {}
        self.counts: Counter[str] = Counter()

    def add_finding(self, kind: str, example: str) -> None:
        examples = self.findings.setdefault(kind, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(example)
        self.counts[kind] += 1

    @property
    def is_ok(self) -> bool:
        return not self.findings


def evaluate(verdict: Verdict, mix: Mix, source: Any, destination: Any, confirmed: list[tuple[int, int]]) -> None:
    """Compare one pair's facts in two zones with each other, with the expected ones and with the confirmed ones."""
    pair, offsets = mix.pair, {}
    ids: Counter[str] = Counter()
    count = 0
    for source_fact, destination_fact in _iter_pairs(source, destination, pair, verdict):
        count += 1
        if source_fact.offset != count or destination_fact.offset != count:
            verdict.add_finding(
                "offsets have a gap", f"{pair}: {source_fact.offset} and {destination_fact.offset} at place {count}"
            )
        for stored in (source_fact, destination_fact):
            if fact_digest(stored.envelope, stored.fact) != stored.digest:
                verdict.add_finding("a digest is wrong", f"{pair}: {stored.envelope.message_id} at {stored.offset}")
        if (source_fact.envelope, source_fact.fact, source_fact.digest, source_fact.epoch) != (
            *(destination_fact.envelope, destination_fact.fact),
            *(destination_fact.digest, destination_fact.epoch),
        ):
            verdict.add_finding(
                "zones differ", f"{pair}: {source_fact.envelope.message_id} and {destination_fact.envelope.message_id}"
            )
        ids[source_fact.envelope.message_id] += 1
        offsets[source_fact.envelope.message_id] = count
        _check_artifact(verdict, mix, destination, destination_fact)
    verdict.counts[f"facts from {pair.from_zone}"] = count
    if count != mix.facts:
        verdict.add_finding("the number of facts is wrong", f"{pair}: {count}, not {mix.facts}")
    for message_id, times in ids.items():
        if times > 1:
            verdict.add_finding("a fact is doubled", f"{pair}: {message_id} {times} times")
    for number, offset in confirmed:
        actual_offset = offsets.get(f"{pair.from_zone}-{number}")
        if actual_offset != offset:
            verdict.add_finding(
                "a confirmed fact is missing", f"{pair}: {number} was confirmed at {offset}, and is {actual_offset}"
            )
    verdict.counts[f"confirmed to {pair.from_zone}"] = len(confirmed)


def _iter_pairs(
    source: Any, destination: Any, pair: ZonePair, verdict: Verdict
) -> Iterator[tuple[StoredFact, StoredFact]]:
    after = Cursor("", 0)
    while True:
        # Under a separate reader name: it must neither look like the replicator nor move its cursor.
        source_facts, destination_facts = (
            list(store.fetch_facts("judge", pair, 1000, after=after)) for store in (source, destination)
        )
        if len(source_facts) != len(destination_facts):
            verdict.add_finding(
                "a zone has more", f"{pair} behind {after.offset}: {len(source_facts)} and {len(destination_facts)}"
            )
        if not source_facts or not destination_facts:
            return
        yield from zip(source_facts, destination_facts, strict=False)
        after = source_facts[min(len(source_facts), len(destination_facts)) - 1].cursor


def _check_artifact(verdict: Verdict, mix: Mix, destination: Any, stored: StoredFact) -> None:
    reference = stored.fact.artifact
    if reference is None:
        return
    number = int(stored.envelope.message_id.rpartition("-")[2])
    hasher = hashlib.sha256()
    try:
        for piece in destination.get_object(reference.bucket, reference.key, zone=stored.envelope.from_zone):
            hasher.update(piece)
    except FactError as error:
        verdict.add_finding("an artifact is missing", f"{reference.bucket}/{reference.key}: {error}")
        return
    expected = mix.describe_artifact(number)
    if expected is None or f"sha256:{hasher.hexdigest()}" != expected.digest or reference.digest != expected.digest:
        verdict.add_finding("an artifact is another", f"{reference.bucket}/{reference.key}")
    verdict.counts[f"artifacts from {mix.pair.from_zone}"] += 1
    verdict.counts["bytes of artifacts"] += reference.size
