"""Many facts as protocol buffers: whole on both ends, no larger than was thought, and nothing believed."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from ergon_framework.facts.errors import FactConflict, FactError, InvalidFactError, ServiceError
from ergon_framework.facts.model import (
    MAX_CORRELATION_CHARS,
    MAX_JSON_INTEGER,
    MAX_LABEL_NAME_CHARS,
    MAX_LABEL_VALUE_CHARS,
    MAX_LABELS,
    MAX_MESSAGE_ID_CHARS,
    MAX_OBJECT_BYTES,
    MAX_PREDICATE_CHARS,
    MAX_SUBJECT_CHARS,
    MAX_ZONE_CHARS,
    Buffer,
    Envelope,
    Fact,
    FactConfirmation,
    StoredFact,
    ZonePair,
    fact_digest,
)
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service import calls, requests
from ergon_framework.facts.service import wire as batches
from ergon_framework.facts.service import wire as messages
from ergon_framework.facts.service.handlers import fetch_within_limit
from ergon_framework.facts.service.requests import MAX_FACTS, MAX_MESSAGE_BYTES, FetchRequest
from ergon_framework.facts.stores.memory import MemoryBoundary


def make_fact(number, text='{"total": 1}', from_zone="Plant A", to_zone="HQ", **fields):
    envelope = Envelope(
        message_id=f"m-{number}", from_zone=from_zone, to_zone=to_zone, produced_at_unix_ms=number, **fields
    )
    return envelope, Fact(subject=f"order:{number}", predicate="paid", object_json=text)


def make_stored_fact(number, **fields):
    envelope, fact = make_fact(number)
    defaults = {
        "digest": fact_digest(envelope, fact),
        "offset": number,
        "epoch": "e",
        "stored_at_unix_ms": 100 + number,
    }
    return StoredFact(envelope=envelope, fact=fact, **defaults | fields)


def make_confirmation(number, **fields):
    defaults = {"message_id": f"m-{number}", "offset": number, "epoch": "e", "digest": "sha256:x", "buffer": Buffer.ESB}
    return FactConfirmation(**defaults | fields)


def encode_calls(facts):
    """The bytes of each call."""
    return [messages.encode(call.request) for call in calls.append_facts(facts)]


FACTS_OF_ALL_KINDS = [
    make_fact(1),
    make_fact(2, "[]", to_zone="Werk Süd", correlation_id="c"),
    make_fact(3, '"🙂"', from_zone="Plant B", causation_id="m", labels={"a": "b", "c": ""}),
]


@pytest.mark.spec("FAC-01")
@pytest.mark.parametrize("facts", [FACTS_OF_ALL_KINDS, FACTS_OF_ALL_KINDS[:1], FACTS_OF_ALL_KINDS[2:]])
def test_facts_arrive_as_they_were_sent(facts):
    (data,) = encode_calls(facts)
    assert list(requests.parse_append_facts(data)) == facts


def test_no_facts_need_no_call():
    assert encode_calls([]) == []
    assert list(requests.parse_append_facts(b"")) == []


def test_facts_of_one_pair_name_it_once():
    facts = wire.AppendFactsRequest.FromString(encode_calls([make_fact(1), make_fact(2)])[0]).facts
    assert (list(facts.from_zones), list(facts.to_zones)) == (["Plant A"], ["HQ"])
    assert (list(facts.correlation_ids), list(facts.causation_ids), dict(facts.labels)) == ([], [], {})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda facts: facts.subjects.pop(), "2 facts have 2 subjects, and not 1"),
        (lambda facts: facts.predicates.append("p"), "2 predicates, and not 3"),
        (lambda facts: facts.from_zones.extend(["a", "b"]), "2 from_zones, and not 3"),
        (lambda facts: facts.ClearField("to_zones"), "2 to_zones, and not 0"),
        # One object for all would be a megabyte that becomes a gigabyte.
        (lambda facts: facts.objects_json.pop(), "2 objects_json, and not 1"),
        (lambda facts: facts.produced_at_unix_ms.append(1), "2 produced_at_unix_ms, and not 3"),
        (lambda facts: facts.correlation_ids.append("c"), "2 correlation_ids, and not 1"),
        (lambda facts: facts.causation_ids.append("c"), "2 causation_ids, and not 1"),
        (lambda facts: facts.labels[2].values.update(a="b"), "fact number 2, and there are 2 facts"),
        (lambda facts: facts.labels[-1].values.update(a="b"), "fact number -1, and there are 2 facts"),
        (lambda facts: facts.message_ids.extend(["m"] * MAX_FACTS), "at most 1,000 facts"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change, message):
    (call,) = calls.append_facts([make_fact(1), make_fact(2)])
    change(call.request.facts)
    with pytest.raises(InvalidFactError, match=message):
        requests.parse_append_facts(messages.encode(call.request))


def test_labels_with_an_unknown_fact_index_are_rejected_before_they_are_read(monkeypatch):
    """A message of a few bytes for each place: none of them is made into anything."""
    request = wire.AppendFactsRequest(facts=wire.Facts(message_ids=["m"]))
    for position in range(10_000):
        request.facts.labels[position].SetInParent()
    monkeypatch.setattr(batches, "dict", lambda _: pytest.fail("a label was read"), raising=False)
    with pytest.raises(InvalidFactError, match="1 facts"):
        requests.parse_append_facts(messages.encode(request))


def test_any_sequence_of_facts_can_be_appended():
    assert encode_calls(deque(FACTS_OF_ALL_KINDS)) == encode_calls(FACTS_OF_ALL_KINDS)


# -- sizes ----------------------------------------------------------------------------------------------


def make_largest_fact(character="\U0001f600"):
    """A fact with as much of everything as the model allows."""
    envelope = Envelope(
        message_id="m" * MAX_MESSAGE_ID_CHARS,
        from_zone=character * MAX_ZONE_CHARS,
        to_zone=character * MAX_ZONE_CHARS,
        produced_at_unix_ms=MAX_JSON_INTEGER,
        correlation_id=character * MAX_CORRELATION_CHARS,
        causation_id=character * MAX_CORRELATION_CHARS,
        labels={
            f"{n:02}" + character * (MAX_LABEL_NAME_CHARS - 2): character * MAX_LABEL_VALUE_CHARS
            for n in range(MAX_LABELS)
        },
    )
    text = '"' + character * ((MAX_OBJECT_BYTES - 2) // len(character.encode())) + '"'
    return envelope, Fact(
        subject=character * MAX_SUBJECT_CHARS, predicate=character * MAX_PREDICATE_CHARS, object_json=text
    )


@pytest.mark.parametrize(
    "facts",
    [
        FACTS_OF_ALL_KINDS,
        [make_largest_fact()],
        [make_largest_fact("a")],
        [make_fact(n, "1") for n in range(1, 400)],
        [make_fact(n, "1", labels={chr(65 + label): "" for label in range(MAX_LABELS)}) for n in range(1, 400)],
    ],
)
def test_no_message_exceeds_its_weight(facts):
    max_bytes = sum(batches.max_encoded_size(*each) for each in facts)
    request = wire.AppendFactsRequest()
    batches.fill_facts(facts, request.facts)
    assert len(messages.encode(request)) <= max_bytes
    epochs = ["\U0001f600" * 128 + str(n) for n in range(len(facts))]
    stored_facts = [
        StoredFact(
            envelope=envelope,
            fact=fact,
            digest="sha256:" + "0" * 64,
            offset=MAX_JSON_INTEGER,
            epoch=epoch,
            stored_at_unix_ms=MAX_JSON_INTEGER,
        )
        for (envelope, fact), epoch in zip(facts, epochs, strict=True)
    ]
    assert len(messages.encode(batches.write_fetch_answer(stored_facts))) <= max_bytes + sum(
        4 * len(epoch) for epoch in epochs
    )


def test_the_largest_fact_fits_into_one_call():
    (data,) = encode_calls([make_largest_fact()])
    assert MAX_OBJECT_BYTES < len(data) <= MAX_MESSAGE_BYTES
    assert list(requests.parse_append_facts(data)) == [make_largest_fact()]


def test_many_facts_are_split_into_calls_that_fit():
    facts = [make_fact(n, '"' + "ü" * 100_000 + '"') for n in range(60)] + [make_fact(n) for n in range(60, 2500)]
    encoded = encode_calls(facts)
    assert max(map(len, encoded)) <= MAX_MESSAGE_BYTES
    assert 4 <= len(encoded) <= 8
    assert [each for data in encoded for each in requests.parse_append_facts(data)] == facts


def test_a_fetch_response_has_a_maximum_size_and_the_rest_comes_next():
    store = MemoryBoundary()
    facts = [make_fact(n, '"' + "ü" * 100_000 + '"') for n in range(60)]
    store.append_facts(facts)
    pair, got, after = ZonePair("Plant A", "HQ"), [], None
    while True:
        stored_facts = asyncio.run(fetch_within_limit(store, FetchRequest("r", pair, 1000, after)))
        assert len(messages.encode(batches.write_fetch_answer(stored_facts))) <= MAX_MESSAGE_BYTES
        if not stored_facts:
            break
        got += [(each.envelope, each.fact) for each in stored_facts]
        after = stored_facts[-1].cursor
    assert got == facts


# -- what came of them ----------------------------------------------------------------------------------

CONFLICT = FactConflict("another payload", from_zone="Plant A", message_id="m-3")


def decode_results(results):
    """As the caller reads them."""
    (call,) = calls.append_facts([make_fact(n) for n in range(1, len(results) + 1)])
    return call.to_result(messages.encode(batches.write_append_answer(results)))


@pytest.mark.parametrize(
    "results",
    [
        [make_confirmation(1), make_confirmation(2), make_confirmation(3)],
        [
            make_confirmation(1, duplicate=True),
            make_confirmation(2),
            make_confirmation(3, duplicate=True, epoch="before"),
        ],
        [make_confirmation(1), make_confirmation(2, epoch="another"), make_confirmation(3, buffer=Buffer.ISB)],
        [make_confirmation(1, duplicate=True)],
    ],
)
def test_confirmations_arrive_as_they_were_sent(results):
    assert decode_results(results) == results


def test_a_rejection_has_the_position_of_its_fact():
    first, second, third, fourth = decode_results(
        [InvalidFactError("no"), make_confirmation(2), CONFLICT, make_confirmation(4)]
    )
    assert (second, fourth) == (make_confirmation(2), make_confirmation(4))
    assert type(first) is InvalidFactError
    assert isinstance(third, FactConflict)
    assert third.message_id == "m-3"


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.offsets.pop(),
        lambda answer: answer.digests.append("sha256:x"),
        lambda answer: answer.Clear(),
        lambda answer: answer.ClearField("others"),
        lambda answer: answer.others[0].Clear(),
        lambda answer: answer.ClearField("buffer"),
        lambda answer: setattr(answer, "buffer", "XYZ"),
        # Facts are confirmed where they were appended, and not where they arrive.
        lambda answer: setattr(answer, "buffer", "IFB"),
        lambda answer: answer.offsets.__setitem__(1, -7),
        lambda answer: answer.others[1].fault.SetInParent(),
        lambda answer: answer.others[7].fault.SetInParent(),
        lambda answer: answer.offsets.__setitem__(0, 1),
        lambda answer: answer.offsets.__setitem__(1, 0),
        lambda answer: answer.others[0].confirmation.CopyFrom(messages.write_confirmation(make_confirmation(2))),
    ],
)
def test_a_response_that_does_not_match_its_request_is_a_service_failure(change):
    answer = batches.write_append_answer([CONFLICT, make_confirmation(2)])
    change(answer)
    (call,) = calls.append_facts([make_fact(1), make_fact(2)])
    with pytest.raises(ServiceError):
        call.to_result(messages.encode(answer))


# -- facts that are read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts",
    [
        [],
        [make_stored_fact(1)],
        [make_stored_fact(1), make_stored_fact(2)],
        [make_stored_fact(1), make_stored_fact(2, epoch="f"), make_stored_fact(3, digest="damaged")],
    ],
)
def test_fetched_facts_arrive_as_they_were_stored(facts):
    assert list(decode_facts(batches.write_fetch_answer(facts))) == facts


def decode_facts(answer, limit=10):
    return calls.fetch_facts("r", ZonePair("Plant A", "HQ"), limit, None).to_result(messages.encode(answer))


@pytest.mark.parametrize("column", ["digests", "offsets", "epochs", "stored_at_unix_ms"])
def test_columns_of_fetched_facts_that_do_not_fit_are_refused(column):
    answer = batches.write_fetch_answer([make_stored_fact(1), make_stored_fact(2), make_stored_fact(3, epoch="f")])
    getattr(answer, column).pop()
    with pytest.raises(ServiceError, match=column):
        decode_facts(answer)


def test_more_facts_than_requested_are_rejected_unparsed():
    answer = batches.write_fetch_answer([make_stored_fact(1), make_stored_fact(2)])
    answer.facts.objects_json[0] = "{"
    with pytest.raises(ServiceError, match="2 facts were returned, and at most 1 were requested"):
        decode_facts(answer, limit=1)


def test_a_malformed_fact_among_fetched_ones_is_raised():
    answer = batches.write_fetch_answer([make_stored_fact(1), make_stored_fact(2)])
    answer.facts.objects_json[1] = "{"
    with pytest.raises(FactError, match="invalid JSON"):
        decode_facts(answer)
