"""What a fact, an envelope and a reference may be, and what is said of those that may not."""

from __future__ import annotations

import pickle
from dataclasses import fields

import pytest

from ergon_framework.errors import Category
from ergon_framework.facts.errors import ArtifactLost, FactConflict, InvalidFactError
from ergon_framework.facts.model import (
    MAX_OBJECT_BYTES,
    ArtifactReference,
    BoundarySide,
    Buffer,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    StoredFact,
    ZonePair,
    fact_digest,
    is_contiguous,
)

DIGEST = "sha256:" + "ab" * 32
REFERENCE = {"bucket": "files", "key": "a/b.pdf", "digest": DIGEST, "size": 7}


def make_envelope(**fields):
    defaults = {"message_id": "m-1", "from_zone": "Plant A", "to_zone": "Enterprise", "produced_at_unix_ms": 0}
    return Envelope(**defaults | fields)


def make_fact(**fields):
    return Fact(**{"subject": "s", "predicate": "p", "object_json": "{}"} | fields)


@pytest.mark.spec("FAC-01")
@pytest.mark.parametrize(
    "fields, message",
    [
        ({"message_id": ""}, "1 to 256 visible"),
        ({"message_id": "x" * 257}, "1 to 256 visible"),
        ({"message_id": "a b"}, "no blanks"),
        ({"message_id": "grün"}, "visible ASCII"),
        ({"message_id": 7}, "visible ASCII"),
        ({"from_zone": ""}, "from_zone has 1 to 64"),
        ({"to_zone": "z" * 65}, "to_zone has 1 to 64 characters, not 65"),
        ({"to_zone": " a"}, "begins or ends"),
        ({"to_zone": None}, "to_zone must be text"),
        ({"from_zone": "a\nb"}, "not a visible character"),
        ({"produced_at_unix_ms": -1}, "milliseconds since 1970"),
        ({"produced_at_unix_ms": 1.5}, "milliseconds since 1970"),
        ({"produced_at_unix_ms": True}, "milliseconds since 1970"),
        ({"correlation_id": ""}, "correlation_id has 1 to 256"),
        ({"causation_id": "x" * 257}, "causation_id has 1 to 256"),
        ({"labels": {f"l{n}": "" for n in range(33)}}, "at most 32 labels, not 33"),
        ({"labels": {"": "x"}}, "name of a label"),
        ({"labels": {"a": 7}}, "label 'a' must be text"),
        ({"labels": {"a": "x" * 16385}}, "label 'a' has 0 to 16384"),
    ],
)
def test_an_envelope_reports_an_invalid_field(fields, message):
    with pytest.raises(InvalidFactError, match=message) as caught:
        make_envelope(**fields)
    assert (caught.value.category, caught.value.final) == (Category.BUSINESS, True)


@pytest.mark.spec("FAC-01")
def test_an_envelope_accepts_every_valid_field():
    labels = {f"label {n}": "" for n in range(32)}
    result = make_envelope(message_id="!" * 256, from_zone="Werk Süd 2", to_zone="z" * 64, labels=labels)
    labels["more"] = "x"
    assert len(result.labels) == 32  # a copy of its own
    with pytest.raises(TypeError):
        result.labels["a"] = "b"
    assert pickle.loads(pickle.dumps(result)) == result
    assert hash(result) == hash(make_envelope(message_id="!" * 256, from_zone="Werk Süd 2", to_zone="z" * 64))
    assert result.pair == ZonePair("Werk Süd 2", "z" * 64)


