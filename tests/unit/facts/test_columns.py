"""A batch by columns: the result of each pair, the offset of each fact, and irregular batches that go another way."""

from __future__ import annotations

import json

import pytest

from ergon_framework.facts.model import ArtifactReference, Envelope, Fact, StoredFact, ZonePair, fact_digest
from ergon_framework.facts.stores.postgres.append import rows_to_append, rows_to_forward, to_columns

NEAR, FAR = ZonePair("A", "B"), ZonePair("Werk Süd", "B")


def make_fact(name, pair=NEAR, fact=None, **fields):
    envelope = Envelope(
        message_id=name, from_zone=pair.from_zone, to_zone=pair.to_zone, produced_at_unix_ms=7, **fields
    )
    return envelope, fact or Fact(subject=f"s-{name}", predicate="p", object_json='"ü"')


def make_stored_fact(name, offset, epoch="e", pair=NEAR):
    envelope, fact = make_fact(name, pair)
    return StoredFact(
        envelope=envelope,
        fact=fact,
        digest=fact_digest(envelope, fact),
        offset=offset,
        epoch=epoch,
        stored_at_unix_ms=100 + offset,
    )


def build_batch(*facts):
    return to_columns(rows_to_append(facts, frozenset()), {NEAR: 5})


def test_pairs_are_sorted_by_name_and_offsets_return_to_their_facts():
    batch = build_batch(make_fact("1", FAR), make_fact("2"), make_fact("3", FAR), make_fact("4"), make_fact("5"))
    assert json.loads(batch.pairs) == [["A", "B", 5, 3], ["Werk Süd", "B", 0, 2]]
    assert batch.texts[0].split("\x1f") == ["2", "4", "5", "1", "3"]
    assert batch.texts[9].split("\x1f") == ["4", "8", "12", "4", "8"], "bytes of each pair, and not characters"
    assert batch.to_offsets([10, 70]) == [71, 11, 72, 12, 13]


def test_facts_of_one_pair_have_offsets_that_follow_each_other():
    assert build_batch(make_fact("1"), make_fact("2"), make_fact("3")).to_offsets([40]) == [41, 42, 43]


def test_an_unused_field_has_no_column_and_a_missing_value_is_empty():
    bare = build_batch(make_fact("1"), make_fact("2"))
    assert (bare.texts[3], bare.texts[4], bare.texts[5], bare.texts[10]) == (None, None, None, None)
    some = build_batch(make_fact("1", correlation_id="c"), make_fact("2", causation_id="m", labels={"l": "\x7e"}))
    assert (some.texts[3], some.texts[4], some.texts[5]) == ("c\x1f", "\x1fm", '\x1f{"l": "~"}')


def test_forwarded_facts_carry_their_first_offset_epoch_and_storage_time():
    batch = to_columns(rows_to_forward([make_stored_fact("1", 6), make_stored_fact("2", 7)], frozenset()), {})
    assert json.loads(batch.pairs) == [["A", "B", 0, 2, 6, "e"]]
    assert batch.texts[10] == "106\x1f107"


@pytest.mark.parametrize(
    "facts",
    [
        [make_stored_fact("1", 6), make_stored_fact("2", 8)],
        [make_stored_fact("1", 6), make_stored_fact("2", 6)],
        [make_stored_fact("1", 6), make_stored_fact("2", 7, epoch="f")],
        [make_stored_fact("1", 6), make_stored_fact("1", 7)],
    ],
    ids=["a gap", "an offset twice", "two epochs", "an id twice"],
)
def test_forwarded_facts_with_a_gap_go_one_by_one(facts):
    assert to_columns(rows_to_forward(facts, frozenset()), {}) is None


def test_a_repeated_id_and_a_fact_about_an_artifact_go_one_by_one():
    reference = ArtifactReference(bucket="b", key="k", digest=f"sha256:{'0' * 64}", size=1)
    assert build_batch(make_fact("1"), make_fact("1")) is None
    assert build_batch(make_fact("1"), make_fact("2", fact=Fact.create("s", "p", reference.to_object()))) is None
    assert build_batch(make_fact("1"), make_fact("1", FAR)) is not None, "an id is that of its zone"


def test_a_value_that_holds_the_separator_never_moves_others_into_wrong_rows():
    items = rows_to_forward([make_stored_fact("1", 6), make_stored_fact("2", 7)], frozenset())
    digits = "0" * 31 + "\x1f" + "0" * 32
    assert to_columns([items[0], items[1]._replace(digest=f"sha256:{digits}")], {}) is None
