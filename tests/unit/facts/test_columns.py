"""A batch by columns: what is told of each pair, whose offset is whose, and what is too odd to go this way."""

from __future__ import annotations

import json

import pytest

from ergon_framework.facts.model import ArtifactReference, Envelope, Fact, Pair, StoredFact, digest_of
from ergon_framework.facts.stores.postgres_batch import appending, forwarding
from ergon_framework.facts.stores.postgres_columns import columns

NEAR, FAR = Pair("A", "B"), Pair("Werk Süd", "B")


def stated(name, pair=NEAR, fact=None, **more):
    envelope = Envelope(message_id=name, from_zone=pair.from_zone, to_zone=pair.to_zone, produced_at_unix_ms=7, **more)
    return envelope, fact or Fact(subject=f"s-{name}", predicate="p", object_json='"ü"')


def arrived(name, offset, epoch="e", pair=NEAR):
    envelope, fact = stated(name, pair)
    return StoredFact(
        envelope=envelope,
        fact=fact,
        digest=digest_of(envelope, fact),
        offset=offset,
        epoch=epoch,
        stored_at_unix_ms=100 + offset,
    )


def by_columns(*given):
    return columns(appending(given, frozenset()), {NEAR: 5})


def test_pairs_come_in_the_order_of_their_names_and_offsets_go_back_to_whom_they_belong():
    batch = by_columns(stated("1", FAR), stated("2"), stated("3", FAR), stated("4"), stated("5"))
    assert json.loads(batch.pairs) == [["A", "B", 5, 3], ["Werk Süd", "B", 0, 2]]
    assert batch.texts[0].split("\x1f") == ["2", "4", "5", "1", "3"]
    assert batch.texts[9].split("\x1f") == ["4", "8", "12", "4", "8"], "bytes of each pair, and not characters"
    assert batch.offsets([10, 70]) == [71, 11, 72, 12, 13]


def test_facts_of_one_pair_have_offsets_that_follow_each_other():
    assert by_columns(stated("1"), stated("2"), stated("3")).offsets([40]) == [41, 42, 43]


def test_what_no_fact_has_is_no_column_and_what_some_have_is_empty_for_the_others():
    bare = by_columns(stated("1"), stated("2"))
    assert (bare.texts[3], bare.texts[4], bare.texts[5], bare.texts[10]) == (None, None, None, None)
    some = by_columns(stated("1", correlation_id="c"), stated("2", causation_id="m", labels={"l": "\x7e"}))
    assert (some.texts[3], some.texts[4], some.texts[5]) == ("c\x1f", "\x1fm", '\x1f{"l": "~"}')


def test_forwarded_facts_bring_their_first_offset_their_epoch_and_when_they_were_stored():
    batch = columns(forwarding([arrived("1", 6), arrived("2", 7)], frozenset()), {})
    assert json.loads(batch.pairs) == [["A", "B", 0, 2, 6, "e"]]
    assert batch.texts[10] == "106\x1f107"


@pytest.mark.parametrize(
    "given",
    [
        [arrived("1", 6), arrived("2", 8)],
        [arrived("1", 6), arrived("2", 6)],
        [arrived("1", 6), arrived("2", 7, epoch="f")],
        [arrived("1", 6), arrived("1", 7)],
    ],
    ids=["a gap", "an offset twice", "two epochs", "an id twice"],
)
def test_forwarded_facts_that_do_not_follow_each_other_go_one_by_one(given):
    assert columns(forwarding(given, frozenset()), {}) is None


def test_an_id_that_comes_twice_and_a_fact_about_an_artifact_go_one_by_one():
    reference = ArtifactReference(bucket="b", key="k", digest=f"sha256:{'0' * 64}", size=1)
    assert by_columns(stated("1"), stated("1")) is None
    assert by_columns(stated("1"), stated("2", fact=Fact.of("s", "p", reference.as_object()))) is None
    assert by_columns(stated("1"), stated("1", FAR)) is not None, "an id is that of its zone"


def test_a_value_that_holds_the_separator_never_moves_others_into_wrong_rows():
    items = forwarding([arrived("1", 6), arrived("2", 7)], frozenset())
    digits = "0" * 31 + "\x1f" + "0" * 32
    assert columns([items[0], items[1]._replace(digest=f"sha256:{digits}")], {}) is None