@pytest.mark.spec("FAC-01")
@pytest.mark.parametrize(
    "fields, message",
    [
        ({"subject": ""}, "subject has 1 to 512"),
        ({"subject": "x" * 513}, "subject has 1 to 512"),
        ({"predicate": "x" * 257}, "predicate has 1 to 256"),
        ({"predicate": "a\0b"}, "not a visible character"),
        ({"object_json": {"a": 1}}, "JSON text, not dict; see Fact.create"),
        ({"object_json": "nothing"}, "invalid JSON"),
        ({"object_json": '"\\ud800"'}, "surrogate"),
        pytest.param({"object_json": '"\ud800"'}, "surrogate", id="half a surrogate pair"),
        pytest.param({"object_json": '"' + "x" * MAX_OBJECT_BYTES + '"'}, "store an artifact", id="1 MiB"),
        pytest.param(
            {"object_json": '"' + "ü" * (MAX_OBJECT_BYTES // 2) + '"'}, "1,048,576 bytes", id="1 MiB of umlauts"
        ),
    ],
)
def test_a_fact_reports_an_invalid_field(fields, message):
    with pytest.raises(InvalidFactError, match=message):
        make_fact(**fields)


@pytest.mark.spec("FAC-01")
def test_a_fact_keeps_the_text_of_its_object():
    text = ' {"b": 1.0, "a": 2} '
    assert make_fact(object_json=text).object_json == text
    assert make_fact(object_json=text).object == {"b": 1.0, "a": 2}
    result = Fact.create("s", "p", {"grün": [1.0, 2]})
    assert result.object_json == '{"grün":[1.0,2]}'
    result.object["grün"].clear()
    assert result.object == {"grün": [1.0, 2]}


def test_a_value_that_does_not_round_trip_is_rejected():
    with pytest.raises(InvalidFactError, match="outside ±2"):
        Fact.create("s", "p", 2**60)
    with pytest.raises(InvalidFactError, match="JSON has no object"):
        Fact.create("s", "p", object())


@pytest.mark.spec("FAC-20")
def test_an_object_with_four_fields_is_a_reference_and_no_other_is():
    full = REFERENCE | {"media_type": "application/pdf", "file_name": "Auftrag 7.pdf"}
    result = Fact.create("s", "p", full).artifact
    assert result == ArtifactReference(**full)
    assert result.to_object() == full
    assert Fact.create("s", "p", REFERENCE | {"pages": 3}).artifact == ArtifactReference(**REFERENCE)
    for name in REFERENCE:
        assert Fact.create("s", "p", {key: value for key, value in REFERENCE.items() if key != name}).artifact is None
    assert Fact.create("s", "p", [REFERENCE]).artifact is None


@pytest.mark.spec("FAC-20")
@pytest.mark.parametrize(
    "changed, message",
    [
        ({"digest": "md5:00"}, "sha256"),
        ({"digest": DIGEST.upper()}, "sha256"),
        ({"digest": None}, "sha256"),
        ({"size": -1}, "whole number of bytes"),
        ({"size": 1.5}, "whole number of bytes"),
        ({"size": True}, "whole number of bytes"),
        ({"bucket": "../files"}, "bucket has 1 to 63"),
        ({"bucket": 7}, "bucket has 1 to 63"),
        ({"key": "a/../b"}, "lead out of its bucket"),
        ({"key": "ü" * 600}, "the maximum is 1024"),
        ({"media_type": ""}, "media_type"),
        ({"file_name": 7}, "file_name"),
    ],
)
def test_an_invalid_reference_is_rejected(changed, message):
    with pytest.raises(InvalidFactError, match=message):
        Fact.create("s", "p", REFERENCE | changed)


@pytest.mark.spec("FAC-24")
def test_each_side_has_a_store_buffer_and_a_forward_buffer():
    assert [buffer.value for buffer in Buffer] == ["ISB", "IFB", "ESB", "EFB"]
    assert (BoundarySide.INNER.store_buffer, BoundarySide.INNER.forward_buffer) == (Buffer.ESB, Buffer.IFB)
    assert (BoundarySide.OUTER.store_buffer, BoundarySide.OUTER.forward_buffer) == (Buffer.ISB, Buffer.EFB)


@pytest.mark.spec("FAC-02")
def test_a_confirmation_has_only_the_position_of_the_fact():
    values = {"message_id": "m", "offset": 1, "epoch": "e", "digest": "d", "buffer": Buffer.ESB, "duplicate": False}
    assert {field.name for field in fields(FactConfirmation)} == set(values)
    assert vars(FactConfirmation(**values)) == values


def test_contiguous_is_without_a_gap():
    facts = [
        StoredFact(
            envelope=make_envelope(), fact=make_fact(), digest=DIGEST, offset=offset, epoch="e", stored_at_unix_ms=0
        )
        for offset in (3, 4, 6)
    ]
    assert is_contiguous(facts[:2], after=2)
    assert not is_contiguous(facts, after=2)
    assert not is_contiguous(facts[:2], after=1)
    assert facts[0].cursor == Cursor("e", 3)


def test_the_digest_of_a_fact_ignores_fields_that_may_differ():
    one = fact_digest(
        make_envelope(labels={"a": "b"}, produced_at_unix_ms=5, correlation_id="c"), make_fact(object_json=" {} ")
    )
    assert one == fact_digest(make_envelope(message_id="other"), make_fact())


def test_errors_keep_their_fields_when_they_are_pickled():
    lost = ArtifactLost("gone", from_zone="A", message_id="m", bucket="b", key="k")
    again = pickle.loads(pickle.dumps(lost))
    assert (again.from_zone, again.message_id, again.bucket, again.key) == ("A", "m", "b", "k")
    conflict = pickle.loads(pickle.dumps(FactConflict("two", from_zone="A", message_id="m")))
    assert (conflict.from_zone, conflict.message_id, str(conflict)) == ("A", "m", "two")
